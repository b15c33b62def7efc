# SPDX-License-Identifier: Apache-2.0
"""A trained parameter and its float32 master: the same tensor where the model computes in float32 or is sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from podium.models.weights import Box


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedParameter:
    """`master` is this rank's part in float32; `parameter` is what the model computes with."""

    name: str  # inside the Hugging Face model
    parameter: nn.Parameter
    master: Tensor
    box: Box
    shape: tuple[int, ...]

    @property
    def has_own_master(self) -> bool:
        return self.master.dtype != self.parameter.dtype

    def publish(self) -> None:
        """Master -> compute copy, where they are two."""
        if self.has_own_master:
            with torch.no_grad():
                self.parameter.copy_(self.master)
