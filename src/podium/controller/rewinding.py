# SPDX-License-Identifier: Apache-2.0
"""Brings a run whose workers died back to its last committed step: replaces the workers, and gives the roles that learn
the state that they had then, from memory if it is there and from the newest checkpoint if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from podium.cluster import Workers
from podium.cluster.blocking import in_thread
from podium.cluster.fanout import OverdueError
from podium.controller.assembly import Inputs, state_handles
from podium.controller.layout import GRADERS, ROLLOUT, RUNNER, RUNNERS, TRAIN, RoleNames, state_folders
from podium.controller.ledger import LEDGER_FILE, Ledger
from podium.controller.phases import GENERATOR
from podium.controller.recovery import Death, Part
from podium.engine.checkpoint_files import newest_whole, saved_steps, set_aside_later
from podium.errors import WorkerDiedError
from podium.observe import StepMetrics, read_metrics
from podium.roles.grading_handle import RewardModelHandle
from podium.roles.handles import PHASE_S, GeneratorHandle, ScorerHandle
from podium.roles.interfaces import POLICY, Critic, EpisodeSource, Generator, Learner, RewardModel, Scorer
from podium.roles.state_handle import StateHandle
from podium.runs.folder import RunFolder
from podium.runs.milestones import Milestones
from podium.runs.standing import HELDOUT
from podium.runs.step_files import recorded_steps

_PARTS: Mapping[str, Part] = {TRAIN: "learner", ROLLOUT: "generator", RUNNERS: "runner", GRADERS: "grader"}


def death_of(error: WorkerDiedError | OverdueError, workers: Workers) -> Death:
    """Which part of the run died. The learner's comes first: it needs the others."""
    dead = [pool for pool in _PARTS if pool in workers.pools and workers.is_damaged(pool)]
    cause = str(error).splitlines()[0]
    if not dead or dead[0] == TRAIN:  # learners are replaced together
        return Death(part="learner", cause=cause)
    pool = workers.worker_pool(dead[0])
    return Death(part=_PARTS[dead[0]], cause=cause, slots=tuple(sorted({*pool.dead, *pool.unfinished})))


async def rewind(
    first: Inputs, names: RoleNames, workers: Workers, *, committed: int, most: int | None = None,
    are_new: bool = False, saving: int | None = None,
) -> Inputs:  # fmt: skip
    """Replaces dead workers and restores the newest step that there is, up to `most`. `first`: the inputs with which
    the workers were started; `committed`: the last committed step; `are_new`: no worker has done anything yet;
    `saving`: the step whose checkpoint learners may be writing. It is waited for, unless a snapshot is as new:
    when it is whole, it removes the checkpoints before it. A worker that dies meanwhile raises WorkerDiedError, and the
    call can be repeated."""
    if ROLLOUT in workers.pools:
        # The run goes on with those that live, and fills the slots of the others later. First: learners that are
        # replaced form their link again, and not with a dead one.
        workers.vacate(ROLLOUT, workers.worker_pool(ROLLOUT).dead)
    for pool in workers.pools:
        await workers.recover(pool)
    if ROLLOUT in workers.pools:
        await workers.renew_channels(ROLLOUT)
    if RUNNERS in workers.pools:
        # Their streams may have failed before they were given up: the next ones must not count as finished.
        await workers.role(RUNNER, EpisodeSource).within(PHASE_S).call_all(EpisodeSource.reset)
    if workers.num_attached:
        committed = max(committed, await take_over(names, workers))
    states = state_handles(first.recipe, names, workers)
    in_memory = set.intersection(*[await state.snapshots() for state in states])
    in_memory = {step for step in in_memory if most is None or step <= most}
    if saving is not None and max(in_memory, default=0) < saving:
        await _finish_saving(names, workers)
    step, saved = await _restored(first, states, in_memory, workers, are_new)
    if step < committed and ROLLOUT in workers.pools:
        # They have weights of a version that will be made again, and may come out differently.
        await workers.recover(ROLLOUT, everyone=True)
    for name in (names.reference, *names.teachers):
        if name is not None:
            await ScorerHandle(workers.role(name, Scorer)).hold("resident")
    for _, name in names.reward_models:
        await RewardModelHandle(workers.role(name, RewardModel)).hold("resident")
    return first.rewound(step, saved)


async def take_over(names: RoleNames, workers: Workers) -> int:
    """Brings roles to a known state that another controller has used. Returns the newest version of the weights that a
    generator has."""
    await _finish_saving(names, workers)
    if ROLLOUT not in workers.pools or names.lent is not None:
        # On the learner's devices: they leave room for what it restores, and wake with its weights.
        await GeneratorHandle(workers.role(names.lent or GENERATOR, Generator)).hold("offloaded")
    usages = await GeneratorHandle(workers.role(GENERATOR, Generator)).usage()
    return max((each.version for each in usages.values()), default=0)


def recorded_step(inputs: Inputs) -> int:
    """The newest step of a run whose controller was killed that ledger, metrics and recorded steps have."""
    folder, known = inputs.folder, list[int]()
    with closing(Ledger(folder.path / LEDGER_FILE)) as ledger:
        known.append(ledger.newest_step())
    known.append(max((each.step for each in _metrics(folder)), default=0))
    if inputs.recipe.rollout.is_recorded:
        known.append(max(recorded_steps(folder.steps), default=0))
    return min(known)


def milestones_of_killed(first: Inputs, step: int) -> Milestones:
    """What a run whose controller was killed has saved and evaluated, as it goes on after `step`. `first`: the inputs
    from the newest checkpoint that it had then."""
    evaluated = {each.step for each in _metrics(first.folder) if any(name.startswith(HELDOUT) for name in each.values)}
    saved = [each.step for each in saved_steps(first.folder.checkpoints)]
    saved = [each for each in saved if each <= step]  # workers may have ended one meanwhile
    return Milestones(
        first.recipe, step, evaluates=bool(first.heldout), saved_step=max(saved, default=0), restarted=True,
        is_evaluated=step in evaluated,
    )  # fmt: skip


def _metrics(folder: RunFolder) -> Sequence[StepMetrics]:
    return read_metrics(folder.path) if folder.metrics_file.exists() else ()


async def _finish_saving(names: RoleNames, workers: Workers) -> None:
    """Waits until no checkpoint is being written, at most `checkpoint.timeout_s`. One that the disk does not take
    leaves those before it."""
    await workers.role(POLICY, Learner).within(PHASE_S).call_all(Learner.finish_saving)
    if names.critic is not None:
        await workers.role(names.critic, Critic).within(PHASE_S).call_all(Critic.finish_saving)


async def _restored(
    first: Inputs, states: Sequence[StateHandle], in_memory: set[int], workers: Workers, are_new: bool
) -> tuple[int, Mapping[str, Any]]:
    """Restores the newest state: the newest snapshot, or a later checkpoint that is whole. Checkpoints that come after
    it are damaged, and are set aside. No checkpoint may be in flight that is newer than the snapshots. Returns its step
    and the controller's values."""
    begin = first.resume_step or 0
    known = max([*in_memory, begin if are_new else 0])  # new workers have just read the checkpoint of `begin`
    # In a thread: all bytes of a checkpoint may take minutes, and heartbeats go on.
    step = await in_thread(newest_whole, state_folders(first.folder), after=known) or known or begin
    for part in state_folders(first.folder):
        set_aside_later(part, step)
    if step in in_memory:
        values = [await state.restore(step, "memory") for state in states]
        return step, values[0]
    if step == begin and (are_new or step == 0):
        if not are_new:
            await workers.recover(TRAIN, everyone=True)  # they are built with this state
        return step, first.saved
    values = [await state.restore(step, "checkpoint") for state in states]
    return step, values[0]
