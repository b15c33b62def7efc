# SPDX-License-Identifier: Apache-2.0
"""Graders and episode runners that die: their handles replace them while the others work, as it is decided here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, assert_never

from podium.cluster.deadlines import now_s
from podium.controller.recovery import Abort, Death, GiveUp, Rebuild, RecoveryPlan, Respawn, Retry, Rewind
from podium.errors import WorkerDiedError
from podium.roles.lost_workers import Answer, LostWorker
from podium.runs.events import append_recovery

_WHAT_HAPPENS = {
    ("grader", "retry"): "It is replaced, and its episodes are graded again.",
    ("grader", "give up"): "It is replaced; its episodes have no reward, because graders keep dying of them.",
    ("runner", "retry"): "It is replaced, and its unfinished episodes are run again.",
    ("runner", "give up"): "It is replaced, without its unfinished episodes.",
}


class WorkerReplacements:
    """Decides by the plan of the run, shows it on the console and records it. Used by the controller's event loop."""

    def __init__(
        self, plan: RecoveryPlan, *, warn: Callable[[str], None], note: Callable[[str], None], folder: Path | None,
        step: int = 0,
    ) -> None:  # fmt: skip
        """`folder`: of the run; None: nothing is recorded. `step`: the last one that is committed."""
        self._plan, self._warn, self._note, self._folder, self._step = plan, warn, note, folder, step

    def note_committed(self, step: int) -> None:
        """The run has committed a step."""
        self._step = step
        self._plan.note_progress()

    def note_work_done(self, part: Literal["grader", "runner"], rank: int) -> None:
        """A worker has done some of its work."""
        self._plan.note_work_done(part, rank)

    def decide(self, lost: LostWorker) -> Answer:
        """What becomes of the work. Raises an error if the run ends."""
        death = Death(
            part=lost.part, cause=lost.cause, slots=(lost.worker.index,), others_go_on=True, failures=lost.failures,
            hangs=lost.hangs,
        )  # fmt: skip
        match self._plan.decide(death):
            case Retry():
                return "retry"
            case GiveUp():
                return "give up"
            case Abort(reason=reason):
                raise WorkerDiedError(
                    f"{lost.error}\nThe run ends: {reason}. User code runs in other processes, so look for what ends "
                    "this one: memory of the machine, or code that kills its parent. `podium resume` continues the run."
                ) from lost.error
            case Respawn() | Rebuild() | Rewind() as other:
                raise AssertionError(f"{other} is no answer where the others go on")
            case other:
                assert_never(other)

    @contextmanager
    def replacing(self, lost: LostWorker, answer: Answer) -> Iterator[None]:
        """Shows and records the start of a successor."""
        self._warn(f"{lost.cause} {_WHAT_HAPPENS[lost.part, answer]}")
        yield
        seconds = now_s() - lost.noticed_s
        if self._folder is not None:
            append_recovery(
                self._folder, part=lost.part, cause=lost.cause, remedy=answer, step=self._step, seconds=seconds
            )
        self._note(f"the {lost.part} is back after {seconds:.1f} s")
