# SPDX-License-Identifier: Apache-2.0
"""The episode runner: a CPU worker that plays many episodes at once and calls generators directly for every turn."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np

from podium.cluster import Computed, WorkerContext
from podium.cluster.channels import Channel
from podium.data.control_tokens import ControlRule
from podium.data.prefixes import RowPrefixes
from podium.data.tokenizer import load_tokenizer, parted_stops, stop_tokens
from podium.data.trajectories import Ints, TrajectoryBlock, TrajectoryId
from podium.environments.episode import (
    Episode,
    EpisodeJob,
    EpisodeLimits,
    TurnAnswer,
    TurnRequest,
    block_of,
    play_episodes,
    run_job,
)
from podium.environments.hosted_episodes import EnvironmentHost, HostedEnvironment
from podium.environments.output_cap import OutputCap
from podium.environments.transcript import TurnTokenizer, check_template, check_tools_shown
from podium.errors import RolloutError, WorkerDiedError
from podium.models.folder import local_folder
from podium.progress import mark_progress
from podium.recipe import EnvironmentSection, ModelSection
from podium.recipe.on_policy import SandboxSection
from podium.roles.agent_sessions import AgentSessions, AgentSettings, Play
from podium.roles.carriers import FINISHES, EpisodeNote, PromptShard, SamplingPlan, TurnRewards
from podium.roles.episode_states import EpisodeStates
from podium.roles.interfaces import EpisodeSource, Generator
from podium.rollout.requests import Completion, Request, Sampling

_BLOCK_EVERY_S = 0.05
# Of one block, from environments.
_MOST_WARNINGS = 5
# How long a generator holds a runner's call without results: short, so that new requests are sent soon.
_WAIT_S = 0.02
# How often a runner whose episodes take long shows that its event loop lives.
_ALIVE_S = 1.0
# In the place of a generator: it knows that nobody wants an answer any more.
_TOLD = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSpec:
    """How an episode runner is built."""

    model: ModelSection
    environment: EnvironmentSection
    generator: str  # the generators' role
    lent: str | None = None  # the role of generators on the learner's devices
    max_length: int
    deadline_s: float = 600.0  # of one call to a generator
    sandbox: SandboxSection | None = None
    has_rewards: bool = True  # whether the recipe grades episodes
    stacks: Path | None = None  # the file for stacks of environments that hang


class EpisodeRunner(EpisodeSource):
    """Runs episodes as coroutines of one event loop. The environment's code runs in separate processes."""

    def __init__(self, context: WorkerContext, spec: RunnerSpec) -> None:
        import transformers  # imported here because the controller imports this module too

        transformers.logging.set_verbosity_error()
        self._context, self._spec = context, spec
        self._output = OutputCap(f"the environment of {context.worker}")
        self._host = EnvironmentHost(  # starts while the tokenizer is read
            spec.environment, output=self._output, sandbox=spec.sandbox, stacks=spec.stacks
        )
        weakref.finalize(self, self._host.close)  # a role that is dropped with its worker
        tokenizer = load_tokenizer(spec.model)
        self._plain_tokenizer = tokenizer
        self._tokenizer = TurnTokenizer(
            tokenizer, hidden_tools=spec.environment.hidden_tools, rule=ControlRule.of(spec.model)
        )
        self._parted_stops = partial(parted_stops, tokenizer)
        self._stops = stop_tokens(tokenizer, local_folder(spec.model.path, "model.path"))
        self._states = EpisodeStates(context)
        self._is_checked = self._uses_lent = False
        self._jobs: asyncio.Queue[EpisodeJob | None] = asyncio.Queue()
        self._abandoned = asyncio.Event()
        self._is_finished = False  # whether no more prompts come for this stream
        self._loop = asyncio.new_event_loop()  # a reference is kept: the environment's processes are connected to it
        try:
            self._loop.run_until_complete(self._host.open())
        except BaseException:
            self._host.close()
            raise

    def admit(self, shard: PromptShard, plan: SamplingPlan) -> None:
        """Adds the episodes of these prompts to the stream. For control threads."""
        if self._is_finished:
            raise RolloutError("prompts were admitted to a stream of episodes that was finished.")
        self._check_template(shard)
        jobs = [
            (TrajectoryId(prompt.prompt_index, sample, 0, shard.attempt), prompt.task)
            for prompt in shard.prompts
            for sample in shard.samples
        ]
        self._loop.call_soon_threadsafe(self._enqueue, jobs)

    def give_back(self, ids: tuple[TrajectoryId, ...]) -> None:
        """Does nothing: an episode stays with its environment. Its requests may move to another generator."""

    def use_lent(self, are_lent: bool) -> None:
        """Whether generators on the learner's devices answer too. For control threads."""
        self._uses_lent = are_lent

    def finish_stream(self, abandon: bool) -> None:
        """No more prompts come."""
        self._is_finished = True
        self._loop.call_soon_threadsafe(self._abandoned.set if abandon else self._enqueue_end)

    def stream(self, plan: SamplingPlan) -> Iterator[Computed[TrajectoryBlock]]:
        """Plays the episodes that `admit` brings and yields them as they end, until `finish_stream` was called and all
        are over."""
        blocks = self._blocks(plan)
        self._host.begin_shard()
        self._states.begin_stream()
        try:
            while True:
                try:
                    block = self._loop.run_until_complete(anext(blocks))
                except StopAsyncIteration:
                    return
                self._states.write()
                yield block
        finally:
            self._states.end_stream()
            self._loop.run_until_complete(blocks.aclose())
            self._host.end_shard()
            self._forget_jobs()

    def reset(self) -> None:
        """Forgets episodes of a stream that has ended, or has never begun."""
        self._loop.run_until_complete(asyncio.sleep(0))  # what control threads have asked for
        self._forget_jobs()
        self._uses_lent = False

    def _forget_jobs(self) -> None:
        self._jobs, self._abandoned, self._is_finished = asyncio.Queue(), asyncio.Event(), False

    def lanes(self) -> int:
        """Number of episodes that run at the same time."""
        return self._spec.environment.concurrency

    def _enqueue(self, jobs: Sequence[EpisodeJob]) -> None:
        """In the thread of the event loop."""
        for job in jobs:
            self._jobs.put_nowait(job)

    def _enqueue_end(self) -> None:
        self._jobs.put_nowait(None)

    def _check_template(self, shard: PromptShard) -> None:
        """Checks the chat template before the first chat. A template that changes earlier turns would make tokens
        drift."""
        if self._is_checked or all(prompt.task.messages is None for prompt in shard.prompts):
            return
        section = self._spec.environment
        if section.is_agent:  # the gateway renders each request; a template that rewrites turns begins a new sequence
            return
        tools = self._host.tool_schemas if section.tools else None
        tokenizer = load_tokenizer(self._spec.model)
        check_template(tokenizer, role=section.reply_role, tools=tools)
        if tools and not section.hidden_tools:
            messages = next(prompt.task.messages for prompt in shard.prompts if prompt.task.messages is not None)
            check_tools_shown(tokenizer, messages, tools)
        self._is_checked = True

    async def _blocks(self, plan: SamplingPlan) -> AsyncGenerator[Computed[TrajectoryBlock], None]:
        """Waits for episodes, and passes on those that have ended at short intervals."""
        ready: list[Episode] = []
        async with (
            self._policy(plan) as policy,
            self._player(policy, plan) as play,
            aclosing(self._episodes(play)) as episodes,
        ):
            sent, coming = time.monotonic(), asyncio.ensure_future(anext(episodes, None))
            abandoned = asyncio.ensure_future(self._abandoned.wait())
            try:
                while not abandoned.done():
                    left_s = max(0.0, sent + _BLOCK_EVERY_S - time.monotonic()) if ready else _ALIVE_S
                    await asyncio.wait({coming, abandoned}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                    mark_progress()
                    if coming.done():
                        episode = coming.result()
                        if episode is None:
                            break
                        self._states.end_episode()
                        ready.append(episode)
                        coming = asyncio.ensure_future(anext(episodes, None))
                    if ready and time.monotonic() - sent >= _BLOCK_EVERY_S:
                        yield self._computed(ready)
                        ready, sent = [], time.monotonic()
            finally:
                coming.cancel()
                abandoned.cancel()
                await asyncio.gather(coming, abandoned, return_exceptions=True)
        yield self._computed(ready)

    def _episodes(self, play: Play) -> AsyncGenerator[Episode, None]:
        return play_episodes(self._jobs, play, concurrency=self._spec.environment.concurrency)

    @asynccontextmanager
    async def _player(self, policy: EnginePolicy, plan: SamplingPlan) -> AsyncIterator[Play]:
        """What plays one episode, for as long as a stream is open."""
        section = self._spec.environment
        if section.is_agent:
            async with AgentSessions(policy, plan, self._agent_settings(), self._make) as sessions:
                yield sessions.play
            return
        limits = EpisodeLimits(
            max_turns=section.max_turns,
            max_new_tokens=plan.max_new_tokens,
            max_episode_tokens=section.max_episode_tokens,
            max_length=self._spec.max_length,
            timeout_s=section.timeout_s,
        )
        yield partial(run_job, self._make, policy, self._tokenizer, limits=limits, greedy=plan.temperature == 0)

    def _agent_settings(self) -> AgentSettings:
        return AgentSettings(
            tokenizer=self._plain_tokenizer,
            max_length=self._spec.max_length,
            section=self._spec.environment,
            needs_reward=not self._spec.has_rewards,
            rule=ControlRule.of(self._spec.model),
        )

    def _make(self) -> HostedEnvironment:
        self._states.begin_episode()
        return self._host.make()

    def _policy(self, plan: SamplingPlan) -> EnginePolicy:
        stops, strings = self._parted_stops(plan.stop)
        spec = self._spec
        return EnginePolicy(
            self._context.channel(spec.generator),
            str(self._context.worker),
            replace(plan, stop=strings),
            self._stops | stops,
            spec.deadline_s,
            lent=None if spec.lent is None else self._context.channel(spec.lent),
            uses_lent=lambda: self._uses_lent,
            states=self._states,
        )

    def _computed(self, episodes: list[Episode]) -> Computed[TrajectoryBlock]:
        episodes = sorted(episodes, key=lambda each: each.id)
        warnings: tuple[str, ...] = () if self._output.warning is None else (self._output.warning,)
        warnings += tuple(islice(dict.fromkeys(text for each in episodes for text in each.warnings), _MOST_WARNINGS))
        block = block_of(episodes)
        note = replace(note_of(episodes), warnings=warnings, prefixes=RowPrefixes.of(block))
        return Computed(rows=block, note=note)


class EnginePolicy:
    """Generators as the policy of episodes. An episode always uses the same generator, which has its conversation
    cached. While the learner's devices generate, they have an even part of all episodes, and the others stay where they
    are. One loop per generator sends new requests and fetches finished ones. If one dies, its requests go to another,
    which gives the same answers if it has the same weights."""

    def __init__(
        self, channel: Channel, name: str, plan: SamplingPlan, stops: frozenset[int], deadline_s: float,
        *, lent: Channel | None = None, uses_lent: Callable[[], bool] = lambda: False,
        states: EpisodeStates | None = None,
    ) -> None:  # fmt: skip
        self._name, self._plan, self._stops, self._deadline_s = name, plan, stops, deadline_s
        self._num_own, self._uses_lent, self._states = len(channel), uses_lent, states
        self._engines = [(each, rank) for each in (channel, lent) if each is not None for rank in range(len(each))]
        self._new: list[list[Request]] = [[] for _ in self._engines]
        self._asked: list[asyncio.Event] = [asyncio.Event() for _ in self._engines]
        self._waiting: dict[TrajectoryId, asyncio.Future[Completion]] = {}
        self._requests: dict[TrajectoryId, Request] = {}  # of those that wait
        self._engine_of: dict[TrajectoryId, int] = {}
        self._unwanted: dict[TrajectoryId, int] = {}  # cancelled, and at which generator
        self._gone: set[int] = set()  # the runner's own generators that died
        self._talks: list[asyncio.Task[None]] = []
        self._broken: BaseException | None = None

    async def __aenter__(self) -> EnginePolicy:
        self._talks = [asyncio.create_task(self._talk(engine)) for engine in range(len(self._engines))]
        return self

    async def __aexit__(self, *error: object) -> None:
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    async def answer(self, request: TurnRequest, /) -> TurnAnswer:
        completion = await self.complete(self._request(request))
        return TurnAnswer(
            tokens_L=completion.tokens_L, logprobs_L=completion.logprobs_L, versions_L=completion.versions_L,
            finish=completion.finish, error=completion.error, experts=completion.experts,
        )  # fmt: skip

    async def complete(self, request: Request) -> Completion:
        """Waits for the generator, whose loop has its own deadline for every call."""
        if self._broken is not None:
            raise self._broken
        waiting: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = waiting
        self._ask(request)
        with nullcontext() if self._states is None else self._states.generating():
            return await waiting

    def cancel(self, id: TrajectoryId) -> None:
        """Ends a request with the tokens that it has."""
        if id in self._requests:
            self._unwanted[id] = self._engine_of[id]
            self._asked[self._engine_of[id]].set()

    def sampling(self, max_new_tokens: int, *, greedy: bool) -> Sampling:
        """How the recipe samples an answer."""
        plan = self._plan
        return Sampling(
            max_new_tokens=max_new_tokens, temperature=0.0 if greedy else plan.temperature, top_p=plan.top_p,
            top_k=plan.top_k, min_p=plan.min_p, stop_tokens=self._stops, stop_strings=plan.stop,
        )  # fmt: skip

    def _ask(self, request: Request) -> None:
        num_lent = len(self._engines) - self._num_own if self._uses_lent() else 0
        engine = engine_of(request.id.prompt_index, self._num_own, num_lent)
        if engine in self._gone:
            living = self._living
            engine = living[request.id.prompt_index % len(living)]
        self._requests[request.id] = request
        self._engine_of[request.id] = engine
        self._new[engine].append(request)
        self._asked[engine].set()

    def _settle(self, completion: Completion, *, was_lent: bool) -> None:
        """Notes an answer. One that a lent generator has given back continues on another."""
        request = self._requests.pop(completion.id)
        self._engine_of.pop(completion.id, None)
        is_unwanted = self._unwanted.pop(completion.id, None) is not None
        if was_lent and completion.finish == "cancelled" and not is_unwanted:
            self._ask(replace(request, begun=completion.so_far))
        else:
            waiting = self._waiting.pop(completion.id)
            if not waiting.done():  # else its episode was given up
                waiting.set_result(completion)

    async def _talk(self, engine: int) -> None:
        """Consumes new requests to one generator and waits for its answers; ends with the policy, or the generator."""
        under_way: set[TrajectoryId] = set()
        channel, rank = self._engines[engine]
        try:
            while True:
                if not under_way and not self._new[engine]:
                    self._asked[engine].clear()
                    await self._asked[engine].wait()
                requests, self._new[engine] = self._new[engine], []
                under_way.update(request.id for request in requests)
                done = await channel.call(
                    rank, self._deadline_s, Generator.exchange, self._name, tuple(requests), _WAIT_S
                )
                self._note(done, engine, under_way)
                unwanted = tuple(id for id, at in self._unwanted.items() if at == engine and id in under_way)
                if unwanted:  # after they were sent
                    self._unwanted |= dict.fromkeys(unwanted, _TOLD)
                    await channel.call(rank, self._deadline_s, Generator.give_back, unwanted)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._end(engine, error)

    def _note(self, done: Sequence[Completion], engine: int, under_way: set[TrajectoryId]) -> None:
        """Passes on a generator's answers to requests that are under way."""
        for completion in done:
            if completion.id in under_way:  # else of a stream before
                under_way.discard(completion.id)
                self._settle(completion, was_lent=engine >= self._num_own)

    @property
    def _living(self) -> list[int]:
        """The runner's own generators that live."""
        return [engine for engine in range(self._num_own) if engine not in self._gone]

    def _end(self, engine: int, error: BaseException) -> None:
        """A generator answers no more. If it died and there are others, they are asked from here on."""
        if engine >= self._num_own or not isinstance(error, WorkerDiedError):
            self._fail(error)
            return
        self._gone.add(engine)
        if not self._living:
            self._fail(error)
            return
        self._new[engine] = []
        for id in [id for id, at in self._engine_of.items() if at == engine]:
            self._ask(self._requests[id])
            if id in self._unwanted:  # it ends as soon as the other one has it
                self._unwanted[id] = self._engine_of[id]

    def _fail(self, error: BaseException) -> None:
        """All that wait for an answer fail, and all that ask later."""
        self._broken = error
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    def _request(self, request: TurnRequest) -> Request:
        sampling = self.sampling(request.max_new_tokens, greedy=request.greedy)
        return Request(id=request.id, prompt=request.prompt, sampling=sampling, seed=self._plan.seed)


def engine_of(prompt_index: int, num_own: int, num_lent: int) -> int:
    """The generator of a prompt's episodes: one of the runner's own, or, numbered after those, a lent one. All have the
    same number of `num_own * (num_own + num_lent)` consecutive prompts. When devices are lent, prompts move to them
    only: nothing that the other generators have cached is lost between them."""
    lap, own = divmod(prompt_index, num_own)
    num_moved, place = divmod((lap + own) * num_lent, num_own + num_lent)  # of this one's prompts, some laps apart
    return own if place >= num_lent else num_own + (num_moved + own) % num_lent


def note_of(episodes: list[Episode]) -> EpisodeNote:
    """The controller's note about each episode."""
    places = [
        (row, end, reward)
        for row, each in enumerate(episodes)
        for end, reward in zip_longest(each.turn_ends, each.turn_rewards[: each.num_turns], fillvalue=0.0)
    ]
    versions = [each.versions_T[each.versions_T >= 0] for each in episodes]  # of the sampled tokens
    names = sorted({name for each in episodes for name in each.metrics})
    return EpisodeNote(
        finish_N=np.array([FINISHES.index(each.finish) for each in episodes], np.int8),
        sampled_N=np.array([len(each) for each in versions], np.int64),
        trained_N=np.array([int(each.loss_mask_T.sum()) for each in episodes], np.int64),
        turns_N=np.array([each.num_turns for each in episodes], np.int64),
        version_N=np.array([int(each.min()) if len(each) else -1 for each in versions], np.int64),
        newest_version_N=np.array([int(each.max()) if len(each) else -1 for each in versions], np.int64),
        environment_N=np.array([each.reward for each in episodes], np.float64),
        turn_rewards=TurnRewards(
            row_K=np.array([row for row, _, _ in places], np.int64),
            token_K=np.array([end for _, end, _ in places], np.int64),
            reward_K=np.array([reward for _, _, reward in places], np.float64),
            parent_K=_parents_of(episodes),
        ),
        errors={row: each.error for row, each in enumerate(episodes) if each.error is not None},
        counts={name: np.array([each.metrics.get(name, 0.0) for each in episodes], np.float64) for name in names},
    )


def _parents_of(episodes: Sequence[Episode]) -> Ints | None:
    """Which turn each one continues, if an agent has played the episodes."""
    parents = [each.turn_parents for each in episodes]
    if any(each is None for each in parents) or not parents:
        return None
    return np.array([parent for each in parents for parent in each or ()], np.int64)
