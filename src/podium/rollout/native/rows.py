# SPDX-License-Identifier: Apache-2.0
"""All running sequences as one table with a row each, so that a step of hundreds of them costs a few array
operations."""

# R rows of the table · B rows of one step · L positions · M blocks of the longest sequence · S stop tokens

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from podium.data.documents import Tokens
from podium.data.routed_experts import Experts, continued
from podium.data.trajectories import TrajectoryId
from podium.rollout.native.block_manager import BlockTable, cache_error
from podium.rollout.native.expert_cache import ExpertCache
from podium.rollout.requests import Completion, Finish, PartialAnswer, Request

Rows = NDArray[np.int64]

_FIRST_WIDTH = 256
_NO_TOKEN = -1
_NO_CACHE = np.iinfo(np.int64).max


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in progress, with its state while it has no row (waiting, or preempted for lack of memory)."""

    request: Request
    arrival: int
    tokens: Tokens  # prompt and sampled tokens
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    versions: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    experts: Experts | None = None  # of the first positions
    row: int = -1
    block_table: BlockTable | None = None
    limit: int = 0  # tokens of prompt and completion together at which it ends
    reused: int = 0
    deferred: int = 0

    def __post_init__(self) -> None:
        self.limit = len(self.request.prompt) + self.request.sampling.max_new_tokens

    @classmethod
    def of(cls, request: Request, *, arrival: int) -> Sequence:
        """A new sequence: of a prompt, and of the answer so far if another engine has begun it."""
        tokens, begun = request.prompt.astype(np.int32), request.begun
        if begun is None:
            return cls(request=request, arrival=arrival, tokens=tokens)
        return cls(
            request=request,
            arrival=arrival,
            tokens=np.concatenate([tokens, begun.tokens_L]),
            logprobs=begun.logprobs_L.astype(np.float32),
            versions=begun.versions_L.astype(np.int32),
            experts=begun.experts,
        )

    @property
    def id(self) -> TrajectoryId:
        """The id of the request."""
        return self.request.id

    def completion(self, finish: Finish, *, stop: int | str | None = None, error: str | None = None) -> Completion:
        """The finished sequence as the caller gets it."""
        sampled = len(self.tokens) - len(self.logprobs)
        return Completion(
            id=self.id,
            prompt=self.tokens[:sampled].copy(),  # the caller's array may have been written to since
            tokens_L=self.tokens[sampled:].copy(),
            logprobs_L=self.logprobs.copy(),
            versions_L=self.versions.copy(),
            finish=finish,
            stop=stop,
            error=error,
            reused_tokens=self.reused,
            experts=self.experts,
        )


class RowTable:
    """`length_R` counts tokens that are sampled or being sampled, `known_R` those that the host has seen. `fed_R`
    counts those whose keys and values are (or, after the steps in flight, will be) in the cache."""

    def __init__(self, num_rows: int, *, block_size: int, max_length: int, experts: ExpertCache | None = None) -> None:
        """`experts`: which experts the tokens in the cache went to, if that is recorded."""
        self.num_rows, self.block_size, self._experts = num_rows, block_size, experts
        self.blocks_RM = np.zeros((num_rows, -(-max_length // block_size)), np.int64)
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.epoch_R = np.zeros(num_rows, np.int64)  # counts the sequences that a row has served
        self.length_R = np.zeros(num_rows, np.int64)
        self.known_R = np.zeros(num_rows, np.int64)
        self.fed_R = np.zeros(num_rows, np.int64)
        self.prompt_R = np.zeros(num_rows, np.int64)
        self.limit_R = np.zeros(num_rows, np.int64)
        self.earliest_R = np.zeros(num_rows, np.int64)  # length before which a stop does not count
        self.admitted_R = np.zeros(num_rows, np.int64)  # length when it was admitted
        self.has_strings_R = np.zeros(num_rows, np.bool_)  # that end it
        self.room_R = np.zeros(num_rows, np.int64)  # positions in the blocks that it holds
        self.arrival_R = np.zeros(num_rows, np.int64)
        self._cache_age_R = np.full(num_rows, _NO_CACHE)  # of its block table
        self.tokens_RL: NDArray[np.int32] = np.zeros((num_rows, _FIRST_WIDTH), np.int32)
        self.logprobs_RL: NDArray[np.float32] = np.zeros((num_rows, _FIRST_WIDTH), np.float32)
        self.versions_RL: NDArray[np.int32] = np.zeros((num_rows, _FIRST_WIDTH), np.int32)
        self._stops_RS = np.full((num_rows, 1), _NO_TOKEN, np.int32)
        self._free = list(range(num_rows - 1, -1, -1))
        self._changed_pages: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of rows without a sequence."""
        return len(self._free)

    @property
    def active(self) -> Rows:
        """Rows in use, the oldest sequence first."""
        rows = np.array([row for row, sequence in enumerate(self.sequences) if sequence is not None], np.int64)
        return rows[np.argsort(self.arrival_R[rows])]

    def admit(self, sequence: Sequence, block_table: BlockTable) -> int:
        """Gives a sequence a row."""
        row = self._free.pop()
        size, sampled = len(sequence.tokens), len(sequence.logprobs)
        self._widen(max(size + 1, min(sequence.limit, 2 * _FIRST_WIDTH)))
        self.sequences[row] = sequence
        sequence.row, sequence.block_table = row, block_table
        sampling = sequence.request.sampling
        self.length_R[row] = self.known_R[row] = size
        self.fed_R[row] = block_table.reused
        self.prompt_R[row] = size - sampled
        self.limit_R[row] = sequence.limit
        self.earliest_R[row] = min(size - sampled + max(sampling.min_new_tokens, 1), sequence.limit + 1)
        self.admitted_R[row] = size
        self.set_blocks(row, block_table)
        self.arrival_R[row] = sequence.arrival
        self._cache_age_R[row] = block_table.age
        self.tokens_RL[row, :size] = sequence.tokens
        self.logprobs_RL[row, size - sampled : size] = sequence.logprobs
        self.versions_RL[row, size - sampled : size] = sequence.versions
        self.has_strings_R[row] = bool(sampling.stop_strings)
        self._set_stops(row, sampling.stop_tokens)
        return row

    def set_blocks(self, row: int, block_table: BlockTable) -> None:
        """Sets the blocks of a row's block table, after it has grown or they were moved."""
        self.blocks_RM[row, : len(block_table.blocks)] = block_table.blocks
        self.room_R[row] = len(block_table.blocks) * self.block_size
        self._changed_pages.add(row)

    def take_changed_blocks(self) -> list[int]:
        """Rows whose blocks have changed since the last call."""
        changed, self._changed_pages = sorted(self._changed_pages), set()
        return changed

    def release(self, row: int) -> Sequence:
        """Takes a sequence out of its row, with all tokens that the host has seen. It keeps its block table."""
        sequence = self.sequences[row]
        assert sequence is not None
        known, prompt = int(self.known_R[row]), int(self.prompt_R[row])
        sequence.tokens = self.tokens_RL[row, :known].copy()
        sequence.logprobs = self.logprobs_RL[row, prompt:known].copy()
        sequence.versions = self.versions_RL[row, prompt:known].copy()
        if self._experts is not None and known > self.admitted_R[row]:
            # All but the newest token have been fed. A position that was fed before keeps its experts: a sampled token
            # depends on those of its time, whatever weights have recomputed the cache since.
            fed = self._experts.read(self.blocks_RM[row], known - 1)
            sequence.experts = continued(sequence.experts, fed)
        sequence.row = -1
        self.sequences[row] = None
        self._cache_age_R[row] = _NO_CACHE
        self.epoch_R[row] += 1
        self._free.append(row)
        return sequence

    def check_caches(self, oldest: int) -> None:
        """Raises an InvariantError if a running sequence has keys and values that were computed before all blocks had
        been forgotten `oldest` times."""
        row = int(self._cache_age_R.argmin())
        if self._cache_age_R[row] >= oldest:
            return
        sequence = self.sequences[row]
        assert sequence is not None
        raise cache_error(
            f"answer {sequence.id} would go on over keys and values of weights that have been replaced, "
            f"{oldest - int(self._cache_age_R[row])} updates ago, and its cache was to be computed again"
        )

    def partial_answer(self, sequence: Sequence) -> PartialAnswer:
        """What the host has seen of a sequence that has a row."""
        sampled = slice(int(self.prompt_R[sequence.row]), int(self.known_R[sequence.row]))
        return PartialAnswer(
            tokens_L=self.tokens_RL[sequence.row, sampled].copy(),
            logprobs_L=self.logprobs_RL[sequence.row, sampled].copy(),
            versions_L=self.versions_RL[sequence.row, sampled].copy(),
        )

    def empty(self) -> None:
        """Takes all sequences out of their rows."""
        for row, sequence in enumerate(self.sequences):
            if sequence is not None:
                self.release(row)
        self._free = list(range(self.num_rows - 1, -1, -1))

    def append(self, rows_B: Rows, tokens_B: Tokens, logprobs_B: NDArray[np.float32], version: int) -> None:
        """Appends the samples of one step, for rows that still hold the same sequences."""
        at_B = self.known_R[rows_B]
        if len(rows_B):
            self._widen(int(at_B.max()) + 1)
        self.tokens_RL[rows_B, at_B] = tokens_B
        self.logprobs_RL[rows_B, at_B] = logprobs_B
        self.versions_RL[rows_B, at_B] = version
        self.known_R[rows_B] = at_B + 1

    def write_proposal(self, row: int, tokens: list[int]) -> None:
        """Puts proposed tokens behind those of a row, to be fed. They do not count as tokens of the sequence."""
        length = int(self.length_R[row])
        self._widen(length + len(tokens) + 1)
        self.tokens_RL[row, length : length + len(tokens)] = tokens

    def accept(self, rows_B: Rows) -> None:
        """The next proposed token of these rows was right: its keys and values count, and one more token is sampled."""
        self.fed_R[rows_B] += 1
        self.length_R[rows_B] += 1

    def at_a_stop(self, rows_B: Rows) -> NDArray[np.bool_]:
        """Rows whose newest token is one of their stop tokens, and that are long enough to stop."""
        known_B = self.known_R[rows_B]
        newest_B = self.tokens_RL[rows_B, known_B - 1]
        hit_B: NDArray[np.bool_] = (self._stops_RS[rows_B] == newest_B[:, None]).any(axis=1)
        return np.logical_and(hit_B, known_B >= self.earliest_R[rows_B])

    def _set_stops(self, row: int, tokens: frozenset[int]) -> None:
        if len(tokens) > self._stops_RS.shape[1]:
            wider = np.full((self.num_rows, len(tokens)), _NO_TOKEN, np.int32)
            wider[:, : self._stops_RS.shape[1]] = self._stops_RS
            self._stops_RS = wider
        self._stops_RS[row] = _NO_TOKEN
        self._stops_RS[row, : len(tokens)] = sorted(tokens)

    def _widen(self, width: int) -> None:
        have = self.tokens_RL.shape[1]
        if width <= have:
            return
        more = ((0, 0), (0, max(width, 2 * have) - have))
        self.tokens_RL = np.pad(self.tokens_RL, more)
        self.logprobs_RL = np.pad(self.logprobs_RL, more)
        self.versions_RL = np.pad(self.versions_RL, more)
