# SPDX-License-Identifier: Apache-2.0
"""Which part of each parameter a rank of a tensor axis or of a group of experts has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from podium.models.tensor_axis import TensorAxis
from podium.models.tensor_shards import Box


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorSplit:
    """How a model is divided. Parameters are named as inside the Hugging Face model."""

    axis: TensorAxis
    dims: Mapping[str, int]  # dimension in which a parameter is divided; others are whole on every rank
    summed: frozenset[str]  # whole on every rank, which has the gradient of its own part of the computation alone
    has_copies: bool = True  # whether each rank has the other parameters too, beside FSDP's shards

    def shape(self, name: str, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole parameter, given that of this rank's part."""
        dim = self.dims.get(name)
        return tuple(size * self.axis.size if at == dim else size for at, size in enumerate(part))

    def numel(self, name: str, part: Tensor) -> int:
        """Elements of the whole parameter, given this rank's part."""
        return part.numel() * (self.axis.size if name in self.dims else 1)

    def box(self, name: str, inside: Box, part: Sequence[int]) -> Box:
        """The place in the whole parameter of a box inside this rank's part, which has the shape `part`."""
        dim = self.dims.get(name)
        if dim is None:
            return inside
        begin = self.axis.rank * part[dim]
        return Box(
            tuple(start + begin * (at == dim) for at, start in enumerate(inside.starts)),
            tuple(stop + begin * (at == dim) for at, stop in enumerate(inside.stops)),
        )
