# SPDX-License-Identifier: Apache-2.0
"""The loss of a value function per trained token, and how much of the returns it explains."""

# S trained tokens of a micro-batch

from __future__ import annotations

import torch
from torch import Tensor

from podium.algorithms.statistics import ValueStatistics


def value_loss(values_S: Tensor, old_values_S: Tensor, returns_S: Tensor, *, clip: float | None) -> Tensor:
    """Half the squared error; with `clip`, the larger of it and that of the value kept within `clip` of the old one."""
    plain_S, clipped_S = _squared_errors(values_S, old_values_S, returns_S, clip)
    return torch.maximum(plain_S, clipped_S) / 2


def _squared_errors(
    values_S: Tensor, old_values_S: Tensor, returns_S: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    values_S, old_values_S, returns_S = values_S.float(), old_values_S.detach().float(), returns_S.detach().float()
    plain_S = (values_S - returns_S).square()
    if clip is None:
        return plain_S, plain_S
    return plain_S, (values_S.clamp(old_values_S - clip, old_values_S + clip) - returns_S).square()


def value_statistics(
    values_S: Tensor, old_values_S: Tensor, returns_S: Tensor, *, clip: float | None
) -> ValueStatistics:
    """What the values of a micro-batch look like beside its returns."""
    with torch.no_grad():
        plain_S, clipped_S = _squared_errors(values_S, old_values_S, returns_S, clip)
        values_S, returns_S = values_S.double(), returns_S.double()
        errors_S = returns_S - values_S
        parts = [values_S, returns_S, returns_S.square(), errors_S, errors_S.square(), clipped_S > plain_S]
        # One transfer from the device for all of them.
        sums = torch.stack([part.double().sum() for part in parts]).tolist()
    return ValueStatistics(
        count=float(values_S.numel()),
        sum_values=sums[0],
        sum_returns=sums[1],
        sum_returns_squared=sums[2],
        sum_errors=sums[3],
        sum_errors_squared=sums[4],
        clipped=sums[5],
    )
