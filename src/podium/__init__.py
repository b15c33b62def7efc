# SPDX-License-Identifier: Apache-2.0
"""Podium post-trains language models: one user API over SPMD programs and a single controller."""

from podium.api import check, export, generate, resume, train, verify
from podium.errors import PodiumError
from podium.recipe import Recipe

__all__ = ["PodiumError", "Recipe", "check", "export", "generate", "resume", "train", "verify"]
