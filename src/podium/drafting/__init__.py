# SPDX-License-Identifier: Apache-2.0
"""Drafts a recipe from a data file and a model: `podium init`. Torch-free at import."""
