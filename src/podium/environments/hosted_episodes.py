# SPDX-License-Identifier: Apache-2.0
"""Environments in separate processes: one that blocks, crashes or hangs fails only its own episode.

Most episodes of a runner share one process. When it is lost, the episode that caused it fails. The others run again
from their beginning, with the same answers of the model, in processes of fewer episodes. At the third attempt an
episode is alone in its process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.data.tasks import Task
from podium.environments.agents import AgentCall
from podium.environments.environment_service import Begin, End, EnvironmentResponse, EnvironmentService, Misfit, Take
from podium.environments.output_cap import OutputCap
from podium.environments.protocol import BoundedEnvironment, CallFailedError, EpisodeLostError, Turn
from podium.environments.user_process import MemoryLimit, ProcessLostError, UserProcess
from podium.recipe.on_policy import EnvironmentSection, SandboxSection

# Episodes in one process by number of losses, and the most such processes at a time.
_RETRY_EPISODES = (16, 1)
_RETRY_PROCESSES = (4, 8)
# Calls in one process that may outlive their deadline before the process is replaced.
MOST_OVERDUE = 8
# Consecutive episodes that end or block their process before the rest of a shard is given up: each may cost a whole
# timeout.
MOST_FAILED = 16


class _Process:
    """A user process with places for episodes."""

    def __init__(self, process: UserProcess, num_places: int) -> None:
        self.process, self.num_places = process, num_places
        self.free = list(range(num_places - 1, -1, -1))
        self.num_episodes = 0
        self.retired = False  # gets no more episodes, and ends with its last one
        self.num_overdue = 0

    @property
    def num_unusable(self) -> int:
        """Places in which code of a finished episode still runs."""
        return self.num_places - len(self.free) - self.num_episodes


@dataclass(frozen=True, slots=True, eq=False)
class _EpisodeSlot:
    host: _Process
    number: int


class EnvironmentHost:
    """The environment processes of one episode runner. For one event loop; `open` first, and `close` in the end."""

    def __init__(
        self, section: EnvironmentSection, *, output: OutputCap, sandbox: SandboxSection | None = None,
        stacks: Path | None = None,
    ) -> None:  # fmt: skip
        """Starts the first process without waiting for it. `sandbox`: the recipe's, for environments that use it.
        `stacks`: the file for stacks of what hangs."""
        self._section, self._output, self._sandbox, self._stacks = section, output, sandbox, stacks
        self._num_places = (section.concurrency, *_RETRY_EPISODES)
        self._processes: tuple[list[_Process], ...] = ([self._spawned(0)], [], [])
        self._room: Sequence[asyncio.Semaphore | None] = ()
        self._num_failed = 0
        self.tool_schemas: list[dict[str, Any]] = []

    async def open(self) -> None:
        """Waits for the first process, which loads the recipe's environment. Raises its error if that fails."""
        most = (count * episodes for count, episodes in zip(_RETRY_PROCESSES, _RETRY_EPISODES, strict=True))
        self._room = (None, *(asyncio.Semaphore(each) for each in most))
        self.tool_schemas = await self._processes[0][0].process.ready()

    def make(self) -> HostedEnvironment:
        """An environment that runs in one of the processes."""
        return HostedEnvironment(self, losses=0)

    def begin_shard(self) -> None:
        """Resets the count of process failures."""
        self._num_failed = 0

    def end_shard(self) -> None:
        """Called when all episodes are over: ends the processes with hanging calls, and the processes of retries."""
        for losses, tier in enumerate(self._processes):
            for each in list(tier):
                if losses or each.retired or each.num_unusable or each.num_overdue:
                    self._end(each, "its episodes are over")

    def close(self) -> None:
        """Ends all processes."""
        for tier in self._processes:
            for each in list(tier):
                self._end(each, "the runner is closed")

    async def acquire(self, losses: int) -> _EpisodeSlot:
        """A place for an episode that was lost this many times. Waits until one is free."""
        room = self._room[losses]
        if room is not None:
            await room.acquire()
        try:
            if self._num_failed >= MOST_FAILED:
                raise CallFailedError(
                    f"was not called, after {MOST_FAILED} episodes in a row that ended or blocked their process"
                )
            usable = (each for each in self._processes[losses] if each.free and not each.retired)
            host = next(usable, None) or self._added(losses)
            place = _EpisodeSlot(host, host.free.pop())
            host.num_episodes += 1
            await host.process.ready()
        except BaseException:
            if room is not None:
                room.release()
            raise
        return place

    def release(self, place: _EpisodeSlot, losses: int, *, is_free: bool) -> None:
        """Releases the place of an episode that is over, or lost with its process. A place in which code still runs is
        not used again."""
        room, host = self._room[losses], place.host
        if room is not None:
            room.release()
        host.num_episodes -= 1
        if is_free:
            host.free.append(place.number)
        host.retired = host.retired or host.num_unusable >= min(MOST_OVERDUE, host.num_places)
        if host.process.lost is not None or (host.retired and not host.num_episodes):
            self._end(host, "it was replaced")

    def blames(self, lost: ProcessLostError, place: _EpisodeSlot, losses: int) -> bool:
        """Whether this episode ended the process: it was alone in it, or the only one whose code was running."""
        blamed = losses + 1 == len(self._num_places) or set(lost.suspects) == {place.number}
        self._num_failed += int(blamed)
        place.host.retired = True
        return blamed

    def note(self, place: _EpisodeSlot, reply: EnvironmentResponse) -> None:
        """Retires a process in which too many calls hang."""
        place.host.num_overdue = reply.num_overdue
        if reply.num_overdue >= MOST_OVERDUE:
            place.host.retired = True

    def note_finished(self) -> None:
        """Records that an episode finished: the environment does not always block."""
        self._num_failed = 0

    def _added(self, losses: int) -> _Process:
        added = self._spawned(losses)
        self._processes[losses].append(added)
        return added

    def _spawned(self, losses: int) -> _Process:
        num_places = self._num_places[losses]
        process = UserProcess(
            EnvironmentService, (self._section, self._sandbox), num_slots=num_places,
            limit_s=self._section.timeout_s,
            memory=MemoryLimit("environment.memory_gib", self._section.memory_gib), output=self._output,
            stacks=self._stacks,
        )  # fmt: skip
        return _Process(process, num_places)

    def _end(self, host: _Process, cause: str) -> None:
        host.process.kill(cause)
        for tier in self._processes:
            if host in tier:
                tier.remove(host)


class HostedEnvironment(BoundedEnvironment):
    """An environment whose code runs in another process, which enforces the deadlines."""

    def __init__(self, host: EnvironmentHost, *, losses: int) -> None:
        self._host, self._losses = host, losses
        self._place: _EpisodeSlot | None = None
        self._closes, self._is_free = False, True
        self.places: Mapping[str, str] = {}  # method of the user's environment -> file and line of its definition

    async def reset(self, task: Task | AgentCall, /) -> Any:
        """Takes a place in a process and resets the environment there."""
        self._place = await self._host.acquire(self._losses)
        return await self._call(Begin(self._place.number, task))

    async def step(self, turn: Turn, /) -> Any:
        """One step of the environment in its process."""
        assert self._place is not None
        return await self._call(Take(self._place.number, turn))

    async def close(self) -> None:
        """Waits only if the user's environment has a `close`."""
        place = self._place
        if place is None:
            return
        try:
            if place.host.process.lost is not None:
                self._is_free = False
            elif self._closes:
                await self._call(End(place.number))
                self._host.note_finished()
            else:
                place.host.process.post(End(place.number), slot=place.number)
                self._host.note_finished()
        except EpisodeLostError:
            pass  # the episode itself is over, and its resources are gone with its process
        finally:
            self._place = None
            self._host.release(place, self._losses, is_free=self._is_free)

    async def _call(self, order: Begin | Take | End) -> Any:
        place = self._place
        assert place is not None
        is_free, self._is_free = self._is_free, False  # also when the caller stops waiting
        try:
            reply: EnvironmentResponse = await place.host.process.call(order, slot=place.number)
        except ProcessLostError as lost:
            if self._host.blames(lost, place, self._losses):
                raise CallFailedError(lost.cause) from lost
            again = functools.partial(HostedEnvironment, self._host, losses=self._losses + 1)
            raise EpisodeLostError(lost.cause, again) from lost
        self._is_free = is_free and reply.is_free
        self._closes = reply.closes
        self.places = reply.places or self.places
        self._host.note(place, reply)
        if reply.error is not None:
            raise CallFailedError(reply.error)
        if isinstance(reply.value, Misfit):
            method = "reset" if isinstance(order, Begin) else "step"
            wanted = "an Observation, or None" if method == "reset" else "an Outcome"
            defined = self.places.get(method)
            raise CallFailedError(
                f"returned {reply.value.kind}; it returns {wanted}{f' ({defined})' if defined else ''}."
            )
        return reply.value
