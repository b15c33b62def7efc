# SPDX-License-Identifier: Apache-2.0
"""A scheduler at work without a model: every plan is carried out on memory that notes what was written where, and
checked on the way."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from podium.data.trajectories import TrajectoryId
from podium.rollout.native.block_manager import BlockManager
from podium.rollout.native.rows import RowTable, Sequence
from podium.rollout.native.scheduler import Drain, Scheduler, StepPlan
from podium.rollout.requests import Request, Sampling

STOP = 6


def inconsistencies(manager: BlockManager) -> Iterator[str]:
    """What does not fit together in its books."""
    if len(set(manager._free)) != len(manager._free):
        yield "a page is free twice"
    for block in manager._free:
        if manager._holders[block] or block in manager._nodes:
            yield f"page {block} is free and in use"
    for block, node in manager._nodes.items():
        if node.block != block:
            yield f"page {block} is filed under another"
        if (block in manager._spare) != (manager._holders[block] == 0 and not node.children):
            yield f"page {block} is spare and should not be, or the other way round"
    accounted = len(manager._free) + sum(
        1 for block in range(manager.num_blocks) if manager._holders[block] or block in manager._nodes
    )
    if accounted != manager.num_blocks:
        yield f"{manager.num_blocks - accounted} pages are lost"
    if manager._num_kept != sum(1 for block in manager._nodes if manager._holders[block] == 0):
        yield "the count of kept pages is wrong"


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
    def sequence(self) -> list[int]:
        sampled: list[int] = []
        while len(sampled) < self.new and STOP not in sampled:
            sampled.append(self.token(len(self.prompt) + len(sampled)))
        return sampled

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

    work: abc.Sequence[Work]
    block_size: int
    num_blocks: int
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
        self.block_manager = BlockManager(self.num_blocks, self.block_size)
        self.rows = RowTable(self.num_rows, block_size=self.block_size, max_length=self.max_length)
        self.scheduler = Scheduler(self.block_manager, self.rows, prefill_tokens=self.prefill_tokens, slots=self.slots)
        self.memory: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.launched: deque[_InFlight] = deque()
        self.fed: dict[TrajectoryId, int] = {}  # of those that have a row
        self.by_id = {each.request.id: each for each in self.work}
        for arrival, each in enumerate(self.work):
            sequence = Sequence(request=each.request, arrival=arrival, tokens=each.request.prompt)
            sequence.limit = min(sequence.limit, self.max_length)
            self.scheduler.waiting.append(sequence)

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
            same_B = rows.epoch_R[step.plan.sample_rows] == step.plan.sample_epochs
            rows_B = step.plan.sample_rows[same_B]
            tokens_B = np.array(step.tokens, np.int32)[same_B]
            rows.append(rows_B, tokens_B, np.zeros(len(rows_B), np.float32), self.weights)
            over_B = rows.at_a_stop(rows_B) | (rows.known_R[rows_B] >= rows.limit_R[rows_B])
            for row in rows_B[over_B].tolist():
                self._end(self.scheduler.end(row))

    def cancel(self, ids: Iterable[TrajectoryId]) -> None:
        self.take_in(lag=0)
        for id in set(ids) - self.ended.keys():
            (sequence,) = [each for each in self._sequences() if each.id == id]
            if sequence.row >= 0:
                self.scheduler.end(sequence.row)
            else:
                self.scheduler.waiting.remove(sequence)
            self._end(sequence)

    def update(self) -> None:
        """New weights: all is computed anew."""
        self.take_in(lag=0)
        for row in self.rows.active.tolist():
            self.scheduler.preempt(row)
        self.block_manager.forget()
        self.fed.clear()
        self.weights += 1

    # What is checked

    def _sequences(self) -> list[Sequence]:
        return [*self.scheduler.waiting, *(each for each in self.rows.sequences if each is not None)]

    def _end(self, sequence: Sequence) -> None:
        assert sequence.id not in self.ended, f"{sequence.id} ended twice"
        assert sequence.block_table is None
        self.fed.pop(sequence.id, None)
        self.ended[sequence.id] = sequence.tokens[len(sequence.request.prompt) :].tolist()

    def _plan(self) -> StepPlan | None:
        admitted = [self.rows.sequences[row] for row in self.rows.active.tolist()]
        plan = self.scheduler.plan()
        if isinstance(plan, Drain):
            assert self.launched, "waits for steps in flight, and there are none"
            self.drains += 1
            self.take_in(lag=0)
            return self._plan()
        preempt = [each for each in admitted if each is not None and each.row < 0 and each.id not in self.ended]
        if admitted:
            assert admitted[0] not in preempt, "the oldest was put back"
        for each in preempt:
            self.fed.pop(each.id)
        waiting = [each.arrival for each in self.scheduler.waiting]
        assert waiting == sorted(waiting)
        return plan

    def _check_before(self, plan: StepPlan) -> None:
        rows = self.rows
        for row in plan.admitted:
            sequence = rows.sequences[row]
            assert sequence is not None
            assert sequence.block_table is not None
            assert sequence.id not in self.fed
            self.fed[sequence.id] = sequence.block_table.reused
        fed_rows = [*plan.decode_rows.tolist(), *(chunk.row for chunk in plan.chunks)]
        assert len(set(fed_rows)) == len(fed_rows), "a row is fed twice in one step"
        assert set(plan.sample_rows.tolist()) <= set(fed_rows)
        assert sum(chunk.stop - chunk.start for chunk in plan.chunks) <= self.prefill_tokens
        assert list(inconsistencies(self.block_manager)) == []
        for row in rows.active.tolist():
            sequence = rows.sequences[row]
            assert sequence is not None
            assert sequence.block_table is not None
            assert rows.fed_R[row] <= len(sequence.block_table.blocks) * self.block_size
            assert rows.blocks_RM[row, : len(sequence.block_table.blocks)].tolist() == sequence.block_table.blocks
            assert rows.length_R[row] <= rows.limit_R[row]

    def _run(self, plan: StepPlan) -> list[int]:
        """Moves, copies, feeds, draws: in the order in which a device does."""
        if plan.moves is not None:
            target_of, kept = plan.moves.target_of, plan.moves.tokens
            still = {at: value for at, value in self.memory.items() if at[0] not in target_of}
            moved = {
                (target_of[block], i): value
                for (block, i), value in self.memory.items()
                if block in target_of and i < kept
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
        for row in plan.sample_rows.tolist():
            sequence = self.rows.sequences[row]
            assert sequence is not None
            assert self.fed[sequence.id] == self.rows.length_R[row] - 1, "a row draws that has not been fed to its end"
            tokens.append(self.by_id[sequence.id].token(int(self.rows.length_R[row]) - 1))
        return tokens

    def _feed(self, row: int, start: int, stop: int) -> None:
        sequence = self.rows.sequences[row]
        assert sequence is not None
        assert sequence.block_table is not None
        assert self.fed[sequence.id] == start, "what is fed does not join on to what was"
        self.fed[sequence.id] = stop
        work = self.by_id[sequence.id]
        prompt = len(work.prompt)
        tokens = (*work.prompt, *(work.token(i) for i in range(prompt, stop)))
        for i in range(stop):
            block = sequence.block_table.blocks[i // self.block_size]
            at, value = (block, i % self.block_size), (self.weights, tokens[: i + 1])
            if i >= start:
                assert self.block_manager._holders[block] == 1, "a block is written that another holds"
                self.memory[at] = value
            assert self.memory.get(at) == value, "attention reads what was not computed for this sequence"
