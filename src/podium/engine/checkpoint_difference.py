# SPDX-License-Identifier: Apache-2.0
"""Compares two checkpoints tensor by tensor, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from podium.engine.checkpoint import CheckpointReader


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDifference:
    """How two checkpoints of one model differ: weights and optimizer state."""

    num_tensors: int
    different: tuple[str, ...]  # names of the tensors that are not the same bits
    largest: float  # largest absolute difference of two numbers; NaN if one of them is not finite

    @property
    def is_none(self) -> bool:
        """Whether all tensors are equal, bit for bit."""
        return not self.different


def compare_checkpoints(one: CheckpointReader, other: CheckpointReader) -> CheckpointDifference:
    """Compares all tensors. The number of ranks that wrote a checkpoint does not matter."""
    shapes, other_shapes = one.shapes(), other.shapes()
    different: list[str] = []
    largest = 0.0
    for name in sorted(shapes.keys() | other_shapes.keys()):
        if shapes.get(name) != other_shapes.get(name):
            different.append(name)
            largest = float("nan")
            continue
        mine, theirs = one.tensor(name), other.tensor(name)
        if not _same_bits(mine, theirs):
            different.append(name)
            apart = float((mine.double() - theirs.double()).abs().max())
            largest = apart if apart != apart else max(largest, apart)
    return CheckpointDifference(
        num_tensors=len(shapes.keys() | other_shapes.keys()), different=tuple(different), largest=largest
    )


def _same_bits(mine: Tensor, theirs: Tensor) -> bool:
    if mine.dtype != theirs.dtype:
        return False
    return torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
