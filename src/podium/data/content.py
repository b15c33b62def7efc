# SPDX-License-Identifier: Apache-2.0
"""Encodes rendered chats such that control tokens come from the chat template alone: content that spells one is text.

Before the template renders a chat, what its content has of control tokens is put between two marks. The rendered text
is then encoded in one piece by a copy of the tokenizer. In the copy, control tokens have other names, which only the
text outside of the marks is given; the original names are ordinary text to it. So all text is divided, normalized and
merged as the tokenizer does it, and nothing is encoded piece by piece."""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from podium.data.control_tokens import ControlSearch, any_of
from podium.data.kinds import Message


class ControlTextError(Exception):
    """Content spells a control token, and this tokenizer cannot encode it as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenamedText:
    """A marked text without its marks, in which the template's control tokens have their names in the copy."""

    text: str
    num_control: int
    places: tuple[int, ...]  # in the marked text, ascending, and where they are in `text`
    moved: tuple[int, ...]

    def place(self, marked: int) -> int:
        """Where a position of the marked text is in `text`. Positions are not inside of marks and control tokens."""
        at = bisect_right(self.places, marked) - 1
        return self.moved[at] + marked - self.places[at]


class ContentEncoder:
    """Marks control tokens in content, and encodes marked texts. Not shared between threads."""

    def __init__(self, tokenizer: Any, search: ControlSearch) -> None:
        self._tokenizer, self.search = tokenizer, search
        # Digits pass through trimming, JSON, HTML and changes of case. Content cannot know them.
        secret = f"{secrets.randbelow(10**20):020d}"
        self._open, self._close = f"{secret}1", f"{secret}2"
        self._name = f"<|{secret}"
        self._control = any_of(search.names.in_results)
        self._parts = re.compile(f"{self._open}|{self._close}|{self._control.pattern}")

    def is_marked(self, text: str) -> bool:
        """Whether a text has marks."""
        return self._open in text

    def marked_chat(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """The chat with marks around what its content has of control tokens."""
        chat = [self._marked(message, self.search.pattern(message)) for message in messages]
        return chat, tools and self._marked(tools, self.search.pattern({}))

    def marked_text(self, text: str) -> str:
        """A text that is content."""
        return str(self._marked(text, self.search.pattern({})))

    def unmarked(self, text: str) -> str:
        """The text without marks."""
        return text.replace(self._open, "").replace(self._close, "")

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a marked text. `special`: with those that the tokenizer adds to a text by itself."""
        renamed = self._renamed(text)
        return self._ids(self._copy.encode(renamed.text, add_special_tokens=special), renamed)

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """The tokens of a marked text, and which of them are in `spans` of its characters."""
        renamed = self._renamed(text)
        encoding = self._copy.encode(renamed.text, add_special_tokens=False)
        tokens = self._ids(encoding, renamed)
        inside = [False] * len(tokens)
        for begin, end in spans:
            first = encoding.char_to_token(renamed.place(begin))
            if first is None:
                break
            last = encoding.char_to_token(renamed.place(end) - 1)
            stop = len(tokens) if last is None else last + 1
            inside[first:stop] = [True] * (stop - first)
        return tokens, inside

    def _marked(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            if self._open in value or self._close in value:
                raise ControlTextError("the content repeats a secret of this process")
            if self.search.hides_in(value, pattern) and (core := value.strip()):
                return value.replace(core, f"{self._open}{core}{self._close}")
            return pattern.sub(lambda found: f"{self._open}{found[0]}{self._close}", value)
        if isinstance(value, Mapping):
            return {self._marked(key, pattern): self._marked(item, pattern) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, pattern) for item in value]
        return value

    def _renamed(self, text: str) -> RenamedText:
        pieces, places, moved = list[str](), [0], [0]
        length = begin = num_control = 0
        inside = False
        for match in self._parts.finditer(text):
            piece, new = text[begin : match.start()], match[0]
            if new in (self._open, self._close):
                if inside == (new == self._open):
                    raise ControlTextError("the chat template takes it apart")
                inside, new = not inside, ""
            elif not inside:
                new, num_control = self._names[new], num_control + 1
            pieces += [piece, new]
            length += len(piece)
            places.append(match.start())
            moved.append(length)
            length, begin = length + len(new), match.end()
            places.append(begin)
            moved.append(length)
        if inside:
            raise ControlTextError("the chat template takes it apart")
        pieces.append(text[begin:])
        return RenamedText(text="".join(pieces), num_control=num_control, places=tuple(places), moved=tuple(moved))

    def _ids(self, encoding: Any, renamed: RenamedText) -> list[int]:
        ids = self._original
        added = encoding.special_tokens_mask
        num_control, tokens = 0, []
        for token, is_added in zip(encoding.ids, added, strict=True):
            if token in ids:
                num_control += 1
            elif token in self._control_ids and not is_added:
                raise ControlTextError("the tokenizer makes a control token of plain text")
            tokens.append(ids.get(token, token))
        if num_control != renamed.num_control:
            raise ControlTextError("the tokenizer does not take every control token of the chat template as one")
        return tokens

    @cached_property
    def _names(self) -> dict[str, str]:
        return {name: f"{self._name}n{at}|>" for at, name in enumerate(sorted(self.search.names.in_results))}

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        vocabulary = self._tokenizer.get_vocab()
        return frozenset(vocabulary[name] for name in self._names if name in vocabulary)

    @cached_property
    def _original(self) -> dict[int, int]:
        """Id in the copy -> id of the control token in the tokenizer."""
        vocabulary = self._tokenizer.get_vocab()
        return {
            self._copy.token_to_id(new): vocabulary[name] for name, new in self._names.items() if name in vocabulary
        }

    @cached_property
    def _copy(self) -> Any:
        """A copy of the tokenizer that reads the names of control tokens as text, and knows them by other names."""
        from tokenizers import AddedToken, Tokenizer

        if not getattr(self._tokenizer, "is_fast", False):
            raise ControlTextError(f"{type(self._tokenizer).__name__} is no fast tokenizer")
        try:
            values = json.loads(self._tokenizer.backend_tokenizer.to_str())
            for each in values["added_tokens"]:
                each["special"] = each["content"] in self._names
            copy = Tokenizer.from_str(json.dumps(values))
        except Exception as error:  # tokenizers raises plain exceptions, for parts written in Python for one
            raise ControlTextError(f"the tokenizer cannot be copied ({error})") from error
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = True
        copy.add_tokens(
            [
                AddedToken(
                    self._names[each["content"]], normalized=each["normalized"], lstrip=each["lstrip"],
                    rstrip=each["rstrip"], single_word=each["single_word"],
                )
                for each in values["added_tokens"]
                if each["content"] in self._names
            ]
        )  # fmt: skip
        return copy
