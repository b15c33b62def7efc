# SPDX-License-Identifier: Apache-2.0
"""AdamW on float32 masters, with clipping and the non-finite guard inside the fused kernel; learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from podium.engine.parameters import TrainedParameter
from podium.recipe import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, steps: int) -> float:
    """The rate of step 1, 2, ... `steps`; pure, so a resumed run needs no schedule state."""
    if step <= section.warmup_steps:
        return section.lr * step / section.warmup_steps
    done = (step - section.warmup_steps) / max(1, steps - section.warmup_steps)
    match section.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = 1.0 - done
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * done))
    if section.schedule == "constant":
        return section.lr
    return section.lr * (section.final_lr_ratio + (1.0 - section.final_lr_ratio) * share)


class AdamW:
    """Moments and masters of the parameters that this rank holds. Plain local tensors: sharding is not its business."""

    def __init__(self, trained: Sequence[TrainedParameter], section: OptimizerSection) -> None:
        self._section = section
        self.trained = list(trained)
        # A rank may hold no row of a small tensor.
        self._held = [each for each in self.trained if each.master.numel()]
        self.first_moments = [torch.zeros_like(each.master) for each in self.trained]
        self.second_moments = [torch.zeros_like(each.master) for each in self.trained]
        self._moments = {
            id(each): pair
            for each, pair in zip(self.trained, zip(self.first_moments, self.second_moments, strict=True), strict=True)
        }
        self._counts = {
            id(each): torch.zeros((), dtype=torch.float32, device=each.master.device) for each in self._held
        }
        # Vectors (norms, biases) are not decayed.
        self._groups = [
            ([each for each in self._held if len(each.shape) >= 2], section.weight_decay),
            ([each for each in self._held if len(each.shape) < 2], 0.0),
        ]
        self._apart = [each for each in self._held if each.has_own_master]

    def set_updates(self, updates: int) -> None:
        """How many updates the moments have seen, for a resumed run."""
        for count in self._counts.values():
            count.fill_(updates)

    def step(self, gradients: dict[int, Tensor], *, lr: float, clip: Tensor, skip: Tensor) -> None:
        """One update. `clip` multiplies every gradient; where `skip` is 1 nothing changes: no wait for the device."""
        beta1, beta2 = self._section.betas
        for group, weight_decay in self._groups:
            if not group:
                continue
            adamw(
                [each.master for each in group],
                [gradients[id(each)] for each in group],
                [self._moments[id(each)][0] for each in group],
                [self._moments[id(each)][1] for each in group],
                [],
                [self._counts[id(each)] for each in group],
                fused=True,
                grad_scale=clip.reciprocal(),  # the kernel divides by it
                found_inf=skip,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=weight_decay,
                eps=self._section.eps,
                maximize=False,
            )
        if self._apart:
            with torch.no_grad():
                torch._foreach_copy_([each.parameter for each in self._apart], [each.master for each in self._apart])
