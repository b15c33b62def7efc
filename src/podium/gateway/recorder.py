# SPDX-License-Identifier: Apache-2.0
"""The record of one episode: a tree of turns, each with the tokens that were sampled. Pure: it waits for nothing.

A request whose history extends a recorded one continues its exact tokens. Any other history begins a new root, or a new
branch behind the longest recorded history that it shares. A request that is made again is recognised."""

# T tokens of a prompt · L tokens of one answer

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from podium.data.documents import Tokens
from podium.data.kinds import Message
from podium.data.masks import ChatTemplateError, Tools
from podium.errors import InvariantError
from podium.gateway.branches import Branch, SessionRecord, branches_of
from podium.gateway.history import answer_keys, history_keys, likeness
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


@dataclass(slots=True, kw_only=True, eq=False)
class RecordedTurn:
    """One answer in the tree. `message` is what the client got."""

    number: int
    parent: RecordedTurn | None
    prompt: ConversationPrompt
    answer: SampledAnswer
    message: Message
    children: list[RecordedTurn] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class OpenedTurn:
    """A request that is under way or answered. Its prompt holds the exact tokens of `parent`, if it has one."""

    number: int
    parent: RecordedTurn | None
    prompt: ConversationPrompt
    key: bytes  # of its history
    content: bytes
    idempotency_key: str | None
    num_turns_before: int  # that were recorded when it was opened
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

    def __init__(self, tokens: ConversationTokens) -> None:
        self._tokens = tokens
        self._opened: dict[int, OpenedTurn] = {}
        self._by_history: dict[bytes, list[RecordedTurn]] = {}
        self._by_content: dict[bytes, int] = {}
        self._by_idempotency_key: dict[str, int] = {}
        self._by_id: dict[str, int] = {}
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
        repeated = self._repeated(content, idempotency_key)
        if repeated is not None:
            self._note_repeat(self._opened[repeated])
            self._by_id[id] = repeated
            return RepeatedTurn(number=repeated)
        keys = history_keys(messages, tools)
        parent, prompt = self._continued(messages, keys)
        if prompt is None:
            prompt = self._tokens.begin(messages, tools)
        opened = OpenedTurn(
            number=self._requests,
            parent=parent,
            prompt=prompt,
            key=keys[-1],
            content=content,
            idempotency_key=idempotency_key,
            num_turns_before=self._turns,
        )
        self._requests += 1
        self._opened[opened.number] = opened
        self._by_id[id] = opened.number
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
                number=self._turns, parent=opened.parent, prompt=opened.prompt, answer=sampled, message=message
            )
            (self._roots if turn.parent is None else turn.parent.children).append(turn)
            for key in answer_keys(opened.key, message):
                self._by_history.setdefault(key, []).append(turn)
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
            turns_by_id={id: answered[number] for id, number in self._by_id.items() if number in answered},
        ).counted()

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


def _require_continued(turn: RecordedTurn, prompt: ConversationPrompt) -> None:
    before, tokens_T = np.concatenate([turn.prompt.tokens_T, turn.answer.tokens_L]), prompt.tokens_T
    if len(tokens_T) <= len(before) or not np.array_equal(tokens_T[: len(before)], before):
        raise InvariantError(
            f"the prompt behind turn {turn.number} does not begin with its {len(before)} recorded tokens."
        )
