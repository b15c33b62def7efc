# SPDX-License-Identifier: Apache-2.0
"""A second copy of a sharded model for generation: plain tensors without sharding hooks. Each device has all of it, or
the devices of a tensor axis have it together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from podium.errors import RolloutError
from podium.models.buffers import restore_buffers
from podium.models.causal_lm import PackedCausalLM, build
from podium.models.expert_axis import ExpertGroups
from podium.models.expert_parallel import divide_experts
from podium.models.tensor_axis import TensorAxis
from podium.models.tensor_parallel import divide_model
from podium.recipe import ModelSection
from podium.weights.divided import fill_parts
from podium.weights.held import all_tensors, fill_held, held_tensors
from podium.weights.published import FrozenWeights, PublishedWeights


class WholeCopy:
    """The model on this rank's device in its compute dtype. Its tensors keep their addresses from `restore` to
    `release`, so that captured graphs may read them; `refill` changes values only. With `axis` it is this rank's part:
    no rank holds more than that and one bucket of whole tensors."""

    def __init__(
        self, weights: PublishedWeights, section: ModelSection, config: Any, *, device: torch.device,
        dtype: torch.dtype, axis: TensorAxis | None = None,
    ) -> None:  # fmt: skip
        self._weights = weights
        self.model = _empty_model(section, config, device=device, dtype=dtype, axis=axis)
        self._sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in self._everything.items()}
        self._addresses = self._where()
        self._is_resident, self._has_base = True, False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every published tensor by name, padding rows included."""
        return held_tensors(self.model)

    @property
    def _everything(self) -> dict[str, Tensor]:
        return all_tensors(self.model)

    @property
    def nbytes(self) -> int:
        """Device memory that it takes while it is allocated."""
        return sum(self._sizes.values())

    def refill(self) -> None:
        """Copies the learner's current weights, bucket by bucket. A frozen base is copied only once, as long as the
        copy stays. Collective over the learner's ranks."""
        if not self._is_resident:
            raise RolloutError("the whole copy of the weights is released, so it cannot be filled. Restore it first.")
        if not self._has_base:
            self._fill(self._everything, self._weights.frozen)
            self._has_base = True
        self._fill(self.tensors, self._weights)

    def _fill(self, tensors: dict[str, Tensor], delivery: PublishedWeights | FrozenWeights) -> None:
        if self.model.split is None:
            fill_held(tensors, delivery)
        else:
            fill_parts(tensors, self.model.split, delivery)

    def release(self) -> int:
        """Frees the memory and returns its size. The model must not run until it is restored and refilled."""
        if not self._is_resident:
            return 0
        for tensor in self._everything.values():
            tensor.untyped_storage().resize_(0)
        self._is_resident = self._has_base = False
        return self.nbytes

    def restore(self) -> bool:
        """Takes the memory again; values are undefined until `refill`. Returns True if some address changed: graphs
        captured for the old addresses must be captured again."""
        if self._is_resident:
            return False
        for name, tensor in self._everything.items():
            tensor.untyped_storage().resize_(self._sizes[name])
        self._is_resident = True
        before, self._addresses = self._addresses, self._where()
        return self._addresses != before

    def _where(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self._everything.items()}


def _empty_model(
    section: ModelSection, config: Any, *, device: torch.device, dtype: torch.dtype, axis: TensorAxis | None
) -> PackedCausalLM:
    model = build(section, config, device=torch.device("meta"), dtype=dtype)
    if axis is not None:  # divided while it has no memory
        divide_model(model, axis)
        divide_experts(model, ExpertGroups(holders=axis, tensor=axis))
    model.to_empty(device=device)
    model.hf.tie_weights()
    restore_buffers(model.hf)
    model.requires_grad_(False)
    model.eval()
    return model
