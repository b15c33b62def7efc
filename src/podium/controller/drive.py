# SPDX-License-Identifier: Apache-2.0
"""Drives a controlled run from start to end: opens the cluster, builds the roles, runs the program."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from podium.cluster import Cluster, Workers, open_inline, open_ray
from podium.cluster.blocking import in_thread, run_to_end
from podium.cluster.member import Timeouts
from podium.controller.connecting import connect_workers
from podium.controller.layout import RoleNames, layout_of, num_learners, role_names
from podium.controller.recovery import RecoveryPlan
from podium.controller.start_up import StartUp, ray_settings
from podium.errors import AttachError, PlacementError, PodiumError, RayDiedError, RoleError
from podium.importing import collector_off
from podium.observe import Stopwatch
from podium.observe.timing import RESTART
from podium.recipe import OnPolicyRecipe
from podium.recipe.policy_mesh import no_place
from podium.runs.folder import RunFolder
from podium.runs.host_memory import held_memory
from podium.runs.interrupts import InterruptHandler
from podium.runs.result import RunResult
from podium.runs.supervised import SUPERVISION, KeptRay, Supervision, predecessor_of

if TYPE_CHECKING:
    from podium.controller.assembly import Inputs
    from podium.controller.healing import Assembled
    from podium.controller.run import OnPolicyRun

First = TypeVar("First")
Second = TypeVar("Second")
ControlledProgram = Callable[["OnPolicyRun[Any]"], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """Which steps a run has: by default new ones, up to the recipe's last."""

    recorded: Path | None = None  # folder of the recorded steps that are run again instead of new ones
    last: int | None = None  # the run stops after this step


def run_controlled(
    load_program: Callable[[], ControlledProgram],
    recipe: OnPolicyRecipe,
    folder: RunFolder,
    *,
    resume_step: int | None,
    start_up: StartUp,
    steps: StepChoice = StepChoice(),  # noqa: B008
) -> RunResult:
    """Runs the program on Ray (or inline, if the recipe says so). Uses the Ray of `start_up` if there is one. Loads the
    program while workers start. The first Ctrl-C saves and stops at the end of the step, the second stops at once."""
    interrupts = InterruptHandler(folder.stop_file)
    with interrupts:
        try:
            return run_to_end(_drive(load_program, recipe, folder, resume_step, interrupts, start_up, steps))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        except RoleError as error:
            raise cause_of(error) from error


def evaluate_controlled(
    recipe: OnPolicyRecipe, folder: RunFolder, *, resume_step: int | None, start_up: StartUp
) -> None:
    """Evaluates the held-out prompts with the checkpoint of a step, or with model.path, and logs it in `folder`. Starts
    only the roles that generate and grade. Ctrl-C stops at once."""
    with InterruptHandler(None) as interrupts:
        try:
            run_to_end(_evaluate(recipe, folder, resume_step, interrupts, start_up))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        except RoleError as error:
            raise cause_of(error) from error


async def _drive(
    load_program: Callable[[], ControlledProgram],
    recipe: OnPolicyRecipe,
    folder: RunFolder,
    resume_step: int | None,
    interrupts: InterruptHandler,
    start_up: StartUp,
    steps: StepChoice,
) -> RunResult:
    _cancel_on_end(interrupts)
    watch, names = Stopwatch(), role_names(recipe)
    supervision, predecessor = SUPERVISION.get(), predecessor_of(folder.path)
    if predecessor is not None:
        watch.note_before(RESTART, time.monotonic() - predecessor.ended_s)
    recovery = RecoveryPlan(
        recipe.placement.restarts,
        goes_back=steps.recorded is None,
        on_progress=supervision.note_progress if supervision is not None else lambda: None,
    )
    memory: AbstractContextManager[None] = nullcontext()
    if recipe.keeps_snapshots:  # a supervisor removes it when the run has ended
        is_first = predecessor is None or not predecessor.is_recorded
        memory = held_memory(folder.path, is_emptied=is_first, is_removed=supervision is None)
    with memory, _restarted_if_ray_died(supervision):
        async with _assembled(load_program, recipe, folder, resume_step, names, watch, start_up) as assembled:
            from podium.controller.assembly import result_of
            from podium.controller.healing import run_program

            return result_of(await run_program(assembled, steps, recovery, predecessor), folder, watch)


@contextmanager
def _restarted_if_ray_died(supervision: Supervision | None) -> Iterator[None]:
    """Without its Ray, or without what another process has left, the run can go on in a new process."""
    try:
        yield
    except AttachError as error:
        if supervision is not None:
            supervision.ask_restart(f"{error} Ray and the workers are started again.", is_death=False)
        raise
    except RayDiedError as error:
        if supervision is not None:
            supervision.ask_restart(str(error))
        raise


async def _evaluate(
    recipe: OnPolicyRecipe,
    folder: RunFolder,
    resume_step: int | None,
    interrupts: InterruptHandler,
    start_up: StartUp,
) -> None:
    _cancel_on_end(interrupts)
    names = role_names(recipe, evaluates_only=True)
    async with _assembled(lambda: None, recipe, folder, resume_step, names, Stopwatch(), start_up) as assembled:
        from podium.controller.assembly import evaluate_once

        with ExitStack() as stack:
            plan = RecoveryPlan(recipe.placement.restarts, goes_back=False)
            await evaluate_once(assembled.inputs, await assembled.open(assembled.inputs, stack, plan))


def _cancel_on_end(interrupts: InterruptHandler) -> None:
    """The user's last Ctrl-C cancels this task."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    interrupts.on_end(lambda: loop.call_soon_threadsafe(this.cancel))


@asynccontextmanager
async def _assembled(
    load_program: Callable[[], First],
    recipe: OnPolicyRecipe,
    folder: RunFolder,
    resume_step: int | None,
    names: RoleNames,
    watch: Stopwatch,
    start_up: StartUp,
) -> AsyncIterator[Assembled[First]]:
    """Opens the cluster, starts the workers and reads the inputs. All of it is closed at the end."""

    def prepare() -> tuple[First, Inputs]:
        """Imports modules and reads data in the controller while the workers start."""
        start_up.tell("controller: importing torch, reading tokenizer and prompts")
        with collector_off():
            program = load_program()
            from podium.controller.assembly import read_inputs
        return program, read_inputs(recipe, folder, resume_step)

    console = start_up.console
    with ExitStack() as stack:
        stack.callback(console.close)
        async with _opened(recipe, watch, start_up) as cluster:
            # A death from here on costs workers, and neither Ray nor the imports of the fork server.
            _keep(recipe, start_up, resume_step, is_ready=start_up.has_workers)
            with watch.span("start-up"):
                # Wait until Ray is up: imports would slow down its start, and everything else waits for Ray.
                preparing = asyncio.ensure_future(asyncio.to_thread(prepare))
                if recipe.placement.launcher == "inline":  # its workers would import the same modules at the same time
                    await preparing
                (program, inputs), workers = await _both(
                    preparing, asyncio.ensure_future(_started(recipe, folder, cluster, resume_step, names, start_up))
                )
                start_up.tell("ready")
                _keep(recipe, start_up, resume_step, is_ready=True)
            from podium.controller.healing import Assembled

            yield Assembled(
                program=program, inputs=inputs, names=names, cluster=cluster, workers=workers, console=console,
                watch=watch,
            )  # fmt: skip


async def _both(first: asyncio.Future[First], second: asyncio.Future[Second]) -> tuple[First, Second]:
    """Waits for both. The first failure ends the wait; the other has stopped too when the failure is raised."""
    try:
        return await asyncio.gather(first, second)
    finally:
        for each in (first, second):
            each.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


@asynccontextmanager
async def _opened(recipe: OnPolicyRecipe, watch: Stopwatch, start_up: StartUp) -> AsyncIterator[Cluster]:
    inline = recipe.placement.launcher == "inline"
    settings = replace(ray_settings(recipe), kept_as=start_up.kept_as)
    opening = open_inline() if inline else open_ray(settings, starting=start_up.ray, tell=start_up.tell)
    with ExitStack() as spans:
        spans.enter_context(watch.span("start-up"))
        async with opening as cluster:
            spans.close()
            try:
                yield cluster
            finally:
                spans.enter_context(watch.span("shut-down"))


async def device_kind_of(recipe: OnPolicyRecipe, cluster: Cluster) -> str:
    """cuda or cpu, as the recipe says and the cluster has."""
    device, gpus = recipe.placement.device, await in_thread(cluster.total, "GPU")
    if device == "auto":
        return "cuda" if gpus > 0 else "cpu"
    if device == "cuda" and gpus == 0:
        raise PlacementError("placement.device: cuda is asked for and the cluster has no GPU. Use cpu or auto.")
    return device


def _keep(recipe: OnPolicyRecipe, start_up: StartUp, resume_step: int | None, *, is_ready: bool) -> None:
    """From now on Ray and the workers stay if this process dies. `is_ready`: all workers have started."""
    supervision, address = SUPERVISION.get(), ray_settings(recipe).running_address
    if supervision is None:
        return
    resume_step = start_up.built_with(resume_step)
    if start_up.ray is not None and start_up.ray.can_outlive:
        supervision.keeps(start_up.ray.outlive(resume_step, is_ready=is_ready))
    elif start_up.kept_as is not None and address is not None:
        supervision.keeps(
            KeptRay(
                address=address, token="", processes=(), folder=None, resume_step=resume_step,
                namespace=start_up.kept_as, is_ready=is_ready,
            )
        )  # fmt: skip


async def _started(
    recipe: OnPolicyRecipe, folder: RunFolder, cluster: Cluster, resume_step: int | None, names: RoleNames,
    start_up: StartUp,
) -> Workers:  # fmt: skip
    """Starts the workers, or attaches to those that another process has left. Learners that replace one of these are
    built like them. Where it had not started all of them, those are ended: to start one takes less time than to learn
    how far its start has come."""
    placement, device = recipe.placement, await device_kind_of(recipe, cluster)
    resume_step = start_up.built_with(resume_step)
    cpu = folder.cpu_settings(num_learners(recipe))
    layout = layout_of(recipe, folder, device=device, resume_step=resume_step, cpu=cpu, names=names)
    timeouts = Timeouts(
        start_s=max(Timeouts().start_s, placement.timeout_s),  # large models are loaded, and vLLM compiles them
        collective_s=placement.collective_s,
        heartbeat_timeout_s=placement.heartbeat_timeout_s,
        hang_s=placement.timeout_s,
    )
    try:
        if start_up.left is not None and not start_up.has_workers:
            await cluster.end_left()
        begin = cluster.attach if start_up.has_workers else cluster.start
        workers = await begin(layout, timeouts, deadline_s=max(600.0, placement.timeout_s))
    except PlacementError as error:
        raise no_place(
            placement.devices, "devices", placement.mesh_sizes, error, generator=placement.generator_tensor
        ) from error
    await connect_workers(recipe, names, workers, start_up.tell)
    return workers


def cause_of(error: RoleError) -> PodiumError:
    """The user's mistake behind a worker's failure, or the failure itself."""
    return error.__cause__ if isinstance(error.__cause__, PodiumError) else error
