# SPDX-License-Identifier: Apache-2.0
"""Answers chats with a backend, with or without a record. Independent of HTTP and of any client's format."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from podium.data.documents import Tokens
from podium.data.kinds import Message
from podium.data.masks import ChatTemplateError, Tools
from podium.data.tokenizer import parted_stops
from podium.errors import DataError
from podium.gateway.backend import Generation, GenerationRequest, OnTokens, TokenBackend
from podium.gateway.branches import SessionRecord
from podium.gateway.conversation import Conversations
from podium.gateway.raw_prompts import RawPrompt
from podium.gateway.recorder import OpenedTurn, Recorder, RepeatedTurn, SampledAnswer
from podium.gateway.refusal import RequestRefusedError
from podium.gateway.shown_text import OnText, ShownText
from podium.gateway.version_gate import VersionGate
from podium.rollout.requests import Completion, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWish:
    """What a client says of sampling. None: as the server has it."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatCall:
    """One request for the next message of a chat. `content`: all that the answer depends on, to recognise repeats."""

    messages: tuple[Message, ...]
    tools: Tools
    wish: SamplingWish
    content: bytes
    idempotency_key: str | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    """Of the response. Clients get it behind `chatcmpl-`, `msg_` or `resp_`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawCall:
    """One request to continue raw text or token ids."""

    given: RawPrompt
    wish: SamplingWish
    content: bytes
    idempotency_key: str | None = None
    id: str

    @property
    def tools(self) -> Tools:
        """Raw text has no tools."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatChoice:
    """One answer: its message, and its tokens as they were sampled. `completion` is without its prompt."""

    message: Message
    answer: SampledAnswer
    completion: Completion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatAnswer:
    """The answers to a request."""

    choices: tuple[ChatChoice, ...]
    prompt_tokens: int
    version: str | None = None  # of the weights that sampled it, where they have a name
    collect: Callable[[], object] = lambda: None
    """To call when the client gets the answer: a session records it only then."""

    @property
    def completion_tokens(self) -> int:
        """Sampled tokens of all choices."""
        return sum(choice.completion.num_tokens for choice in self.choices)

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that needed no computation."""
        return max((choice.completion.reused_tokens for choice in self.choices), default=0)


class ModelService:
    """A model with its tokenizer and a backend. Used from one event loop."""

    def __init__(
        self,
        name: str,
        conversations: Conversations,
        backend: TokenBackend,
        *,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """`stop_tokens`: that end every answer."""
        self.name, self.conversations, self.backend = name, conversations, backend
        self.gate = VersionGate()
        size = backend.capacity.vocab_size
        self._stop_tokens = frozenset(token for token in stop_tokens if token < size)

    async def chat(self, call: ChatCall, on_text: OnText | None = None) -> ChatAnswer:
        """Answers without a record: the history is rendered as it is. Ends generation if this is cancelled."""
        prompt = readable(lambda: self.conversations.begin(call.messages, call.tools)).tokens_T
        seed = secrets.randbits(62) if call.wish.seed is None else call.wish.seed
        sampling = self.sampling(call.wish, len(prompt))
        async with self.gate.use() as version:
            flight = Flight(self, prompt, call, sampling, seed, on_text)
            try:
                return replace(flight.answer(await flight.completions()), version=version)
            except asyncio.CancelledError:
                flight.cancel()
                raise

    def sampling(self, wish: SamplingWish, prompt_tokens: int, base: Sampling | None = None) -> Sampling:
        """What the engine gets. `base`: of a session, whose distribution clients cannot change."""
        capacity = self.backend.capacity
        room = capacity.max_length - prompt_tokens
        if room < 1:
            raise RequestRefusedError(
                400,
                f"the prompt has {prompt_tokens} tokens and the context {capacity.max_length}, which leaves no room "
                "for an answer. Shorten the messages, or serve with a larger --max-length.",
                param="messages",
                code="context_length_exceeded",
            )
        limits = (room, wish.max_tokens, None if base is None else base.max_new_tokens)
        most = min(limit for limit in limits if limit is not None)
        named, strings = parted_stops(self.conversations.tokenizer, wish.stop)
        stops = self._stop_tokens | frozenset(token for token in named if token < capacity.vocab_size)
        if base is None:
            base = Sampling(
                max_new_tokens=most,
                temperature=1.0 if wish.temperature is None else wish.temperature,
                top_p=1.0 if wish.top_p is None else wish.top_p,
                top_k=max(wish.top_k or 0, 0),
                min_p=wish.min_p or 0.0,
                repetition_penalty=1.0 if wish.repetition_penalty is None else wish.repetition_penalty,
                logit_bias=dict(wish.logit_bias),
            )
        sampling = replace(
            base,
            max_new_tokens=most,
            stop_tokens=base.stop_tokens | stops,
            stop_strings=(*base.stop_strings, *strings),
        )
        problems = list(sampling.problems(capacity.vocab_size))
        if problems:
            raise RequestRefusedError(400, " ".join(problems))
        return sampling


class Flight:
    """The generations of one request, of one prompt."""

    def __init__(
        self, service: ModelService, prompt_T: Tokens, call: ChatCall | RawCall, sampling: Sampling, seed: int,
        on_text: OnText | None,
    ) -> None:  # fmt: skip
        self._service, self._prompt_T, self._tools = service, prompt_T, call.tools
        self._is_chat = isinstance(call, ChatCall)
        on_tokens: OnTokens | None = None
        if on_text is not None and call.wish.n == 1 and not call.tools:
            chat_T = prompt_T if self._is_chat else None
            on_tokens = ShownText(service.conversations, sampling.stop_strings, on_text, chat_T)
        self._generations: list[Generation] = [
            service.backend.submit(
                GenerationRequest(prompt=prompt_T, sampling=sampling, seed=seed, sample=sample), on_tokens
            )
            for sample in range(call.wish.n)
        ]

    async def completions(self) -> list[Completion]:
        """Waits until all generations have ended, also those that were cancelled."""
        return list(await asyncio.gather(*(asyncio.shield(each.completion) for each in self._generations)))

    def cancel(self) -> None:
        """Ends the generations with what they have sampled."""
        for generation in self._generations:
            generation.cancel()

    def answer(self, completions: Sequence[Completion]) -> ChatAnswer:
        """The messages of finished generations."""
        choices = []
        for completion in completions:
            if completion.finish == "error":
                raise RequestRefusedError(500, completion.error or "the engine cannot answer this request.")
            if completion.finish == "cancelled":
                raise RequestRefusedError(503, "the request was cancelled.")
            answer = SampledAnswer(
                tokens_L=completion.tokens_L,
                logprobs_L=completion.logprobs_L,
                versions_L=completion.versions_L,
                stopped=completion.finish == "stop" and not isinstance(completion.stop, str),
            )
            message = self._message(answer, completion)
            alone = replace(completion, prompt=completion.prompt[:0].copy())
            choices.append(ChatChoice(message=message, answer=answer, completion=alone))
        return ChatAnswer(choices=tuple(choices), prompt_tokens=len(self._prompt_T))

    def _message(self, answer: SampledAnswer, completion: Completion) -> Message:
        conversations = self._service.conversations
        if self._is_chat:
            return conversations.message(self._prompt_T, answer, self._tools, stop=completion.stop)
        return {"role": "assistant", "content": conversations.text(answer.tokens_L.tolist(), stop=completion.stop)}

    def release(self) -> None:
        """Frees what was only needed until the answer: a session keeps its requests, and their prompts would add up
        to the square of its length."""
        self._generations, self._prompt_T = [], self._prompt_T[:0].copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How a session samples. `sampling`: the distribution and the longest answer; clients choose only fewer tokens and
    further stops. None: as clients ask. `seed`: of all answers; a client's seed changes it and does not replace it.
    `grace_s`: how long an answer is still sampled after its last client has left, for one that asks again. `task`: the
    messages of the episode's task; asked for the first time, and continued by results of tools only, they have
    `task_seed`, as in an environment that asks the same."""

    sampling: Sampling | None = None
    seed: int = 0
    task: tuple[Message, ...] | None = None
    task_seed: int = 0
    grace_s: float = 60.0
    max_requests: int = 10_000


class ChatSession:
    """One episode: its recorder, and the requests that are under way."""

    def __init__(self, service: ModelService, settings: SessionSettings | None = None) -> None:
        self._service, self.settings = service, settings or SessionSettings()
        self._recorder = Recorder(service.conversations, self.settings.task)
        self._running: dict[int, _Running] = {}
        self._prompts: Counter[bytes] = Counter()
        self._closed = False

    async def chat(self, call: ChatCall, on_text: OnText | None = None) -> ChatAnswer:
        """Answers; `collect` of the answer records it. A repeated request waits for the same answer. When the last
        client has left, generation goes on for `grace_s`, so that a client with a short timeout finds its answer when
        it asks again. An answer that nobody collects is discarded and counted."""
        number = self._opened(
            call,
            on_text,
            lambda: self._recorder.open(
                call.messages, call.tools, content=call.content, idempotency_key=call.idempotency_key, id=call.id
            ),
        )
        return await self._answered(number)

    async def complete(self, call: RawCall, on_text: OnText | None = None) -> tuple[Tokens, ChatAnswer]:
        """Continues raw text or token ids, recorded like a chat. Returns the exact prompt too."""
        number = self._opened(
            call,
            on_text,
            lambda: self._recorder.open_raw(
                call.given, content=call.content, idempotency_key=call.idempotency_key, id=call.id
            ),
        )
        prompt_T = self._recorder.opened(number).prompt.tokens_T
        return prompt_T, await self._answered(number)

    @property
    def service(self) -> ModelService:
        """What answers."""
        return self._service

    def _opened(
        self, call: ChatCall | RawCall, on_text: OnText | None, open: Callable[[], OpenedTurn | RepeatedTurn]
    ) -> int:
        if self._closed:
            raise RequestRefusedError(410, "this session is closed.")
        opened: OpenedTurn | RepeatedTurn = readable(open)
        if isinstance(opened, OpenedTurn):
            self._begin(opened, call, on_text)
        return opened.number

    async def _answered(self, number: int) -> ChatAnswer:
        running = self._running[number]
        running.waiting += 1
        if running.leaving is not None:
            running.leaving.cancel()
            running.leaving = None
        try:
            answer = await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if running.waiting == 0 and not running.task.done() and not self._closed:
                running.leaving = asyncio.get_running_loop().call_later(self.settings.grace_s, self._drop, number)
        return replace(answer, collect=lambda: self._collect(number))

    async def close(self) -> SessionRecord:
        """Ends what is under way, and returns everything that was sampled and collected."""
        self._closed = True
        for each in self._running.values():
            if each.leaving is not None:
                each.leaving.cancel()
            if not each.task.done():
                each.flight.cancel()
        await asyncio.gather(*(each.task for each in self._running.values()), return_exceptions=True)
        for number, each in self._running.items():
            self._discard(number, each)
        return self._recorder.record()

    def record(self) -> SessionRecord:
        """Everything that was sampled and collected so far."""
        return self._recorder.record()

    def _begin(self, opened: OpenedTurn, call: ChatCall | RawCall, on_text: OnText | None) -> None:
        try:
            if opened.number >= self.settings.max_requests:
                raise RequestRefusedError(429, f"the session has had its {self.settings.max_requests} requests.")
            prompt_T = opened.prompt.tokens_T
            sampling = self._service.sampling(call.wish, len(prompt_T), self.settings.sampling)
            flight = Flight(self._service, prompt_T, call, sampling, self._seed(opened, prompt_T, call), on_text)
        except BaseException:
            self._recorder.abandon(opened.number)
            raise
        task = asyncio.get_running_loop().create_task(self._finish(opened.number, flight))
        task.add_done_callback(_retrieved)
        self._running[opened.number] = _Running(flight, task)

    async def _finish(self, number: int, flight: Flight) -> ChatAnswer:
        try:
            completions = await flight.completions()
        except BaseException:
            self._recorder.abandon(number)
            raise
        try:
            return flight.answer(completions)
        except BaseException:
            self._recorder.abandon(number, sampled_tokens=sum(each.num_tokens for each in completions))
            raise
        finally:
            flight.release()

    def _collect(self, number: int) -> None:
        """A client gets the answer, so it is recorded, once. A closed session has counted it as discarded."""
        running = self._running[number]
        if running.is_settled:
            return
        running.is_settled = True
        self._recorder.answer(number, [(choice.answer, choice.message) for choice in running.task.result().choices])

    def _drop(self, number: int) -> None:
        """Nobody has asked again in time: from now on the same request is a new one."""
        running = self._running[number]
        running.leaving = None
        if running.waiting or running.task.done():
            return
        running.flight.cancel()
        self._recorder.stop_repeats(number)
        # The engine may have finished just now. No client can ask for that answer any more.
        running.task.add_done_callback(lambda task: self._discard(number, running))

    def _discard(self, number: int, running: _Running) -> None:
        """Forgets an answer that no client has got. One that ended with an error is forgotten already."""
        if running.is_settled or running.task.cancelled() or running.task.exception() is not None:
            return
        running.is_settled = True
        self._recorder.abandon(number, sampled_tokens=running.task.result().completion_tokens)

    def _seed(self, opened: OpenedTurn, prompt_T: Tokens, call: ChatCall | RawCall) -> int:
        """Of the session, and of the client's seed. Without one, of the prompt and how often it was asked, so that it
        does not depend on the order of concurrent requests; of the task's own prompt, that of its environment."""
        digest = hashlib.sha256(prompt_T.tobytes()).digest()
        if call.wish.seed is not None:
            text = b"%d seed %d " % (self.settings.seed, call.wish.seed)
        else:
            self._prompts[digest] += 1
            if opened.is_task and self._prompts[digest] == 1:
                return self.settings.task_seed
            text = b"%d %d " % (self.settings.seed, self._prompts[digest])
        return int.from_bytes(hashlib.sha256(text + digest).digest()[:8], sys.byteorder) >> 2


@dataclass(slots=True, eq=False)
class _Running:
    flight: Flight
    task: asyncio.Task[ChatAnswer]
    waiting: int = 0
    leaving: asyncio.TimerHandle | None = None  # the last client has left, and its time to ask again runs
    is_settled: bool = False  # recorded or discarded


def readable(render: Callable[[], Any]) -> Any:
    """Renders a request. What the template or the tokenizer refuses is the client's error."""
    try:
        return render()
    except (ChatTemplateError, DataError) as error:
        raise RequestRefusedError(400, f"the messages cannot be rendered: {error}", param="messages") from error
    except (TypeError, UnicodeError) as error:
        raise RequestRefusedError(400, f"the tokenizer cannot read the messages: {error}", param="messages") from error


def _retrieved(task: asyncio.Task[ChatAnswer]) -> None:
    """Every client that waits gets the exception. If all have left, it is not reported."""
    if not task.cancelled():
        task.exception()
