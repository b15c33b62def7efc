# SPDX-License-Identifier: Apache-2.0
"""One step through the model in plain torch: one forward for all fed tokens, then one sample per row."""

# T tokens fed · B rows that sample · N decode rows · V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.data.documents import Tokens
from podium.data.routed_experts import Experts
from podium.rollout.native.attention import SlotRun
from podium.rollout.native.cache import KVCache
from podium.rollout.native.forward import HostPackedSpans, HostSpan, ModelForward, StepInputs
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


class EagerRunner:
    """Feeds and samples in one go; its results are known when `run` returns."""

    lag = 0

    def __init__(
        self,
        forward: ModelForward,
        cache: KVCache,
        rows: RowTable,
        samples: SamplingTable,
        *,
        slots: bool,
    ) -> None:
        self._forward, self._cache, self._rows, self._sampling = forward, cache, rows, samples
        self._slots = slots
        self._segments: tuple[bytes, list[Segment]] = (b"", [])

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step and waits for its samples."""
        if plan.moves is not None:
            self._cache.move(plan.moves)
        self._cache.copy(plan.copies)
        logits_BV = self.forward(plan.decode_rows, [*plan.verified, *plan.chunks])
        sampled = self.sample(logits_BV, plan.sample_rows, plan.sample_positions)
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

    @property
    def experts_LTK(self) -> Tensor | None:
        """Experts of the tokens of the last forward, if they are recorded."""
        return self._forward.experts_LTK

    def forward(self, decode: Rows, chunks: Sequence[Chunk]) -> Tensor:
        """Float32 logits of the tokens that sample: the decode rows, then the last ones of each chunk; then
        `ModelForward.repeats` of these."""
        return self._forward.run(self._inputs(decode, chunks))

    def _inputs(self, decode: Rows, chunks: Sequence[Chunk]) -> StepInputs:
        rows = self._rows
        at_N = rows.fed_R[decode] - 1
        parts = [np.arange(chunk.start, chunk.stop) for chunk in chunks]
        row_T = np.concatenate([decode, *(np.full(c.stop - c.start, c.row) for c in chunks)])
        position_T = np.concatenate([at_N, *parts])
        ends = len(decode) + np.cumsum([chunk.stop - chunk.start for chunk in chunks], dtype=np.int64)
        sampling = [np.arange(end - c.samples, end) for end, c in zip(ends.tolist(), chunks, strict=True)]
        is_packed = self._forward.device.type == "cuda" and len(chunks) > 0 and not len(decode)
        return StepInputs(
            tokens_T=rows.tokens_RL[row_T, position_T].astype(np.int64),
            positions_T=position_T,
            block_T=rows.blocks_RM[row_T, position_T // rows.block_size],
            offset_T=position_T % rows.block_size,
            slot_runs=self._slot_runs(decode, at_N + 1),
            lengths_N=at_N + 1,
            spans=self._spans(decode, chunks),
            packed=self._packed(chunks) if is_packed else None,
            sampled_B=np.concatenate([np.arange(len(decode)), *sampling]),
        )

    def sample(self, logits_BV: Tensor, rows: Rows, position_B: Rows) -> SampledTokens:
        """Samples one token for each of these rows, at these positions of their sequences. `logits_BV` come from
        `forward`."""
        table, count = self._sampling, len(rows)
        processings = self.processings(rows, position_B)
        again = self._forward.repeats(count)
        rows, position_B = np.concatenate([rows, rows[again]]), np.concatenate([position_B, position_B[again]])
        sampled = sample(
            logits_BV,
            self.moved(table.temperature_R[rows]),
            # The token's own position in its sequence keys the stream.
            self.moved(uniforms_on_host(table.key_R[rows], position_B)),
            processings,
        )
        return SampledTokens(sampled.tokens_B[:count], sampled.logprobs_B[:count])

    def processings(self, rows: Rows, position_B: Rows) -> list[LogitsProcessing]:
        """Logits processing of a step's rows that need it, for tokens at these positions. Tokens before them may be
        proposals: a sample behind a wrong one does not count."""
        table = self._rows
        processings = []
        for at in np.flatnonzero(self._sampling.processed_R[rows]).tolist():
            row = int(rows[at])
            sequence = table.sequences[row]
            assert sequence is not None
            length = int(position_B[at])
            processings.append(
                LogitsProcessing(
                    row=at,
                    sampling=sequence.request.sampling,
                    tokens=table.tokens_RL[row, :length],
                    num_new=length - int(table.prompt_R[row]),
                )
            )
        return processings + [processings[at] for at in self._forward.repeats(len(processings))]

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

    def _spans(self, decode: Rows, chunks: Sequence[Chunk]) -> list[HostSpan]:
        """Prompts and, without slots, all decode rows are read sequence by sequence."""
        rows, first, spans = self._rows, len(decode), []
        if not self._slots:
            singles = zip(decode.tolist(), rows.fed_R[decode].tolist(), strict=True)
            spans = [self._span(row, at, 1, length) for at, (row, length) in enumerate(singles)]
        for chunk in chunks:
            spans.append(self._span(chunk.row, first, chunk.stop - chunk.start, chunk.stop))
            first += chunk.stop - chunk.start
        return spans

    def _span(self, row: int, first: int, count: int, length: int) -> HostSpan:
        blocks = self._rows.blocks_RM[row, : -(-length // self._rows.block_size)].copy()
        return HostSpan(first=first, count=count, length=length, blocks=blocks)

    def _packed(self, chunks: Sequence[Chunk]) -> HostPackedSpans:
        counts = np.array([chunk.stop - chunk.start for chunk in chunks])
        lengths = np.array([chunk.stop for chunk in chunks])
        block = offset = None
        if any(chunk.start for chunk in chunks):
            at = np.concatenate([np.arange(length) for length in lengths])
            row = np.repeat([chunk.row for chunk in chunks], lengths)
            block = self._rows.blocks_RM[row, at // self._rows.block_size]
            offset = at % self._rows.block_size
        return HostPackedSpans(
            query_bounds=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            key_bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            longest_query=int(counts.max()),
            longest_key=int(lengths.max()),
            key_block=block,
            key_offset=offset,
        )

    def moved(self, array: NDArray[Any]) -> Tensor:
        """Copies to the device without waiting for it."""
        return self._forward.moved(array)
