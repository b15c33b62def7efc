# SPDX-License-Identifier: Apache-2.0
"""The learner's devices while they generate: layout elastic. Generators there use the learner's own tensors, so that
lending costs a cache and no transfer of weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

from podium.cluster.deadlines import now_s
from podium.controller.episodes import training_sampling
from podium.controller.group_flow import GroupFlow
from podium.controller.lending import LOOK_AGAIN
from podium.controller.parts import OnPolicyParts
from podium.controller.scheduling import LearnerWaits
from podium.controller.state import RunState
from podium.errors import WorkerDiedError
from podium.recipe import OnPolicyRecipe
from podium.roles.episode_stream import Block, EpisodeStream, Left, Lost
from podium.roles.handles import GeneratorHandle

_LENT = "lent-"
# Shortest time until the scheduler is told again how long the learner has waited, and how long that goes on.
_LOOK_S, _LAST_LOOK_S = 1.0, 1e6
NoteArrival = Callable[[Block | Lost | Left, str], Awaitable[None]]
"""Gets what a worker sends, and the worker's name."""


def lent_name(rank: int) -> str:
    """The scheduler's name of a generator on a learner's device."""
    return f"{_LENT}{rank}"


def lent_rank(worker: str) -> int:
    """The rank of a generator with such a name."""
    return int(worker.removeprefix(_LENT))


class WaitClock:
    """Tells the scheduler how long the learner waits, rarer and rarer. The controller's event loop uses it."""

    def __init__(self, tell: Callable[[LearnerWaits], None]) -> None:
        self._tell = tell
        self._began_s = 0.0
        self._next: asyncio.TimerHandle | None = None

    def begin(self, switch_s: float) -> None:
        """A wait begins. `switch_s`: what it costs to lend devices and recall them."""
        self._began_s = now_s()
        self._plan(max(_LOOK_S, switch_s))

    def end(self) -> None:
        """It is over."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _plan(self, seconds: float) -> None:
        self._next = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        waited_s = now_s() - self._began_s
        self._tell(LearnerWaits(waited_s=waited_s))
        if waited_s < _LAST_LOOK_S:
            self._plan((LOOK_AGAIN - 1.0) * waited_s)


class LentDevices:
    """The controller's event loop uses it: `lend` and `recall` in turn, once or more often for a step. Between them,
    episodes arrive by `note`; with episode runners, they arrive at the runners."""

    def __init__(
        self, parts: OnPolicyParts[OnPolicyRecipe], flow: GroupFlow, state: RunState, generator: GeneratorHandle,
        note: NoteArrival, fail: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        """`fail` is told what goes wrong while the devices are lent."""
        self._parts, self._flow, self._state, self._generator, self._note = parts, flow, state, generator, note
        self._fail = fail
        self._sleeps = parts.names.lent in parts.leaving
        self._opened = AsyncExitStack()
        self._reading: asyncio.Task[None] | None = None
        self._lanes: tuple[int, ...] = ()
        self._has_served = False  # the streams of runners that are open
        self._lent_at: float | None = None
        self._lend_s = self._recall_s = 0.0  # of the last time
        self._lent_s = self._switch_s = self._tokens = self._tokens_before = 0.0  # since the last `take_metrics`
        self._num_lendings = 0  # since then
        self.stream: EpisodeStream | None = None  # of lent generators that get episodes from the scheduler

    @property
    def switch_s(self) -> float:
        """Seconds that the last lending cost; 0 before the first."""
        return self._lend_s + self._recall_s

    @property
    def recall_s(self) -> float:
        """Of these, seconds to recall them."""
        return self._recall_s

    def begin_streams(self) -> None:
        """Streams of the other workers begin anew: episode runners wait for nothing that was asked before."""
        self._has_served = False

    async def lend(self) -> None:
        """The devices generate from now on, with the learner's weights."""
        began = now_s()
        if not self._lanes:
            self._lanes = tuple((await self._generator.lanes()).values())
        await self._generator.share(self._state.version)  # wakes the engines
        self._tokens_before = await self._generated()
        runner = self._parts.roles.runner
        if runner is not None:
            serving = self._generator.serving(keeps_answers=self._has_served)
            served = await self._opened.enter_async_context(serving)
            self._has_served = True
            self._reading = asyncio.create_task(self._failing(served))
            await runner.use_lent(True)
            self._flow.note_lent({})
        else:
            streaming = self._generator.streaming(training_sampling(self._parts.recipe))
            self.stream = await self._opened.enter_async_context(streaming)
            self._reading = asyncio.create_task(self._failing(self._read(self.stream)))
            self._flow.note_lent({lent_name(rank): lanes for rank, lanes in enumerate(self._lanes)})
        self._lent_at = now_s()
        self._lend_s = self._lent_at - began
        self._switch_s += self._lend_s
        self._num_lendings += 1

    async def recall(self) -> None:
        """The devices are the learner's again. What was running there is given back before."""
        began, runner = now_s(), self._parts.roles.runner
        assert self._reading is not None, "they are lent"
        if runner is not None:
            await runner.use_lent(False)
            await self._generator.stop_serving()
        elif self.stream is not None:
            await self.stream.recall()
        await self._reading
        await self._opened.aclose()
        self._tokens += await self._generated() - self._tokens_before
        if self._sleeps:
            await self._generator.hold("offloaded")
        workers = [] if self.stream is None else [lent_name(rank) for rank in range(len(self._lanes))]
        self.stream, self._reading = None, None
        ended = now_s()
        self._recall_s = ended - began
        self._switch_s += self._recall_s
        if self._lent_at is not None:
            self._lent_s += began - self._lent_at
            self._lent_at = None
        self._flow.note_returned(workers)

    async def close(self) -> None:
        """Gives up what is running there, on every device whatever fails on others. Then the first failure is raised,
        unless it is a death: what the run ends with says which worker died."""
        failures: list[Exception] = []
        if self._reading is not None and self._parts.roles.runner is not None:
            failures += await _failures_of(self._generator.stop_serving())
        failures += await _failures_of(self._opened.aclose())
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if failures:
            raise failures[0]

    def take_metrics(self) -> dict[str, float]:
        """Of all lending since the last call."""
        metrics = {
            "lent_s": self._lent_s,
            "lent_tokens": self._tokens,
            "switch_s": self._switch_s,
            "lendings": float(self._num_lendings),
        }
        self._lent_s = self._switch_s = self._tokens = 0.0
        self._num_lendings = 0
        return metrics

    async def _generated(self) -> float:
        return float(sum(each.load.generated_tokens for each in (await self._generator.usage()).values()))

    async def _read(self, stream: EpisodeStream) -> None:
        async for arrival in stream:
            await self._note(arrival, lent_name(arrival.rank))

    async def _failing(self, work: Awaitable[object]) -> None:
        try:
            await work
        except Exception as error:
            self._fail(error)


async def _failures_of(work: Awaitable[object]) -> list[Exception]:
    """What it raises, but for deaths."""
    try:
        with suppress(WorkerDiedError):
            await work
    except Exception as error:
        return [error]
    return []
