# SPDX-License-Identifier: Apache-2.0
"""Environments, tools, verifiers, reward functions and grading. Torch-free."""
