# SPDX-License-Identifier: Apache-2.0
"""Podium post-trains language models: one user API over SPMD programs and a single controller."""
