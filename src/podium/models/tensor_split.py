# SPDX-License-Identifier: Apache-2.0
"""Which part of each parameter a rank of a tensor axis or of a group of experts has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from podium.models.tensor_axis import TensorAxis
from podium.models.tensor_shards import Box


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """How one parameter is divided: evenly over the ranks of an axis, in one dimension."""

    axis: TensorAxis
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorSplit:
    """How a model is divided. Parameters are named as inside the Hugging Face model."""

    tensor: TensorAxis | None  # ranks that each have the parameters that are not divided; None: FSDP's shards alone
    divisions: Mapping[str, Division]  # others are whole on every rank
    summed: frozenset[str] = frozenset()  # whole on every rank, which has the gradient of its own computation alone

    @property
    def axis(self) -> TensorAxis:
        """The tensor axis, of a model that has one."""
        assert self.tensor is not None
        return self.tensor

    def with_divided(self, divisions: Mapping[str, Division]) -> TensorSplit:
        """The same with more parameters divided."""
        return replace(self, divisions={**self.divisions, **divisions})

    def shape(self, name: str, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole parameter, given that of this rank's part."""
        found = self.divisions.get(name)
        if found is None:
            return tuple(part)
        return tuple(size * found.axis.size if at == found.dim else size for at, size in enumerate(part))

    def numel(self, name: str, part: Tensor) -> int:
        """Elements of the whole parameter, given this rank's part."""
        found = self.divisions.get(name)
        return part.numel() * (1 if found is None else found.axis.size)

    def box(self, name: str, inside: Box, part: Sequence[int]) -> Box:
        """The place in the whole parameter of a box inside this rank's part, which has the shape `part`."""
        found = self.divisions.get(name)
        if found is None:
            return inside
        begin = found.axis.rank * part[found.dim]
        return Box(
            tuple(start + begin * (at == found.dim) for at, start in enumerate(inside.starts)),
            tuple(stop + begin * (at == found.dim) for at, stop in enumerate(inside.stops)),
        )
