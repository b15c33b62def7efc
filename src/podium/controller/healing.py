# SPDX-License-Identifier: Apache-2.0
"""Runs a program from its first step to its last, over deaths of workers: a run that loses a learner goes back to its
last committed step, and its program is started again from there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, assert_never

from podium.cluster import Cluster, Workers
from podium.cluster.deadlines import now_s
from podium.cluster.fanout import OverdueError
from podium.controller.assembly import Inputs, begin_run, open_parts
from podium.controller.drive import StepChoice
from podium.controller.layout import RoleNames
from podium.controller.parts import OnPolicyParts
from podium.controller.recovery import Abort, Death, GiveUp, Rebuild, RecoveryPlan, Respawn, Retry, Rewind
from podium.controller.rewinding import death_of, milestones_of_killed, recorded_step, rewind
from podium.controller.run import OnPolicyRun
from podium.controller.watching import Standing, hang_reporter, saying_what_takes_long
from podium.engine.checkpoint_files import saved_steps
from podium.errors import CheckpointError, ClusterError, RoleError, WorkerDiedError, counted
from podium.observe import Console, Stopwatch
from podium.recipe import OnPolicyRecipe
from podium.runs.events import append_recovery
from podium.runs.milestones import Milestones
from podium.runs.program_errors import named_program
from podium.runs.supervised import Predecessor

ProgramT = TypeVar("ProgramT")
Program = Callable[[OnPolicyRun[Any]], Awaitable[None]]

# For the save after a failure of the cluster: workers that live answer within this time.
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assembled(Generic[ProgramT]):
    """A started cluster with everything that a run needs to begin."""

    program: ProgramT
    inputs: Inputs
    names: RoleNames
    cluster: Cluster
    workers: Workers
    console: Console
    watch: Stopwatch

    async def open(self, inputs: Inputs, stack: ExitStack, recovery: RecoveryPlan) -> OnPolicyParts[OnPolicyRecipe]:
        """Opens the parts of a run that begins with these inputs. `stack` closes them."""
        self.workers.report_hangs_to(hang_reporter(inputs.folder, self.console))
        with self.watch.span("start-up"):
            return await open_parts(
                inputs, self.names, self.cluster, self.workers, self.console, self.watch, stack, recovery
            )


async def run_program(
    assembled: Assembled[Program], steps: StepChoice, recovery: RecoveryPlan, predecessor: Predecessor | None = None
) -> OnPolicyRun[OnPolicyRecipe]:
    """Runs the program to its end. A run that fails is saved as far as its learners answer. `predecessor`: the process
    with whose run this one goes on, or whose command it repeats."""
    first = inputs = assembled.inputs
    milestones: Milestones | None = None
    if predecessor is not None and not predecessor.is_recorded:
        death = Death(part="controller", cause=predecessor.cause)
        _note_recovery(assembled, death, Rewind(), inputs, predecessor.ended_s)
    elif predecessor is not None:
        inputs = await _rewound(assembled, recovery, None, predecessor, committed=0)
        milestones = milestones_of_killed(first, inputs.resume_step or 0)
    while True:
        run: OnPolicyRun[OnPolicyRecipe] | None = None
        with ExitStack() as stack:
            try:
                parts = await assembled.open(inputs, stack, recovery)
                run = begin_run(inputs, parts, steps, milestones)
                with named_program(first.recipe, first.folder):
                    async with saying_what_takes_long(run, assembled.workers, assembled.console):
                        await assembled.program(run)
                run.require_finished()
                await parts.snapshots.forget()
                return run
            except (WorkerDiedError, OverdueError) as error:
                committed = inputs.resume_step or 0 if run is None else run.num_committed
                try:
                    rewound = await _rewound(assembled, recovery, run, error, committed)
                except (WorkerDiedError, OverdueError):
                    await _save_before_failing(run, error, assembled.console)
                    raise
            except Exception as error:
                await _save_before_failing(run, error, assembled.console)
                raise
        inputs = rewound
        milestones = milestones if run is None else run.milestones
        if milestones is not None:
            milestones.rewound([each.step for each in saved_steps(first.folder.checkpoints)])


async def _rewound(
    assembled: Assembled[Program],
    recovery: RecoveryPlan,
    run: OnPolicyRun[OnPolicyRecipe] | None,
    cause: WorkerDiedError | OverdueError | Predecessor,
    committed: int,
) -> Inputs:
    """Replaces dead workers and brings all roles back to the last committed step; those of a new process, to the last
    one of which its predecessor recorded everything. Returns the inputs from there. A worker that dies meanwhile is one
    more death, and so is one that does not answer; the one that ends the run is raised."""
    first, console, workers = assembled.inputs, assembled.console, assembled.workers
    began_s, most = now_s(), None
    error: WorkerDiedError | OverdueError | None = None
    begun: tuple[Death, Rebuild | Rewind] | None = None
    if isinstance(cause, Predecessor):
        began_s, most = cause.ended_s, recorded_step(first)
        begun = Death(part="controller", cause=cause.cause), Rewind()
    else:
        error = cause
    with assembled.watch.span("recovery"):
        while True:
            if error is not None:  # else the supervisor has decided that the run goes on
                if isinstance(error, OverdueError) and not await workers.end_overdue(error):
                    raise error
                death = death_of(error, workers)
                match recovery.decide(death):
                    case Abort(reason=reason):
                        console.warning(f"{death.cause} The run ends: {reason}.")
                        raise error
                    case _ if assembled.cluster.failure() is not None:
                        raise error
                    case Rebuild() | Rewind() as remedy:
                        begun = begun or (death, remedy)
                        what = "Its workers are" if isinstance(remedy, Rebuild) else "It is"
                        console.warning(f"{death.cause} {what} replaced.")
                    case Retry() | GiveUp() | Respawn() as unfit:
                        raise AssertionError(f"{unfit} is no answer where nobody goes on")
                    case other:
                        assert_never(other)
            try:
                if run is not None:
                    with suppress(ClusterError):  # what is dead cannot be closed
                        await run.give_up()
                are_new = error is None and not workers.num_attached
                saving = None if run is None else run.milestones.saving_step
                async with saying_what_takes_long(Standing(committed), workers, console):
                    inputs = await rewind(
                        first, assembled.names, workers, committed=committed, most=most, are_new=are_new, saving=saving
                    )
                break
            except (WorkerDiedError, OverdueError) as again:
                error = again
    assert begun is not None
    _note_recovery(assembled, *begun, inputs, began_s)
    return inputs


def _note_recovery(
    assembled: Assembled[Program], death: Death, done: Rebuild | Rewind, inputs: Inputs, began_s: float
) -> None:
    """Records that the run goes on with these inputs, and says so. `began_s`: when the death was noticed."""
    step, seconds, num_attached = inputs.resume_step or 0, now_s() - began_s, assembled.workers.num_attached
    remedy, how = "rebuild" if isinstance(done, Rebuild) else "rewind", ""
    if death.part == "controller" and num_attached:
        remedy, how = "attach", f", attached to {counted(num_attached, 'worker')}"
    elif death.part == "controller":
        remedy, how = "restart", ", with new workers"
    append_recovery(inputs.folder.path, part=death.part, cause=death.cause, remedy=remedy, step=step, seconds=seconds)
    assembled.console.note(f"the {death.part} is back after {seconds:.1f} s{how}: going on after step {step}")


async def _save_before_failing(run: OnPolicyRun[OnPolicyRecipe] | None, error: Exception, console: Console) -> None:
    """Saves what Ctrl-C would save, as far as the learners still answer. The failure is what the user must see, so an
    error of the save is only reported."""
    if run is None or isinstance(error, CheckpointError):
        return  # nothing is there to save, or saving is what failed
    is_users = isinstance(error, RoleError) or not isinstance(error, ClusterError)
    limit_s = run.recipe.checkpoint.timeout_s if is_users else _SETTLE_S
    step = run.unsaved_step
    if step is not None:
        console.note(f"the run failed after step {step}: saving it")
    try:
        async with asyncio.timeout(limit_s):
            await run.save_before_failing()
    except Exception as failure:
        if step is not None:
            console.warning(f"step {step} cannot be saved: {failure or type(failure).__name__}")
