# SPDX-License-Identifier: Apache-2.0
"""Reward functions in a separate process: a call that ends or freezes the process fails, and the others continue.

Batches that are open at the same time share the process. When it is lost, the calls that were running in it are the
suspects. A single suspect is the cause, and fails. If there are several, each is called alone in a process that has no
other call. All other calls are sent to a new process, with the results that are known."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from podium.environments.grading import MOST_HANGING, CallId, Grade
from podium.environments.output_cap import OutputCap
from podium.environments.reward_service import Calls, GradeBatch, RewardFacts, RewardService, RewardSpec, Settled
from podium.environments.rewards import RewardResult, Sample
from podium.environments.user_process import MemoryLimit, ProcessLostError, UserProcess


class HostedGrader:
    """Grades batches, any number at a time, in a process that is replaced when it is lost, or when calls hang in it.
    For one event loop; `open` first, and `close` in the end."""

    def __init__(self, spec: RewardSpec, *, output: OutputCap) -> None:
        """Starts the process without waiting for it."""
        self._spec, self._output = spec, output
        self._is_closed = False
        self._processes: list[_RewardProcess] = []
        self._shared = self._spawned()
        self._alone = asyncio.Lock()  # for the one process in which suspects are called alone
        self.rewards: Mapping[str, tuple[RewardFacts, ...]] = {}
        """How each reward is called, by purpose; known once it is open."""

    async def open(self) -> None:
        """Waits until the recipe's rewards are loaded. Raises their error if that fails."""
        self.rewards = await self._shared.user.ready()

    async def grade(self, purpose: str, samples: Sequence[Sample]) -> list[Grade]:
        """One grade for each sample. Results from before a loss are kept, and the call that caused it fails. Other
        batches are not affected, whatever happens to this one."""
        batch = OpenBatch(purpose, samples, self._spec.first_slot(purpose))
        while True:
            try:
                if batch.alone:
                    await self._call_alone(batch)
                else:
                    return await (await self._living()).grade(batch)
            except ProcessLostError:  # the batch knows of it
                if self._is_closed:
                    raise

    def close(self) -> None:
        """Ends all processes. Open batches raise an error."""
        self._is_closed = True
        for process in self._processes:
            process.user.kill("the grader is closed")

    async def _call_alone(self, batch: OpenBatch) -> None:
        """Calls the batch's suspects one at a time in another process, so that the next loss has one cause, and the
        other batches continue meanwhile."""
        async with self._alone:
            process = self._spawned()
            try:
                await process.user.ready()
                await process.call_alone(batch)
            finally:
                if self._shared.is_usable or not process.is_usable:
                    process.user.kill("its calls are made")
                else:
                    self._shared = process

    async def _living(self) -> _RewardProcess:
        if not self._shared.is_usable:
            self._shared = self._spawned()
        process = self._shared
        await process.user.ready()
        return process

    def _spawned(self) -> _RewardProcess:
        user = UserProcess(
            RewardService, (self._spec,), num_slots=self._spec.num_slots, limit_s=self._spec.timeout_s,
            memory=MemoryLimit("grading.memory_gib", self._spec.memory_gib), output=self._output,
            stacks=self._spec.stacks,
        )  # fmt: skip
        self._processes = [each for each in self._processes if not each.user.is_over]
        self._processes.append(_RewardProcess(user))
        return self._processes[-1]


class _RewardProcess:
    """A user process and the batches that are open in it."""

    def __init__(self, user: UserProcess) -> None:
        self.user = user
        self._batches: list[OpenBatch] = []
        self._next_call = 0
        self._is_retired = False  # gets no more batches, and ends with its last one
        self._is_settled = False  # its loss is

    @property
    def is_usable(self) -> bool:
        """Whether it can be sent batches."""
        return not self._is_retired and not self.user.is_over

    async def grade(self, batch: OpenBatch) -> list[Grade]:
        """Grades the batch beside the others. Waits for user code, whose deadlines the process enforces."""
        return await self._send(batch, batch.order(self._next_call))

    async def call_alone(self, batch: OpenBatch) -> None:
        """Makes the calls of `batch.alone`, one after the other."""
        await self._send(batch, batch.order(self._next_call, alone=batch.alone))
        batch.alone = []

    async def _send(self, batch: OpenBatch, order: GradeBatch) -> list[Grade]:
        batch.numbers = range(self._next_call, self._next_call + len(batch.samples))
        self._next_call = batch.numbers.stop
        self._batches.append(batch)
        try:
            grades: list[Grade]
            grades, num_stuck = await self.user.call(order, on_partial=batch.hear)
            self._is_retired = self._is_retired or num_stuck > 0  # hanging threads cannot be ended otherwise
            return grades
        except ProcessLostError as lost:
            if not self._is_settled:  # all of its batches hear of it; the first one settles it for all
                self._is_settled = True
                settle_loss(self._batches, lost)
            raise
        finally:
            self._batches.remove(batch)
            if self._is_retired and not self._batches:
                self.user.kill("calls hang in it")


class OpenBatch:
    """One batch and its results over all attempts."""

    def __init__(self, purpose: str, samples: Sequence[Sample], first_slot: int) -> None:
        self.purpose, self.samples = purpose, samples
        self.known: dict[CallId, list[RewardResult] | str] = {}
        self.alone: list[CallId] = []  # suspects of a loss that had several
        self.numbers = range(0)  # of its calls in the activity slots of the process that has it now
        self._first_slot = first_slot
        self._num_lost = 0
        self._num_in_a_row = 0  # losses of which it was suspected, with no result in between
        self._counts: tuple[int, ...] = ()

    def order(self, first_call: int, alone: Sequence[CallId] = ()) -> GradeBatch:
        """What its process is sent."""
        return GradeBatch(
            purpose=self.purpose, samples=self.samples, first_call=first_call, known=dict(self.known), alone=alone,
            careful=self._num_lost > 0,
        )  # fmt: skip

    def hear(self, part: Calls | Settled) -> None:
        """Keeps a partial result of its process."""
        if isinstance(part, Calls):
            self._counts = part.counts
        else:
            self.known.update(part.results)
            self._num_in_a_row = 0

    def marked(self, marks: Mapping[int, int]) -> list[CallId]:
        """Its calls among those that were running; the others belong to other batches, or were given up."""
        calls = [(slot - self._first_slot, value - 1 - self.numbers.start) for slot, value in marks.items()
                 if value - 1 in self.numbers]  # fmt: skip
        return [call for call in calls if call not in self.known]

    @property
    def waiting(self) -> list[CallId]:
        """Its calls that may have been waiting for something when the process was lost."""
        if self.alone:
            return [call for call in self.alone if call not in self.known][:1]
        return self._open_calls

    @property
    def _open_calls(self) -> list[CallId]:
        calls = ((at, call) for at, count in enumerate(self._counts) for call in range(count))
        return [call for call in calls if call not in self.known]

    def lose(self, cause: str, suspects: Sequence[CallId], *, is_certain: bool) -> None:
        """Its process is lost. Each loss settles a call, of this batch or another, or leads to one that does, so every
        batch ends. `is_certain`: all batches together have a single suspect."""
        self._num_lost += 1
        self._num_in_a_row += bool(suspects)
        if is_certain and suspects:
            self.known[suspects[0]] = cause
        if suspects and self._num_in_a_row >= MOST_HANGING:
            why = f"was not called, after {MOST_HANGING} calls in a row that ended or blocked their process"
            self.known.update(dict.fromkeys(self._open_calls, why))
        # Suspects among several, and those of an earlier loss that are not cleared yet.
        self.alone = [call for call in dict.fromkeys((*self.alone, *suspects)) if call not in self.known]


def settle_loss(batches: Sequence[OpenBatch], lost: ProcessLostError) -> None:
    """Finds the suspects of a loss among the open calls of all batches of the process. These are the calls whose code
    was running. If no code was, for instance because it was a thread that ended the process, all open calls are."""
    marks = {slot: value for slot, value in lost.suspects.items() if value > 0}
    suspects = [batch.marked(marks) if marks else batch.waiting for batch in batches]
    num_suspects = sum(map(len, suspects))
    for batch, calls in zip(batches, suspects, strict=True):
        batch.lose(lost.cause, calls, is_certain=num_suspects == 1)
