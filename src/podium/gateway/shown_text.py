# SPDX-License-Identifier: Apache-2.0
"""Shows the text of an answer while it is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from podium.data.documents import Tokens
from podium.environments.call_markup import harmony_parts
from podium.gateway.conversation import Conversations

OnText = Callable[[str], object]
"""Gets the text of an answer so far."""

_THOUGHT, _THOUGHT_END = "<think>", "</think>"
# The longest run of tokens that may make no whole character.
_MOST_HELD = 64


class ShownText:
    """Gets all tokens of an answer so far, now and then, and shows what of its text will not change: no half
    characters, no beginning of a stop string, no reasoning. Only tokens that are new are decoded."""

    def __init__(
        self, conversations: Conversations, stops: Sequence[str], on_text: OnText, prompt_T: Tokens | None = None
    ) -> None:
        """`prompt_T`: of a chat, whose answers may begin with reasoning. None: raw text is continued."""
        self._stops, self._on_text = stops, on_text
        kind: type[_Plain | _Chat | _Harmony | _Templated] = _Plain
        if prompt_T is not None:
            kind = _Templated if conversations.parses_responses else _Harmony if conversations.is_harmony else _Chat
        self._reader = kind(conversations, prompt_T)
        self._decoded = _Decoded(conversations, special=kind in (_Harmony, _Templated))

    def __call__(self, tokens: Tokens) -> None:
        text = self._reader.read(self._decoded.more(tokens.tolist()))
        for stop in self._stops:
            text = text.partition(stop)[0]
            held = next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)
            text = text[: len(text) - held]
        self._on_text(text)


class _Decoded:
    """Decodes a growing list of tokens piece by piece. A piece is decoded behind the one before it, since some
    tokenizers write white space only between tokens."""

    def __init__(self, conversations: Conversations, *, special: bool) -> None:
        self._decode = conversations.marked_text if special else conversations.text
        self._begin = self._done = 0

    def more(self, tokens: Sequence[int]) -> str:
        """The text that the new tokens add. Half characters wait for their other half."""
        before = self._decode(tokens[self._begin : self._done])
        text = self._decode(tokens[self._begin :])
        if (text.endswith("\ufffd") and len(tokens) - self._done < _MOST_HELD) or not text.startswith(before):
            return ""
        self._begin, self._done = self._done, len(tokens)
        return text[len(before) :]


class _Plain:
    """Raw text."""

    def __init__(self, conversations: Conversations, prompt_T: Tokens | None) -> None:
        self._text = ""

    def read(self, new: str) -> str:
        """All text that can be shown."""
        self._text += new
        return self._text


class _Chat(_Plain):
    """A chat whose reasoning stands before `</think>`. Its beginning is in the prompt or in the answer."""

    def __init__(self, conversations: Conversations, prompt_T: Tokens | None) -> None:
        super().__init__(conversations, prompt_T)
        tail = [] if prompt_T is None else prompt_T[-8:].tolist()
        self._thinks = conversations.marked_text(tail).rstrip().endswith(_THOUGHT)

    def read(self, new: str) -> str:
        """The text behind the reasoning."""
        self._text += new
        _, closed, said = self._text.rpartition(_THOUGHT_END)
        if closed:
            return said.lstrip("\n")
        begun = self._text.lstrip()
        may_think = _THOUGHT.startswith(begun[: len(_THOUGHT)])
        return "" if self._thinks or may_think else self._text


class _Harmony(_Plain):
    """Messages with channels."""

    def read(self, new: str) -> str:
        """The messages for the user."""
        self._text += new
        return harmony_parts(self._text)[1]


class _Templated:
    """An answer that the tokenizer's response template divides."""

    def __init__(self, conversations: Conversations, prompt_T: Tokens | None) -> None:
        self._parser: Any = conversations.response_parser(() if prompt_T is None else prompt_T.tolist())
        self._text = ""

    def read(self, new: str) -> str:
        """The content so far; all of it comes at the end if the template cannot read it."""
        if self._parser is None:
            return ""
        try:
            events = self._parser.feed(new)
        except Exception:  # model output is untrusted, and the parser is not ours
            self._parser = None
            return ""
        for each in events:
            if each["type"] == "region_chunk" and each["field"] == "content":
                self._text += each["text"]
        return self._text.strip()
