# SPDX-License-Identifier: Apache-2.0
"""How a restarted group of ranks goes on: from the newest snapshot in host memory or checkpoint, whichever is later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from podium.engine.checkpoint import CheckpointReader, newest_usable
from podium.engine.checkpoint_files import saved_steps, set_aside_later
from podium.engine.memory_snapshots import MemorySnapshots, whole_snapshots
from podium.engine.mesh import Mesh
from podium.engine.resuming import checkpoint_shards
from podium.engine.train_step import TrainEngine
from podium.errors import CheckpointError
from podium.observe import Console
from podium.observe.metrics import read_last_metrics
from podium.recipe import SpmdRecipe
from podium.runs.events import append_recovery
from podium.runs.folder import RunFolder
from podium.runs.host_memory import memory_folder
from podium.runs.milestones import Milestones
from podium.spmd.launch import RankPlace


def snapshot_folder(run: Path, launch_id: str | None) -> Path | None:
    """Where ranks of one launch keep their snapshots. Snapshots of earlier launches are elsewhere: a run that was
    resumed by hand may have been changed. None: there are no snapshots."""
    memory = memory_folder(run) if launch_id is not None else None
    return None if memory is None or launch_id is None else memory / f"launch-{launch_id}"


def newest_state(
    folder: RunFolder, memory: Path | None, mesh: Mesh, warn: Callable[[str], object] = lambda text: None
) -> CheckpointReader | None:
    """The newest snapshot, or a later checkpoint that is whole, the same on all ranks; None if there is neither.
    Checkpoints that come after it are damaged: `warn` gets each, and they are set aside. Raises an error if nothing is
    there but damaged checkpoints. Collective."""
    on_disk = [each.step for each in saved_steps(folder.checkpoints)]
    seen = mesh.gather((on_disk, () if memory is None else whole_snapshots(memory)))
    saved, _ = seen[0]
    # A rank that was moved to another node cannot read the others' memory.
    newest = max(set.intersection(*(set(steps) for _, steps in seen)), default=0)
    found: CheckpointReader | None = None
    for step in sorted((each for each in saved if each > newest), reverse=True):
        found = _whole_on_all_ranks(folder.checkpoints / f"step-{step:08d}", mesh, warn)
        if found is not None:
            break
    if found is None and newest and memory is not None:
        found = CheckpointReader(memory / f"step-{newest:08d}")
    if found is None and saved:
        return newest_usable(folder.checkpoints, max(saved))  # says what is damaged
    if found is not None and mesh.is_main:
        set_aside_later(folder.checkpoints, found.step)
    return found


def _whole_on_all_ranks(path: Path, mesh: Mesh, warn: Callable[[str], object]) -> CheckpointReader | None:
    """A checkpoint, unless a rank cannot read it. Collective."""
    found, damage = None, ""
    try:
        found = CheckpointReader(path)
    except (CheckpointError, OSError) as error:  # a disk may also refuse to read it
        damage = str(error)
    damages = [each for each in mesh.gather(damage) if each]
    if damages:
        warn(f"{damages[0]} The run goes on from an older state.")
    return None if damages else found


def open_snapshots(where: RankPlace, memory: Path | None, engine: TrainEngine) -> MemorySnapshots | None:
    """What takes the snapshots of this rank; None where there are no restarts."""
    if memory is None:
        return None
    return MemorySnapshots(memory, engine.mesh, node=where.node, pieces=lambda: checkpoint_shards(engine))


def restarted_milestones(
    recipe: SpmdRecipe, step: int, folder: RunFolder, mesh: Mesh, *, evaluates: bool
) -> Milestones:
    """The milestones of a run that goes on after `step`: whether it had saved and evaluated that step before it was
    killed. Collective: rank 0 looks."""
    saved = saved_steps(folder.checkpoints)
    last = read_last_metrics(folder.metrics_file) if mesh.is_main else []
    is_evaluated = any(each.step == step and "heldout/loss" in each.values for each in last)
    saved_step, is_evaluated = mesh.gather((saved[-1].step if saved else 0, is_evaluated))[0]
    return Milestones(
        recipe, step, evaluates=evaluates, restarted=True, saved_step=saved_step, is_evaluated=is_evaluated
    )


def report_restart(where: RankPlace, folder: RunFolder, console: Console, step: int) -> None:
    """Says where the run goes on, and how long that took; rank 0 only."""
    restart = where.restart
    if restart is None or where.rank != 0:
        return
    seconds = restart.seconds
    place = f"going on after step {step}" if step else "beginning again"
    console.note(f"{restart.title}: {place}, {seconds:.1f} s after the failure")
    append_recovery(folder.path, part="rank", cause=restart.cause, remedy="restart", step=step, seconds=seconds)
