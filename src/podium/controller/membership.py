# SPDX-License-Identifier: Apache-2.0
"""Which generators a run has: some die or leave, and others join while the run goes on.

The pool of generators has as many slots as the recipe allows. A slot whose generator died or left is vacant, and so are
those beyond `placement.rollout_devices` at the start. Vacant slots are filled as soon as there is room for them: in
place of one that died, or on a node that joins. Until then the run goes on with the generators that it has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

from podium.cluster.deadlines import now_s
from podium.cluster.health import Leaving
from podium.cluster.identity import WorkerId
from podium.controller.devices import Devices
from podium.controller.layout import ROLLOUT, TRAIN
from podium.controller.parts import OnPolicyParts
from podium.controller.recovery import Abort, Death, GiveUp, Rebuild, Respawn, Retry, Rewind
from podium.controller.state import RunState
from podium.errors import ClusterError, PlacementError, WorkerDiedError
from podium.observe.timing import JOINED, VACATED
from podium.recipe import OnPolicyRecipe
from podium.roles.handles import LoseGenerator
from podium.runs.events import append_membership, append_recovery
from podium.weights.weight_transfers import ByStore

log = logging.getLogger("podium.controller")

# A new generator waits for its process, imports and loads the model; a run without any waits as long for a place.
_START_S = 600.0
# After a failed start, while others generate.
_TRY_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class GeneratorsReady:
    """New generators can be admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorLeaves:
    """A generator will be gone soon."""

    rank: int


News = GeneratorsReady | GeneratorLeaves | Exception
"""What happens to the generators; an exception ends the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vacancy:
    """A slot whose generator died."""

    worker: WorkerId | None  # None: its timeline knows already that there is no room for a successor
    cause: str
    since_s: float


class Membership:
    """The controller's event loop uses it: the executor's task, and those that fill slots and look at nodes."""

    def __init__(self, parts: OnPolicyParts[OnPolicyRecipe], state: RunState, tell: Callable[[News], object]) -> None:
        """`tell` gets the news. It may come at any time; `settle` takes care of what nobody could use."""
        self._parts, self._state, self._tell = parts, state, tell
        self._has_pool = ROLLOUT in parts.workers.pools
        self._vacancies: dict[int, _Vacancy] = {}  # by rank: deaths without a successor so far
        self._leaving: dict[int, str] = {}  # by rank: why
        self._is_short = False  # whether the console knows that there is no room
        self._changed = asyncio.Event()  # a slot may be filled
        self._arrived = asyncio.Event()  # a generator can be admitted, or none will come
        self._error: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._has_old_channels = False  # whether episode runners have those of generators that are gone

    @property
    def moves_episodes(self) -> bool:
        """Whether generators join and leave while episodes run: they have devices of their own, and their sequences are
        episodes. With episode runners they join and leave between steps; what one was asked that dies is asked of the
        others."""
        return self._has_pool and self._parts.roles.runner is None

    @property
    def is_missing(self) -> bool:
        """Whether there is no generator."""
        return self._has_pool and not self._parts.roles.generator.ranks

    @property
    def has_ready(self) -> bool:
        """Whether generators wait for `admit`."""
        return self._has_pool and bool(self._parts.workers.worker_pool(ROLLOUT).ready)

    @property
    def leaving(self) -> tuple[int, ...]:
        """Ranks of generators that are there and will be gone soon."""
        return tuple(rank for rank in self._leaving if rank in self._parts.roles.generator.ranks)

    def report_lost_to(self, lose: LoseGenerator) -> None:
        """From now on `lose` is told of generators that die where the scheduler does not deal with them itself."""
        if self._has_pool:  # else they are learners' too
            self._parts.roles.generator.report_lost_to(lose)

    def open(self) -> None:
        """From now on vacant slots are filled."""
        if self._has_pool and not self._tasks:
            self._parts.workers.report_leaving_to(self._note_leaving)
            pool = self._parts.workers.worker_pool(ROLLOUT)
            for member in pool.members:
                if member.leaving is not None and member.slot not in pool.vacant:  # said before the run was rewound
                    self._leaving.setdefault(member.slot, member.leaving.cause)
            self._tasks = [asyncio.create_task(self._fill_slots()), asyncio.create_task(self._look_at_nodes())]

    async def close(self) -> None:
        """Ends what is starting, until the next `settle`."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for vacancy in self._vacancies.values():
            self._note_recovery(vacancy, "fewer")
        self._vacancies.clear()

    async def settle(self) -> None:
        """Lets generators go and come while nothing runs. Waits for one if there is none."""
        if not self._has_pool:
            return
        self.open()
        workers, pool = self._parts.workers, self._parts.workers.worker_pool(ROLLOUT)
        causes = {each.slot: str(each.died) for each in pool.members}
        for rank in pool.dead:
            self.lose(rank, WorkerDiedError(f"{causes.get(rank, f'{ROLLOUT}[{rank}] died')}."))
        for rank in self.leaving:
            self.leave(rank)
        if self._has_old_channels:
            await workers.renew_channels(ROLLOUT)
            self._has_old_channels = False
        await self.admit()
        while not self._parts.roles.generator.ranks:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            if not workers.worker_pool(ROLLOUT).ready:
                await self._arrived.wait()  # `_fill_slots` has a deadline
            await self.admit()

    async def publish(self, devices: Devices, version: int) -> None:
        """Lets generators go and come like `settle`, and gives those that are there this version. One that dies
        meanwhile is lost like one that dies between two steps: the learner has its weights still, and the others take
        all of them again, whatever part they have received. They check what they receive before they generate."""
        while True:
            await self.settle()
            try:
                return await devices.publish(version)
            except WorkerDiedError:
                if not self._has_lost_generators_only:
                    raise

    @property
    def _has_lost_generators_only(self) -> bool:
        """Whether generators have died, and the learners can be called as before."""
        workers = self._parts.workers
        return self._has_pool and bool(workers.worker_pool(ROLLOUT).dead) and not workers.is_damaged(TRAIN)

    def lose(self, rank: int, error: WorkerDiedError) -> None:
        """The run goes on without a generator that died. Raises the error if too many died."""
        cause, worker = str(error).splitlines()[0], self._parts.workers.registry.worker(ROLLOUT, rank)
        has_left = self._leaving.pop(rank, None)
        if has_left is None:
            death = Death(part="generator", cause=cause, slots=(rank,), others_go_on=True)
            match self._parts.recovery.decide(death):
                case Respawn():
                    others = "its episodes are run again" if self.moves_episodes else "the others do its work"
                    self._parts.log.console.warning(f"{cause} It is replaced, and {others}.")
                case Abort():
                    raise error
                case Retry() | GiveUp() | Rebuild() | Rewind() as remedy:
                    raise AssertionError(f"{remedy} is no answer to the death of a generator while others go on")
                case other:
                    assert_never(other)
            self._vacancies[rank] = _Vacancy(worker=worker, cause=cause, since_s=now_s())
        else:
            self._parts.log.console.warning(f"{cause} Its grace period was too short: its episodes are run again.")
        self._vacate(rank, frees_place=has_left is not None)
        if has_left is not None:
            self._note_left(rank, worker, has_left)
        self._changed.set()

    def lose_one_of_several(self, rank: int, error: WorkerDiedError) -> None:
        """Like `lose`, where only other generators can go on with what it did: for episode runners, or in an
        evaluation. Raises the error if there are none."""
        if not set(self._parts.roles.generator.ranks) - {rank}:
            raise error
        self.lose(rank, error)

    def leave(self, rank: int) -> None:
        """Ends a generator that leaves and runs nothing any more."""
        cause, worker = self._leaving.pop(rank), self._parts.workers.registry.worker(ROLLOUT, rank)
        self._vacate(rank, frees_place=True)
        self._note_left(rank, worker, cause)
        self._changed.set()

    def _vacate(self, rank: int, *, frees_place: bool) -> None:
        self._parts.workers.vacate(ROLLOUT, [rank], frees_places=frees_place)
        self._has_old_channels = self._parts.roles.runner is not None  # a runner that plays cannot take new ones

    async def admit(self) -> tuple[int, ...]:
        """Lets new generators in. Returns their ranks. They have no weights yet."""
        new = await self._parts.workers.admit(ROLLOUT)
        for worker in new:
            vacancy = self._vacancies.pop(worker.index, None)
            if vacancy is not None:
                self._note_recovery(vacancy, "respawn")
                self._parts.log.console.note(f"the generator is back after {now_s() - vacancy.since_s:.1f} s")
            else:
                self._parts.watch.mark(f"{JOINED}{worker}")
                self._note_change("joined", str(worker), f"there is room on {worker.node}")
        if new:
            self._is_short = False
        return tuple(worker.index for worker in new)

    async def equip(self, rank: int, transfer: ByStore) -> int:
        """Gives a new generator weights while the others generate. Returns how many sequences it generates at the same
        time."""
        roles = self._parts.roles
        if self._parts.recipe.model.lora is not None:
            await roles.generator.check_base_on(rank, await roles.policy.describe_base())
        await roles.generator.install_in_flight(rank, transfer, "recompute")
        return await roles.generator.lanes_of(rank)

    # --- tasks ---

    async def _fill_slots(self) -> None:
        """Starts generators in vacant slots. Waits for slots that become vacant and for nodes that change; ended by
        `close`. A run without any generator waits for one no longer than the deadline."""
        pool = self._parts.workers.worker_pool(ROLLOUT)
        while True:
            self._changed.clear()
            try:
                slots = await self._parts.workers.fill(ROLLOUT, deadline_s=_START_S)
            except ClusterError as error:
                if not await self._may_try_again(error):
                    return
                continue
            if slots:
                self._arrived.set()
                self._tell(GeneratorsReady())
            elif self._vacancies:
                self._mark_vacancies()
                if not self._is_short:
                    self._note_shortage()
            is_alone = self.is_missing and not pool.ready
            try:
                async with asyncio.timeout(_START_S if is_alone else None):
                    await self._changed.wait()
            except TimeoutError:
                self._fail(
                    PlacementError(
                        f"the run has no generator, and for {_START_S:.0f} s there was no place for one. Add a node to "
                        "the cluster; `podium resume` continues the run."
                    )
                )
                return

    async def _may_try_again(self, error: ClusterError) -> bool:
        """A generator could not be started. While others generate, that is no reason to end the run."""
        cause = str(error).splitlines()[0]
        if not self.is_missing:
            self._parts.log.console.warning(
                f"{cause} The run goes on with {self._counted()}; another start is tried in {_TRY_AGAIN_S:.0f} s."
            )
            await asyncio.sleep(_TRY_AGAIN_S)
            return True
        if isinstance(error, WorkerDiedError):
            remedy = self._parts.recovery.decide(Death(part="generator", cause=cause, others_go_on=True))
            if isinstance(remedy, Respawn):
                self._parts.log.console.warning(f"{cause} It is replaced.")
                return True
        self._fail(error)
        return False

    async def _look_at_nodes(self) -> None:
        """Looks for nodes that join, or are being drained; ended by `close`."""
        while True:
            try:
                await self._parts.workers.nodes_changed(ROLLOUT)
            except Exception as error:  # a cluster that has failed ends the run by itself
                log.warning("the nodes of the cluster cannot be seen: %s", error)
                await asyncio.sleep(_TRY_AGAIN_S)
            self._changed.set()

    # --- what happens ---

    def _note_leaving(self, leaving: Leaving) -> None:
        rank = leaving.worker.index
        if leaving.worker.pool != ROLLOUT or leaving.worker not in self._parts.roles.generator.workers:
            return  # one that was not admitted yet leaves like one that dies
        self._leaving[rank] = leaving.cause
        self._parts.log.console.warning(f"{leaving}. Its running sequences move to the others.")
        self._tell(GeneratorLeaves(rank=rank))

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._arrived.set()
        self._tell(error)

    def _note_left(self, rank: int, worker: WorkerId | None, cause: str) -> None:
        if worker is not None:
            self._parts.watch.mark(f"{VACATED}{worker}")
        self._note_change("left", f"{ROLLOUT}[{rank}]", cause)

    def _mark_vacancies(self) -> None:
        """Those who died have no successor soon: from now on nobody has the time of their slots."""
        for rank, vacancy in self._vacancies.items():
            if vacancy.worker is not None:
                self._parts.watch.mark(f"{VACATED}{vacancy.worker}")
                self._vacancies[rank] = replace(vacancy, worker=None)

    def _note_shortage(self) -> None:
        self._is_short = True
        for vacancy in self._vacancies.values():
            self._note_recovery(vacancy, "fewer")
        self._vacancies.clear()
        what = "waits" if self.is_missing else f"goes on with {self._counted()}"
        self._parts.log.console.warning(f"there is no room for another generator: the run {what} until a node joins.")

    def _note_change(self, change: str, generator: str, cause: str) -> None:
        count = self._parts.roles.generator.num_engines
        append_membership(
            self._parts.folder.path, change=change, generator=generator, cause=cause, step=self._state.step,
            generators=count,
        )  # fmt: skip
        self._parts.log.console.note(f"{generator} has {change} ({cause}): {self._counted()} now")

    def _note_recovery(self, vacancy: _Vacancy, remedy: str) -> None:
        seconds = now_s() - vacancy.since_s if remedy == "respawn" else 0.0
        append_recovery(
            self._parts.folder.path, part="generator", cause=vacancy.cause, remedy=remedy, step=self._state.step,
            seconds=seconds,
        )  # fmt: skip

    def _counted(self) -> str:
        count = self._parts.roles.generator.num_engines
        return f"{count} generator{'' if count == 1 else 's'}"
