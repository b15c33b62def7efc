# SPDX-License-Identifier: Apache-2.0
"""Plans the next step: feeds the last token of every running sequence, and as many waiting prompt tokens as the budget
allows.

Pure: row table and block manager in, a plan out. Sequences are served in order of arrival. The oldest sequence is never
preempted, so it always advances. Every sequence eventually becomes the oldest, so none starves."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from podium.rollout.native.block_manager import BlockCopy, BlockManager, common_prefix
from podium.rollout.native.rows import Rows, RowTable, Sequence
from podium.rollout.native.slots import Arrangement, arrange
from podium.rollout.native.speculation import Speculation

# A prompt waits for a common prefix that is being computed if that saves this many tokens, or all of it.
_WORTH_WAITING = 32
# But not forever: others with longer common prefixes could keep coming.
_LONGEST_DEFERRAL = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of a row's sequence are fed."""

    row: int
    start: int
    stop: int
    samples: int  # at so many of its last tokens: 0 inside a prompt, 1 at its end, more where proposals are verified


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One step. Fed tokens are laid out as decode rows first, then those to verify, then the chunks."""

    moves: Arrangement | None  # slots change places before anything else
    copies: abc.Sequence[BlockCopy]  # then these
    decode_rows: Rows
    verified: abc.Sequence[Chunk]  # the newest token of a row and proposals behind it
    chunks: abc.Sequence[Chunk]
    sample_rows: Rows  # rows that sample a token in this step, in the same order; a verified row once for each token
    sample_epochs: Rows
    sample_positions: Rows  # of the sampled token in its sequence
    proposed_B: Rows  # the proposal at which a verified row samples; -1: its newest token, or nothing to verify
    admitted: abc.Sequence[int]  # rows that got a new sequence

    def places(self, rows: RowTable) -> tuple[Rows, Rows]:
        """Block and offset in the cache of each fed token. To be called before the next plan."""
        chunks = [*self.verified, *self.chunks]
        row_T = np.concatenate([self.decode_rows, *(np.full(each.stop - each.start, each.row) for each in chunks)])
        at_T = np.concatenate([rows.fed_R[self.decode_rows] - 1, *(np.arange(c.start, c.stop) for c in chunks)])
        return rows.blocks_RM[row_T, at_T // rows.block_size], at_T % rows.block_size

    @property
    def is_first_B(self) -> NDArray[np.bool_]:
        """Samples that count whatever was proposed: one of each row."""
        return self.proposed_B < 0


@dataclass(frozen=True, slots=True)
class Drain:
    """Memory has run out while steps are in flight: their results are needed before a sequence can be preempted."""


def _share(budget: int) -> int:
    """One prompt's first share of a step's budget: a long prompt does not delay short ones."""
    return -(-budget // 2)


class Scheduler:
    """Waiting sequences, rows and blocks."""

    def __init__(
        self,
        block_manager: BlockManager,
        rows: RowTable,
        *,
        prefill_tokens: int,
        slots: bool,
        speculation: Speculation | None = None,
    ) -> None:
        self.block_manager, self.rows, self._speculation = block_manager, rows, speculation
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self._prefill_tokens = prefill_tokens
        self._slots = slots
        self._rows_changed = False

    @property
    def num_running(self) -> int:
        """Number of admitted sequences."""
        return self.rows.num_rows - self.rows.num_free

    def preempt(self, row: int) -> None:
        """A sequence gives up its row and its cache, and waits ahead of all later arrivals."""
        sequence = self.end(row, keep=False)
        at = next((i for i, other in enumerate(self.waiting) if other.arrival > sequence.arrival), len(self.waiting))
        self.waiting.insert(at, sequence)

    def end(self, row: int, *, keep: bool = True) -> Sequence:
        """A sequence leaves its row for good; `keep`: its computed blocks may be reused."""
        sequence = self.rows.sequences[row]
        assert sequence is not None
        assert sequence.block_table is not None
        fed = int(min(self.rows.fed_R[row], self.rows.known_R[row]))
        self.block_manager.release(sequence.block_table, self.rows.tokens_RL[row, :fed] if keep else None)
        sequence.block_table = None
        self._rows_changed = True
        return self.rows.release(row)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Restarts all sequences after a failed step, from the tokens that the host has seen."""
        self.rows.empty()
        self.block_manager.reset()
        self.waiting = deque(sorted(sequences, key=lambda sequence: sequence.arrival))
        for sequence in self.waiting:
            sequence.row, sequence.block_table = -1, None
        self._rows_changed = True

    def cancel(self, sequences: Collection[Sequence]) -> None:
        """Removes these from the waiting sequences."""
        gone = {id(sequence) for sequence in sequences}
        self.waiting = deque(sequence for sequence in self.waiting if id(sequence) not in gone)

    def plan(self) -> StepPlan | Drain | None:
        """The next step, or None if there is nothing to do. Rows and blocks are advanced as if the step had run."""
        rows = self.rows
        moves = self._arranged()
        running = rows.active
        if not self._make_room(running):
            return Drain()
        running = rows.active
        chunks: list[Chunk] = []
        budget = self._prefill_tokens
        for row in running[rows.length_R[running] - rows.fed_R[running] > 1].tolist():
            budget -= self._take_chunk(row, _share(budget), chunks)
        admitted, budget = self._admit(budget, chunks)
        self._lengthen(chunks, budget)
        running = rows.active
        decode = running[self._samples_next(running)]
        decode = decode[~np.isin(decode, [chunk.row for chunk in chunks])]
        if self._slots:
            decode = decode[np.argsort(rows.blocks_RM[decode, 0])]
        if not len(decode) and not chunks:
            return None
        verified = self._proposed(decode)
        decode = decode[~np.isin(decode, [chunk.row for chunk in verified])]
        return self._launched(moves, decode, verified, chunks, admitted)

    def _launched(
        self, moves: Arrangement | None, decode: Rows, verified: list[Chunk], chunks: list[Chunk], admitted: list[int]
    ) -> StepPlan:
        rows = self.rows
        verified_rows = np.array([chunk.row for chunk in verified], np.int64)
        rows.fed_R[decode] += 1
        rows.fed_R[verified_rows] += 1
        for chunk in chunks:
            rows.fed_R[chunk.row] = chunk.stop
            sequence = rows.sequences[chunk.row]
            assert sequence is not None
            assert sequence.block_table is not None
            self.block_manager.remember(sequence.block_table, rows.tokens_RL[chunk.row, : chunk.stop])
        ending = [chunk.row for chunk in chunks if chunk.samples]
        counts = np.array([chunk.samples for chunk in verified], np.int64)
        ahead = np.concatenate([np.arange(chunk.samples) for chunk in verified] or [verified_rows])
        sample = np.concatenate([decode, np.repeat(verified_rows, counts), np.array(ending, np.int64)])
        position, proposed = rows.length_R[sample], np.full(len(sample), -1, np.int64)
        inside = slice(len(decode), len(decode) + len(ahead))
        position[inside] += ahead
        proposed[inside] = np.where(ahead > 0, rows.tokens_RL[sample[inside], position[inside] - 1], -1)
        rows.length_R[np.concatenate([decode, verified_rows, np.array(ending, np.int64)])] += 1
        return StepPlan(
            moves=moves,
            copies=self.block_manager.take_copies(),
            decode_rows=decode,
            verified=verified,
            chunks=chunks,
            sample_rows=sample,
            sample_epochs=rows.epoch_R[sample].copy(),
            sample_positions=position,
            proposed_B=proposed,
            admitted=admitted,
        )

    def _proposed(self, decode: Rows) -> list[Chunk]:
        """Rows for which earlier answers propose tokens, with room for them. A row whose newest token is still being
        sampled has none."""
        speculation, rows, verified = self._speculation, self.rows, list[Chunk]()
        if speculation is None or not speculation.per_lane:
            return verified
        left = speculation.most_rows - len(decode)
        for row in decode.tolist():
            length, sequence = int(rows.length_R[row]), rows.sequences[row]
            assert sequence is not None
            most = min(left, int(rows.limit_R[row]) - length - 1)  # the step itself samples one
            if most < 1 or rows.known_R[row] < length:
                continue
            tokens = speculation.propose(sequence, rows.tokens_RL[row, :length], most)
            tokens = tokens[: self._room_behind(row, length, len(tokens))]
            if tokens:
                left -= len(tokens)
                rows.write_proposal(row, tokens)
                verified.append(Chunk(row, length - 1, length + len(tokens), len(tokens) + 1))
        return verified

    def _room_behind(self, row: int, length: int, wanted: int) -> int:
        """Positions for proposals in a row's blocks; it gets more blocks only if every running sequence could too."""
        sequence = self.rows.sequences[row]
        assert sequence is not None
        assert sequence.block_table is not None
        missing = self.block_manager.blocks_for(length + wanted) - len(sequence.block_table.blocks)
        if missing > 0 and self.block_manager.num_available >= missing + self.num_running:
            self.block_manager.grow(sequence.block_table, length + wanted)
            self.rows.set_blocks(row, sequence.block_table)
        return max(0, int(self.rows.room_R[row]) - length)

    def _take_chunk(self, row: int, budget: int, chunks: list[Chunk]) -> int:
        start, length = int(self.rows.fed_R[row]), int(self.rows.length_R[row])
        stop = min(length, start + budget)
        if stop > start:
            chunks.append(Chunk(row, start, stop, int(stop == length)))
        return max(stop - start, 0)

    def _make_room(self, running: Rows) -> bool:
        """Allocates a block for every row whose next token needs one, oldest first; preempts the youngest if there are
        too few. False: this must wait for the results of the steps in flight."""
        rows = self.rows
        needy = self._samples_next(running) & (rows.length_R[running] > rows.room_R[running])
        for row in running[needy].tolist():
            sequence = rows.sequences[row]
            if sequence is None:  # preempted by an earlier iteration
                continue
            assert sequence.block_table is not None
            while not self.block_manager.grow(sequence.block_table, int(rows.length_R[row])):
                if (rows.length_R > rows.known_R)[rows.active].any():
                    return False
                youngest = int(rows.active[-1])
                self.preempt(youngest)
                self.preemptions += 1
                if youngest == row:
                    break
            else:
                rows.set_blocks(row, sequence.block_table)
        return True

    def _samples_next(self, rows: Rows) -> NDArray[np.bool_]:
        """Rows that need one token fed to sample the next, and have not reached their end."""
        length, fed, limit = self.rows.length_R[rows], self.rows.fed_R[rows], self.rows.limit_R[rows]
        ready: NDArray[np.bool_] = (length - fed == 1) & (length < limit)
        return ready

    def _lengthen(self, chunks: list[Chunk], budget: int) -> None:
        """Gives the budget that short prompts left over to the long ones, oldest first."""
        for at, chunk in enumerate(chunks):
            length = int(self.rows.length_R[chunk.row])
            more = min(length - chunk.stop, budget)
            if more > 0:
                stop = chunk.stop + more
                chunks[at] = Chunk(chunk.row, chunk.start, stop, int(stop == length))
                budget -= more

    def _admit(self, budget: int, chunks: list[Chunk]) -> tuple[list[int], int]:
        """Admits waiting sequences as far as rows, blocks and budget allow; returns the rows and the remaining
        budget."""
        put_off: list[Sequence] = []
        admitted: list[int] = []
        while self.waiting and self.rows.num_free and budget > 0:
            sequence = self.waiting.popleft()
            if self._should_wait(sequence, chunks):
                sequence.deferred += 1
                put_off.append(sequence)
                continue
            block_table = (
                self.block_manager.begin(sequence.tokens, len(sequence.tokens))
                if self._has_room_for(sequence)
                else None
            )
            if block_table is None:
                self.waiting.appendleft(sequence)
                break
            row = self.rows.admit(sequence, block_table)
            sequence.reused = max(sequence.reused, min(block_table.reused, len(sequence.request.prompt)))
            admitted.append(row)
            self._rows_changed = True
            if len(sequence.tokens) - block_table.reused > 1:
                budget -= self._take_chunk(row, _share(budget), chunks)
        self.waiting.extendleft(reversed(put_off))
        return admitted, budget

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Running sequences need room to grow: a sequence that takes the last blocks would soon be preempted."""
        if self._slots or not self.num_running:
            return True
        left = self.block_manager.num_available - self.block_manager.blocks_for(len(sequence.tokens) + 1)
        return left >= min(self.num_running, self.block_manager.num_blocks // 8)

    def _should_wait(self, sequence: Sequence, chunks: list[Chunk]) -> bool:
        """Whether a prompt that is being computed now shares enough tokens to be worth waiting for."""
        if sequence.deferred >= _LONGEST_DEFERRAL or not chunks or not self.block_manager.remembers:
            return False
        wanted = sequence.tokens[:-1]
        if not len(wanted):
            return False
        rows = self.rows
        # Most differ at once, and this is cheaper than comparing arrays.
        alike = [chunk.row for chunk in chunks if rows.tokens_RL[chunk.row, 0] == wanted[0]]
        shared = max((common_prefix(wanted, rows.tokens_RL[row, : rows.known_R[row]]) for row in alike), default=0)
        if shared < min(_WORTH_WAITING, len(wanted)):
            return False
        gain = shared - self.block_manager.common_with_remembered(wanted)
        return gain >= _WORTH_WAITING or (gain > 0 and shared == len(wanted))

    # Slots

    def _arranged(self) -> Arrangement | None:
        """If a block is a slot, places rows that are read together side by side."""
        if not self._slots or not self._rows_changed:
            return None
        self._rows_changed = False
        rows = self.rows
        running = rows.active
        moves = arrange(rows.blocks_RM[running, 0], rows.length_R[running])
        if moves is not None:
            moves = replace(moves, tokens=max(moves.tokens, self.block_manager.longest_remembered(moves.target_of)))
            block_tables = {
                row: sequence.block_table
                for row, sequence in enumerate(rows.sequences)
                if sequence and sequence.block_table
            }
            self.block_manager.rename(moves.target_of, list(block_tables.values()))
            for row, block_table in block_tables.items():
                rows.set_blocks(row, block_table)
        return moves
