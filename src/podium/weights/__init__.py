# SPDX-License-Identifier: Apache-2.0
"""Versioned weights: their description, their transfer, and the check that they arrived."""
