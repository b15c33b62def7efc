# SPDX-License-Identifier: Apache-2.0
"""Decoding on CUDA: the state of every sequence is on the device, a step is one replay of a CUDA graph, and the host
reads the samples of a step while the next one runs.

Step n + 1 feeds the token sampled by step n before the host has seen it. The host notices a stop token one step late;
tokens sampled after it do not count."""

# R rows, one more for idle lanes, and as many again for tokens to verify · B lanes of a graph · M blocks of the longest
# sequence

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from podium.data.routed_experts import RouterShape
from podium.models.causal_lm import PackedCausalLM
from podium.models.compiling import uncompiled
from podium.models.head import full_logits, shaped_scores
from podium.models.routing import Routing
from podium.rollout.native.cache import KVCache
from podium.rollout.native.forward import ModelForward, recording
from podium.rollout.native.fused_experts import fused, fusible_experts
from podium.rollout.native.kernels import cut_for, paged_decode, sample_on_device
from podium.rollout.native.lane_writes import write_lanes
from podium.rollout.native.rows import Rows, RowTable
from podium.rollout.native.runner import EagerRunner, SamplingTable, StepSamples
from podium.rollout.native.sampling import sample
from podium.rollout.native.scheduler import StepPlan
from podium.rollout.randomness import uniforms

_FEWEST_LANES = 8


class PagedDecode:
    """One token of each lane over its blocks; passed to the attention of every layer in place of a packing. The cache
    of a layer is attached to its attention module, so that all layers share one compiled piece of code."""

    def __init__(self, table: Tensor, rows: Tensor, lengths: Tensor, cut: Tensor) -> None:
        self.table, self.rows, self.lengths, self.cut = table, rows, lengths, cut

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Writes one key and value per row into the cache and attends over its blocks."""
        held: Any = module
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out: Tensor = paged_decode(
            query, key, value, held.podium_keys, held.podium_values, self.table, self.rows, self.lengths, self.cut,
            sinks, scale, softcap or 0.0, window or 0,
        )  # fmt: skip
        return out


class PagedVerify(PagedDecode):
    """Lanes may be successive tokens of one sequence, so all keys and values are written before any lane attends."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As `PagedDecode`; the kernel then stores what is there already."""
        held: Any = module
        # The result is used, so that a compiler keeps the call and its order.
        lengths = write_lanes(key, value, held.podium_keys, held.podium_values, self.table, self.rows, self.lengths)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out: Tensor = paged_decode(
            query, key, value, held.podium_keys, held.podium_values, self.table, self.rows, lengths, self.cut,
            sinks, scale, softcap or 0.0, window or 0,
        )  # fmt: skip
        return out


# Lanes, the shape of the cut, and whether tokens are verified.
_Key = tuple[int, torch.Size, bool]


@dataclass(frozen=True, slots=True, eq=False)
class _PendingSamples:
    """A step whose samples are being copied to the host."""

    tokens: Tensor
    logprobs: Tensor
    experts_LTK: Tensor | None
    done: torch.cuda.Event

    def read(self) -> StepSamples:
        self.done.synchronize()
        return StepSamples(
            tokens_B=self.tokens.numpy().astype(np.int32),
            logprobs_B=self.logprobs.numpy().copy(),
            experts_TLK=None if self.experts_LTK is None else self.experts_LTK.numpy().swapaxes(0, 1),
        )


class GraphRunner:
    """Runs prompts through an eager forward and sequences through graphs, both on one stream, in order."""

    def __init__(
        self,
        model: PackedCausalLM,
        modules: Sequence[nn.Module],
        cache: KVCache,
        rows: RowTable,
        samples: SamplingTable,
        device: torch.device,
        *,
        compiled: bool,
        recorded: RouterShape | None = None,
    ) -> None:
        """`compiled`: layers that the learner compiles are compiled for decoding too. `recorded`: sizes of the routers
        whose choices are recorded."""
        self._model, self._modules, self._cache, self._rows, self._sampling = model, modules, cache, rows, samples
        self._device, self._compiled = device, compiled
        forward = ModelForward(model, modules, cache, device, recorded=recorded)
        self._eager = EagerRunner(forward, cache, rows, samples, slots=False)
        self._attach()
        self._experts = fusible_experts(model.hf)
        # Tokens to verify are lanes with rows of their own behind the idle one: a copy of the blocks of their sequence.
        count, width = 2 * rows.num_rows + 1, rows.blocks_RM.shape[1]
        self._verified: list[int] = []  # rows that the host knows better than the device
        self._token_R = torch.zeros(count, dtype=torch.int64, device=device)
        self._length_R = torch.ones(count, dtype=torch.int64, device=device)
        self._key_R = torch.zeros(count, dtype=torch.int64, device=device)
        self._temperature_R = torch.ones(count, dtype=torch.float32, device=device)
        self._table_RM = torch.zeros(count, width, dtype=torch.int32, device=device)
        # The idle row writes into the block after the allocated ones.
        self._table_RM[rows.num_rows] = cache.num_blocks - 1
        self._lanes_B = torch.full((rows.num_rows,), rows.num_rows, dtype=torch.int64, device=device)
        self._drawn_B = torch.zeros(rows.num_rows, dtype=torch.int64, device=device)
        self._logprob_B = torch.zeros(rows.num_rows, dtype=torch.float32, device=device)
        # Graphs write the experts of their lanes here.
        self._experts_LBK = None if recorded is None else recording(recorded, rows.num_rows, device).recorded_LTK
        self._logits: dict[_Key, Tensor] = {}
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._lanes_now = b""

    @property
    def lag(self) -> int:
        """With a penalty, each token must be known before the next is sampled. How many proposals were right is known
        after their step."""
        return 0 if self._verified or self._sampling.wants_history_R[self._rows.active].any() else 1

    def run(self, plan: StepPlan) -> _PendingSamples:
        """Launches a step; its samples are read later."""
        self._cache.copy(plan.copies)
        self._update_rows(plan)
        tokens, logprobs, experts = [], [], []
        count = len(plan.decode_rows) + sum(chunk.samples for chunk in plan.verified)
        if count:
            self._decode(plan, count)
            if self._experts_LBK is not None:
                experts.append(self._experts_LBK[:, :count].clone())
            # Cloned on the device: the next replay overwrites them before the host may have read these.
            tokens.append(self._drawn_B[:count].clone())
            logprobs.append(self._logprob_B[:count].clone())
        if plan.chunks:
            fresh = self._take_prompts(plan, plan.sample_rows[count:])
            if self._eager.experts_LTK is not None:
                experts.append(self._eager.experts_LTK)
            if fresh is not None:
                tokens.append(fresh[0])
                logprobs.append(fresh[1])
        return self._sent(tokens, logprobs, torch.cat(experts, dim=1) if experts else None)

    def forget_addresses(self) -> None:
        """Drops graphs, which hold the old addresses of weights and cache; they are captured again when needed."""
        self._drop_graphs()
        self._attach()

    def close(self) -> None:
        """Frees graphs and everything attached to the model."""
        self._drop_graphs()
        for module in self._modules:
            held: Any = module
            del held.podium_keys, held.podium_values

    def _drop_graphs(self) -> None:
        self._logits.clear()
        self._graphs.clear()
        self._pool = None  # it is freed with the last graph that was captured into it

    def _attach(self) -> None:
        for module, layer in zip(self._modules, self._cache.layers, strict=True):
            held: Any = module
            held.podium_keys, held.podium_values = layer.keys, layer.values

    def _sent(self, tokens: list[Tensor], logprobs: list[Tensor], experts_LTK: Tensor | None) -> _PendingSamples:
        if not tokens:
            tokens, logprobs = [self._drawn_B[:0]], [self._logprob_B[:0]]
        both = (torch.cat(each) if len(each) > 1 else each[0] for each in (tokens, logprobs))
        on_host = [_to_host(each) for each in both]
        experts = None if experts_LTK is None else _to_host(experts_LTK)
        done = torch.cuda.Event()
        done.record()
        return _PendingSamples(on_host[0], on_host[1], experts, done)

    # The device's own table of rows

    def _update_rows(self, plan: StepPlan) -> None:
        """Sends the host's changes since the last step: new sequences, new blocks."""
        rows = self._rows
        changed = rows.take_changed_blocks()
        if changed:
            where = np.array(changed, np.int64)
            self._table_RM.index_copy_(0, self._moved(where), self._moved(rows.blocks_RM[where].astype(np.int32)))
        known = sorted({*plan.admitted, *self._verified})
        self._verified = [chunk.row for chunk in plan.verified]
        if known:
            where = np.array(known, np.int64)
            # Lengths of rows that sample in this step already count that token; the device has not sampled it yet.
            length = rows.known_R[where]
            packed = np.stack([rows.tokens_RL[where, length - 1].astype(np.int64), length, self._sampling.key_R[where]])
            target, (token, length_t, key) = self._moved(where), self._moved(packed)
            self._token_R.index_copy_(0, target, token)
            self._length_R.index_copy_(0, target, length_t)
            self._key_R.index_copy_(0, target, key)
            self._temperature_R.index_copy_(0, target, self._moved(self._sampling.temperature_R[where]))

    def _update_verified(self, plan: StepPlan) -> Rows:
        """Sends the tokens to verify to rows behind the idle one, and returns these."""
        rows, chunks, first = self._rows, plan.verified, self._rows.num_rows + 1
        row = np.repeat([chunk.row for chunk in chunks], [chunk.samples for chunk in chunks])
        position = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        packed = np.stack([rows.tokens_RL[row, position].astype(np.int64), position + 1, self._sampling.key_R[row]])
        own = slice(first, first + len(row))
        token, length, key = self._moved(packed)
        self._token_R[own].copy_(token)
        self._length_R[own].copy_(length)
        self._key_R[own].copy_(key)
        self._temperature_R[own].copy_(self._moved(self._sampling.temperature_R[row]))
        self._table_RM[own].copy_(self._moved(rows.blocks_RM[row].astype(np.int32)))
        return np.arange(first, first + len(row))

    def _take_prompts(self, plan: StepPlan, ending: Rows) -> tuple[Tensor, Tensor] | None:
        """Runs prompt chunks eagerly; chunks that reach their end sample their first token."""
        none = plan.decode_rows[:0]
        logits_BV = self._eager.forward(none, plan.chunks)
        if not len(ending):
            return None
        sampled = self._eager.sample(logits_BV, ending, self._rows.length_R[ending] - 1)
        target = self._moved(ending)
        self._token_R.index_copy_(0, target, sampled.tokens_B)
        self._length_R.index_copy_(0, target, self._moved(self._rows.length_R[ending]))
        return sampled.tokens_B, sampled.logprobs_B

    # Decoding

    def _decode(self, plan: StepPlan, count: int) -> None:
        rows, longest = plan.decode_rows, plan.sample_positions[:count].max()
        if plan.verified:
            rows = np.concatenate([rows, self._update_verified(plan)])
        lanes = self._bucket(count)
        now = rows.tobytes() + bytes([0]) + lanes.to_bytes(4, "little")
        if now != self._lanes_now:
            padded = np.full(lanes, self._rows.num_rows, np.int64)
            padded[:count] = rows
            self._lanes_B[:lanes].copy_(self._moved(padded), non_blocking=True)
            self._lanes_now = now
        # Lengths without the token that this step samples, with the one that it feeds.
        cut = cut_for(int(longest), self._device)
        key = (lanes, cut.shape, bool(plan.verified))
        if key not in self._graphs:
            with nullcontext() if self._compiled else uncompiled():
                self._capture(key, cut)
        self._graphs[key].replay()
        self._narrow(plan, rows, self._logits[key])

    def _narrow(self, plan: StepPlan, rows: Rows, logits_BV: Tensor) -> None:
        """Samples lanes with logits processing again from the same logits. `rows`: of the device, one for each lane."""
        count = len(rows)
        processings = self._eager.processings(plan.sample_rows[:count], plan.sample_positions[:count])
        if not processings:
            return
        at = self._moved(np.array([each.row for each in processings], np.int64))
        which = self._moved(rows[np.array([each.row for each in processings])])
        renumbered = [replace(each, row=index) for index, each in enumerate(processings)]
        position = self._length_R[which] - 1
        sampled = sample(
            shaped_scores(logits_BV.index_select(0, at), self._model.head_spec).clone(),
            self._temperature_R[which],
            uniforms(self._key_R[which], position),
            renumbered,
        )
        self._drawn_B.index_copy_(0, at, sampled.tokens_B)
        self._logprob_B.index_copy_(0, at, sampled.logprobs_B)
        self._token_R.index_copy_(0, which, sampled.tokens_B)

    def _step(self, lanes: int, cut: Tensor, is_verifying: bool) -> Tensor:
        """The captured step: feed, sample, advance. Returns the logits."""
        rows = self._lanes_B[:lanes]
        length = self._length_R.index_select(0, rows)
        experts = self._experts_LBK
        routing = None if experts is None else Routing(recorded_LTK=experts[:, :lanes])
        kind = PagedVerify if is_verifying else PagedDecode
        step = kind(self._table_RM, rows, length.to(torch.int32), cut)
        with self._model.routed(routing), self._model.generating(), fused(self._experts):
            out = self._model.hf.get_decoder()(
                input_ids=self._token_R.index_select(0, rows)[None],
                position_ids=(length - 1)[None],
                use_cache=False,
                packing=step,
            )
        logits_BV = full_logits(out.last_hidden_state[0], self._model.head_weight)
        spec = self._model.head_spec
        sample_on_device(
            logits_BV,
            self._temperature_R.index_select(0, rows),
            uniforms(self._key_R.index_select(0, rows), length),
            vocab_size=spec.vocab_size,
            scale=spec.scale,
            softcap=spec.softcap,
            tokens_B=self._drawn_B,
            logprobs_B=self._logprob_B,
        )
        self._token_R.index_copy_(0, rows, self._drawn_B[:lanes])
        self._length_R.index_copy_(0, rows, length + 1)
        self._length_R[self._rows.num_rows : self._rows.num_rows + 1].fill_(1)  # the idle row goes nowhere
        return logits_BV

    def _capture(self, key: _Key, cut: Tensor) -> None:
        """Captures a graph. Warm-up and capture really sample, so the rows are restored afterwards."""
        lanes, _, is_verifying = key
        saved = [each.clone() for each in (self._token_R, self._length_R)]
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(lanes, cut, is_verifying)
            self._token_R.copy_(saved[0])
            self._length_R.copy_(saved[1])
            torch.cuda.synchronize()
            # Without torch's context manager, which collects garbage and empties caches every time.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._logits[key] = self._step(lanes, cut, is_verifying)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph

    def _bucket(self, count: int) -> int:
        """Number of lanes of the graph for this many rows: powers of two, and steps of 32 from 64 on."""
        lanes = max(_FEWEST_LANES, 1 << (count - 1).bit_length()) if count <= 64 else -(-count // 32) * 32
        return min(lanes, self._rows.num_rows)

    def _moved(self, array: NDArray[Any]) -> Tensor:
        return self._eager.moved(array)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is complete when the stream has come to it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
