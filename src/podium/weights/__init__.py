# SPDX-License-Identifier: Apache-2.0
"""Versioned weights: what they are, how they travel, and the proof that they arrived."""
