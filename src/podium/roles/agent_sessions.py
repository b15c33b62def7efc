# SPDX-License-Identifier: Apache-2.0
"""Agents play episodes: a gateway in the episode runner answers their requests with the run's generators and records
them, one session for each episode."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from podium.data.control_tokens import AS_TEXT, ControlRule
from podium.data.documents import Tokens
from podium.data.splitmix import GAMMA, mix
from podium.data.tasks import Task
from podium.data.trajectories import TrajectoryId
from podium.environments.agents import AgentCall, AgentOutcome, TurnRewardsById
from podium.environments.episode import Episode, EpisodeFinish
from podium.environments.hosted_episodes import HostedEnvironment
from podium.environments.protocol import CallFailedError, EpisodeLostError, Outcome
from podium.errors import InvariantError, exception_text
from podium.gateway.backend import Generation, GenerationRequest, OnTokens
from podium.gateway.branches import SessionRecord
from podium.gateway.chat import ModelService, SamplingWish, SessionSettings
from podium.gateway.conversation import Conversations
from podium.gateway.episodes import SessionSequences, sequences_of
from podium.gateway.http import HttpLimits, HttpServer
from podium.gateway.refusal import RequestRefusedError
from podium.gateway.server import Gateway
from podium.recipe import EnvironmentSection
from podium.roles.carriers import SamplingPlan
from podium.rollout.engine import Capacity, TokenScores
from podium.rollout.requests import Completion, Request, Sampling

if TYPE_CHECKING:
    from podium.roles.episode_runner import EnginePolicy

Play = Callable[[TrajectoryId, Task], Awaitable[Episode]]

# Requests of an episode differ in `attempt`, which the engine's random numbers do not depend on.
_REQUESTS_PER_ATTEMPT = 1 << 20
# A request is not ended by the server before the deadline of its episode.
_SLACK_S = 60.0
_CONNECTIONS_PER_EPISODE = 16
MODEL_NAME = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What sessions need to know beside the sampling. `needs_reward`: nothing but the agent rewards its episodes."""

    tokenizer: Any
    max_length: int
    section: EnvironmentSection
    needs_reward: bool
    rule: ControlRule = AS_TEXT


class AgentSessions:
    """A gateway for the agents of one stream of episodes. It listens on loopback while the context is open."""

    def __init__(
        self, policy: EnginePolicy, plan: SamplingPlan, settings: AgentSettings, make: Callable[[], HostedEnvironment]
    ) -> None:
        self._policy, self._plan, self._settings, self._make = policy, plan, settings, make
        self._conversations = Conversations(settings.tokenizer, rule=settings.rule)
        section = settings.section
        self._limits = HttpLimits(
            connections=max(HttpLimits().connections, section.concurrency * _CONNECTIONS_PER_EPISODE),
            request_s=section.timeout_s + _SLACK_S,
            idle_s=section.timeout_s + _SLACK_S,
        )
        self._address = ""

    async def __aenter__(self) -> AgentSessions:
        nobody = _SessionBackend(self._policy, TrajectoryId(-1, 0), self._settings, numbers=count(), greedy=False)
        # Nobody knows this key: outside of sessions nothing is answered, because nothing would be recorded.
        key = secrets.token_urlsafe(24)
        self._gateway = Gateway(_SessionService(MODEL_NAME, self._conversations, nobody), key=key)
        self._server = HttpServer(self._gateway.handle, limits=self._limits, admission=self._gateway.admit)
        self._address = f"http://127.0.0.1:{await self._server.listen('127.0.0.1', 0)}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.close()

    async def play(self, id: TrajectoryId, task: Task) -> Episode:
        """Plays one episode. If its process is lost through another episode, it is played again from its beginning,
        in a new session with the same random numbers."""
        environment, numbers = self._make(), count()
        while True:
            backend = _SessionBackend(
                self._policy, id, self._settings, numbers=numbers, greedy=self._plan.temperature == 0
            )
            try:
                return await self._played(environment, backend, id, task)
            except EpisodeLostError as lost:
                environment = lost.again()  # type: ignore[assignment]

    async def _played(
        self, environment: HostedEnvironment, backend: _SessionBackend, id: TrajectoryId, task: Task
    ) -> Episode:
        """Waits for the agent, which has its own deadline, or for the failure of a generator."""
        sampling = self._policy.sampling(self._plan.max_new_tokens, greedy=backend.greedy)
        settings = SessionSettings(
            sampling=sampling,
            seed=_session_seed(self._plan.seed, id),
            max_requests=_REQUESTS_PER_ATTEMPT,
            task=None if task.messages is None else tuple(task.messages),
            task_seed=self._plan.seed,
        )
        service = _SessionService(MODEL_NAME, self._conversations, backend)
        access = self._gateway.open_session(settings, service)
        call = AgentCall(task=task, session_url=f"{self._address}{access.path}", key=access.key)
        agent = asyncio.ensure_future(environment.reset(call))
        try:
            try:
                await asyncio.wait({agent, backend.broken}, return_when=asyncio.FIRST_COMPLETED)
                if backend.broken.done():
                    backend.broken.result()
                outcome, error = _ended(agent)
            finally:
                agent.cancel()
                await asyncio.gather(agent, return_exceptions=True)
                record = await self._gateway.close_session(access.id)
                await environment.close()
            backend.require_recorded(record)
            return self._episode(id, backend, record, outcome, error)
        except InvariantError as broken:
            raise InvariantError(f"session {access.id} of episode {id}: {broken}") from broken

    def _episode(
        self, id: TrajectoryId, backend: _SessionBackend, record: SessionRecord, outcome: Any, error: str | None
    ) -> Episode:
        sequences = sequences_of(record)
        sampled_T = sequences.sampled_T
        turn_rewards: tuple[float, ...] = ()
        if isinstance(outcome, AgentOutcome) and error is None:
            try:
                turn_rewards = rewards_of_turns(outcome.turn_rewards, record, sequences)
            except CallFailedError as failure:
                error = f"agent: {failure}"
        finish, error = self._ending(backend, record, outcome, error)
        reward = outcome.reward if isinstance(outcome, Outcome) else 0.0
        return Episode(
            id=id,
            tokens_T=sequences.tokens_T,
            loss_mask_T=sampled_T if error is None else np.zeros_like(sampled_T),
            behavior_logprobs_T=sequences.behavior_logprobs_T,
            versions_T=sequences.versions_T,
            starts=sequences.starts,
            num_prompt_tokens=sequences.num_prompt_tokens,
            messages=(),
            num_prompt_messages=0,
            turn_rewards=turn_rewards if error is None else (),
            turn_ends=sequences.turn_ends,
            turn_parents=sequences.parents,
            whole_reward=reward if error is None else 0.0,
            finish=finish,
            error=error,
            metrics={
                **(outcome.metrics if isinstance(outcome, Outcome) else {}),
                "sequences": float(len(record.branches)),
                "requests": float(record.requests),
                "repeated_requests": float(record.repeated_requests),
                "rerendered_requests": float(record.rerendered_requests),
                "sampled_tokens": float(backend.sampled_tokens),
                "discarded_tokens": float(record.discarded_tokens),
                "trained_tokens": float(sampled_T.sum()) if error is None else 0.0,
            },
        )

    def _ending(
        self, backend: _SessionBackend, record: SessionRecord, outcome: Any, error: str | None
    ) -> tuple[EpisodeFinish, str | None]:
        if backend.unanswered is not None:
            return "unanswered", backend.unanswered
        if error is not None:
            return "error", error
        if not record.turns:
            return "error", "the agent ended without an answer of the model, so there is nothing to train."
        if outcome is None and self._settings.needs_reward:
            return "error", "the agent returned None, and the recipe has no reward. Return a number, or add a reward."
        if backend.has_refused_turns:
            return "turns", None
        return ("tokens" if backend.was_cut else "done"), None


def rewards_of_turns(
    given: tuple[float, ...] | TurnRewardsById, record: SessionRecord, sequences: SessionSequences
) -> tuple[float, ...]:
    """An agent's rewards of single answers, in the order of the turns in the sequences."""
    named: list[tuple[str, tuple[int, ...] | None, tuple[float, ...]]]
    if isinstance(given, tuple):
        if len(given) != len(record.answered):
            raise CallFailedError(
                f"`turn_rewards` has {len(given)} numbers, and {len(record.answered)} requests were answered (without "
                "repeated ones). Give one for each, or name responses by their ids."
            )
        named = [("in order", turns, (reward,)) for turns, reward in zip(record.answered, given, strict=True)]
    else:
        # Clients get the id behind a word for the kind of response.
        named = [(id, record.turns_by_id.get(re.split("[-_]", id)[-1]), rewards) for id, rewards in given.items()]
    rewards_by_turn: dict[int, float] = {}
    for id, turns, rewards in named:
        if turns is None:
            raise CallFailedError(f"`turn_rewards` names {id[:80]!r}, and no response of the episode has this id.")
        if len(turns) != len(rewards):
            raise CallFailedError(
                f"`turn_rewards` has {len(rewards)} numbers for a response with {len(turns)} choices. Name the "
                "response by its id, and give a list with one number for each choice."
            )
        for turn, reward in zip(turns, rewards, strict=True):
            rewards_by_turn[turn] = rewards_by_turn.get(turn, 0.0) + reward
    return tuple(rewards_by_turn.get(turn, 0.0) for turn in sequences.turns)


def _ended(agent: asyncio.Future[Any]) -> tuple[Any, str | None]:
    """What an agent returned, and why it has failed."""
    try:
        return agent.result(), None
    except EpisodeLostError:
        raise
    except CallFailedError as failure:
        return None, f"agent: {failure}"
    except Exception as failure:  # its process does not start, for instance
        return None, f"agent: {exception_text(failure)}"


def _session_seed(seed: int, id: TrajectoryId) -> int:
    """The same in every attempt at an episode."""
    key = 0
    for part in (seed, id.prompt_index, id.sample):
        key = mix(key + GAMMA + part)
    return key


class _SessionService(ModelService):
    """The model of one session: also refuses more answers than the recipe allows."""

    def sampling(self, wish: SamplingWish, prompt_tokens: int, base: Sampling | None = None) -> Sampling:
        """What the engine gets."""
        assert isinstance(self.backend, _SessionBackend)
        sampling = super().sampling(wish, prompt_tokens, base)
        self.backend.require_turns(wish.n)  # last: what is refused takes no answer away
        return sampling


class _SessionBackend:
    """The run's generators, for the requests of one episode."""

    def __init__(
        self, policy: EnginePolicy, id: TrajectoryId, settings: AgentSettings, *, numbers: Iterator[int], greedy: bool
    ) -> None:
        """`numbers`: of the episode's requests, also of those before its process was lost."""
        self._policy, self._id, self._settings, self._numbers = policy, id, settings, numbers
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = settings.section.max_turns
        self.greedy = greedy
        self.capacity = Capacity(
            vocab_size=len(settings.tokenizer), max_length=settings.max_length, max_running=0, cache_tokens=0,
            cache_bytes=0,
        )  # fmt: skip
        self.sampled_tokens = 0
        self.has_refused_turns = self.was_cut = False
        self.unanswered: str | None = None  # why an engine did not answer
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def require_turns(self, count: int) -> None:
        """Takes so many answers from those that are left."""
        if count > self._left:
            self.has_refused_turns = True
            raise RequestRefusedError(
                400,
                f"an episode has at most {self._settings.section.max_turns} answers of the model "
                "(environment.max_turns).",
                code="max_turns",
            )
        self._left -= count

    def submit(self, wanted: GenerationRequest, on_tokens: OnTokens | None = None) -> Generation:
        """Begins an answer. Its random numbers depend on the episode, the prompt and how often that was asked."""
        id = _request_id(self._id, wanted.sample, next(self._numbers))
        request = Request(id=id, prompt=wanted.prompt, sampling=wanted.sampling, seed=wanted.seed)
        generation = Generation(lambda: self._policy.cancel(id))
        task = asyncio.ensure_future(self._answer(request, generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return generation

    async def score(self, tokens_T: Tokens) -> TokenScores:
        """Refused: only sampled tokens have log-probs here."""
        raise RequestRefusedError(400, "the generators of a run give no log-probs of prompts.", param="echo")

    def require_recorded(self, record: SessionRecord) -> None:
        """Raises an InvariantError unless the record has every token that the engines have sampled."""
        recorded = record.sampled_tokens + record.discarded_tokens
        if recorded != self.sampled_tokens:
            raise InvariantError(f"{recorded} tokens are recorded and engines have sampled {self.sampled_tokens}.")

    async def _answer(self, request: Request, generation: Generation) -> None:
        try:
            completion = await self._policy.complete(request)
        except Exception as error:  # a generator has failed: the stream ends with its error
            if not self.broken.done():
                self.broken.set_exception(error)
                self.broken.exception()  # retrieved, also if the episode is over
            generation.completion.set_exception(RequestRefusedError(503, "the generator has failed."))
            return
        self._note(completion)
        generation.completion.set_result(completion)

    def _note(self, completion: Completion) -> None:
        self.sampled_tokens += completion.num_tokens
        if completion.finish == "error":
            self.unanswered = f"the engine did not answer a request: {completion.error}"
        self.was_cut = completion.finish == "length"


def _request_id(episode: TrajectoryId, sample: int, number: int) -> TrajectoryId:
    """The id of a request: that of its episode, and what tells it from the episode's other requests."""
    assert number < _REQUESTS_PER_ATTEMPT
    return episode._replace(branch=sample, attempt=episode.attempt * _REQUESTS_PER_ATTEMPT + number)
