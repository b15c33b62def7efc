# SPDX-License-Identifier: Apache-2.0
"""A parameter and its float32 master: the same tensor if the model computes in float32 or is sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from podium.models.tensor_shards import Box


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedParameter:
    """`master` is this rank's part in float32; `parameter` is what the model computes with. `is_frozen`: it never
    changes (a router's bias that the architecture excludes from training, which is saved and published with the others;
    or the base of an adapter, whose only copy is in the dtype that it computes in). `is_copy`: another rank holds the
    same part, and is the one that counts it in norms and saves it. `has_part_of_gradient`: each rank of the tensor axis
    has the gradient of its own heads alone."""

    name: str  # inside the Hugging Face model
    parameter: nn.Parameter
    master: Tensor
    box: Box
    shape: tuple[int, ...]
    is_frozen: bool = False
    is_copy: bool = False
    has_part_of_gradient: bool = False

    @property
    def has_own_master(self) -> bool:
        """Whether the float32 master is a separate tensor."""
        return self.master.dtype != self.parameter.dtype

    def publish(self) -> None:
        """Copies the master to the compute copy if they are separate."""
        if self.has_own_master:
            with torch.no_grad():
                self.parameter.copy_(self.master)
