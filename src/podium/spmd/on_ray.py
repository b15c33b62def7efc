# SPDX-License-Identifier: Apache-2.0
"""An SPMD program on a Ray cluster: identical workers each run all of it; the driver launches, watches and gathers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from podium.cluster import Cluster, Layout, MeshShape, Pool, Resources, RoleGroup, RoleSpec, Seat, open_ray
from podium.cluster.crew import Patience
from podium.errors import LaunchError, PlacementError, PodiumError, RoleError, WorkerDiedError
from podium.recipe import PlacementSection
from podium.spmd.folder import RunFolder
from podium.spmd.launch import InterruptHandler, RankPlace

if TYPE_CHECKING:
    from podium.spmd.rank import Program, RankTask
    from podium.spmd.run import RunResult

_POOL = "ranks"
_LOOK_S = 0.2
# A run may take months; what can hang inside it (collectives, checkpoints) has deadlines of its own.
_RUN_S = 3e8


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTask:
    """What the driver launches."""

    task: RankTask
    program: Program
    placement: PlacementSection


class SpmdRank:
    """The role: one rank of the program."""

    def __init__(self, seat: Seat, folder: str) -> None:
        self._seat = seat
        if not Path(folder).is_dir():
            raise LaunchError(
                f"{seat.worker}: the folder {folder}, from which the run was launched, is not on this node. Ranks read "
                "the recipe's files and write the run folder: launch from a folder that all nodes share."
            )
        os.chdir(folder)

    def run(self, attempt: int, launched: RayTask) -> RunResult:
        """The whole program, from the mesh that the worker has joined already."""
        from podium.engine.mesh import adopt
        from podium.spmd.rank import run_joined

        seat = self._seat
        mesh = adopt(rank=seat.rank, world=seat.world, device=seat.device, devices=seat.devices)
        where = RankPlace(rank=seat.rank, world=seat.world, attempt=attempt, launched=True)
        with _console_of(RunFolder(path=launched.task.folder), main=mesh.is_main):
            return run_joined(where, mesh, launched.task, launched.program)


@contextlib.contextmanager
def _console_of(folder: RunFolder, *, main: bool) -> Iterator[None]:
    """What rank 0 prints goes to a file of the run folder, which the driver shows as it grows."""
    if not main:
        yield
        return
    with folder.console_file.open("a", encoding="utf-8", buffering=1) as file, contextlib.redirect_stdout(file):
        yield


def launch_on_ray(launched: RayTask, folder: RunFolder) -> RunResult:
    """Runs the program on the Ray cluster that RAY_ADDRESS or a submitted job names, or on a local one. The first
    Ctrl-C asks the ranks to save and stop, the second ends them."""
    interrupts = InterruptHandler(folder.stop_file)
    with interrupts:
        try:
            return asyncio.run(_drive(launched, folder, interrupts))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _drive(launched: RayTask, folder: RunFolder, interrupts: InterruptHandler) -> RunResult:
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    interrupts.on_end(lambda: loop.call_soon_threadsafe(this.cancel))
    placement = launched.placement
    shown = folder.console_file.stat().st_size if folder.console_file.exists() else 0
    async with open_ray() as cluster:
        workers = await cluster.start(_layout(placement, cluster), Patience(collective_s=placement.timeout_s))
        print("\n".join(f"rank {rank}: {each}" for rank, each in enumerate(workers.registry.workers_of("rank"))))
        group = workers.role("rank", SpmdRank).within(_RUN_S)
        console = asyncio.create_task(_show(folder.console_file, shown))
        try:
            for attempt in range(placement.restarts + 1):
                try:
                    return await _run(group, attempt, launched)
                except (WorkerDiedError, RoleError) as error:
                    if attempt == placement.restarts:
                        raise _told(error) from error
                    print(f"restart {attempt + 1} of {placement.restarts}: {str(error).splitlines()[0]}", flush=True)
                    await workers.recover(_POOL)
        finally:
            await asyncio.sleep(_LOOK_S)  # the last lines
            console.cancel()
            await asyncio.gather(console, return_exceptions=True)
    raise AssertionError("the last attempt returns or raises")


async def _run(group: RoleGroup[SpmdRank], attempt: int, launched: RayTask) -> RunResult:
    answers = await group.call_all(SpmdRank.run, attempt, launched)
    return answers[0].value


def _layout(placement: PlacementSection, cluster: Cluster) -> Layout:
    device = placement.device
    if device == "auto":
        device = "cuda" if cluster.total("GPU") > 0 else "cpu"
    if device == "cuda" and cluster.total("GPU") == 0:
        raise PlacementError("placement.device: cuda is asked for and the Ray cluster has no GPU. Use cpu or auto.")
    each = Resources(cpus=1.0, gpus=1.0 if device == "cuda" else 0.0)
    return Layout(
        pools=(Pool(name=_POOL, slots=placement.devices, each=each),),
        roles=(
            RoleSpec(
                name="rank",
                kind=SpmdRank,
                pool=_POOL,
                mesh=MeshShape(shard=placement.devices),
                arguments=(os.getcwd(),),
            ),
        ),
    )


def _told(error: WorkerDiedError | RoleError) -> PodiumError:
    """A mistake of the user comes back as itself, whichever rank found it."""
    return error.__cause__ if isinstance(error.__cause__, PodiumError) else LaunchError(str(error))


async def _show(file: Path, shown: int) -> None:
    """Prints what is appended to the file. Consumes nothing else, waits for nobody; the driver cancels it."""
    while True:
        if file.exists():
            with file.open("rb") as text:
                text.seek(shown)
                new = text.read()
            if new:
                shown += len(new)
                sys.stdout.write(new.decode(errors="replace"))
                sys.stdout.flush()
        await asyncio.sleep(_LOOK_S)
