# SPDX-License-Identifier: Apache-2.0
"""What the next step feeds: every answer that draws one token at a time, and as much waiting prompt as the budget has.

Pure: tables and page books in, a plan out. The order of arrival rules. The oldest answer is never put back, so it
always advances, and whoever waits becomes the oldest in the end: nobody starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from podium.rollout.native.pages import PageBook, PageCopy, common_prefix
from podium.rollout.native.rows import Answer, Rows, RowTable
from podium.rollout.native.slots import Arrangement, arrange

# A prompt whose beginning is being computed right now waits for it when it would save this many tokens, or all of it.
_WORTH_WAITING = 32
# But not for ever: others with longer common beginnings could keep coming.
_LONGEST_DEFERRAL = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of a row's sequence are fed."""

    row: int
    start: int
    stop: int
    draws: bool  # it reaches the end of what is known, so the row draws its next token


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One step. Fed tokens are laid out as decode rows first, then the chunks."""

    moves: Arrangement | None  # slots change places before anything else
    copies: Sequence[PageCopy]  # then these
    decode_rows: Rows
    chunks: Sequence[Chunk]
    draw_rows: Rows  # rows that draw a token in this step: the decode rows, then chunks that reach their end
    draw_epochs: Rows
    seated: Sequence[int]  # rows that got a new answer


@dataclass(frozen=True, slots=True)
class Drain:
    """Memory has run out while steps are in flight: their results are needed before an answer can be put back."""


def _share(budget: int) -> int:
    """What one prompt gets of a step's budget at first: a long one does not keep short ones waiting."""
    return -(-budget // 2)


class Scheduler:
    """Waiting answers, rows and pages."""

    def __init__(self, book: PageBook, rows: RowTable, *, prefill_tokens: int, slots: bool) -> None:
        self.book, self.rows = book, rows
        self.waiting: deque[Answer] = deque()
        self.preemptions = 0
        self._prefill_tokens = prefill_tokens
        self._slots = slots
        self._rows_changed = False

    @property
    def num_running(self) -> int:
        return self.rows.num_rows - self.rows.num_free

    def put_back(self, row: int) -> None:
        """An answer gives up its row and its cache, and waits, before all that arrived later."""
        answer = self.end(row, keep=False)
        at = next((i for i, other in enumerate(self.waiting) if other.arrival > answer.arrival), len(self.waiting))
        self.waiting.insert(at, answer)

    def end(self, row: int, *, keep: bool = True) -> Answer:
        """An answer leaves its row for good; `keep`: what it computed may be reused."""
        answer = self.rows.answers[row]
        assert answer is not None
        assert answer.lease is not None
        fed = int(min(self.rows.fed_R[row], self.rows.known_R[row]))
        self.book.release(answer.lease, self.rows.tokens_RL[row, :fed] if keep else None)
        answer.lease = None
        self._rows_changed = True
        return self.rows.unseat(row)

    def restart(self, answers: Iterable[Answer]) -> None:
        """After a step that failed nothing is certain but what the host has seen: all begin again from there."""
        self.rows.empty()
        self.book.reset()
        self.waiting = deque(sorted(answers, key=lambda answer: answer.arrival))
        for answer in self.waiting:
            answer.row, answer.lease = -1, None
        self._rows_changed = True

    def cancel(self, answers: Collection[Answer]) -> None:
        """These wait no longer."""
        gone = {id(answer) for answer in answers}
        self.waiting = deque(answer for answer in self.waiting if id(answer) not in gone)

    def plan(self) -> StepPlan | Drain | None:
        """The next step, or None when there is nothing to do. Rows and pages are advanced as if it had been run."""
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
        seated, budget = self._admit(budget, chunks)
        self._lengthen(chunks, budget)
        running = rows.active
        decode = running[self._draws_next(running)]
        decode = decode[~np.isin(decode, [chunk.row for chunk in chunks])]
        if self._slots:
            decode = decode[np.argsort(rows.pages_RM[decode, 0])]
        if not len(decode) and not chunks:
            return None
        return self._launched(moves, decode, chunks, seated)

    def _launched(self, moves: Arrangement | None, decode: Rows, chunks: list[Chunk], seated: list[int]) -> StepPlan:
        rows = self.rows
        rows.fed_R[decode] += 1
        for chunk in chunks:
            rows.fed_R[chunk.row] = chunk.stop
            answer = rows.answers[chunk.row]
            assert answer is not None
            assert answer.lease is not None
            self.book.remember(answer.lease, rows.tokens_RL[chunk.row, : chunk.stop])
        ending = [chunk.row for chunk in chunks if chunk.draws]
        draw = np.concatenate([decode, np.array(ending, np.int64)])
        rows.length_R[draw] += 1
        return StepPlan(
            moves=moves,
            copies=self.book.take_copies(),
            decode_rows=decode,
            chunks=chunks,
            draw_rows=draw,
            draw_epochs=rows.epoch_R[draw].copy(),
            seated=seated,
        )

    def _take_chunk(self, row: int, budget: int, chunks: list[Chunk]) -> int:
        start, length = int(self.rows.fed_R[row]), int(self.rows.length_R[row])
        stop = min(length, start + budget)
        if stop > start:
            chunks.append(Chunk(row, start, stop, stop == length))
        return max(stop - start, 0)

    def _make_room(self, running: Rows) -> bool:
        """A page for every row whose next token needs one, the oldest first; the youngest are put back where there is
        none. False: that cannot be done before the steps in flight are known."""
        rows = self.rows
        needy = self._draws_next(running) & (rows.length_R[running] > rows.room_R[running])
        for row in running[needy].tolist():
            answer = rows.answers[row]
            if answer is None:  # put back meanwhile
                continue
            assert answer.lease is not None
            while not self.book.grow(answer.lease, int(rows.length_R[row])):
                if (rows.length_R > rows.known_R)[rows.active].any():
                    return False
                youngest = int(rows.active[-1])
                self.put_back(youngest)
                self.preemptions += 1
                if youngest == row:
                    break
            else:
                rows.set_pages(row, answer.lease)
        return True

    def _draws_next(self, rows: Rows) -> NDArray[np.bool_]:
        """Rows that need one token fed to draw the next, and are not at their end."""
        length, fed, limit = self.rows.length_R[rows], self.rows.fed_R[rows], self.rows.limit_R[rows]
        found: NDArray[np.bool_] = (length - fed == 1) & (length < limit)
        return found

    def _lengthen(self, chunks: list[Chunk], budget: int) -> None:
        """What the short prompts have left of the budget goes to the long ones, the oldest first."""
        for at, chunk in enumerate(chunks):
            length = int(self.rows.length_R[chunk.row])
            more = min(length - chunk.stop, budget)
            if more > 0:
                stop = chunk.stop + more
                chunks[at] = Chunk(chunk.row, chunk.start, stop, stop == length)
                budget -= more

    def _admit(self, budget: int, chunks: list[Chunk]) -> tuple[list[int], int]:
        """Gives rows to those that wait, as far as rows, pages and budget go; returns the rows and what is left."""
        put_off: list[Answer] = []
        seated: list[int] = []
        while self.waiting and self.rows.num_free and budget > 0:
            answer = self.waiting.popleft()
            if self._should_wait(answer, chunks):
                answer.deferred += 1
                put_off.append(answer)
                continue
            lease = self.book.begin(answer.tokens, len(answer.tokens)) if self._has_room_for(answer) else None
            if lease is None:
                self.waiting.appendleft(answer)
                break
            row = self.rows.context(answer, lease)
            answer.reused = max(answer.reused, min(lease.reused, len(answer.request.prompt)))
            seated.append(row)
            self._rows_changed = True
            if len(answer.tokens) - lease.reused > 1:
                budget -= self._take_chunk(row, _share(budget), chunks)
        self.waiting.extendleft(reversed(put_off))
        return seated, budget

    def _has_room_for(self, answer: Answer) -> bool:
        """Those that run need room to grow: an answer that takes the last pages would soon be put back."""
        if self._slots or not self.num_running:
            return True
        left = self.book.num_available - self.book.pages_for(len(answer.tokens) + 1)
        return left >= min(self.num_running, self.book.num_pages // 8)

    def _should_wait(self, answer: Answer, chunks: list[Chunk]) -> bool:
        """Whether a prompt that is being computed right now has so much in common that it pays to wait for it."""
        if answer.deferred >= _LONGEST_DEFERRAL or not chunks or not self.book.remembers:
            return False
        wanted = answer.tokens[:-1]
        if not len(wanted):
            return False
        rows = self.rows
        # Most differ at once, and this is cheaper than comparing arrays.
        alike = [chunk.row for chunk in chunks if rows.tokens_RL[chunk.row, 0] == wanted[0]]
        shared = max((common_prefix(wanted, rows.tokens_RL[row, : rows.known_R[row]]) for row in alike), default=0)
        if shared < min(_WORTH_WAITING, len(wanted)):
            return False
        gain = shared - self.book.common_with_remembered(wanted)
        return gain >= _WORTH_WAITING or (gain > 0 and shared == len(wanted))

    # Slots

    def _arranged(self) -> Arrangement | None:
        """Where a page is a slot, rows that are read together lie side by side."""
        if not self._slots or not self._rows_changed:
            return None
        self._rows_changed = False
        rows = self.rows
        running = rows.active
        moves = arrange(rows.pages_RM[running, 0], rows.length_R[running])
        if moves is not None:
            moves = replace(moves, tokens=max(moves.tokens, self.book.longest_remembered(moves.target_of)))
            leases = {row: answer.lease for row, answer in enumerate(rows.answers) if answer and answer.lease}
            self.book.rename(moves.target_of, list(leases.values()))
            for row, lease in leases.items():
                rows.set_pages(row, lease)
        return moves
