# SPDX-License-Identifier: Apache-2.0
"""Pure tensor functions: what each method computes. No configuration, no logging, no collectives."""
