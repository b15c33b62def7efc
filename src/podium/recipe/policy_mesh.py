# SPDX-License-Identifier: Apache-2.0
"""`placement.policy`: over which axes a program's devices hold the model. Sizes are plain numbers; torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Strict, Tag

from podium.errors import PlacementError
from podium.recipe.fields import Count, Section

_REST = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSizes:
    """The size of each axis. `tensor` varies fastest over ranks, then `context`, `shard` and `replicate`."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    # Neighbours among the ranks of shard and context that, with their tensor groups, hold all experts between them.
    experts: int = 1

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data_ranks(self) -> int:
        """Number of ranks that get different data."""
        return self.replicate * self.shard

    @property
    def parts(self) -> int:
        """Over how many ranks each tensor is divided."""
        return self.shard * self.context * self.tensor

    def __str__(self) -> str:
        context = f"context: {self.context}, " if self.context > 1 else ""
        experts = f" with experts: {self.experts}" if self.experts > 1 else ""
        return f"{{replicate: {self.replicate}, shard: {self.shard}, {context}tensor: {self.tensor}}}{experts}"

    @property
    def sharding(self) -> int:
        """Number of ranks over which FSDP shards."""
        return self.shard * self.context


class PolicyMeshSection(Section):
    """Axes over which the devices that train hold the model, and models beside it. Their product is the number of these
    devices: with `placement.layout` split or elastic, those that do not only generate. Default: all of them shard."""

    replicate: Count = Field(
        1, description="HSDP: so many groups of ranks each hold the whole model between them, and add up gradients."
    )
    shard: Annotated[int, Strict(), Field(ge=-1)] = Field(
        _REST, description="FSDP2: ranks that each hold a part of every tensor, and gather a layer to compute it. "
        "-1: the devices that the other axes leave."
    )  # fmt: skip
    context: Count = Field(
        1,
        description="Context parallelism: ranks that each compute a part of the tokens of the same micro-batch, and in "
        "attention all tokens of a part of the heads. They shard the model too.",
    )
    tensor: Count = Field(
        1,
        description="Tensor parallelism: ranks that compute a part of every layer and of the vocabulary, on the same "
        "data. Divides the attention heads, key-value heads and width of the model's MLP, and of a mixture the number "
        "of experts.",
    )

    def sizes(self, devices: int) -> MeshSizes:
        """The size of each axis on so many devices. Raises a PlacementError with the nearest shape that works."""
        others = self._others
        shard = devices // others if self.shard == _REST and devices % others == 0 else self.shard
        if shard > 0 and others * shard == devices:
            return MeshSizes(replicate=self.replicate, shard=shard, context=self.context, tensor=self.tensor)
        raise PlacementError(f"placement.policy: {self._problem(devices)} Use {nearest(self, devices)}.")

    @property
    def _others(self) -> int:
        return self.replicate * self.context * self.tensor

    def _problem(self, devices: int) -> str:
        if self.shard == 0:
            return "shard is 0, and every axis has at least 1 (-1: the devices that are left)."
        context = f" × context {self.context}" if self.context > 1 else ""
        others = f"replicate {self.replicate}{context} × tensor {self.tensor}"
        if self.shard == _REST:
            return f"{others} = {self._others} does not divide {_counted(devices)}."
        return f"{others} × shard {self.shard} = {self._others * self.shard}, and there {_counted(devices, verb=True)}."


PolicyMesh = Annotated[
    Annotated[Literal["auto"], Tag("policy=auto")] | Annotated[PolicyMeshSection, Tag("policy=section")],
    Discriminator(lambda value: "policy=auto" if isinstance(value, str) else "policy=section"),
]
"""Axes, or `auto`: the planner chooses them."""


def nearest(asked: PolicyMeshSection, devices: int, tensors: frozenset[int] | None = None) -> MeshSizes:
    """The shape of so many devices that changes the sizes asked for by the smallest factors. `tensors`: sizes of the
    tensor axis that the model allows; None: all."""

    def change(shape: MeshSizes) -> tuple[float, int]:
        factors = [
            (shape.replicate, asked.replicate), (shape.context, asked.context), (shape.tensor, asked.tensor)
        ]  # fmt: skip
        if asked.shard > 0:
            factors.append((shape.shard, asked.shard))
        return sum(abs(math.log(size / wanted)) for size, wanted in factors), -shape.shard

    shapes = [shape for shape in shapes_of(devices) if tensors is None or shape.tensor in tensors]
    return min(shapes, key=change)


def with_experts(sizes: MeshSizes, experts: int) -> MeshSizes:
    """The same axes with groups of so many ranks that hold the experts of a mixture. Raises a PlacementError with the
    nearest number that works."""
    if sizes.sharding % experts:
        fits = min(_divisors(sizes.sharding), key=lambda each: (abs(math.log(each / experts)), each))
        raise PlacementError(
            f"placement.experts: {experts} does not divide the {sizes.sharding} ranks of shard {sizes.shard} × context "
            f"{sizes.context}. Use {fits}."
        )
    return replace(sizes, experts=experts)


def no_place(devices: int, what: str, sizes: MeshSizes, error: PlacementError, *, generator: int = 1) -> PlacementError:
    """The error of a cluster that has no room for so many devices, in words of the recipe. `what`: are placed.
    `generator`: devices of each generator."""
    text = f"placement.devices: {devices} {what} have no place. {error}"
    if sizes.tensor > 1:
        text += f"\nThe {sizes.tensor} ranks of a tensor group (placement.policy.tensor) share a node."
    if generator > 1:
        text += f"\nThe {generator} devices of a generator (placement.generator.tensor) share a node."
    return PlacementError(text)


def section_of(sizes: MeshSizes) -> PolicyMeshSection:
    """The section with these sizes."""
    return PolicyMeshSection.model_validate({name: size for name, size in asdict(sizes).items() if name != "experts"})


def shapes_of(devices: int) -> Iterator[MeshSizes]:
    """All sizes of axes whose product is this."""
    for replicate in _divisors(devices):
        for context in _divisors(devices // replicate):
            left = devices // (replicate * context)
            for tensor in _divisors(left):
                yield MeshSizes(replicate=replicate, shard=left // tensor, context=context, tensor=tensor)


def _divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if number % each == 0)


def _counted(devices: int, *, verb: bool = False) -> str:
    are = ("is " if devices == 1 else "are ") if verb else ""
    return f"{are}{devices} device{'' if devices == 1 else 's'}"
