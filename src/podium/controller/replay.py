# SPDX-License-Identifier: Apache-2.0
"""Runs the steps of a recorded run again: the episodes come from its record, and nothing is generated or graded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from podium.cluster import ObjectScope, Stored
from podium.cluster.blocking import in_thread
from podium.controller.ledger import GroupRecord, OpenGroupRecord
from podium.controller.open_groups import SampledStep
from podium.controller.parts import OnPolicyParts
from podium.controller.step_record import RecordedStep, recorded_step
from podium.data.tasks import Task
from podium.errors import DataError, ProgramError
from podium.recipe import OnPolicyRecipe
from podium.roles.stages import GradedRollouts
from podium.runs.step_files import NO_DIGEST, read_step


class ReplayExecutor:
    """Gives the steps that `folder` has, in order and from the first. Only the controller's single task uses it."""

    def __init__(self, parts: OnPolicyParts[OnPolicyRecipe], folder: Path) -> None:
        self._parts, self._folder = parts, folder
        self._digest = NO_DIGEST  # of the last file
        self._tasks: dict[int, Task] = {}  # by prompt index: taken from the data, and not used by a step yet
        self._used: set[int] = set()  # prompt indices of the step that is being read
        self._last_index = -1  # of the prompts that were taken
        self._step: RecordedStep | None = None
        self._num_more = 0  # of the further samples of the step that the program has asked for

    async def sample(self, step: int, objects: ObjectScope) -> SampledStep:
        """The recorded episodes of a step. Raises an error if its file is missing or is not what was written."""
        recorded, stored = await in_thread(self._read, step)
        objects.free_at_end(stored)
        self._step, self._num_more = recorded, 0
        return recorded.step

    def sample_more(self, step: int) -> GradedRollouts:
        """What the program sampled beside the groups of the step, one call after the other."""
        assert self._step is not None, "a step has begun"
        if self._num_more == len(self._step.more):
            raise ProgramError(
                f"step {step}: the program calls run.sample more often than when the run was recorded, "
                f"{len(self._step.more)} times. A replay needs the program as it was."
            )
        self._num_more += 1
        return self._step.more[self._num_more - 1]

    def commit(self, step: int, *, is_updated: bool) -> list[GroupRecord]:
        """The recorded histories of the groups that ended with the step."""
        recorded, self._step = self._step, None
        return list(recorded.groups) if recorded is not None else []

    def history(self, prompt_index: int) -> Sequence[str]:
        """None: a record has what became of a group, and not how."""
        return []

    def open_groups(self) -> list[OpenGroupRecord]:
        """None: nothing is on its way."""
        return []

    def data_state(self) -> dict[str, Any]:
        """Nothing: a replay begins at the first step, and is not resumed."""
        return {}

    def note_used(self, prompt_indices: Iterable[int]) -> None:
        """Nothing: prompts are those of the record."""

    async def pause(self) -> None:
        """Nothing runs."""

    async def close(self) -> None:
        """Nothing runs."""

    def end(self) -> None:
        """Nothing is left: a replay has no groups of its own."""

    def _read(self, step: int) -> tuple[RecordedStep, list[Stored[Any]]]:
        stored: list[Stored[Any]] = []

        def store(block: Any) -> Stored[Any]:
            stored.append(self._parts.cluster.store(block))
            return stored[-1]

        file, self._digest = read_step(self._folder, step, self._digest)
        recorded = recorded_step(file, self._tasks_of, store)
        for index in self._used:
            self._tasks.pop(index, None)
        self._used.clear()
        return recorded, stored

    def _tasks_of(self, prompt_indices: Iterable[int]) -> dict[int, Task]:
        """Tasks of these prompts, read from the data. Prompts in between are kept: later steps may have them."""
        tasks: dict[int, Task] = {}
        for index in prompt_indices:
            while self._last_index < index:
                (prompt,) = self._parts.prompts.take(1)
                self._last_index = prompt.prompt_index
                self._tasks[prompt.prompt_index] = prompt.task
            if index not in self._tasks:
                raise DataError(
                    f"data.train has no prompt with index {index}, which the recorded run trained on. A replay needs "
                    "the data as it was."
                )
            tasks[index] = self._tasks[index]
            self._used.add(index)
        return tasks
