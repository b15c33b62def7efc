# SPDX-License-Identifier: Apache-2.0
"""Episodes: a policy and an environment take turns, in thousands of episodes at once. Each episode ends as tokens to
train on."""

# L new tokens of one answer · T tokens of a whole episode

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from podium.data.documents import Mask, Tokens
from podium.data.kinds import Message, parse_messages
from podium.data.masks import ChatTemplateError, Tools
from podium.data.routed_experts import Experts, aligned
from podium.data.rows import Row
from podium.data.tasks import Task
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.environments.protocol import (
    BoundedEnvironment,
    CallFailedError,
    Environment,
    EpisodeLostError,
    Observation,
    Outcome,
    SingleTurn,
    Turn,
    call_within,
)
from podium.environments.replay import ReplayPolicy
from podium.environments.transcript import Transcript, TurnTokenizer
from podium.errors import DataError, exception_text, type_phrase, with_place

EpisodeFinish = Literal["done", "turns", "tokens", "error", "unanswered"]
MakeEnvironment = Callable[[], Environment]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRequest:
    """A request for one answer. The prompt is the whole conversation so far: an engine that keys random numbers by id
    and position gives every turn its own part of the episode's stream."""

    id: TrajectoryId
    turn: int
    prompt: Tokens
    max_new_tokens: int
    greedy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnAnswer:
    """The tokens that the policy generated, as a rollout engine returns them."""

    tokens_L: Tokens
    logprobs_L: NDArray[np.float32]
    versions_L: Tokens
    finish: Literal["stop", "length", "cancelled", "error"]
    error: str | None = None
    experts: Experts | None = None  # of the first positions of prompt and answer


class Policy(Protocol):
    """Generates the answers. A problem with one request comes back as an answer with finish "error". An exception means
    that the policy itself is broken, and is raised in the caller."""

    async def answer(self, request: TurnRequest, /) -> TurnAnswer:
        """Generates the answer to one turn."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits that end an episode."""

    max_turns: int
    max_new_tokens: int  # of one answer
    max_episode_tokens: int | None = None  # after the prompt, the environment's too
    max_length: int | None = None  # prompt and everything after it: the engine's context
    timeout_s: float = 60.0  # of one call of reset, step or close; an environment may allow its step more

    def room(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Tokens that may still be added."""
        longest = sys.maxsize if self.max_length is None else self.max_length
        if self.max_episode_tokens is not None:
            longest = min(longest, num_prompt_tokens + self.max_episode_tokens)
        return max(0, longest - num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """A finished episode.

    finish: `done`, the environment ended it; `turns`, the model used all its turns; `tokens`, a token limit cut off the
    last answer or left no room for another; `error`, environment or engine failed, and nothing of it is trained."""

    id: TrajectoryId
    tokens_T: Tokens
    loss_mask_T: Mask
    behavior_logprobs_T: NDArray[np.float32]  # 0 where the token was not sampled
    versions_T: Tokens  # -1 where the token was not sampled
    starts: tuple[int, ...] = ()  # where further token sequences begin, if the episode has several
    experts: Experts | None = None  # of the first positions
    num_prompt_tokens: int
    messages: tuple[Message, ...]  # the whole conversation; raw text becomes user and assistant messages too
    num_prompt_messages: int
    turn_rewards: tuple[float, ...]  # the environment's, one for each turn that it stepped
    turn_ends: tuple[int, ...]  # where the last token of each answer is
    turn_parents: tuple[int, ...] | None = None  # of an agent's turns: which of them each one continues, or -1
    whole_reward: float = 0.0  # an agent's, which belongs to no single turn
    finish: EpisodeFinish
    error: str | None
    metrics: Mapping[str, float]
    warnings: tuple[str, ...] = ()  # the environment's, for the console

    @property
    def num_turns(self) -> int:
        """Number of the model's answers."""
        return len(self.turn_ends)

    @property
    def reward(self) -> float:
        """Sum of the environment's rewards over all turns, and an agent's for the whole episode."""
        return math.fsum((*self.turn_rewards, self.whole_reward))

    @property
    def answer(self) -> str:
        """The model's last answer."""
        said = [message for message in self.messages[self.num_prompt_messages :] if message["role"] == "assistant"]
        return str(said[-1]["content"]) if said else ""


async def run_episode(
    environment: Environment,
    task: Task,
    policy: Policy,
    tokenizer: TurnTokenizer,
    *,
    id: TrajectoryId,
    limits: EpisodeLimits,
    greedy: bool = False,
) -> Episode:
    """Plays one episode to its end. Waits for the environment (bounded by limits.timeout_s) and for the policy (whose
    adapter owns that deadline). Errors of the environment are recorded in the returned episode."""
    running = _Running(environment, task, policy, tokenizer, id=id, limits=limits, greedy=greedy)
    try:
        finish, error = await running.play(), None
    except _EpisodeError as failure:
        finish, error = failure.finish, str(failure)
    finally:
        await running.close()
    return running.over(finish, error)


EpisodeJob = tuple[TrajectoryId, Task]


async def run_episodes(
    make: MakeEnvironment,
    jobs: Iterable[EpisodeJob] | asyncio.Queue[EpisodeJob | None],
    policy: Policy,
    tokenizer: TurnTokenizer,
    *,
    limits: EpisodeLimits,
    concurrency: int,
    greedy: bool = False,
) -> AsyncGenerator[Episode, None]:
    """Yields episodes as they finish, with at most `concurrency` running; `jobs` is read as places become free. A queue
    may be filled meanwhile; None ends it.

    An exception of the policy is raised after all episodes that finished before it. The other episodes are then
    cancelled, as they are when the caller stops early (close the generator, or leave it in `contextlib.aclosing`)."""

    async def play(id: TrajectoryId, task: Task) -> Episode:
        return await run_job(make, policy, tokenizer, id, task, limits=limits, greedy=greedy)

    async with contextlib.aclosing(play_episodes(jobs, play, concurrency=concurrency)) as episodes:
        async for episode in episodes:
            yield episode


async def play_episodes(
    jobs: Iterable[EpisodeJob] | asyncio.Queue[EpisodeJob | None],
    play: Callable[[TrajectoryId, Task], Awaitable[Episode]],
    *,
    concurrency: int,
) -> AsyncGenerator[Episode, None]:
    """Yields episodes that `play` plays, like `run_episodes`. An exception of `play` counts as the policy's."""
    finished: asyncio.Queue[Episode | None] = asyncio.Queue()
    waiting = jobs if isinstance(jobs, asyncio.Queue) else iter(jobs)

    async def next_job() -> EpisodeJob | None:
        """Every job is taken by one worker; the end is for all of them."""
        if not isinstance(waiting, asyncio.Queue):
            return next(waiting, None)
        job = await waiting.get()
        if job is None:
            waiting.put_nowait(None)
        return job

    async def work() -> None:
        while (job := await next_job()) is not None:
            finished.put_nowait(await play(*job))

    workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
    everyone = asyncio.gather(*workers)
    everyone.add_done_callback(lambda _: finished.put_nowait(None))
    try:
        while (episode := await finished.get()) is not None:
            yield episode
        await everyone
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(everyone, *workers, return_exceptions=True)


def block_of(episodes: Sequence[Episode]) -> TrajectoryBlock:
    """The episodes' tokens concatenated in this order."""
    offsets = np.zeros(len(episodes) + 1, np.int64)
    np.cumsum([len(episode.tokens_T) for episode in episodes], out=offsets[1:])
    return TrajectoryBlock(
        ids=TrajectoryIds.of(episode.id for episode in episodes),
        offsets=offsets,
        tokens_T=_joined([episode.tokens_T for episode in episodes], np.int32),
        loss_mask_T=_joined([episode.loss_mask_T for episode in episodes], np.bool_),
        behavior_logprobs_T=_joined([episode.behavior_logprobs_T for episode in episodes], np.float32),
        versions_T=_joined([episode.versions_T for episode in episodes], np.int32),
        experts_TLK=aligned([(episode.experts, len(episode.tokens_T)) for episode in episodes]),
        starts_T=_starts(episodes, offsets),
    )


def _starts(episodes: Sequence[Episode], offsets: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    if not any(episode.starts for episode in episodes):
        return None
    starts_T = np.zeros(int(offsets[-1]), np.bool_)
    for first, episode in zip(offsets[:-1].tolist(), episodes, strict=True):
        starts_T[[first + start for start in episode.starts]] = True
    return starts_T


class _EpisodeError(Exception):
    """Why an episode cannot continue."""

    finish: EpisodeFinish = "error"


class _UnansweredError(_EpisodeError):
    """The engine failed: nothing about the episode, so that it must not count as one of no reward."""

    finish = "unanswered"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Checked:
    """An Outcome that has been checked: messages are a list, numbers are finite floats."""

    messages: list[Message]
    reward: float
    done: bool
    metrics: Mapping[str, float]
    warnings: tuple[str, ...]


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """A context for work on tokens: a chat that the template or the tokenizer refuses ends the episode."""
    try:
        yield
    except (ChatTemplateError, DataError) as error:
        raise _EpisodeError(str(error)) from error
    except (TypeError, UnicodeError) as error:
        raise _EpisodeError(
            f"the tokenizer cannot read what was said ({type(error).__name__}: {error}). Look for broken characters in "
            "it, half an emoji for instance."
        ) from error


class _Running:
    """A running episode."""

    def __init__(
        self, environment: Environment, task: Task, policy: Policy, tokenizer: TurnTokenizer, *, id: TrajectoryId,
        limits: EpisodeLimits, greedy: bool,
    ) -> None:  # fmt: skip
        self._environment, self._task, self._policy, self._tokenizer = environment, task, policy, tokenizer
        self._id, self._limits, self._greedy = id, limits, greedy
        self._step_timeout_s = max(limits.timeout_s, getattr(environment, "step_timeout_s", 0.0))
        self._transcript: Transcript | None = None
        self._tools: Tools = None
        self._messages: list[Message] = []
        self._num_prompt_messages = 0
        self._rewards: list[float] = []
        self._metrics: dict[str, float] = {}
        self._warnings: list[str] = []

    async def play(self) -> EpisodeFinish:
        transcript = self._transcript = self._begun(await self._call("reset", self._task))
        for number in range(self._limits.max_turns):
            answer = await self._answered(transcript, number)
            outcome = await self._stepped(answer, number)
            if outcome.done or number + 1 == self._limits.max_turns:
                return "tokens" if answer.finish == "length" else "done" if outcome.done else "turns"
            with _guarded():
                reply = transcript.reply(outcome.messages)
            if len(reply.tokens_L) >= self._room(transcript):
                return "tokens"
            transcript.add_reply(reply)
        raise _EpisodeError(f"max_turns is {self._limits.max_turns}, so the model may not answer at all.")

    async def close(self) -> None:
        """Closes the environment. A failure of close does not change the episode: it is counted, not raised."""
        if callable(getattr(self._environment, "close", None)):
            try:
                await self._call("close")
            except _EpisodeError:
                self._metrics["close_failed"] = 1.0

    def over(self, finish: EpisodeFinish, error: str | None) -> Episode:
        arrays = None if self._transcript is None else self._transcript.arrays()
        empty = np.empty(0, np.int32)
        mask = np.empty(0, np.bool_) if arrays is None else arrays.loss_mask_T
        return Episode(
            id=self._id,
            tokens_T=empty if arrays is None else arrays.tokens_T,
            loss_mask_T=mask if error is None else np.zeros_like(mask),
            behavior_logprobs_T=np.empty(0, np.float32) if arrays is None else arrays.behavior_logprobs_T,
            versions_T=empty if arrays is None else arrays.versions_T,
            experts=None if arrays is None else arrays.experts,
            num_prompt_tokens=0 if self._transcript is None else self._transcript.num_prompt_tokens,
            messages=tuple(self._messages),
            num_prompt_messages=self._num_prompt_messages,
            turn_rewards=tuple(self._rewards),
            turn_ends=() if arrays is None else arrays.turn_ends,
            finish=finish,
            error=error,
            metrics=dict(self._metrics),
            warnings=tuple(dict.fromkeys(self._warnings)),
        )

    def _begun(self, observation: Any) -> Transcript:
        observation = Observation() if observation is None else observation
        if not isinstance(observation, Observation):
            raise _EpisodeError(
                f"{self._named('reset')} returned {type_phrase(observation)}; it returns an Observation, or None."
            )
        messages, text = observation.messages, observation.text
        if messages is None and text is None:
            messages, text = self._task.messages, self._task.text
            if not self._task.has_prompt:
                raise _EpisodeError(
                    f"{self._named('reset')} returned neither messages nor text, and the row has no prompt, so the "
                    "model has nothing to answer."
                )
        if messages is not None and text is not None:
            raise _EpisodeError(
                f"{self._named('reset')} returned both messages and text; an episode begins with one of them."
            )
        self._messages += self._as_messages(messages if messages is not None else str(text), "reset")
        self._num_prompt_messages = len(self._messages)
        tools = self._tools = self._task.tools if observation.tools is None else observation.tools
        with _guarded():
            if text is None:
                self._tokenizer.require_tools_shown(self._messages, tools)
            transcript = Transcript(
                self._tokenizer, self._messages if text is None else text, tools,
                observed=observation.text is not None,
            )  # fmt: skip
        if self._room(transcript) < 1:
            raise _EpisodeError(
                f"the prompt has {len(transcript)} tokens and at most {self._limits.max_length} fit, which leaves no "
                "room for an answer."
            )
        return transcript

    async def _answered(self, transcript: Transcript, number: int) -> TurnAnswer:
        request = TurnRequest(
            id=self._id,
            turn=number,
            prompt=transcript.tokens_T,
            max_new_tokens=min(self._limits.max_new_tokens, self._room(transcript)),
            greedy=self._greedy,
        )
        answer = await self._policy.answer(request)
        if len(answer.tokens_L) > 0:  # also of a truncated answer: sampled tokens are not discarded
            stopped = answer.finish == "stop"
            with _guarded():
                transcript.add_answer(
                    answer.tokens_L, answer.logprobs_L, answer.versions_L, stopped=stopped, experts=answer.experts
                )
        if answer.finish in ("error", "cancelled"):
            why = f": {answer.error}" if answer.error else "."
            raise _UnansweredError(f"the engine did not finish the answer of turn {number} ({answer.finish}){why}")
        if len(answer.tokens_L) == 0:
            raise _UnansweredError(f"the engine answered turn {number} with no token.")
        return answer

    async def _stepped(self, answer: TurnAnswer, number: int) -> _Checked:
        text = self._tokenizer.text_of(answer.tokens_L)
        self._messages.append({"role": "assistant", "content": text})
        turn = Turn(
            number=number,
            text=text,
            calls=self._tokenizer.calls_of(answer.tokens_L, stopped=answer.finish == "stop", tools=self._tools),
            finish="length" if answer.finish == "length" else "stop",
        )
        outcome = self._checked(await self._call("step", turn), last=number + 1 == self._limits.max_turns)
        self._messages += outcome.messages
        self._rewards.append(outcome.reward)
        self._warnings += outcome.warnings
        for name, value in outcome.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value
        return outcome

    def _checked(self, outcome: Any, *, last: bool) -> _Checked:
        step = self._named("step")
        if not isinstance(outcome, Outcome):
            raise _EpisodeError(f"{step} returned {type_phrase(outcome)}; it returns an Outcome.")
        messages = self._as_messages(outcome.messages, "step") if outcome.messages else []
        if not messages and not outcome.done and not last:
            raise _EpisodeError(f"{step} returned no messages and is not done, so the model has nothing to answer.")
        try:
            reward = float(outcome.reward)
            metrics = {str(name): float(value) for name, value in outcome.metrics.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise _EpisodeError(f"{step} returned a reward or metrics that are not numbers ({error}).") from error
        if not math.isfinite(reward):
            raise _EpisodeError(f"{step} returned the reward {reward}; it must be a finite number.")
        warnings = tuple(str(text) for text in outcome.warnings)
        return _Checked(messages=messages, reward=reward, done=bool(outcome.done), metrics=metrics, warnings=warnings)

    def _as_messages(self, said: Sequence[Message] | str, method: str) -> list[Message]:
        if isinstance(said, str):
            return [{"role": "user", "content": said}]
        try:
            return parse_messages(list(said), "messages", Row({}, method))
        except (DataError, TypeError) as error:
            raise _EpisodeError(f"{self._named(method)} returned messages that are none: {error}") from error

    def _named(self, method: str) -> str:
        """The method, with file and line of its definition."""
        if isinstance(self._environment, BoundedEnvironment):
            place = self._environment.places.get(method)
            return f"{method} ({place})" if place else method
        return with_place(method, getattr(self._environment, method))

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the environment; an exception or a timeout ends the episode."""
        called = getattr(self._environment, method)
        try:
            if isinstance(self._environment, BoundedEnvironment):
                return await called(*arguments)
            timeout_s = self._step_timeout_s if method == "step" else self._limits.timeout_s
            return await call_within(timeout_s, called, *arguments)
        except EpisodeLostError:
            raise
        except CallFailedError as error:
            raise _EpisodeError(f"{method}: {error}") from error
        except Exception as error:  # the environment is the user's code
            raise _EpisodeError(f"{method}: {exception_text(error)}") from error

    def _room(self, transcript: Transcript) -> int:
        return self._limits.room(transcript.num_prompt_tokens, len(transcript))


async def run_job(
    make: MakeEnvironment, policy: Policy, tokenizer: TurnTokenizer, id: TrajectoryId, task: Task, *,
    limits: EpisodeLimits, greedy: bool,
) -> Episode:  # fmt: skip
    """Plays one episode in an environment of its own, again from its beginning if its process is lost."""
    try:
        environment = make()
    except Exception as error:  # the environment is the user's code
        failed = _Running(SingleTurn(), task, policy, tokenizer, id=id, limits=limits, greedy=greedy)
        return failed.over("error", f"the environment cannot be made: {exception_text(error)}")
    replay = ReplayPolicy(policy)
    while True:  # the maker of environments bounds how often one is lost
        try:
            return await run_episode(environment, task, replay, tokenizer, id=id, limits=limits, greedy=greedy)
        except EpisodeLostError as lost:
            environment = lost.again()


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
