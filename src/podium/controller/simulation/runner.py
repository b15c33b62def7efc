# SPDX-License-Identifier: Apache-2.0
"""The episode runner of a simulated run: episodes take turns between generators, which are asked as by the real one,
and an environment that takes its time. No code of an environment is loaded. Torch-free."""

# T tokens of an episode

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from podium.cluster import Computed, WorkerContext
from podium.controller.simulation.costs import EpisodeCosts, RunCosts
from podium.data.trajectories import TrajectoryBlock, TrajectoryId
from podium.environments.episode import Episode, EpisodeFinish, EpisodeLimits, TurnRequest, block_of
from podium.errors import RolloutError
from podium.roles.carriers import PromptShard, SamplingPlan
from podium.roles.episode_runner import EnginePolicy, EpisodeRunner, RunnerSpec, note_of
from podium.roles.episode_states import EpisodeStates
from podium.roles.interfaces import Generator
from podium.rollout.requests import Request

# Of a call's deadline: for how long a call waits for an answer.
_WAITING_SHARE = 0.5


class SimulatedRunner(EpisodeRunner):
    """Plays every episode as a task of the event loop, so nothing is locked. Episodes have no prompts: only what the
    policy answers and the environment replies."""

    def __init__(self, context: WorkerContext, spec: RunnerSpec, costs: RunCosts) -> None:
        self._context, self._spec, self._costs = context, spec, costs
        self._states = EpisodeStates(context)
        self._uses_lent = False
        self._open_stream()

    def _open_stream(self) -> None:
        """Of the next stream: episodes that wait for it, and what it is told."""
        self._waiting: deque[TrajectoryId] = deque()
        self._ended: list[Episode] = []
        self._changed = asyncio.Event()
        self._is_finished = self._is_abandoned = False

    def admit(self, shard: PromptShard, plan: SamplingPlan) -> None:
        """Adds the episodes of these prompts to the stream."""
        if self._is_finished:
            raise RolloutError("prompts were admitted to a stream of episodes that was finished.")
        self._waiting.extend(shard.ids)
        self._changed.set()

    def finish_stream(self, abandon: bool) -> None:
        """No more prompts come."""
        self._is_finished, self._is_abandoned = True, self._is_abandoned or abandon
        self._changed.set()

    def reset(self) -> None:
        """Forgets episodes of a stream that has ended, or has never begun."""
        self._open_stream()
        self._uses_lent = False

    async def stream(self, plan: SamplingPlan) -> AsyncIterator[Computed[TrajectoryBlock]]:  # type: ignore[override]
        """Plays episodes and yields them as they end. The last block is empty: metrics come from generators."""
        self._states.begin_stream()
        running: set[asyncio.Task[None]] = set()
        try:
            async with self._simulated_policy(plan) as policy:
                while not self._is_abandoned:
                    while self._waiting and len(running) < self.lanes():
                        running.add(asyncio.create_task(self._play(self._waiting.popleft(), policy, plan)))
                    ended, self._ended = self._ended, []
                    if ended:
                        self._states.write()
                        yield self._block(ended)
                        continue
                    over = [each for each in running if each.done()]
                    running.difference_update(over)
                    errors = [error for each in over if (error := each.exception()) is not None]
                    if errors:  # of the policy
                        raise errors[0]
                    if self._is_finished and not running and not self._waiting:
                        break
                    if not over:
                        self._changed.clear()
                        await self._changed.wait()
            yield self._block([])
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._states.end_stream()
            self._open_stream()

    def _simulated_policy(self, plan: SamplingPlan) -> SimulatedPolicy:
        context, spec = self._context, self._spec
        return SimulatedPolicy(
            context.channel(spec.generator), str(context.worker), plan, frozenset(), spec.deadline_s,
            lent=None if spec.lent is None else context.channel(spec.lent), uses_lent=lambda: self._uses_lent,
            states=self._states,
        )  # fmt: skip

    def _block(self, episodes: Sequence[Episode]) -> Computed[TrajectoryBlock]:
        episodes = sorted(episodes, key=lambda each: each.id)
        return Computed(rows=block_of(episodes), note=note_of(episodes))

    async def _play(self, id: TrajectoryId, policy: EnginePolicy, plan: SamplingPlan) -> None:
        """Plays one episode to its end."""
        self._states.begin_episode()
        section = self._spec.environment
        limits = EpisodeLimits(
            max_turns=section.max_turns, max_new_tokens=plan.max_new_tokens,
            max_episode_tokens=section.max_episode_tokens, max_length=self._spec.max_length,
            timeout_s=section.timeout_s,
        )  # fmt: skip
        playing = _Playing(id, self._costs.episode(id.prompt_index, id.sample), limits)
        try:
            await playing.play(policy, self._wait, is_greedy=plan.temperature == 0)
            reward = 0.0 if self._spec.has_rewards else self._costs.reward(id.prompt_index, id.sample)
            self._ended.append(playing.episode(reward))
        finally:
            self._states.end_episode()
            self._changed.set()

    async def _wait(self, seconds: float) -> None:
        await self._costs.work(self._context.worker, seconds)


class _Playing:
    """What an episode has so far."""

    def __init__(self, id: TrajectoryId, costs: EpisodeCosts, limits: EpisodeLimits) -> None:
        self._id, self._costs, self._limits = id, costs, limits
        self._tokens_T: NDArray[np.int32] = np.empty(0, np.int32)
        self._versions_T: NDArray[np.int32] = np.empty(0, np.int32)
        self._turn_ends: list[int] = []
        self._num_steps = 0  # of the environment
        self._finish: EpisodeFinish = "error"
        self._error: str | None = None

    async def play(self, policy: EnginePolicy, wait: Callable[[float], Awaitable[None]], *, is_greedy: bool) -> None:
        """Takes turns until the environment or a limit ends the episode, as `environments.episode.run_episode` does."""
        for number in range(self._limits.max_turns):
            room = min(self._limits.max_new_tokens, self._room)
            answer = await policy.answer(
                TurnRequest(id=self._id, turn=number, prompt=self._tokens_T, max_new_tokens=room, greedy=is_greedy)
            )
            self._add(answer.tokens_L, answer.versions_L)
            self._turn_ends.append(len(self._tokens_T) - 1)
            if answer.finish == "cancelled":
                self._fail("unanswered", f"the engine did not finish the answer of turn {number} (cancelled).")
                return
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    await wait(self._costs.calls_s[number])
            except TimeoutError:
                self._fail("error", f"step: took longer than {self._limits.timeout_s:g} s and was given up")
                return
            self._num_steps += 1
            is_done = number + 1 == self._costs.num_turns
            if is_done or number + 1 == self._limits.max_turns:
                self._finish = "tokens" if answer.finish == "length" else "done" if is_done else "turns"
                return
            reply = self._costs.reply_tokens[number]
            if reply >= self._room:
                self._finish = "tokens"
                return
            self._add(np.zeros(reply, np.int32), np.full(reply, -1, np.int32))

    def episode(self, reward: float) -> Episode:
        """The episode. The environment's last step has the reward; one that failed is not trained."""
        sampled_T = self._versions_T >= 0
        return Episode(
            id=self._id,
            tokens_T=self._tokens_T,
            loss_mask_T=sampled_T if self._error is None else np.zeros_like(sampled_T),
            behavior_logprobs_T=np.zeros(len(self._tokens_T), np.float32),
            versions_T=self._versions_T,
            num_prompt_tokens=0,
            messages=(),
            num_prompt_messages=0,
            turn_rewards=tuple(reward if step + 1 == self._num_steps else 0.0 for step in range(self._num_steps)),
            turn_ends=tuple(self._turn_ends),
            finish=self._finish,
            error=self._error,
            metrics={},
        )

    @property
    def _room(self) -> int:
        return self._limits.room(0, len(self._tokens_T))

    def _add(self, tokens_L: NDArray[np.int32], versions_L: NDArray[np.int32]) -> None:
        self._tokens_T = np.concatenate([self._tokens_T, tokens_L])
        self._versions_T = np.concatenate([self._versions_T, versions_L])

    def _fail(self, finish: EpisodeFinish, error: str) -> None:
        self._finish, self._error = finish, error


class SimulatedPolicy(EnginePolicy):
    """The real one asks a generator again and again, which takes many calls where nothing but a clock goes on. This one
    has a call at every generator that waits until there is an answer."""

    async def _talk(self, engine: int) -> None:
        """Sends new requests to one generator, while another task fetches answers; ends with the policy, or the
        generator."""
        under_way: set[TrajectoryId] = set()
        asked, fetching = self._asked[engine], None
        try:
            while True:
                await asked.wait()
                asked.clear()
                requests, self._new[engine] = self._new[engine], []
                under_way.update(request.id for request in requests)
                await self._exchange(engine, under_way, requests, 0.0)
                if under_way and (fetching is None or fetching.done()):
                    fetching = asyncio.create_task(self._fetch(engine, under_way))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._end(engine, error)
        finally:
            if fetching is not None:
                fetching.cancel()

    async def _fetch(self, engine: int, under_way: set[TrajectoryId]) -> None:
        """Fetches answers until no request is under way."""
        try:
            while under_way:
                await self._exchange(engine, under_way, [], _WAITING_SHARE * self._deadline_s)
        except Exception as error:
            self._end(engine, error)

    async def _exchange(
        self, engine: int, under_way: set[TrajectoryId], requests: Sequence[Request], wait_s: float
    ) -> None:
        channel, rank = self._engines[engine]
        done = await channel.call(rank, self._deadline_s, Generator.exchange, self._name, tuple(requests), wait_s)
        self._note(done, engine, under_way)
