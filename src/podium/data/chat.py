# SPDX-License-Identifier: Apache-2.0
"""Turns rows into documents: tokenized, with trained tokens marked, truncated to the longest allowed length."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from podium.data.chat_text import message_text
from podium.data.control_tokens import AS_TEXT, ControlRule
from podium.data.documents import Document, Mask, Tokens
from podium.data.kinds import (
    MapFunction,
    Message,
    kind_of,
    named_values,
    parse_messages,
    parse_prompt_completion,
    parse_text,
    parse_tools,
)
from podium.data.masks import ChatRenderer, ChatTemplateError, MarkedChat, Tools, template_error
from podium.data.rows import Row
from podium.data.tokenizer import answer_text
from podium.errors import BadRowError, DataError
from podium.recipe import plugins
from podium.recipe.schema import SourceSection

Trained = Literal["assistant", "last_turn", "everything"]
Overlong = Literal["truncate", "drop", "error"]

_NO_COLUMNS: Mapping[str, str] = {}
_PromptParts = tuple[list[int], str, tuple[Message, ...] | None]
"""The prompt's tokens, the answer's text, and the messages before it."""


class Dropped(enum.Enum):
    """Why a row gave no document."""

    OVERLONG = "longer than data.max_length"
    NO_ANSWER = "no assistant turn to train on"
    UNTRAINED = "no trained token"
    BY_MAP = "dropped by the source's map"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Made:
    """The document of a row, and whether it was truncated."""

    document: Document
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """The prompt that generation starts from, the answer in the data, and the row (after `columns` and `map`)."""

    tokens: Tokens
    reference: str
    values: Mapping[str, Any]
    messages: tuple[Message, ...] | None = None  # of a chat: those before the answer


class DocumentMaker:
    """Turns rows into documents and prompts with one tokenizer. Not shared between threads: tokenizers are not
    thread-safe."""

    def __init__(
        self, tokenizer: Any, trained: Trained, max_length: int, overlong: Overlong, rule: ControlRule = AS_TEXT
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer, rule)
        self._trained = trained
        self._max_length = max_length
        self._overlong = overlong

    def make(
        self, row: Row, columns: Mapping[str, str] = _NO_COLUMNS, map: MapFunction | None = None
    ) -> Made | Dropped:
        """The row's document, or why there is none. An invalid row raises a BadRowError that names it."""
        values = named_values(row, columns, map)
        return Dropped.BY_MAP if values is None else self.document(values, columns, row)

    def document(self, values: Mapping[str, Any], columns: Mapping[str, str], row: Row) -> Made | Dropped:
        """Like `make`, for values after renaming."""
        try:
            marked = self._marked(values, columns, row)
        except ChatTemplateError as error:
            raise template_error(row, error) from error
        except (TypeError, UnicodeError) as error:
            raise unreadable(row, error) from error
        return Dropped.NO_ANSWER if marked is None else self._finished(marked, row)

    def prompt_of(
        self, row: Row, columns: Mapping[str, str] = _NO_COLUMNS, map: MapFunction | None = None
    ) -> Prompt | None:
        """The prompt before the row's last answer; None for raw text, a chat without answer, or a dropped row."""
        values = named_values(row, columns, map)
        return None if values is None else self.prompt(values, columns, row)

    def prompt(self, values: Mapping[str, Any], columns: Mapping[str, str], row: Row) -> Prompt | None:
        """Like `prompt_of`, for values after renaming."""
        try:
            parts = self._prompt(values, columns, row)
        except ChatTemplateError as error:
            raise template_error(row, error) from error
        except (TypeError, UnicodeError) as error:
            raise unreadable(row, error) from error
        if parts is None:
            return None
        tokens, reference, messages = parts
        return Prompt(tokens=np.array(tokens, np.int32), reference=reference, values=values, messages=messages)

    def _marked(self, values: Mapping[str, Any], columns: Mapping[str, str], row: Row) -> MarkedChat | None:
        match kind_of(values, columns, row):
            case "messages":
                messages = parse_messages(values["messages"], "messages", row)
                return self._marked_chat(messages, parse_tools(values, row), 0)
            case "prompt_completion":
                prompt, completion = parse_prompt_completion(values, row)
                if isinstance(prompt, str):
                    assert isinstance(completion, str)
                    return self._marked_completion(prompt, completion)
                return self._marked_chat([*prompt, *_messages(completion)], parse_tools(values, row), len(prompt))
            case "text":
                tokens = self._with_end(self._encode(parse_text(values, "text", row)))
                return MarkedChat(tokens, [True] * len(tokens))

    def _marked_chat(self, messages: list[Message], tools: Tools, first: int) -> MarkedChat | None:
        """None without an assistant turn to train. `first`: messages before it are a prompt, whose assistant turns are
        not trained."""
        if self._trained == "everything":
            tokens = self._renderer.tokens(messages, tools, generation_prompt=False)
            return MarkedChat(tokens, [True] * len(tokens))
        turns = [index for index in range(first, len(messages)) if messages[index]["role"] == "assistant"]
        if not turns:
            return None
        return self._renderer.mark(messages, tools, turns[-1:] if self._trained == "last_turn" else turns)

    def _marked_completion(self, prompt: str, completion: str) -> MarkedChat:
        """The prompt's tokens are exactly those that generation starts from. The joint text is used if its tokens begin
        with them. Otherwise a token would span the border, and the two parts are tokenized separately."""
        before = self._prompt_tokens(prompt)
        joint = self._without_end(self._encode(prompt + completion))
        if joint[: len(before)] != before:
            joint = before + self._encode(completion, special=False)
        tokens = self._with_end(joint)
        in_prompt = 0 if self._trained == "everything" else len(before)
        return MarkedChat(tokens, [index >= in_prompt for index in range(len(tokens))])

    def _prompt(self, values: Mapping[str, Any], columns: Mapping[str, str], row: Row) -> _PromptParts | None:
        match kind_of(values, columns, row):
            case "messages":
                messages = parse_messages(values["messages"], "messages", row)
            case "prompt_completion":
                prompt, completion = parse_prompt_completion(values, row)
                if isinstance(prompt, str):
                    return self._prompt_tokens(prompt), str(completion), None
                messages = [*prompt, *_messages(completion)]
            case "text":
                return None
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or turns[-1] == 0:
            return None
        last, tools = turns[-1], parse_tools(values, row)
        before = self._renderer.tokens(messages[:last], tools, generation_prompt=True)
        return before, self._answer(messages[: last + 1], tools), tuple(messages[:last])

    def _answer(self, messages: list[Message], tools: Tools) -> str:
        """The text of a chat's last turn. A turn that calls tools is what the model is to write, as the template has
        it."""
        turn = messages[-1]
        if not turn.get("tool_calls"):
            return str(turn.get("content", ""))
        try:
            marked = self._renderer.mark(messages, tools, [len(messages) - 1])
        except ChatTemplateError:  # training says so; here it is only shown
            return message_text(turn)
        written = [token for token, trained in zip(marked.tokens, marked.trained, strict=True) if trained]
        return answer_text(self._tokenizer, written)

    def _finished(self, marked: MarkedChat, row: Row) -> Made | Dropped:
        tokens, trained = np.array(marked.tokens, np.int32), np.array(marked.trained, np.bool_)
        trained[:1] = False
        length = _end_of_trained(trained)
        if length == 0:
            return Dropped.UNTRAINED
        longest = self._max_length + 1  # the last token is only ever a target: it is not an input
        truncated = length > longest
        if truncated:
            match self._overlong:
                case "drop":
                    return Dropped.OVERLONG
                case "error":
                    raise DataError(
                        f"{row.where}: {length - 1} tokens, more than the longest allowed {self._max_length}. Raise "
                        "data.max_length, or set data.overlong to truncate or drop."
                    )
                case "truncate":
                    length = _end_of_trained(trained[:longest])
                    if length == 0:
                        return Dropped.UNTRAINED
        tokens, trained = tokens[:length].copy(), trained[:length].copy()  # copies, so that the truncated part is freed
        tokens.flags.writeable = trained.flags.writeable = False
        return Made(document=Document(tokens=tokens, trained=trained), truncated=truncated)

    def _encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _prompt_tokens(self, prompt: str) -> list[int]:
        return self._without_end(self._encode(prompt))

    def _without_end(self, tokens: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return tokens[:-1] if tokens and end is not None and tokens[-1] == end else tokens

    def _with_end(self, tokens: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return tokens if end is None or (tokens and tokens[-1] == end) else [*tokens, end]


def load_map(section: SourceSection, key: str) -> MapFunction | None:
    """The source's `map` plug-in, if it has one."""
    return plugins.load(section.map, f"{key}.map") if section.map is not None else None


def unreadable(row: Row, error: Exception) -> BadRowError:
    """The error for a row that the tokenizer cannot read."""
    return BadRowError(
        f"{row.where}: the tokenizer cannot read it ({type(error).__name__}: {error}). Halves of surrogate pairs, "
        "as in broken emoji, are the usual reason; fix or drop such rows with the source's `map`."
    )


def _end_of_trained(trained: Mask) -> int:
    positions = np.flatnonzero(trained)
    return int(positions[-1]) + 1 if len(positions) else 0


def _messages(value: str | list[Message]) -> list[Message]:
    assert not isinstance(value, str)
    return value
