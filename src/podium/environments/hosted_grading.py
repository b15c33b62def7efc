# SPDX-License-Identifier: Apache-2.0
"""Reward functions in a separate process: a call that ends or freezes the process fails, and the others continue."""

from __future__ import annotations

from collections.abc import Sequence

from podium.environments.grading import MOST_HANGING, CallId, Grade
from podium.environments.output_cap import OutputCap
from podium.environments.reward_service import Calls, GradeBatch, RewardService, RewardSpec, Settled
from podium.environments.rewards import RewardResult, Sample
from podium.environments.user_process import ProcessLostError, UserProcess


class HostedGrader:
    """Grades batches in a process that is replaced when it is lost, or when calls hang in it. For one event loop;
    `open` first, and `close` in the end."""

    def __init__(self, spec: RewardSpec, *, output: OutputCap) -> None:
        """Starts the process without waiting for it."""
        self._spec, self._output = spec, output
        self._process = self._spawned()

    async def open(self) -> None:
        """Waits until the recipe's rewards are loaded. Raises their error if that fails."""
        await self._process.ready()

    async def grade(self, purpose: str, samples: Sequence[Sample]) -> list[Grade]:
        """One grade for each sample. Results from before a loss are kept; the call that caused it fails. If several
        were running, these are called again one at a time, so that the next loss has one cause."""
        progress = _Progress()
        while True:
            process = await self._living()
            order = GradeBatch(
                purpose=purpose, samples=samples, known=dict(progress.known), alone=progress.alone,
                careful=progress.num_lost > 0,
            )  # fmt: skip
            grades: list[Grade]
            try:
                grades, num_stuck = await process.call(order, on_partial=progress.hear)
            except ProcessLostError as lost:
                progress.lose(lost)
                continue
            if num_stuck:
                process.kill("calls hang in it")  # their threads cannot be ended otherwise
            return grades

    def close(self) -> None:
        """Ends the process."""
        self._process.kill("the grader is closed")

    async def _living(self) -> UserProcess:
        if self._process.is_over:
            self._process = self._spawned()
        await self._process.ready()
        return self._process

    def _spawned(self) -> UserProcess:
        num_slots = max(len(sections) for sections, _ in self._spec.sections.values())
        return UserProcess(
            RewardService, (self._spec,), num_slots=max(1, num_slots), limit_s=self._spec.timeout_s, output=self._output
        )


class _Progress:
    """Results of one batch over all attempts."""

    def __init__(self) -> None:
        self.known: dict[CallId, list[RewardResult] | str] = {}
        self.alone: list[CallId] = []
        self.num_lost = 0
        self._num_in_a_row = 0  # losses with no result in between
        self._counts: tuple[int, ...] = ()

    def hear(self, part: Calls | Settled) -> None:
        if isinstance(part, Calls):
            self._counts = part.counts
        else:
            self.known.update(part.results)
            self._num_in_a_row = 0

    def lose(self, lost: ProcessLostError) -> None:
        """Each loss settles a call, or leads to one that does, so the batch always ends."""
        self.num_lost += 1
        self._num_in_a_row += 1
        open_calls = [
            (at, call) for at, count in enumerate(self._counts) for call in range(count) if (at, call) not in self.known
        ]
        running = [(at, value - 1) for at, value in lost.suspects.items() if value > 0]
        suspects = [call for call in running if call not in self.known] or open_calls
        if len(suspects) == 1:
            self.known[suspects[0]] = lost.cause
        if self._num_in_a_row >= MOST_HANGING:
            why = f"was not called, after {MOST_HANGING} calls in a row that ended or blocked their process"
            self.known.update(dict.fromkeys((call for call in open_calls if call not in self.known), why))
        # Suspects among several, and those of an earlier loss that are not cleared yet.
        self.alone = [call for call in dict.fromkeys((*self.alone, *suspects)) if call not in self.known]
