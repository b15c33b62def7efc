# SPDX-License-Identifier: Apache-2.0
"""The learning rate of each step."""

from __future__ import annotations

import math

from podium.recipe import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, steps: int) -> float:
    """The rate of step 1, 2, ... `steps`; pure, so a resumed run needs no schedule state. Warm-up reaches the full rate
    at its last step. Linear and cosine reach their end one step after the last, so that no step is wasted."""
    if step <= section.warmup_steps:
        return section.lr * step / section.warmup_steps
    done = (step - 1 - section.warmup_steps) / (steps - section.warmup_steps)
    match section.schedule:
        case "constant":
            return section.lr
        case "linear":
            share = 1.0 - done
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * done))
    return section.lr * (section.final_lr_ratio + (1.0 - section.final_lr_ratio) * share)
