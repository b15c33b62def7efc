# SPDX-License-Identifier: Apache-2.0
"""Watches the routers of a mixture of experts over an optimizer step: statistics, and the load-balancing loss.

The loss multiplies each expert's share of all tokens of the step, on all ranks, by its mean probability. The share is
a constant, known only when every token was routed. With the loss, each step begins with a forward that counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from podium.algorithms.router_statistics import NUM_OTHER_COLUMNS, RouterStatistics
from podium.data.documents import PackedBatch
from podium.data.routed_experts import RouterShape
from podium.engine.mesh import Mesh
from podium.errors import UnsupportedModelError
from podium.models.causal_lm import PackedCausalLM
from podium.models.packing import TokenBatch, to_device
from podium.models.routing import RouterSums, Routing
from podium.models.scalar import PackedScalarLM


class RouterWatch:
    """The routers of one model."""

    def __init__(
        self, model: PackedCausalLM | PackedScalarLM, shape: RouterShape, mesh: Mesh, coefficient: float
    ) -> None:
        self._model, self._mesh, self._coefficient, self.shape = model, mesh, coefficient, shape

    @classmethod
    def of(cls, model: PackedCausalLM | PackedScalarLM, mesh: Mesh, coefficient: float) -> RouterWatch | None:
        """None: the model is dense, or its routers are not known. `coefficient`: of the load-balancing loss; 0: off."""
        if model.routers is not None:
            return cls(model, model.routers.shape, mesh, coefficient)
        if coefficient:
            reason = model.router_problem or f"{type(model.hf).__name__} has no experts"
            raise UnsupportedModelError(
                f"model.router_aux_loss_coef: {coefficient:g} asks for a load-balancing loss, and {reason}. Remove it."
            )
        return None

    def begin(self, micro_batches: Iterable[PackedBatch], multiple: int) -> WatchedStep:
        """Begins a step of these micro-batches. Collective with the loss."""
        step = WatchedStep(self.shape, self._mesh)
        if self._coefficient:
            step.balance_LE = self._balance(micro_batches, multiple)
        return step

    def statistics(self, sums: Sequence[float]) -> RouterStatistics:
        """From a step's sums over all ranks."""
        *of_layers, num_tokens = sums
        return RouterStatistics.of(np.array(of_layers).reshape(self.shape.num_layers, -1), num_tokens)

    @torch.no_grad()
    def _balance(self, micro_batches: Iterable[PackedBatch], multiple: int) -> Tensor:
        """d loss / d probability of each expert, from the counts of the whole step."""
        shape, counted = self.shape, WatchedStep(self.shape, self._mesh)
        for packed in micro_batches:
            tokens = to_device(packed, self._mesh.device, multiple=multiple)
            with counted.watching(tokens, packed) as tokens:
                self._model(tokens, None, "states" if isinstance(self._model, PackedCausalLM) else "values")
        sums = self._mesh.sum_of_tokens(counted.sums)
        counts_LE = sums[:-1].view(shape.num_layers, -1)[:, : shape.num_experts]
        num_tokens = sums[-1].clamp_min(1.0)
        scale = self._coefficient * shape.num_experts / shape.num_layers
        return scale * counts_LE / num_tokens.square()


class WatchedStep:
    """One optimizer step of one rank."""

    def __init__(self, shape: RouterShape, mesh: Mesh) -> None:
        self._shape, self._mesh = shape, mesh
        self.balance_LE: Tensor | None = None
        # Of each layer, then the number of tokens.
        size = shape.num_layers * (2 * shape.num_experts + NUM_OTHER_COLUMNS) + 1
        self.sums = torch.zeros(size, dtype=torch.float32, device=mesh.device)

    @contextmanager
    def watching(self, tokens: TokenBatch, packed: PackedBatch) -> Iterator[TokenBatch]:
        """The batch for a forward whose routers are watched. Tokens of padding do not count, nor does the only token of
        a rank without documents."""
        device, num_real = self.sums.device, packed.num_tokens if packed.num_trained else 0
        is_real_T = (torch.arange(len(tokens.tokens_T), device=device) < num_real).float()
        filled = RouterSums.empty(self._shape, is_real_T)
        routing = replace(tokens.packing.routing or Routing(), sums=filled, balance_LE=self.balance_LE)
        yield replace(tokens, packing=replace(tokens.packing, routing=routing))
        self.sums[:-1] += filled.sums_LC.flatten()
        if self._mesh.speaks_for_data:  # ranks of a context group have sums of their own tokens, and this number of all
            self.sums[-1] += num_real
