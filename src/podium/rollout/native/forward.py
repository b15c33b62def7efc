# SPDX-License-Identifier: Apache-2.0
"""The forward of one step: its inputs as plain arrays, which can be sent to other ranks, and the computation."""

# T tokens fed · B rows that sample · N decode rows · V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from podium.data.routed_experts import RouterShape
from podium.models.causal_lm import PackedCausalLM
from podium.models.compiling import uncompiled
from podium.models.cost import has_experts
from podium.models.device import onednn_off
from podium.models.head import next_token_scores
from podium.models.routing import Routing
from podium.rollout.native.attention import CachedStep, PackedSpans, QuerySpan, SlotRun
from podium.rollout.native.cache import KVCache
from podium.rollout.native.rows import Rows

# On CPU a matrix product rounds a row in the same way whatever other rows it has, but for small counts, which go to
# routines of their own: one row always, up to eight where oneDNN multiplies large matrices. And elementwise kernels
# compute what is left behind the last whole vector of a tensor with other functions: whole vectors of rows leave none.
_CPU_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostSpan:
    """Tokens [first, first + count) of the forward are the last `count` of the first `length` of a sequence."""

    first: int
    count: int
    length: int
    blocks: Rows  # that hold the sequence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostPackedSpans:
    """All chunks of a forward on CUDA, for one variable-length call; see PackedSpans."""

    query_bounds: NDArray[np.int32]
    key_bounds: NDArray[np.int32]
    longest_query: int
    longest_key: int
    key_block: Rows | None
    key_offset: Rows | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """All that a forward reads beside weights and cache."""

    tokens_T: Rows
    positions_T: Rows
    block_T: Rows  # where each token's keys and values are written
    offset_T: Rows
    slot_runs: Sequence[SlotRun]
    lengths_N: Rows  # of the decode rows, this forward's token included
    spans: Sequence[HostSpan]
    packed: HostPackedSpans | None
    sampled_B: Rows  # tokens of the forward whose logits are wanted


def recording(shape: RouterShape, num_tokens: int, device: torch.device) -> Routing:
    """Routers that write their choices for so many tokens."""
    dtype = torch.uint8 if shape.dtype is np.uint8 else torch.int16
    size = (shape.num_layers, num_tokens, shape.per_token)
    return Routing(recorded_LTK=torch.empty(size, dtype=dtype, device=device))


class ModelForward:
    """Runs fed tokens through the model and its cache.

    On CPU the numbers of a token do not depend on its batch: some rows are computed again until kernels treat every row
    of that count alike. The experts of a mixture may get any number of tokens. There every token is fed twice (no
    expert sees a single one) and oneDNN, which has special routines for other small numbers, is off."""

    def __init__(
        self,
        model: PackedCausalLM,
        modules: Sequence[nn.Module],
        cache: KVCache,
        device: torch.device,
        *,
        recorded: RouterShape | None = None,
    ) -> None:
        """`recorded`: sizes of the routers whose choices are recorded."""
        self._recorded = recorded
        self.experts_LTK: Tensor | None = None  # of the tokens of the last forward
        self._model, self.device = model, device
        self._row_multiple = _CPU_ROWS if device.type == "cpu" else 1
        self._feeds_twice = device.type == "cpu" and has_experts(model.hf)
        self._layers = {id(module): layer for module, layer in zip(modules, cache.layers, strict=True)}

    def run(self, inputs: StepInputs) -> Tensor:
        """Float32 logits of the tokens that sample, then `repeats` of these."""
        count = len(inputs.tokens_T)
        repeats = self.repeats(count, twice=self._feeds_twice)
        routing = None if self._recorded is None else recording(self._recorded, count + len(repeats), self.device)
        step = CachedStep(
            layers=self._layers,
            block_T=self.moved(inputs.block_T),
            offset_T=self.moved(inputs.offset_T),
            slot_runs=inputs.slot_runs,
            lengths_N=self.moved(inputs.lengths_N),
            pieces=[self._span(each) for each in inputs.spans],
            packed=None if inputs.packed is None else self._packed(inputs.packed),
            repeats=self.moved(repeats) if len(repeats) else None,
        )
        fed = np.concatenate([np.arange(count), repeats])
        with self._kernels(), self._model.routed(routing), self._model.generating():
            out = self._model.hf.get_decoder()(
                input_ids=self.moved(inputs.tokens_T[fed])[None],
                position_ids=self.moved(inputs.positions_T[fed])[None],
                use_cache=False,
                packing=step,
            )
        if routing is not None and routing.recorded_LTK is not None:
            self.experts_LTK = routing.recorded_LTK[:, :count]
        return self._logits(out.last_hidden_state[0], inputs.sampled_B)

    def repeats(self, count: int, *, twice: bool = False) -> Rows:
        """Which of `count` rows are computed again beside them, so that their numbers do not depend on the count."""
        missing = count if twice else 0
        missing += -(count + missing) % self._row_multiple
        return np.arange(missing, dtype=np.int64) % max(count, 1)

    def moved(self, array: NDArray[Any]) -> Tensor:
        """Copies to the device without waiting for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _kernels(self) -> AbstractContextManager[None]:
        """Disables compiled layers, which would be compiled again for every shape of a step."""
        if self.device.type == "cuda":
            return uncompiled()
        if self._feeds_twice:
            return onednn_off()
        return nullcontext()

    def _logits(self, hidden: Tensor, sampled_B: Rows) -> Tensor:
        """Logits of these rows of a forward."""
        chosen = np.concatenate([sampled_B, sampled_B[self.repeats(len(sampled_B))]])
        if len(chosen) != len(hidden) or (chosen != np.arange(len(hidden))).any():
            hidden = hidden.index_select(0, self.moved(chosen))
        return next_token_scores(hidden, self._model.head_weight, self._model.head_spec)

    def _span(self, span: HostSpan) -> QuerySpan:
        return QuerySpan(first=span.first, count=span.count, length=span.length, blocks=self.moved(span.blocks))

    def _packed(self, packed: HostPackedSpans) -> PackedSpans:
        block, offset = packed.key_block, packed.key_offset
        return PackedSpans(
            first=0,
            query_bounds=self.moved(packed.query_bounds),
            key_bounds=self.moved(packed.key_bounds),
            longest_query=packed.longest_query,
            longest_key=packed.longest_key,
            key_block=None if block is None else self.moved(block),
            key_offset=None if offset is None else self.moved(offset),
        )
