# SPDX-License-Identifier: Apache-2.0
"""A scheduler at work without a model: every plan is carried out on memory that notes what was written where, and
checked on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from podium.data.trajectories import TrajectoryId
from podium.rollout.native.pages import PageBook
from podium.rollout.native.rows import Answer, RowTable
from podium.rollout.native.scheduler import Drain, Scheduler, StepPlan
from podium.rollout.requests import Request, Sampling

STOP = 6


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request: samples of one `draw` have one prompt and draw much alike."""

    draw: int
    sample: int
    prompt: tuple[int, ...]
    new: int

    def token(self, position: int) -> int:
        """What is drawn at a position, whatever it is batched with; STOP ends it."""
        return (self.draw * 3 + (self.sample % 2) * (position // 5) + position**3 + position // 3) % 7

    @property
    def answer(self) -> list[int]:
        drawn: list[int] = []
        while len(drawn) < self.new and STOP not in drawn:
            drawn.append(self.token(len(self.prompt) + len(drawn)))
        return drawn

    @property
    def request(self) -> Request:
        sampling = Sampling(max_new_tokens=self.new, stop_tokens=frozenset([STOP]))
        id = TrajectoryId(self.draw, self.sample)
        return Request(id=id, prompt=np.array(self.prompt, np.int32), sampling=sampling)

    def steps(self, budget: int) -> int:
        """As the only one, computed anew once at its longest."""
        return -(-(len(self.prompt) + self.new) // budget) + self.new + 2


@dataclass(frozen=True, eq=False)
class _InFlight:
    plan: StepPlan
    tokens: list[int]


@dataclass(eq=False)
class Simulation:
    """`lag`: steps that are launched before the first of them is known."""

    work: Sequence[Work]
    page_tokens: int
    num_pages: int
    num_rows: int
    prefill_tokens: int
    lag: int
    max_length: int
    slots: bool = False
    steps: int = 0
    drains: int = 0
    prefilled: int = 0
    weights: int = 0
    ended: dict[TrajectoryId, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.book = PageBook(self.num_pages, self.page_tokens)
        self.rows = RowTable(self.num_rows, page_tokens=self.page_tokens, max_length=self.max_length)
        self.scheduler = Scheduler(self.book, self.rows, prefill_tokens=self.prefill_tokens, slots=self.slots)
        self.memory: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.launched: deque[_InFlight] = deque()
        self.fed: dict[TrajectoryId, int] = {}  # of those that have a row
        self.by_id = {each.request.id: each for each in self.work}
        for arrival, each in enumerate(self.work):
            answer = Answer(request=each.request, arrival=arrival, tokens=each.request.prompt)
            answer.limit = min(answer.limit, self.max_length)
            self.scheduler.waiting.append(answer)

    @property
    def is_over(self) -> bool:
        return len(self.ended) == len(self.work)

    # What the engine does

    def step(self) -> None:
        self.steps += 1
        plan = self._plan()
        if plan is None:
            assert self.launched or self.is_over, "nothing is planned, nothing is in flight, and answers are missing"
            self.take_in(lag=0)
            return
        self._check_before(plan)
        self.launched.append(_InFlight(plan, self._run(plan)))
        self.take_in(lag=self.lag)

    def take_in(self, lag: int) -> None:
        rows = self.rows
        while len(self.launched) > lag:
            step = self.launched.popleft()
            same_B = rows.epoch_R[step.plan.draw_rows] == step.plan.draw_epochs
            rows_B = step.plan.draw_rows[same_B]
            tokens_B = np.array(step.tokens, np.int32)[same_B]
            rows.append(rows_B, tokens_B, np.zeros(len(rows_B), np.float32), self.weights)
            over_B = rows.at_a_stop(rows_B) | (rows.known_R[rows_B] >= rows.limit_R[rows_B])
            for row in rows_B[over_B].tolist():
                self._end(self.scheduler.end(row))

    def cancel(self, ids: Iterable[TrajectoryId]) -> None:
        self.take_in(lag=0)
        for id in set(ids) - self.ended.keys():
            (answer,) = [each for each in self._answers() if each.id == id]
            if answer.row >= 0:
                self.scheduler.end(answer.row)
            else:
                self.scheduler.waiting.remove(answer)
            self._end(answer)

    def update(self) -> None:
        """New weights: all is computed anew."""
        self.take_in(lag=0)
        for row in self.rows.active.tolist():
            self.scheduler.put_back(row)
        self.book.forget()
        self.fed.clear()
        self.weights += 1

    # What is checked

    def _answers(self) -> list[Answer]:
        return [*self.scheduler.waiting, *(each for each in self.rows.answers if each is not None)]

    def _end(self, answer: Answer) -> None:
        assert answer.id not in self.ended, f"{answer.id} ended twice"
        assert answer.lease is None
        self.fed.pop(answer.id, None)
        self.ended[answer.id] = answer.tokens[len(answer.request.prompt) :].tolist()

    def _plan(self) -> StepPlan | None:
        seated = [self.rows.answers[row] for row in self.rows.active.tolist()]
        plan = self.scheduler.plan()
        if isinstance(plan, Drain):
            assert self.launched, "waits for steps in flight, and there are none"
            self.drains += 1
            self.take_in(lag=0)
            return self._plan()
        put_back = [each for each in seated if each is not None and each.row < 0 and each.id not in self.ended]
        if seated:
            assert seated[0] not in put_back, "the oldest was put back"
        for each in put_back:
            self.fed.pop(each.id)
        waiting = [each.arrival for each in self.scheduler.waiting]
        assert waiting == sorted(waiting)
        return plan

    def _check_before(self, plan: StepPlan) -> None:
        rows = self.rows
        for row in plan.seated:
            answer = rows.answers[row]
            assert answer is not None
            assert answer.lease is not None
            assert answer.id not in self.fed
            self.fed[answer.id] = answer.lease.reused
        fed_rows = [*plan.decode_rows.tolist(), *(chunk.row for chunk in plan.chunks)]
        assert len(set(fed_rows)) == len(fed_rows), "a row is fed twice in one step"
        assert set(plan.draw_rows.tolist()) <= set(fed_rows)
        assert sum(chunk.stop - chunk.start for chunk in plan.chunks) <= self.prefill_tokens
        assert list(self.book.check()) == []
        for row in rows.active.tolist():
            answer = rows.answers[row]
            assert answer is not None
            assert answer.lease is not None
            assert rows.fed_R[row] <= len(answer.lease.pages) * self.page_tokens
            assert rows.pages_RM[row, : len(answer.lease.pages)].tolist() == answer.lease.pages
            assert rows.length_R[row] <= rows.limit_R[row]

    def _run(self, plan: StepPlan) -> list[int]:
        """Moves, copies, feeds, draws: in the order in which a device does."""
        if plan.moves is not None:
            target_of, kept = plan.moves.target_of, plan.moves.tokens
            still = {at: value for at, value in self.memory.items() if at[0] not in target_of}
            moved = {
                (target_of[page], i): value
                for (page, i), value in self.memory.items()
                if page in target_of and i < kept
            }
            self.memory = {**still, **moved}
        copied = {(c.target, i): self.memory[c.source, i] for c in plan.copies for i in range(c.tokens)}
        self.memory.update(copied)
        for row in plan.decode_rows.tolist():
            length = int(self.rows.length_R[row])
            assert self.rows.fed_R[row] == length - 1
            self._feed(row, length - 2, length - 1)  # the length counts the token that is being drawn
        for chunk in plan.chunks:
            self.prefilled += chunk.stop - chunk.start
            self._feed(chunk.row, chunk.start, chunk.stop)
        tokens = []
        for row in plan.draw_rows.tolist():
            answer = self.rows.answers[row]
            assert answer is not None
            assert self.fed[answer.id] == self.rows.length_R[row] - 1, "a row draws that has not been fed to its end"
            tokens.append(self.by_id[answer.id].token(int(self.rows.length_R[row]) - 1))
        return tokens

    def _feed(self, row: int, start: int, stop: int) -> None:
        answer = self.rows.answers[row]
        assert answer is not None
        assert answer.lease is not None
        assert self.fed[answer.id] == start, "what is fed does not join on to what was"
        self.fed[answer.id] = stop
        work = self.by_id[answer.id]
        prompt = len(work.prompt)
        sequence = (*work.prompt, *(work.token(i) for i in range(prompt, stop)))
        for i in range(stop):
            page = answer.lease.pages[i // self.page_tokens]
            at, value = (page, i % self.page_tokens), (self.weights, sequence[: i + 1])
            if i >= start:
                assert self.book.holders(page) == 1, "a page is written that another holds"
                self.memory[at] = value
            assert self.memory.get(at) == value, "attention reads what was not computed for this sequence"
