# SPDX-License-Identifier: Apache-2.0
"""The weights that an engine computes with: whole on one device, or a part on each rank of a tensor group."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from podium.errors import WeightMismatchError
from podium.models.causal_lm import PackedCausalLM, padded_parameters
from podium.models.fp8 import Fp8Layers, require_fp8, require_undivided, use_fp8
from podium.models.tensor_axis import TensorAxis
from podium.models.tensor_split import TensorSplit
from podium.recipe import EngineSection
from podium.rollout.native.tensor_group import Install, TensorLeader, Verify
from podium.weights.divided import fill_parts, verify_divided
from podium.weights.held import all_tensors, fill_held, held_tensors
from podium.weights.receiving import Verified, check_manifest, verify_in_place
from podium.weights.transports import Delivery, torch_dtype
from podium.weights.versions import WeightVersion

_FP8_KEY = "rollout.fp8"


def copies_in_fp8(model: PackedCausalLM, device: torch.device, section: EngineSection) -> Fp8Layers | None:
    """Gives the linear layers copies of their weights in fp8, if the recipe wants that; None: it does not."""
    if not section.fp8:
        return None
    require_fp8(device, _FP8_KEY)
    require_undivided(model.split is not None, _FP8_KEY)
    if model.fp8 is None:
        model.fp8 = use_fp8(model.layers, _FP8_KEY, learner=False)
    model.fp8.copy_weights()
    return model.fp8


class EngineWeights:
    """Weights of an engine. `group`: the ranks that have the other parts."""

    def __init__(self, model: PackedCausalLM, group: TensorLeader | None) -> None:
        self._model, self._group = model, group

    def check(self, version: WeightVersion) -> None:
        """Raises unless the version is one of this model."""
        tensors, split = held_tensors(self._model), self._model.split
        if split is not None:
            tensors = {
                name: torch.empty(split.shape(name, each.shape), dtype=each.dtype, device="meta")
                for name, each in tensors.items()
            }
        check_manifest(version, tensors, padded_parameters(self._model))

    def take(self, version: WeightVersion, delivery: Delivery | None) -> None:
        """Fills the tensors in place and verifies them. Without a delivery, verifies those in place."""
        self.check(version)
        if delivery is None:
            self._verify(version, everything=False)
        elif self._group is None:
            fill_held(held_tensors(self._model), Verified(delivery, version))
        else:
            self._spread(self._group, version, Verified(delivery, version))

    def check_frozen(self, version: WeightVersion) -> None:
        """Raises unless the weights in place, those of a frozen base included, are those of the version."""
        self._verify(version, everything=True)

    def _verify(self, version: WeightVersion, *, everything: bool) -> None:
        if self._group is None:
            verify_in_place((all_tensors if everything else held_tensors)(self._model), version)
            return
        self._group.send(Verify(version=version, everything=everything))
        verify_parts(self._model, version, everything=everything)

    def _spread(self, group: TensorLeader, version: WeightVersion, delivery: Delivery) -> None:
        """Passes whole tensors on to all ranks as they arrive; each keeps its part."""
        group.send(Install(version))
        forwarded = _Forwarded(delivery, version, group)
        try:
            fill_parts(held_tensors(self._model), _split_of(self._model), forwarded)
        finally:
            problems = [] if forwarded.is_cut_off else group.answers()
        for rank, problem in enumerate(problems, start=1):
            if problem is not None:
                raise WeightMismatchError(f"rank {rank} of the engine: {problem}")


def receive_parts(model: PackedCausalLM, version: WeightVersion, device: torch.device) -> None:
    """A following rank's end of an install. Collective."""
    split = _split_of(model)
    fill_parts(held_tensors(model), split, Verified(_FromLeader(version, split.axis, device), version))


def verify_parts(model: PackedCausalLM, version: WeightVersion, *, everything: bool) -> None:
    """Verifies the weights in place, of which each rank has a part. Collective: all ranks raise the same, except that
    followers leave it to rank 0."""
    split = _split_of(model)
    try:
        verify_divided((all_tensors if everything else held_tensors)(model), split, version)
    except WeightMismatchError:
        if split.axis.rank == 0:
            raise


def _split_of(model: PackedCausalLM) -> TensorSplit:
    assert model.split is not None, "the model of a tensor group is divided"
    return model.split


class _Forwarded:
    """A delivery whose tensors are broadcast to the other ranks before they are passed on. The other ranks count on all
    tensors of the manifest: after an error they get zeros, which their fingerprints reveal."""

    def __init__(self, delivery: Delivery, version: WeightVersion, group: TensorLeader) -> None:
        self._delivery, self._version, self._group = delivery, version, group
        self.is_cut_off = False  # the group failed, so nobody answers

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every tensor of the manifest, in order."""
        arriving, num_sent = self._delivery.tensors(), 0
        try:
            for spec in self._version.manifest:
                _, tensor = next(arriving)
                self._broadcast(tensor.contiguous().reshape(-1).view(torch.uint8))
                num_sent += 1
                yield spec.name, tensor
            for _ in arriving:  # the delivery compares fingerprints at its end
                raise AssertionError("the delivery goes on behind its manifest")
        finally:
            if isinstance(arriving, Generator):
                arriving.close()
            for spec in () if self.is_cut_off else self._version.manifest[num_sent:]:
                self._broadcast(torch.zeros(spec.nbytes, dtype=torch.uint8, device=self._group.device))

    def _broadcast(self, values: Tensor) -> None:
        self.is_cut_off = True
        with self._group.together():
            self._group.axis.broadcast(values)
        self.is_cut_off = False


class _FromLeader:
    """The tensors that rank 0 passes on. A rank that stops reading early takes part to the end."""

    def __init__(self, version: WeightVersion, axis: TensorAxis, device: torch.device) -> None:
        self._version, self._axis = version, axis
        most = max((spec.nbytes for spec in version.manifest), default=0)
        self._buffer = torch.empty(most, dtype=torch.uint8, device=device)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every tensor of the manifest, in order; each is valid until the next one is requested."""
        num_received = 0
        try:
            for spec in self._version.manifest:
                values = self._axis.broadcast(self._buffer[: spec.nbytes])
                num_received += 1
                yield spec.name, values.view(torch_dtype(spec.dtype)).view(spec.shape)
        except GeneratorExit:
            for spec in self._version.manifest[num_received:]:
                self._axis.broadcast(self._buffer[: spec.nbytes])
            raise
