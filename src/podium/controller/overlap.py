# SPDX-License-Identifier: Apache-2.0
"""Generation that goes on while the policy learns (staleness above 0), and devices that change sides (layout elastic).

Streams to the workers stay open over many steps. A task reads them; what it and the graders bring is told to the
scheduler at once, and what that admits is sent at once. After an update the learner puts its weights into the object
store, and is free for the next one. Every generator takes them from there while it generates. With layout elastic the
learner's devices generate while the program waits for its next step: they are lent and recalled while the other
generators go on. Generators join and leave at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, assert_never

from podium.cluster import ObjectScope
from podium.cluster.deadlines import now_s
from podium.controller.devices import Devices
from podium.controller.episodes import training_sampling
from podium.controller.grading_queue import GradedPart, GradingQueue
from podium.controller.group_flow import GroupFlow
from podium.controller.ledger import GroupRecord, OpenGroupRecord
from podium.controller.lent_devices import LentDevices, WaitClock, lent_rank
from podium.controller.membership import GeneratorLeaves, GeneratorsReady, Membership, News
from podium.controller.open_groups import SampledStep
from podium.controller.overlap_meter import OverlapMeter, WaitsFor
from podium.controller.parts import OnPolicyParts
from podium.controller.scheduling import (
    Event,
    LearnerIdle,
    LearnerWaits,
    Lend,
    StepRequested,
    StopRequested,
    WeightsInstalled,
)
from podium.controller.state import RunState
from podium.errors import WorkerDiedError
from podium.observe.causes import FOR_GENERATION, FOR_GRADING
from podium.observe.timing import LENT, PUBLISHED, RECALLED
from podium.recipe import OnPolicyRecipe
from podium.roles.episode_stream import Block, EpisodeStream, Left, Lost
from podium.rollout.engine import InFlight
from podium.weights.weight_transfers import ByStore

# Longest wait for weights that are on their way when a run ends.
_ARRIVE_S = 60.0
# Shortest time between two looks for a request to stop.
_LOOK_EVERY_S = 1.0


class OverlapExecutor:
    """The controller's event loop uses it: one task that runs the program, and those that this class starts. A failure
    of one of those is raised by the next `sample` or `pause`."""

    def __init__(self, parts: OnPolicyParts[OnPolicyRecipe], devices: Devices, state: RunState) -> None:
        self._parts, self._devices, self._state = parts, devices, state
        self._flow = GroupFlow(parts, state)
        self._grading = GradingQueue(parts.roles.grader, self._note_graded)
        self._in_flight: InFlight = "keep" if parts.recipe.rollout.on_new_weights == "keep" else "recompute"
        self._is_pausing = False
        self._is_finishing = False  # streams take no more episodes
        self._members = Membership(parts, state, self._note_news)
        self._members.report_lost_to(self._lose_generator)
        self._equipping: asyncio.Task[None] | None = None
        self._retiring: set[int] = set()  # ranks of generators that give back what they run
        self._stream: EpisodeStream | None = None
        self._generating: asyncio.Task[None] | None = None
        self._storing: asyncio.Task[None] | None = None  # the learner must keep its weights until it ends
        self._transfer: ByStore | None = None  # the newest weights in the object store
        self._to_install: set[str] = set()  # workers that wait for them
        self._versions: dict[int, int] = {}  # engine -> version of its weights
        lent = parts.roles.lent
        self._lent = None if lent is None else LentDevices(parts, self._flow, state, lent, self._note, self._fail)
        self._scoring: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._meter = OverlapMeter(self._flow, self._lent, has_runners=parts.roles.runner is not None)
        self._waited_s = self._graded_s = 0.0  # for the last step, and of that for rewards alone
        self._wait_clock = WaitClock(self._tell_waits)
        self._is_learning = self._is_waiting = self._is_lent = False  # the learner
        self._is_stopping, self._looks_s = False, 0.0  # whether the scheduler knows of a stop; when to look next
        self._installing: set[int] = set()  # engines

    async def sample(self, step: int, objects: ObjectScope) -> SampledStep:
        """The next step that the scheduler starts. Generation goes on when it is returned."""
        if not self._members.moves_episodes and (self._members.has_ready or self._members.leaving):
            await self.pause()  # requests of episode runners end first
        if self._generating is None:
            await self._begin()
        await self._until_stored()  # the learner's devices are idle from then on
        idle_since_s = now_s()
        if self._lent is not None:
            self._tell_idle(self._lent)
        self._is_waiting = True
        self._tell(StepRequested())
        try:
            await self._until_step_is_ready()
        finally:
            self._wait_clock.end()
        self._waited_s = now_s() - idle_since_s
        self._is_learning, self._is_waiting = True, False
        self._note_idle()
        return self._flow.collect(step, objects, self._meter.take(await self._parts.roles.generator.usage()))

    def commit(self, step: int, *, is_updated: bool) -> list[GroupRecord]:
        """Notes that a step is committed, and begins to publish its weights."""
        self._look_for_stop(is_overdue=True)  # before anything is admitted for the steps after this one
        records = self._flow.commit(step, is_updated=is_updated)
        self._is_learning = False
        if is_updated and step < self._flow.settings.steps:
            self._storing = self._start(self._store, self._state.version)
        self._send()
        return records

    def history(self, prompt_index: int) -> Sequence[str]:
        """From its admission to its step."""
        return self._flow.history(prompt_index)

    def open_groups(self) -> list[OpenGroupRecord]:
        """All that no committed step has trained on."""
        return self._flow.open_groups()

    def data_state(self) -> dict[str, Any]:
        """The position of the oldest prompt that no committed step has trained on."""
        return self._flow.data_state()

    def note_used(self, prompt_indices: Iterable[int]) -> None:
        """They are not offered again by a run that resumes before them."""
        self._flow.note_used(prompt_indices)

    async def pause(self) -> None:
        """Waits until the episodes that run now have ended and all weights are installed. Then the workers are idle.
        Episodes that are admitted meanwhile wait for the next `sample`. Waits for a generator if there is none."""
        if self._generating is not None:
            await self._end_streams(self._generating)
        await self._members.settle()

    async def _end_streams(self, generating: asyncio.Task[None]) -> None:
        self._is_pausing = True
        self._note_idle()
        try:
            with self._parts.watch.span("drain"):
                await self._drain(generating)
            if self._versions:
                self._devices.note_published(min(self._versions.values()))
        finally:
            self._is_pausing = self._is_finishing = False

    async def close(self) -> None:
        """Gives up the episodes that are running. Weights that are on their way arrive first: they must not replace
        newer ones later."""
        async with AsyncExitStack() as stack:  # whatever fails before
            stack.push_async_callback(self._grading.close)
            if self._lent is not None:
                stack.push_async_callback(self._lent.close)
            await self._members.close()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_ARRIVE_S)
            tasks = [*self._tasks, *([self._generating] if self._generating is not None else [])]
            self._generating = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self) -> None:
        """Groups that no step has trained on are void, as far as this process is concerned."""
        self._flow.end()

    async def _drain(self, generating: asyncio.Task[None]) -> None:
        """Waits for the episodes that run, for weights on their way, and for the end of the streams."""
        # A step may be ready before its streams are open; a stream that opens later would not be finished.
        # Episodes of a worker that is being retired come back before it has left, and are then given to others.
        await self._until(self._is_drained)
        assert self._stream is not None, "it was waited for"
        self._is_finishing = True
        await self._stream.finish()
        self._generating = None
        await generating
        self._raise_error()

    def _is_drained(self) -> bool:
        return self._stream is not None and not (self._flow.num_running or self._tasks or self._retiring)

    # --- tasks ---

    async def _begin(self) -> None:
        """Gives the workers the newest weights, and opens their streams."""
        roles = self._parts.roles
        await self._members.publish(self._devices, self._state.version)
        facts, lanes = await roles.grader.facts(), await roles.episode_workers.lanes()
        self._flow.open(lanes, grades_single=facts.takes_single_episodes)
        self._grading.open(facts)
        self._versions = dict.fromkeys(roles.generator.ranks, self._state.version)
        self._to_install.update(publish.worker for publish in self._flow.take_publishes())
        for worker in sorted(self._to_install):
            self._flow.tell(WeightsInstalled(worker=worker, version=self._state.version))
        self._to_install.clear()
        if self._transfer is None and self._members.moves_episodes:  # for generators that join
            self._transfer = await roles.policy.store(self._state.version)
        self._meter.begin(await roles.generator.usage())
        if self._lent is not None:
            self._lent.begin_streams()
        self._generating = asyncio.create_task(self._generate())

    async def _generate(self) -> None:
        """Reads the streams until they are finished."""
        workers = self._parts.roles.episode_workers
        try:
            async with workers.streaming(training_sampling(self._parts.recipe)) as stream:
                self._stream = stream
                self._changed.set()
                self._send()
                self._look_at_members()
                try:
                    async for arrival in stream:
                        await self._note(arrival, str(arrival.rank))
                except Exception as error:
                    self._fail(error)  # before the streams are closed, which may take long
        except Exception as error:
            self._fail(error)
        finally:
            self._stream = None
            self._note_idle()

    async def _note(self, arrival: Block | Lost | Left, worker: str) -> None:
        """Notes what a worker sent. The run goes on without one that is lost, unless the learner was on its device."""
        if isinstance(arrival, Lost | Left):
            if self._stream is None or (isinstance(arrival, Lost) and worker not in self._flow.own_workers):
                assert isinstance(arrival, Lost), "lent devices are recalled"
                raise arrival.error
            await self._note_gone(arrival, worker, self._stream)
            return
        self._look_for_stop()
        for part in self._flow.note_arrived(arrival, worker):
            self._grading.submit(part)
        if self._flow.has_unscored and (self._scoring is None or self._scoring.done()):
            self._scoring = self._start(self._score)
        self._send()
        self._changed.set()

    async def _until_stored(self) -> None:
        """Waits until the learner has stored its weights, and may change them."""
        if self._storing is not None:
            with self._parts.watch.span("publish"):
                await self._storing
            self._raise_error()

    def _tell_idle(self, lent: LentDevices) -> None:
        """The learner's devices may be lent from now on, until the next step."""
        measured = LearnerIdle(
            episodes_per_s=self._meter.episodes_per_s, waited_s=self._waited_s, switch_s=lent.switch_s,
            recall_s=lent.recall_s, graded_s=self._graded_s,
        )  # fmt: skip
        self._graded_s = 0.0
        self._flow.tell(measured)
        self._wait_clock.begin(lent.switch_s)

    def _tell_waits(self, event: LearnerWaits) -> None:
        try:
            self._tell(event)
        except Exception as error:
            self._fail(error)

    async def _lend(self, lent: LentDevices) -> None:
        await lent.lend()
        self._parts.watch.mark(LENT)
        self._send()

    async def _recall(self, lent: LentDevices) -> None:
        await lent.recall()
        self._parts.watch.mark(RECALLED)
        self._is_lent = False
        self._send()

    async def _replace(self, lost: Lost, stream: EpisodeStream) -> None:
        """Starts another episode runner."""
        worker = str(lost.rank)
        await self._parts.roles.episode_workers.replace(stream, lost)
        self._flow.note_lost(worker)
        self._flow.note_replaced(worker, min(self._versions.values()))  # new weights may be on their way to engines
        self._send(is_repeated=True)

    async def _note_gone(self, gone: Lost | Left, worker: str, stream: EpisodeStream) -> None:
        """A worker is lost, or has left. The others take over its episodes."""
        if isinstance(gone, Lost) and not self._members.moves_episodes:
            await self._start(self._replace, gone, stream)  # as a task that a pause waits for
            return
        self._retiring.discard(gone.rank)
        self._versions.pop(gone.rank, None)
        if isinstance(gone, Lost):
            self._flow.note_lost(worker)
            self._members.lose(gone.rank, gone.error)
            stream.forget(gone.rank)
        else:
            self._flow.note_left(worker)
            self._members.leave(gone.rank)
        self._send(is_repeated=True)
        self._changed.set()

    def _lose_generator(self, rank: int, error: WorkerDiedError) -> None:
        """One that episode runners ask, or that evaluates, died."""
        self._members.lose_one_of_several(rank, error)
        self._versions.pop(rank, None)
        self._note_idle()

    async def _equip(self, stream: EpisodeStream) -> None:
        """Gives new generators the newest stored weights and opens their streams; the learner may be busy."""
        for rank in await self._members.admit():
            assert self._transfer is not None, "the first are stored before streams are opened"
            transfer = self._transfer
            try:
                lanes = await self._members.equip(rank, transfer)
            except WorkerDiedError as error:
                self._members.lose(rank, error)
                continue
            self._versions[rank] = transfer.version.number
            stream.begin([rank])
            self._flow.note_joined(str(rank), lanes, transfer.version.number)
        self._meter.join(await self._parts.roles.generator.usage())
        self._send()

    async def _score(self) -> None:
        """Reward models score complete groups, until none waits."""
        while self._flow.has_unscored:
            await self._flow.score()
            self._send()

    async def _store(self, version: int) -> None:
        """Puts the learner's weights into the object store, for all workers that are to get them."""
        self._transfer = await self._parts.roles.policy.store(version)
        self._parts.watch.mark(f"{PUBLISHED}{version}")
        self._publish()

    async def _install(self, workers: tuple[str, ...], transfer: ByStore) -> None:
        """Installs weights for these workers. With episode runners they are those of all engines."""
        generator = self._parts.roles.generator
        ranks = generator.ranks if self._parts.roles.runner is not None else map(int, workers)
        version = transfer.version.number
        if not any(await asyncio.gather(*(self._install_on(rank, transfer) for rank in ranks))):
            return
        for worker in workers:
            self._flow.tell(WeightsInstalled(worker=worker, version=version))
        self._send()

    async def _install_on(self, rank: int, transfer: ByStore) -> bool:
        """False if the engine is dead: its stream reports that, and its successor gets the newest weights."""
        self._installing.add(rank)
        self._note_idle()
        try:
            await self._parts.roles.generator.install_in_flight(rank, transfer, self._in_flight)
        except WorkerDiedError:
            return False
        finally:
            self._installing.discard(rank)
        if rank in self._versions:  # else it is gone
            self._versions[rank] = transfer.version.number
        return True

    # --- what happens ---

    def _look_for_stop(self, *, is_overdue: bool = False) -> None:
        """Tells the scheduler, once, that the run ends with the step in progress: it then admits only what this step
        needs. Looks from time to time, because the stop file may be on a slow disk."""
        has_step = self._is_learning or self._is_waiting  # between two steps the program looks itself
        if self._is_stopping or not has_step or not (is_overdue or now_s() >= self._looks_s):
            return
        self._looks_s = now_s() + _LOOK_EVERY_S
        if self._parts.stop_requested():
            self._is_stopping = True
            self._flow.tell(StopRequested())

    def _tell(self, event: Event) -> None:
        """Tells the scheduler, and carries out what follows."""
        self._flow.tell(event)
        self._send()

    def _send(self, *, is_repeated: bool = False) -> None:
        """Carries out what the scheduler decided. `is_repeated`: episodes of a lost worker are among it, which a pause
        waits for."""
        self._carry_out(is_repeated)
        self._note_idle()

    def _carry_out(self, is_repeated: bool) -> None:
        self._to_install.update(publish.worker for publish in self._flow.take_publishes())
        self._publish()
        lending = self._flow.take_lending()
        if self._lent is not None and lending is not None:
            self._is_lent = True  # until it is recalled
            self._start(self._lend if isinstance(lending, Lend) else self._recall, self._lent)
        if self._stream is None or self._is_finishing or (self._is_pausing and not is_repeated):
            return
        try:
            for admission in self._flow.take_admissions():
                stream, rank = self._stream_of(admission.worker)
                stream.admit(rank, admission.prompts, admission.samples, admission.attempt, admission.begun)
        except Exception as error:  # of the data
            self._fail(error)
            return
        for rank in self._flow.take_retirements():
            self._retiring.add(rank)
            self._start(self._stream.retire, rank)
        for each in self._flow.take_give_backs():
            stream, rank = self._stream_of(each.worker)
            stream.give_back(rank, each.ids)

    def _stream_of(self, worker: str) -> tuple[EpisodeStream, int]:
        """The stream and rank of a worker."""
        is_own = worker in self._flow.own_workers
        stream = self._stream if is_own or self._lent is None else self._lent.stream
        assert stream is not None, "the scheduler gives nothing to workers that are not there"
        return stream, int(worker) if is_own else lent_rank(worker)

    def _note_news(self, news: News) -> None:
        """A generator is ready to join, or leaves. While nothing runs, the next `_begin` takes care of it."""
        match news:
            case Exception():
                self._fail(news)
            case GeneratorsReady() | GeneratorLeaves():
                self._look_at_members()
            case other:
                assert_never(other)

    def _look_at_members(self) -> None:
        """Retires generators that leave, and starts to equip new ones, as a task that a pause waits for."""
        if self._stream is None or not self._members.moves_episodes:
            return
        for rank in self._members.leaving:
            self._flow.note_leaving(str(rank))
            self._send(is_repeated=True)
        is_equipping = self._equipping is not None and not self._equipping.done()
        if self._members.has_ready and not self._is_pausing and not is_equipping:
            self._equipping = self._start(self._equip, self._stream)
            self._equipping.add_done_callback(lambda task: self._look_at_members())

    def _publish(self) -> None:
        """Starts to install the newest weights where they are waited for, as soon as they are stored."""
        runner, transfer = self._parts.roles.runner, self._transfer
        if not self._to_install or transfer is None or transfer.version.number != self._state.version:
            return
        if runner is not None and len(self._to_install) < len(self._flow.own_workers):
            return  # engines answer all runners: the others have not ended their episodes yet
        workers, self._to_install = tuple(sorted(self._to_install)), set()
        for each in [workers] if runner is not None else [(worker,) for worker in workers]:
            self._start(self._install, each, transfer)

    def _note_graded(self, part: GradedPart | Exception) -> None:
        if isinstance(part, Exception):
            self._fail(part)
            return
        self._flow.note_graded(part)
        self._send()
        self._changed.set()

    def _start(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work(*arguments)
            except Exception as error:
                self._fail(error)

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._changed.set()

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(end)
        return task

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()

    def _is_step_ready(self) -> bool:
        """Whether the step can begin. Raises an error if nothing can happen any more that would let it."""
        flow = self._flow
        is_still = self._stream is not None and self._grading.is_idle and not self._tasks
        is_still = is_still and not self._retiring and not self._members.is_missing
        if is_still and not flow.is_step_ready and not flow.num_running and not flow.has_admissions:
            raise flow.standstill()
        return flow.is_step_ready

    async def _until_step_is_ready(self) -> None:
        """What the learner waits for is accounted apart: episodes, only their rewards, or its devices."""
        flow, watch = self._flow, self._parts.watch
        self._raise_error()
        while not self._is_step_ready():
            if flow.lacks_only_devices:
                with watch.span("lend"):
                    await self._until(lambda: self._is_step_ready() or not flow.lacks_only_devices)
            elif flow.lacks_only_rewards:
                began_s = now_s()
                with watch.span("grade"), watch.detail(FOR_GRADING):
                    await self._until(lambda: self._is_step_ready() or not flow.lacks_only_rewards)
                self._graded_s += now_s() - began_s
            else:
                with watch.span("wait"), watch.detail(FOR_GENERATION):
                    await self._until(
                        lambda: self._is_step_ready() or flow.lacks_only_rewards or flow.lacks_only_devices
                    )

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Waits for workers and graders, which have their own deadlines."""
        while True:
            self._raise_error()
            if is_so():
                return
            self._changed.clear()
            await self._changed.wait()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # --- what is waited for ---

    def _note_idle(self) -> None:
        """Notes what generators without work and a learner without a step wait for from now on."""
        self._meter.generators.note(self._generators_wait_for())
        self._meter.learner.note(self._learner_waits_for())

    def _generators_wait_for(self) -> Iterator[WaitsFor]:
        """A cause for every generator that has nothing to answer. Those that install weights are busy. With episode
        runners, generators have nothing to answer when no runner has an episode."""
        flow, has_runners = self._flow, self._parts.roles.runner is not None
        if self._stream is None or (has_runners and flow.num_running):
            return
        common: WaitsFor = "prompts"
        if self._is_pausing:
            common = "drain"
        elif self._is_learning:
            common = "other_role"
        elif flow.num_running:
            common = "tail"
        elif not self._grading.is_idle or flow.has_unscored:
            common = "grading"
        for rank in self._versions if has_runners else map(int, flow.idle_workers):
            if rank not in self._installing:
                yield "weights" if self._versions.get(rank, 0) < self._state.version else common

    def _learner_waits_for(self) -> Iterator[WaitsFor]:
        if not self._is_waiting or self._is_lent:
            return
        if self._flow.lacks_only_rewards:
            yield "grading"
        else:
            yield "tail" if self._flow.num_running and self._flow.idle_workers else "other_role"
