# SPDX-License-Identifier: Apache-2.0
"""The record of one episode: a tree of turns, each with the tokens that were sampled. Pure: it waits for nothing.

A request whose history extends a recorded one continues its exact tokens. Any other history begins a new root, or a new
branch behind the longest recorded history that it shares. A request that is made again is recognised."""

# T tokens of a prompt · L tokens of one answer

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from podium.data.documents import Tokens
from podium.data.kinds import Message
from podium.data.masks import ChatTemplateError, Tools
from podium.errors import InvariantError
from podium.gateway.branches import Branch, SessionRecord, branches_of
from podium.gateway.history import answer_keys, history_keys, likeness
from podium.gateway.raw_prompts import PrefixIndex, RawPrompt, text_bytes, token_bytes
from podium.gateway.refusal import RequestRefusedError

# Clients retry a request a few times. An agent that asks until it likes the answer would never end.
_MOST_REPEATS = 32


class HasTokens(Protocol):
    """The tokens of a conversation so far."""

    @property
    def tokens_T(self) -> Tokens:
        """All of them."""

    def __len__(self) -> int:
        """How many there are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConversationPrompt:
    """The tokens before an answer, and what their renderer needs to continue behind it: `state` gives all tokens as
    `tokens_T`, and shares them with the prompts that continue it."""

    state: HasTokens

    @property
    def tokens_T(self) -> Tokens:
        """All tokens before the answer, as a new array."""
        return self.state.tokens_T

    def __len__(self) -> int:
        return len(self.state)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledAnswer:
    """The tokens of one answer exactly as they were sampled; `stopped` if it ended at a stop token."""

    tokens_L: Tokens
    logprobs_L: NDArray[np.float32]
    versions_L: Tokens
    stopped: bool


class ConversationTokens(Protocol):
    """Turns messages into tokens."""

    def begin(self, messages: Sequence[Message], tools: Tools) -> ConversationPrompt:
        """The prompt of a new conversation."""

    def extend(
        self, prompt: ConversationPrompt, answer: SampledAnswer, messages: Sequence[Message]
    ) -> ConversationPrompt:
        """The prompt that follows an answer: the same tokens, those of the answer, and those of `messages`. Raises a
        ChatTemplateError if the template cannot continue a conversation."""

    def begin_raw(self, given: RawPrompt) -> ConversationPrompt:
        """The prompt of raw text or token ids."""

    def extend_raw(self, prompt: ConversationPrompt, answer: SampledAnswer, rest: RawPrompt) -> ConversationPrompt:
        """The prompt that follows an answer: the same tokens, those of the answer, and those of `rest`."""

    def text(self, tokens: Sequence[int]) -> str:
        """Text of an answer without special tokens."""


@dataclass(slots=True, kw_only=True, eq=False)
class RecordedTurn:
    """One answer in the tree. `message` is what the client got."""

    number: int
    parent: RecordedTurn | None
    prompt: ConversationPrompt
    answer: SampledAnswer
    message: Message
    is_task: bool = False  # as of its request; of several choices the first
    children: list[RecordedTurn] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class OpenedTurn:
    """A request that is under way or answered. Its prompt holds the exact tokens of `parent`, if it has one."""

    number: int
    parent: RecordedTurn | None
    prompt: ConversationPrompt
    key: bytes | None  # of its history; None: the prompt is no chat
    text: str | None = None  # of the prompt, if it is raw text
    content: bytes
    idempotency_key: str | None
    num_turns_before: int  # that were recorded when it was opened
    is_task: bool = False  # the task's own prompt, or answers to it and results of tools
    repeats: int = 0  # how often it was made again
    turns: tuple[RecordedTurn, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether another request with the same content means this one: it is under way, or nothing has followed."""
        return not any(turn.children for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedTurn:
    """A request that was made before, as the number of that one."""

    number: int


class Recorder:
    """One episode. `open` a request, then `answer` or `abandon` it; `record` gives what was sampled, as branches."""

    def __init__(self, tokens: ConversationTokens, task: Sequence[Message] | None = None) -> None:
        """`task`: the messages that the episode's environment would begin with."""
        self._tokens, self._task = tokens, task
        self._opened: dict[int, OpenedTurn] = {}
        self._by_history: dict[bytes, list[RecordedTurn]] = {}
        self._by_text: PrefixIndex[RecordedTurn] = PrefixIndex()
        self._by_tokens: PrefixIndex[RecordedTurn] = PrefixIndex()
        self._by_content: dict[bytes, int] = {}
        self._by_idempotency_key: dict[str, int] = {}
        self._by_id: dict[str, list[int]] = {}
        self._roots: list[RecordedTurn] = []
        self._last_turns_from = 0
        self._turns = self._requests = self._sampled = self._discarded = self._repeats = self._rerendered = 0

    def open(
        self, messages: Sequence[Message], tools: Tools, *, content: bytes, idempotency_key: str | None = None,
        id: str = "",
    ) -> OpenedTurn | RepeatedTurn:  # fmt: skip
        """Takes a request. `content`: everything that the answer depends on, also sampling; equal contents are the same
        request until something follows its answer. An idempotency key says that explicitly, for good. `id`: of the
        response; a repeated request has several."""
        repeated = self._repeated_turn(content, idempotency_key, id)
        if repeated is not None:
            return repeated
        keys = history_keys(messages, tools)
        parent, prompt = self._continued(messages, keys)
        if prompt is None:
            prompt = self._tokens.begin(messages, tools)
        if parent is not None:
            is_task = parent.is_task and _only_results(messages)
        else:
            is_task = self._task is not None and history_keys(self._task, tools)[-1] == keys[-1]
        return self._new(parent, prompt, content, idempotency_key, id, key=keys[-1], is_task=is_task)

    def open_raw(
        self, given: RawPrompt, *, content: bytes, idempotency_key: str | None = None, id: str = ""
    ) -> OpenedTurn | RepeatedTurn:
        """Takes a request to continue raw text or token ids. Token ids that extend a recorded sequence, and text that
        extends that of a recorded prompt and its answer, continue the exact tokens. Anything else begins anew."""
        repeated = self._repeated_turn(content, idempotency_key, id)
        if repeated is not None:
            return repeated
        parent, prompt = self._continued_raw(given)
        if prompt is None:
            prompt = self._tokens.begin_raw(given)
        text = given if isinstance(given, str) else None
        return self._new(parent, prompt, content, idempotency_key, id, text=text)

    def _new(
        self, parent: RecordedTurn | None, prompt: ConversationPrompt, content: bytes, idempotency_key: str | None,
        id: str, *, key: bytes | None = None, text: str | None = None, is_task: bool = False,
    ) -> OpenedTurn:  # fmt: skip
        opened = OpenedTurn(
            number=self._requests,
            parent=parent,
            prompt=prompt,
            key=key,
            text=text,
            content=content,
            idempotency_key=idempotency_key,
            num_turns_before=self._turns,
            is_task=is_task,
        )
        self._requests += 1
        self._opened[opened.number] = opened
        self._by_id.setdefault(id, []).append(opened.number)
        self._by_content[content] = opened.number
        if idempotency_key is not None:
            self._by_idempotency_key[idempotency_key] = opened.number
        return opened

    def answer(self, number: int, answers: Sequence[tuple[SampledAnswer, Message]]) -> tuple[RecordedTurn, ...]:
        """Records what was sampled for a request, and the messages that its client gets."""
        opened = self._opened[number]
        assert not opened.turns, "a request is answered once"
        self._last_turns_from = max(self._last_turns_from, opened.num_turns_before)
        for sampled, message in answers:
            turn = RecordedTurn(
                number=self._turns,
                parent=opened.parent,
                prompt=opened.prompt,
                answer=sampled,
                message=message,
                is_task=opened.is_task and not opened.turns,
            )
            (self._roots if turn.parent is None else turn.parent.children).append(turn)
            for key in answer_keys(opened.key, message) if opened.key is not None else ():
                self._by_history.setdefault(key, []).append(turn)
            if opened.text is not None:  # also what a stop string has cut off, which clients may write again
                text = opened.text + self._tokens.text(sampled.tokens_L.tolist())
                self._by_text.add(text_bytes(text), turn)
            self._by_tokens.add(token_bytes(opened.prompt.tokens_T) + token_bytes(sampled.tokens_L), turn)
            self._turns += 1
            self._sampled += len(sampled.tokens_L)
            opened.turns += (turn,)
        return opened.turns

    def abandon(self, number: int, *, sampled_tokens: int = 0) -> None:
        """Forgets a request that got no answer; its client has seen nothing of it. `sampled_tokens`: discarded."""
        self.stop_repeats(number)
        del self._opened[number]
        self._discarded += sampled_tokens

    def stop_repeats(self, number: int) -> None:
        """From now on the same request is a new one: this one is being cancelled."""
        opened = self._opened[number]
        if self._by_content.get(opened.content) == number:
            del self._by_content[opened.content]
        key = opened.idempotency_key
        if key is not None and self._by_idempotency_key.get(key) == number:
            del self._by_idempotency_key[key]

    def opened(self, number: int) -> OpenedTurn:
        """The request of this number."""
        return self._opened[number]

    def record(self) -> SessionRecord:
        """Everything that was sampled, as branches. Counts that trained and sampled tokens are the same."""
        branches: tuple[Branch, ...] = branches_of(self._roots)
        answered = {
            number: tuple(turn.number for turn in opened.turns)
            for number, opened in sorted(self._opened.items())
            if opened.turns
        }
        return SessionRecord(
            branches=branches,
            sampled_tokens=self._sampled,
            discarded_tokens=self._discarded,
            turns=self._turns,
            last_turns_from=self._last_turns_from,
            requests=self._requests,
            repeated_requests=self._repeats,
            rerendered_requests=self._rerendered,
            answered=tuple(answered.values()),
            turns_by_id={
                id: tuple(turn for number in numbers for turn in answered.get(number, ()))
                for id, numbers in self._by_id.items()
                if any(number in answered for number in numbers)
            },
        ).counted()

    def _repeated_turn(self, content: bytes, idempotency_key: str | None, id: str) -> RepeatedTurn | None:
        number = self._repeated(content, idempotency_key)
        if number is None:
            return None
        self._note_repeat(self._opened[number])
        self._by_id.setdefault(id, []).append(number)
        return RepeatedTurn(number=number)

    def _continued_raw(self, given: RawPrompt) -> tuple[RecordedTurn | None, ConversationPrompt | None]:
        """The turn whose prompt and answer are the longest beginning of what is given, and the prompt behind it."""
        rest: RawPrompt
        if isinstance(given, str):
            data = text_bytes(given)
            found = self._by_text.longest(data)
            rest = "" if found is None else data[found[1] :].decode("utf-8", "surrogatepass")
        else:
            data = token_bytes(given)
            found = self._by_tokens.longest(data)
            rest = given[:0] if found is None else given[found[1] // np.dtype(np.int32).itemsize :]
        if found is None:
            return None, None
        turn = found[0]
        prompt = self._tokens.extend_raw(turn.prompt, turn.answer, rest)
        _require_continued(turn, prompt)
        return turn, prompt

    def _note_repeat(self, opened: OpenedTurn) -> None:
        """Counts it. Refuses an agent that waits for another answer to the same request."""
        if opened.repeats >= _MOST_REPEATS:
            raise RequestRefusedError(
                400,
                f"this request was made {_MOST_REPEATS + 1} times, and the same request has the same answer. For "
                "another answer, give each request its own `seed`, or ask for several with `n`.",
                code="repeated_request",
            )
        opened.repeats += 1
        self._repeats += 1

    def _repeated(self, content: bytes, idempotency_key: str | None) -> int | None:
        if idempotency_key is not None:
            number = self._by_idempotency_key.get(idempotency_key)
            if number is not None and self._opened[number].content != content:
                raise RequestRefusedError(
                    409,
                    "this idempotency key was sent with another request of the session. Give every request its own.",
                    code="idempotency_key_reused",
                )
            return number
        number = self._by_content.get(content)
        if number is None or not self._opened[number].is_open:
            return None
        return number

    def _continued(
        self, messages: Sequence[Message], keys: Sequence[bytes]
    ) -> tuple[RecordedTurn | None, ConversationPrompt | None]:
        """The turn with the longest history that these messages extend, and the prompt behind it."""
        for count in range(len(messages) - 1, 0, -1):
            turns = self._by_history.get(keys[count])
            if not turns:
                continue
            turn = max(turns, key=lambda turn: (likeness(messages[count - 1], turn.message), turn.number))
            try:
                prompt = self._tokens.extend(turn.prompt, turn.answer, messages[count:])
            except ChatTemplateError:
                self._rerendered += 1  # the template rewrites earlier turns: these are other tokens
                return None, None
            _require_continued(turn, prompt)
            return turn, prompt
        return None, None


def _only_results(messages: Sequence[Message]) -> bool:
    """Whether only results of tools stand behind the last answer."""
    behind = list(takewhile(lambda message: message["role"] != "assistant", reversed(messages)))
    return all(message["role"] == "tool" for message in behind)


def _require_continued(turn: RecordedTurn, prompt: ConversationPrompt) -> None:
    before, tokens_T = np.concatenate([turn.prompt.tokens_T, turn.answer.tokens_L]), prompt.tokens_T
    if len(tokens_T) < len(before) or not np.array_equal(tokens_T[: len(before)], before):
        raise InvariantError(
            f"the prompt behind turn {turn.number} does not begin with its {len(before)} recorded tokens."
        )
