# SPDX-License-Identifier: Apache-2.0
"""The controller's side of streams: workers get episodes while they run, and send them as they end."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from podium.cluster import Metric, RoleGroup, RowRefs, ShardResult, WorkerId
from podium.cluster.deadlines import now_s
from podium.cluster.results import reduce_metrics
from podium.data.tasks import IndexedTask
from podium.data.trajectories import TrajectoryBlock, TrajectoryId
from podium.errors import RolloutError, WorkerDiedError
from podium.roles.carriers import PromptShard, SamplingPlan
from podium.roles.interfaces import EpisodeSource

Block = ShardResult[TrajectoryBlock]
CauseOf = Callable[[Exception], Awaitable[Exception]]
"""What the iteration raises if a worker's stream fails with this error."""

_AHEAD = 4
# How long workers may take to give up their episodes when a stream is abandoned.
_ABANDON_S = 60.0


async def _itself(error: Exception) -> Exception:
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A worker died in the stream. Its running episodes are gone; those that it sent are kept."""

    rank: int
    worker: WorkerId
    error: WorkerDiedError
    noticed_s: float = field(default_factory=now_s)  # when


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A worker that was retired has ended its stream: all its episodes have ended or were given back."""

    rank: int


class EpisodeStream:
    """Open streams of all workers of a role. Used by one task of the controller, inside `streaming`."""

    def __init__(
        self, group: RoleGroup[Any], plan: SamplingPlan, look_at: Callable[[Block], None], cause_of: CauseOf
    ) -> None:
        self._group, self._plan, self._look_at, self._cause_of = group, plan, look_at, cause_of
        self._arrivals: asyncio.Queue[Block | Lost | Left | BaseException | None] = asyncio.Queue()
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._finished: set[int] = set()  # ranks that get no more prompts
        self._lost: set[int] = set()  # ranks whose replacement has no stream yet
        self._retired: set[int] = set()
        self._is_finishing = False
        self._num_open: Counter[int] = Counter()  # rank -> episodes that it was given and that have not ended
        self._calls: set[asyncio.Task[None]] = set()  # nobody waits for their answers
        self._metrics: list[tuple[WorkerId, Metric]] = []

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics that the workers sent, over all of them; complete when the stream is closed."""
        return reduce_metrics(self._metrics)

    def note_metrics(self, worker: WorkerId, metrics: Iterable[Metric]) -> None:
        """Adds metrics of a worker."""
        self._metrics += [(worker, metric) for metric in metrics]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the workers that run episodes."""
        return self._group.ranks

    def begin(self, ranks: Sequence[int]) -> None:
        """Opens the streams of these workers, which may have joined meanwhile."""
        for rank in ranks:
            self._finished.discard(rank)
            self._lost.discard(rank)
            self._retired.discard(rank)
            self._num_open[rank] = 0
            self._pumps[rank] = asyncio.create_task(self._pump(rank))

    def admit(
        self, rank: int, prompts: Sequence[IndexedTask], samples: tuple[int, ...], attempt: int = 0,
        begun: RowRefs[TrajectoryBlock] | None = None,
    ) -> None:  # fmt: skip
        """Sends prompts to a worker, without waiting for it. An error is raised by the iteration."""
        self._num_open[rank] += len(prompts) * len(samples)
        shard = PromptShard(prompts=tuple(prompts), samples=samples, attempt=attempt, begun=begun)
        self._control(rank, EpisodeSource.admit, shard, self._plan)

    def give_back(self, rank: int, ids: tuple[TrajectoryId, ...]) -> None:
        """Asks a worker for these episodes, without waiting for it: they come as cancelled, unless they have ended
        meanwhile."""
        self._control(rank, EpisodeSource.give_back, ids)

    def forget(self, rank: int) -> None:
        """A lost worker may have no successor: the iteration does not wait for one."""
        self._lost.discard(rank)
        self._arrivals.put_nowait(None)

    async def retire(self, rank: int) -> None:
        """A worker gets no more prompts and gives back what is running: it comes as cancelled, and then `Left`."""
        self._retired.add(rank)
        while self._calls:
            await asyncio.gather(*self._calls)
        self._finished.add(rank)
        await self._finish_one(rank, give_back=True)

    async def finish(self) -> None:
        """No more prompts come: the iteration ends when all are answered. A worker that is replaced afterwards must be
        finished again."""
        await self._finish(give_back=False)

    async def recall(self) -> None:
        """No more prompts come, and the workers give back what is running: it comes as cancelled, then the iteration
        ends."""
        await self._finish(give_back=True)

    async def _finish(self, *, give_back: bool) -> None:
        while self._calls:
            await asyncio.gather(*self._calls)
        ranks = [rank for rank in self._pumps if rank not in self._finished]
        self._finished.update(ranks)
        self._is_finishing = True
        await asyncio.gather(*(self._finish_one(rank, give_back) for rank in ranks))
        self._arrivals.put_nowait(None)  # there may be no worker that would send something

    @property
    def _is_open(self) -> bool:
        """Whether something can arrive."""
        is_running = any(not pump.done() for pump in self._pumps.values())
        return not self._is_finishing or bool(self._lost) or is_running or not self._arrivals.empty()

    async def __aiter__(self) -> AsyncIterator[Block | Lost | Left]:
        """Yields blocks as they arrive, workers that are lost, which the caller replaces, and those that have left.
        Waits for any worker to send something. Ends after `finish`, when all workers have ended their streams. One that
        dies then without an episode has lost nothing: the next stream reports it."""
        while self._is_open:
            arrival = await self._arrivals.get()
            if isinstance(arrival, BaseException):
                raise arrival
            if isinstance(arrival, Lost) and self._is_over(arrival.rank):
                arrival = Left(rank=arrival.rank) if arrival.rank in self._retired else None
            if arrival is None:
                continue
            if isinstance(arrival, Lost):
                self._lost.add(arrival.rank)
            yield arrival

    def fail(self, error: BaseException) -> None:
        """Something that the workers need has failed: the iteration raises it."""
        self._arrivals.put_nowait(error)

    async def abandon(self) -> None:
        """Gives up what is running, so that the workers can do something else."""
        for task in (*self._calls,):
            task.cancel()
        alive = [rank for rank, pump in self._pumps.items() if not pump.done()]
        group = self._group.within(_ABANDON_S)
        await asyncio.gather(
            *(group.control_one(rank, EpisodeSource.finish_stream, True) for rank in alive), return_exceptions=True
        )
        if self._pumps:
            await asyncio.wait(self._pumps.values(), timeout=_ABANDON_S)
        for pump in self._pumps.values():
            pump.cancel()
        await asyncio.gather(*self._pumps.values(), return_exceptions=True)

    def _control(self, rank: int, method: Callable[..., None], *arguments: object) -> None:
        async def call() -> None:
            try:
                with suppress(WorkerDiedError):  # the pump reports it
                    await self._group.control_one(rank, method, *arguments)
            except Exception as error:
                self._arrivals.put_nowait(error)

        task = asyncio.create_task(call())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _is_over(self, rank: int) -> bool:
        """Whether a worker has nothing to do any more."""
        return rank in self._finished and not self._num_open[rank]

    async def _finish_one(self, rank: int, give_back: bool) -> None:
        with suppress(WorkerDiedError):  # the pump reports it
            await self._group.control_one(rank, EpisodeSource.finish_stream, give_back)

    async def _pump(self, rank: int) -> None:
        """Passes on the blocks of one worker until its stream ends."""
        worker = self._group.worker(rank)
        try:
            async for block in self._group.stream_open(rank, EpisodeSource.stream, self._plan):
                self._num_open[rank] -= len(block.ids)
                self.note_metrics(block.worker, block.metrics)
                self._look_at(block)
                self._arrivals.put_nowait(block)
            if rank in self._retired:
                self._arrivals.put_nowait(Left(rank=rank))
            elif rank not in self._finished:
                self._arrivals.put_nowait(
                    RolloutError(
                        f"{worker} has ended its stream of episodes, and nobody asked it to: {self._num_open[rank]} "
                        "episodes have no end. This is a defect of Podium or of the engine: please report it with the "
                        "run folder. What was committed can be resumed."
                    )
                )
        except WorkerDiedError as error:
            self._arrivals.put_nowait(Lost(rank=rank, worker=worker, error=error))
        except Exception as error:
            self._arrivals.put_nowait(await self._cause_of(error))
        self._arrivals.put_nowait(None)


@asynccontextmanager
async def streaming(
    group: RoleGroup[Any], plan: SamplingPlan, look_at: Callable[[Block], None] = lambda block: None,
    cause_of: CauseOf = _itself,
) -> AsyncIterator[EpisodeStream]:  # fmt: skip
    """Streams of all workers of a role. `look_at` gets every block. Leaving the block early gives up what is
    running."""
    stream = EpisodeStream(group, plan, look_at, cause_of)
    stream.begin(stream.ranks)
    try:
        yield stream
    finally:
        await stream.abandon()


class EpisodeWorkers(Protocol):
    """The handle of workers that run episodes: of generators, or of episode runners."""

    def streaming(self, plan: SamplingPlan) -> AbstractAsyncContextManager[EpisodeStream]:
        """Streams of all workers."""
        ...

    async def lanes(self) -> Mapping[int, int]:
        """By rank: number of episodes that a worker runs at the same time."""
        ...

    async def replace(self, stream: EpisodeStream, lost: Lost) -> None:
        """Starts another worker in place of a lost one and opens its stream, or raises the error."""
        ...


async def run_all(
    workers: EpisodeWorkers, prompts: Sequence[IndexedTask], samples: int, plan: SamplingPlan
) -> tuple[list[Block], dict[str, float]]:
    """Runs `samples` episodes for each prompt and returns all blocks with the workers' metrics. Workers get prompts as
    they have room. Episodes of a worker that dies run again under the next attempt, with the same random numbers."""
    lanes = await workers.lanes()
    async with workers.streaming(plan) as stream:
        blocks, attempts, waiting = list[Block](), Counter[tuple[int, int]](), deque(prompts)
        open_by_rank: dict[int, dict[tuple[int, int], IndexedTask]] = {rank: {} for rank in stream.ranks}

        def admit_more() -> None:
            for rank, mine in to_free_lanes(waiting, samples, lanes, open_by_rank).items():
                stream.admit(rank, mine, tuple(range(samples)))

        admit_more()
        is_finished = not prompts
        if is_finished:
            await stream.finish()
        async for arrival in stream:
            if isinstance(arrival, Left):
                continue  # nobody is retired here
            if isinstance(arrival, Lost):
                await workers.replace(stream, arrival)
                again = open_by_rank.pop(arrival.rank)
                if arrival.rank in stream.ranks:  # there is a successor; else the others take over
                    open_by_rank[arrival.rank] = {}
                for (prompt_index, sample), prompt in again.items():
                    rank = _least_busy(lanes, open_by_rank)
                    open_by_rank[rank][prompt_index, sample] = prompt
                    attempts[prompt_index, sample] += 1
                    stream.admit(rank, [prompt], (sample,), attempts[prompt_index, sample])
                continue
            blocks.append(arrival)
            for prompt_index, sample, _, _ in arrival.ids.array_N4.tolist():
                del open_by_rank[arrival.rank][prompt_index, sample]
            admit_more()
            if not is_finished and not any(open_by_rank.values()):
                is_finished = True
                await stream.finish()
    return blocks, stream.metrics


def most_episodes(lanes: int) -> int:
    """How many a worker is given that runs `lanes` of them at the same time: a quarter more, because a free lane must
    not wait for a message."""
    return lanes + -(-lanes // _AHEAD)


def to_free_lanes(
    waiting: deque[IndexedTask], samples: int, lanes: Mapping[int, int],
    open_by_rank: Mapping[int, dict[tuple[int, int], IndexedTask]],
) -> dict[int, list[IndexedTask]]:  # fmt: skip
    """The next prompts for the workers with the lowest load, while one has room; they are open from now on."""
    given: dict[int, list[IndexedTask]] = {}
    while waiting:
        rank = _least_busy(lanes, open_by_rank)
        if len(open_by_rank[rank]) >= most_episodes(lanes[rank]):
            break
        prompt = waiting.popleft()
        given.setdefault(rank, []).append(prompt)
        open_by_rank[rank].update({(prompt.prompt_index, sample): prompt for sample in range(samples)})
    return given


def _least_busy(lanes: Mapping[int, int], open_by_rank: Mapping[int, dict[tuple[int, int], IndexedTask]]) -> int:
    """The worker with the lowest load."""
    return min(open_by_rank, key=lambda rank: (len(open_by_rank[rank]) / lanes[rank], rank))
