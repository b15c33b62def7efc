# SPDX-License-Identifier: Apache-2.0
"""One step through the model in plain torch: one forward for all fed tokens, then one sample per row."""

# T tokens fed · B rows that sample · N decode rows · V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from podium.data.documents import Tokens
from podium.data.routed_experts import Experts, RouterShape
from podium.models.causal_lm import PackedCausalLM
from podium.models.cost import has_experts
from podium.models.device import onednn_off
from podium.models.head import next_token_scores
from podium.models.routing import Routing
from podium.rollout.native.attention import CachedStep, PackedSpans, QuerySpan, SlotRun
from podium.rollout.native.cache import KVCache
from podium.rollout.native.rows import Rows, RowTable
from podium.rollout.native.sampling import LogitsProcessing, SampledTokens, sample
from podium.rollout.native.scheduler import Chunk, StepPlan
from podium.rollout.native.slots import Segment, segments
from podium.rollout.randomness import uniforms_on_host


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSamples:
    """The tokens that the sample rows of a plan sampled."""

    tokens_B: Tokens
    logprobs_B: NDArray[np.float32]
    experts_TLK: Experts | None = None  # of the tokens that were fed: decode rows, then chunks; None: not recorded


class StepResult(Protocol):
    """A launched step."""

    def read(self) -> StepSamples:
        """Its samples; waits for the device."""


class Runner(Protocol):
    """Runs plans in order."""

    @property
    def lag(self) -> int:
        """Number of steps that may be launched before the first of them is read."""

    def run(self, plan: StepPlan) -> StepResult:
        """Launches one step."""

    def forget_addresses(self) -> None:
        """Called when the addresses of weights or cache have changed."""

    def close(self) -> None:
        """Frees what the runner holds."""


class SamplingTable:
    """How each row samples: temperature, key of its random stream, and logits processing."""

    def __init__(self, num_rows: int) -> None:
        self.temperature_R = np.ones(num_rows, np.float32)
        self.key_R = np.zeros(num_rows, np.int64)
        self.processed_R = np.zeros(num_rows, np.bool_)
        self.wants_history_R = np.zeros(num_rows, np.bool_)


@dataclass(frozen=True, slots=True)
class Known:
    """A result that is already available."""

    samples: StepSamples

    def read(self) -> StepSamples:
        """The samples, which are already available."""
        return self.samples


def recording(shape: RouterShape, num_tokens: int, device: torch.device) -> Routing:
    """Routers that write their choices for so many tokens."""
    dtype = torch.uint8 if shape.dtype is np.uint8 else torch.int16
    size = (shape.num_layers, num_tokens, shape.per_token)
    return Routing(recorded_LTK=torch.empty(size, dtype=dtype, device=device))


# On CPU a matrix product rounds a row in the same way whatever other rows it has, but for small counts, which go to
# routines of their own: one row always, up to eight where oneDNN multiplies large matrices. And elementwise kernels
# compute what is left behind the last whole vector of a tensor with other functions: whole vectors of rows leave none.
_CPU_ROWS = 16


class EagerRunner:
    """Feeds and samples in one go; its results are known when `run` returns.

    On CPU the numbers of a token do not depend on its batch: some rows are computed again until kernels treat every row
    of that count alike. The experts of a mixture may get any number of tokens. There every token is fed twice (no
    expert sees a single one) and oneDNN, which has special routines for other small numbers, is off."""

    lag = 0

    def __init__(
        self,
        model: PackedCausalLM,
        modules: Sequence[nn.Module],
        cache: KVCache,
        rows: RowTable,
        samples: SamplingTable,
        device: torch.device,
        *,
        slots: bool,
        recorded: RouterShape | None = None,
    ) -> None:
        """`recorded`: sizes of the routers whose choices are recorded."""
        self._recorded = recorded
        self.experts_LTK: Tensor | None = None  # of the tokens of the last forward
        self._model, self._cache, self._rows, self._sampling, self._device = model, cache, rows, samples, device
        self._slots = slots
        self._row_multiple = _CPU_ROWS if device.type == "cpu" else 1
        self._feeds_twice = device.type == "cpu" and has_experts(model.hf)
        self._layers = {id(module): layer for module, layer in zip(modules, cache.layers, strict=True)}
        self._segments: tuple[bytes, list[Segment]] = (b"", [])

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step and waits for its samples."""
        if plan.moves is not None:
            self._cache.move(plan.moves)
        self._cache.copy(plan.copies)
        sampled = self.sample(self.forward(plan.decode_rows, plan.chunks), plan.sample_rows)
        experts_LTK = self.experts_LTK
        return Known(
            StepSamples(
                tokens_B=sampled.tokens_B.to(torch.int32).cpu().numpy(),
                logprobs_B=sampled.logprobs_B.cpu().numpy(),
                experts_TLK=None if experts_LTK is None else experts_LTK.transpose(0, 1).cpu().numpy(),
            )
        )

    def forget_addresses(self) -> None:
        """Does nothing: no addresses are stored."""

    def close(self) -> None:
        """Does nothing: no resources are held."""

    def forward(self, decode: Rows, chunks: Sequence[Chunk]) -> Tensor:
        """Float32 logits of the rows that sample: the decode rows, then the chunks that reach their end; then
        `_repeats` of these."""
        rows = self._rows
        at_N = rows.fed_R[decode] - 1
        parts = [np.arange(chunk.start, chunk.stop) for chunk in chunks]
        row_T = np.concatenate([decode, *(np.full(c.stop - c.start, c.row) for c in chunks)])
        position_T = np.concatenate([at_N, *parts])
        repeats = self._repeats(len(row_T), twice=self._feeds_twice)
        routing = None if self._recorded is None else recording(self._recorded, len(row_T) + len(repeats), self._device)
        step = CachedStep(
            layers=self._layers,
            block_T=self.moved(rows.blocks_RM[row_T, position_T // rows.block_size]),
            offset_T=self.moved(position_T % rows.block_size),
            slot_runs=self._slot_runs(decode, at_N + 1),
            lengths_N=self.moved(at_N + 1),
            pieces=self._pieces(decode, chunks),
            packed=self._packed(chunks) if self._device.type == "cuda" and chunks and not len(decode) else None,
            repeats=self.moved(repeats) if len(repeats) else None,
        )
        fed = np.concatenate([np.arange(len(row_T)), repeats])
        with self._kernels(), self._model.routed(routing):
            out = self._model.hf.get_decoder()(
                input_ids=self.moved(rows.tokens_RL[row_T, position_T].astype(np.int64)[fed])[None],
                position_ids=self.moved(position_T[fed])[None],
                use_cache=False,
                packing=step,
            )
        if routing is not None and routing.recorded_LTK is not None:
            self.experts_LTK = routing.recorded_LTK[:, : len(row_T)]
        ends = len(decode) + np.cumsum([chunk.stop - chunk.start for chunk in chunks]) - 1
        reached = [int(end) for end, c in zip(ends, chunks, strict=True) if c.samples]
        drawing = np.concatenate([np.arange(len(decode)), np.array(reached, np.int64)])
        return self._logits(out.last_hidden_state[0], drawing)

    def _kernels(self) -> AbstractContextManager[None]:
        """Disables compiled layers, which would be compiled again for every shape of a step."""
        if self._device.type == "cuda":
            return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
        if self._feeds_twice:
            return onednn_off()
        return nullcontext()

    def _logits(self, hidden: Tensor, drawing: Rows) -> Tensor:
        """Logits of these rows of a forward."""
        chosen = np.concatenate([drawing, drawing[self._repeats(len(drawing))]])
        if len(chosen) != len(hidden) or (chosen != np.arange(len(hidden))).any():
            hidden = hidden.index_select(0, self.moved(chosen))
        return next_token_scores(hidden, self._model.head_weight, self._model.head_spec)

    def _repeats(self, count: int, *, twice: bool = False) -> Rows:
        """Which of `count` rows are computed again beside them, so that their numbers do not depend on the count."""
        missing = count if twice else 0
        missing += -(count + missing) % self._row_multiple
        return np.arange(missing, dtype=np.int64) % max(count, 1)

    def sample(self, logits_BV: Tensor, rows: Rows) -> SampledTokens:
        """Samples one token for each of these rows. `logits_BV` come from `forward`."""
        table, count = self._sampling, len(rows)
        rows = np.concatenate([rows, rows[self._repeats(count)]])
        # The token's own position in its sequence keys the stream. `length` counts the token that is being sampled.
        position_B = self._rows.length_R[rows] - 1
        sampled = sample(
            logits_BV,
            self.moved(table.temperature_R[rows]),
            self.moved(uniforms_on_host(table.key_R[rows], position_B)),
            self.processings(rows[:count]),
        )
        return SampledTokens(sampled.tokens_B[:count], sampled.logprobs_B[:count])

    def processings(self, rows: Rows) -> list[LogitsProcessing]:
        """Logits processing of a step's rows that need it."""
        table = self._rows
        processings = []
        for at in np.flatnonzero(self._sampling.processed_R[rows]).tolist():
            row = int(rows[at])
            sequence = table.sequences[row]
            assert sequence is not None
            length = int(table.length_R[row]) - 1
            processings.append(
                LogitsProcessing(
                    row=at,
                    sampling=sequence.request.sampling,
                    tokens=table.tokens_RL[row, :length],
                    num_new=length - int(table.prompt_R[row]),
                )
            )
        return processings + [processings[at] for at in self._repeats(len(processings))]

    def _slot_runs(self, decode: Rows, lengths_N: Rows) -> list[SlotRun]:
        if not self._slots or not len(decode):
            return []
        slots = self._rows.blocks_RM[decode, 0]
        return [
            SlotRun(
                first=segment.start,
                count=segment.stop - segment.start,
                first_slot=int(slots[segment.start]),
                longest=int(lengths_N[segment.start : segment.stop].max()),
            )
            for segment in self._read_together(slots, lengths_N)
        ]

    def _read_together(self, slots: Rows, lengths_N: Rows) -> list[Segment]:
        """Reads neighbouring slots in the cheapest number of calls. All rows grow alike, so this holds until the rows
        change."""
        key = slots.tobytes()
        if self._segments[0] != key:
            self._segments = (key, segments(slots, lengths_N))
        return self._segments[1]

    def _pieces(self, decode: Rows, chunks: Sequence[Chunk]) -> list[QuerySpan]:
        """Prompts and, without slots, all decode rows are read sequence by sequence."""
        rows, first, pieces = self._rows, len(decode), []
        if not self._slots:
            singles = zip(decode.tolist(), rows.fed_R[decode].tolist(), strict=True)
            pieces = [self._piece(row, at, 1, length) for at, (row, length) in enumerate(singles)]
        for chunk in chunks:
            pieces.append(self._piece(chunk.row, first, chunk.stop - chunk.start, chunk.stop))
            first += chunk.stop - chunk.start
        return pieces

    def _piece(self, row: int, first: int, count: int, length: int) -> QuerySpan:
        blocks = self._rows.blocks_RM[row, : -(-length // self._rows.block_size)]
        return QuerySpan(first=first, count=count, length=length, blocks=self.moved(blocks))

    def _packed(self, chunks: Sequence[Chunk]) -> PackedSpans:
        counts = np.array([chunk.stop - chunk.start for chunk in chunks])
        lengths = np.array([chunk.stop for chunk in chunks])
        block = offset = None
        if any(chunk.start for chunk in chunks):
            at = np.concatenate([np.arange(length) for length in lengths])
            row = np.repeat([chunk.row for chunk in chunks], lengths)
            block = self.moved(self._rows.blocks_RM[row, at // self._rows.block_size])
            offset = self.moved(at % self._rows.block_size)
        return PackedSpans(
            first=0,
            query_bounds=self.moved(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
            key_bounds=self.moved(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
            longest_query=int(counts.max()),
            longest_key=int(lengths.max()),
            key_block=block,
            key_offset=offset,
        )

    def moved(self, array: NDArray[Any]) -> Tensor:
        """Copies to the device without waiting for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor
