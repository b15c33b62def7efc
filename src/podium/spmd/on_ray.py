# SPDX-License-Identifier: Apache-2.0
"""Runs an SPMD program on a Ray cluster: identical workers each run all of it. The driver launches, watches and
gathers."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from podium.cluster import (
    Cluster,
    Layout,
    MeshShape,
    Pool,
    RayCluster,
    Resources,
    RoleSpec,
    WorkerContext,
    Workers,
    open_ray,
)
from podium.cluster.blocking import in_thread, run_to_end
from podium.cluster.hangs import Hang
from podium.cluster.member import Timeouts
from podium.errors import LaunchError, PlacementError, PodiumError, ProgramRaisedError, RoleError, WorkerDiedError
from podium.observe import Console
from podium.observe.console import PlainConsole
from podium.observe.metrics import newest_step
from podium.observe.recording import LogFile, tolerate_no_reader
from podium.recipe import SpmdPlacementSection
from podium.recipe.policy_mesh import no_place
from podium.runs.folder import RunFolder
from podium.runs.interrupts import InterruptHandler
from podium.spmd.launch import RankPlace
from podium.spmd.restart_budget import Restart, RestartBudget
from podium.stack_dumps import append_stacks

if TYPE_CHECKING:
    from podium.runs.result import RunResult
    from podium.spmd.rank import RankTask

_POOL = "ranks"
_LOOK_S = 0.2
# Modules that a rank imports before its program.
_PRELOAD = ("podium.spmd.rank", "podium.engine.mesh")
# A run may take months. Everything in it that can hang (collectives, checkpoints) has its own deadline.
_RUN_S = 3e8


class SpmdRank:
    """The role: one rank of the program."""

    def __init__(self, context: WorkerContext, folders: tuple[str, ...]) -> None:
        """`folders` are the folder where the run was launched and the folder where it writes."""
        self._context = context
        for folder in folders:
            if not Path(folder).is_dir():
                raise LaunchError(
                    f"{context.worker}: there is no folder {folder} on this node. Ranks read the recipe's files and "
                    "write the run folder: launch from a folder, and into one, that all nodes share."
                )
        os.chdir(folders[0])

    def run(self, restart: Restart | None, failed_ago_s: float, task: RankTask) -> RunResult:
        """Runs the whole program on the mesh that the worker has already joined. `restart`: why it runs again, after a
        failure `failed_ago_s` ago: the driver may be on a machine with another clock."""
        from podium.engine.mesh import adopt, with_axes
        from podium.spmd.rank import run_joined

        if restart is not None:
            restart = dataclasses.replace(restart, failed_s=time.monotonic() - failed_ago_s)
        context = self._context
        mesh = adopt(rank=context.rank, world=context.world, device=context.device, devices=context.devices)
        placement = task.recipe.placement
        mesh = with_axes(mesh, placement.mesh_sizes, timeout_s=placement.collective_s)
        where = RankPlace(
            rank=context.rank, world=context.world, attempt=0 if restart is None else restart.attempt, restart=restart,
            restarts_left=placement.restarts if restart is None else restart.left,
            node=context.worker.node, launched=True, is_followed=True,
        )  # fmt: skip
        with _console_of(RunFolder(path=task.folder), main=mesh.is_main):
            return run_joined(where, mesh, task)


@contextlib.contextmanager
def _console_of(folder: RunFolder, *, main: bool) -> Iterator[None]:
    """Writes the output of rank 0 to a file of the run folder, which the driver follows."""
    if not main:
        yield
        return
    with folder.console_file.open("a", encoding="utf-8", buffering=1) as file, contextlib.redirect_stdout(file):
        yield


def launch_on_ray(task: RankTask, folder: RunFolder, console: Console, tell: Callable[[str], object]) -> RunResult:
    """Runs the program on the Ray cluster that RAY_ADDRESS or a submitted job names, or on a local one. `tell` gets
    the phases of the start-up. The first Ctrl-C asks the ranks to save and stop, the second ends them. An evaluation
    ends with the first."""
    interrupts = InterruptHandler(None if task.evaluates_only else folder.stop_file)
    with interrupts:
        try:
            return run_to_end(_drive(task, folder, interrupts, console, tell))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _drive(
    task: RankTask, folder: RunFolder, interrupts: InterruptHandler, console: Console, tell: Callable[[str], object]
) -> RunResult:
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    interrupts.on_end(lambda: loop.call_soon_threadsafe(this.cancel))
    placement = task.recipe.placement
    settings = RayCluster(
        heartbeat_timeout_s=placement.heartbeat_timeout_s, preload=_PRELOAD if placement.fork_workers else ()
    )
    async with open_ray(settings, tell=tell) as cluster:
        workers = await _started(task.recipe.placement, cluster, folder)
        workers.report_hangs_to(lambda hang: _report_hang(hang, folder, console))
        for rank, worker in enumerate(workers.registry.workers_of("rank")):
            console.note(f"rank {rank}: {worker}")
        tail = _Tail(folder.console_file)  # from here on the ranks print there
        showing = asyncio.create_task(tail.follow())
        log, tracebacks = LogFile(folder.console_file), list[str]()
        try:
            return await _run(workers, task, PlainConsole(log), tracebacks)
        finally:
            showing.cancel()
            tail.show()
            log.write("".join(tracebacks))  # from here on nothing of the file is shown


def _report_hang(hang: Hang, folder: RunFolder, console: Console) -> None:
    names = ", ".join(map(str, hang.workers))
    console.warning(f"{names}: {hang.cause}. The stacks of all ranks are in {folder.stacks_file}.")
    append_stacks(folder.stacks_file, names, str(hang))


async def _started(placement: SpmdPlacementSection, cluster: Cluster, folder: RunFolder) -> Workers:
    try:
        timeouts = Timeouts(
            collective_s=placement.collective_s, heartbeat_timeout_s=placement.heartbeat_timeout_s,
            hang_s=placement.timeout_s,
        )  # fmt: skip
        gpus = await in_thread(cluster.total, "GPU")
        return await cluster.start(_layout(placement, gpus, folder), timeouts)
    except PlacementError as error:
        raise no_place(placement.devices, "ranks", placement.mesh_sizes, error) from error
    except RoleError as error:
        raise _as_podium_error(error) from error


async def _run(workers: Workers, task: RankTask, log: Console, tracebacks: list[str]) -> RunResult:
    """Runs the program until it ends. After a failure the ranks are started again while restarts are left, which a
    completed step gives back.
    Waits for the ranks without a deadline; a death, a failure or the user's second Ctrl-C unblocks it. `tracebacks`
    gets those of a custom program."""
    budget, worker_pool = RestartBudget(task.recipe.placement.restarts), workers.worker_pool(_POOL)
    group = workers.role("rank", SpmdRank).within(_RUN_S)
    restart: Restart | None = None
    while True:
        try:
            failed_ago_s = 0.0 if restart is None else time.monotonic() - restart.failed_s
            answers = await group.call_all(SpmdRank.run, restart, failed_ago_s, task)
            return answers[0].value
        except (WorkerDiedError, RoleError) as error:
            failure = _as_podium_error(
                error, [str(member.died) for member in worker_pool.members if member.died is not None]
            )
            if isinstance(failure, ProgramRaisedError) and failure.traceback_text is not None:
                tracebacks.append(failure.traceback_text)
            cause, step = str(failure).splitlines()[0], newest_step(RunFolder(path=task.folder).metrics_file)
            restart = budget.restart(cause, step=step, failed_s=time.monotonic())
            if restart is None:
                raise failure from error
            log.note(f"{restart.title}: {cause}")
            # Also after all ranks answered: state that a failure left in a process must not survive.
            await workers.recover(_POOL, everyone=True)


def _layout(placement: SpmdPlacementSection, gpus: float, folder: RunFolder) -> Layout:
    device = placement.device
    if device == "auto":
        device = "cuda" if gpus > 0 else "cpu"
    if device == "cuda" and gpus == 0:
        raise PlacementError("placement.device: cuda is asked for and the Ray cluster has no GPU. Use cpu or auto.")
    each = Resources(cpus=1.0, gpus=1.0 if device == "cuda" else 0.0)
    return Layout(
        pools=(Pool(name=_POOL, slots=placement.devices, each=each, together=placement.mesh_sizes.tensor),),
        roles=(
            RoleSpec(
                name="rank",
                kind=SpmdRank,
                pool=_POOL,
                mesh=MeshShape(shard=placement.devices),
                arguments=((os.getcwd(), str(folder.path.resolve())),),
            ),
        ),
    )


def _as_podium_error(error: WorkerDiedError | RoleError, deaths: Sequence[str] = ()) -> PodiumError:
    """A user error is raised as itself, whichever rank found it."""
    if isinstance(error.__cause__, PodiumError):
        return error.__cause__
    if deaths:
        return LaunchError(f"{'; '.join(deaths)}. The other ranks were ended. Was it out of memory?")
    return LaunchError(str(error))


class _Tail:
    """Prints text that is appended to a file from now on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._shown = file.stat().st_size if file.exists() else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a read may end inside a character

    async def follow(self) -> None:
        """Polls the file at intervals. Waits for no other task; the driver cancels it."""
        while True:
            self.show()
            await asyncio.sleep(_LOOK_S)

    def show(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._file.open("rb") as file:
            file.seek(self._shown)
            new = file.read()
            self._shown += len(new)
            with tolerate_no_reader(lambda: None):
                sys.stdout.write(self._decoder.decode(new))
                sys.stdout.flush()
