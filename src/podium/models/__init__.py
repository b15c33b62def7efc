# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints in and out, packed attention, the fused head, and the cost of a model's shape."""
