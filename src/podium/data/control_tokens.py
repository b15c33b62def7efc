# SPDX-License-Identifier: Apache-2.0
"""Control tokens of a tokenizer and its chat template: which they are, and where the content of a chat spells them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.data.kinds import Message
from podium.data.tokenizer import listed_tokens
from podium.recipe.schema import ModelSection

# What a dataset or an environment may hold of a row's content.
_CONTENT_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "text", "tools")
_MARKER = re.compile(r"\W.*\W", re.DOTALL)  # <|user|>, [INST]; an added word or white space is no marker
_PLAIN_TAG = re.compile(r"</?[A-Za-z_]\w*>")  # <think>, </tool_response>
_QUESTION, _ANSWER, _RESULT, _REPLY = "podiumquestion", "podiumanswer", "podiumresult", "podiumreply"

Render = Callable[[Sequence[Message], bool], str | None]
"""Messages, and whether the generation prompt follows -> the rendered text; None if the template refuses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRule:
    """How content that spells a control token is encoded."""

    as_text: bool = True
    kept: frozenset[str] = frozenset()  # special tokens that content may use: those that a recipe adds

    @classmethod
    def of(cls, section: ModelSection) -> ControlRule:
        """The rule of a recipe's model."""
        added = frozenset() if section.new_tokens is None else frozenset(listed_tokens(section.new_tokens))
        return cls(as_text=section.control_tokens_in_content == "text", kept=added)


AS_TEXT = ControlRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNames:
    """The texts of a tokenizer's control tokens."""

    everywhere: frozenset[str]
    in_results: frozenset[str]  # those, and tags that the template writes around results of tools

    @classmethod
    def of(cls, tokenizer: Any, rule: ControlRule, render: Render | None) -> ControlNames:
        """Special tokens, and other added tokens with which the template divides turns. `render`: the template."""
        added = tuple(getattr(tokenizer, "added_tokens_decoder", {}).values())
        special = {str(each) for each in tokenizer.all_special_tokens} | {
            each.content for each in added if each.special
        }
        other = {each.content for each in added if not each.special and _MARKER.fullmatch(each.content)} - special
        listed = getattr(tokenizer, "chat_control_tokens", None)
        kept = rule.kept
        if listed is not None:
            turns, results = other & set(listed), set[str]()
        else:
            # A token that a recipe adds and its template writes divides turns all the same.
            probed = other | kept
            turns, results = _dividing(probed, render) if probed and render is not None else (set[str](), set[str]())
        everywhere = frozenset((special - kept) | turns) - {""}
        return cls(everywhere=everywhere, in_results=everywhere | results)


def _dividing(tokens: set[str], render: Render) -> tuple[set[str], set[str]]:
    """Those of `tokens` that the template writes to divide turns, and those that it writes around results of tools.

    A plain tag such as <think> may be what the model itself writes. It divides turns only where the template puts it
    behind a message of a user, or between an answer and such a message; around results, only in them."""
    question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}
    result, reply = {"role": "tool", "content": _RESULT, "tool_call_id": "0" * 9}, {"role": "user", "content": _REPLY}
    call = {"id": "0" * 9, "type": "function", "function": {"name": "probe", "arguments": {}}}
    calling = {**answer, "tool_calls": [call]}

    def written(*messages: Message, prompt: bool = False) -> str:
        return render(messages, prompt) or ""

    whole = _found(tokens, written(question, answer, reply)) | _found(tokens, written(question, prompt=True))
    borders = _found(tokens, _behind(written(question, answer, reply), _ANSWER))
    around = _found(tokens, _around(written(question, answer, result, reply), written(question, answer, result)))
    if not around:  # some templates write results only behind calls
        around = _found(tokens, _around(written(question, calling, result, reply), written(question, calling, result)))
        around -= _found(tokens, written(question, calling)) - whole  # what the model writes to call
    plain = {each for each in tokens if _PLAIN_TAG.fullmatch(each)}
    turns = ((whole | around) - plain) | borders
    return turns, around - turns


def _behind(text: str, content: str) -> str:
    return text.rpartition(content)[2] if content in text else ""


def _around(*texts: str) -> str:
    """What stands behind the answer in those of the texts that have a result."""
    return "".join(_behind(text, _ANSWER) for text in texts if _RESULT in text)


def _found(tokens: Iterable[str], text: str) -> set[str]:
    return {each for each in tokens if each in text}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpelledTokens:
    """Control tokens that a row spells, each once: in what a chat template renders, and in plain text."""

    chat: tuple[str, ...]
    raw: tuple[str, ...]


class ControlSearch:
    """Finds control tokens in content by one pass of a compiled pattern."""

    def __init__(self, tokenizer: Any, names: ControlNames) -> None:
        self.names = names
        self._everywhere, self._in_results = any_of(names.everywhere), any_of(names.in_results)
        self._normalize = _normalizer(tokenizer, names.in_results)

    def in_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Whether the content of a chat spells a control token."""
        return any(self._is_in(message, self.pattern(message)) for message in messages) or (
            bool(tools) and self._is_in(tools, self._everywhere)
        )

    def in_text(self, text: str) -> bool:
        """Whether a text spells a control token."""
        return self._is_in(text, self._everywhere)

    def in_columns(self, values: Mapping[str, Any]) -> SpelledTokens:
        """The control tokens that a row's columns spell."""
        chat, raw = dict[str, None](), dict[str, None]()
        for name in _CONTENT_COLUMNS:
            value = values.get(name)
            found = raw if isinstance(value, str) and name != "tools" else chat
            found |= dict.fromkeys(self._texts(value))
        return SpelledTokens(chat=tuple(chat), raw=tuple(raw))

    def pattern(self, message: Mapping[str, Any]) -> re.Pattern[str]:
        """What may not stand in a message as a control token. What a user says may come from anywhere, as results of
        tools do: neither can forge a result."""
        return self._in_results if message.get("role") in ("tool", "user") else self._everywhere

    def hides_in(self, text: str, pattern: re.Pattern[str]) -> bool:
        """Whether the tokenizer's normalizer makes a control token out of a text that has none."""
        return self._normalize is not None and pattern.search(self._normalize(text)) is not None

    def _is_in(self, value: Any, pattern: re.Pattern[str]) -> bool:
        if isinstance(value, str):
            return pattern.search(value) is not None or self.hides_in(value, pattern)
        if isinstance(value, Mapping):
            return any(self._is_in(item, pattern) or self._is_in(key, pattern) for key, item in value.items())
        if isinstance(value, list | tuple):
            return any(self._is_in(item, pattern) for item in value)
        return False

    def _texts(self, value: Any, pattern: re.Pattern[str] | None = None) -> Iterator[str]:
        pattern = pattern or self._everywhere
        if isinstance(value, str):
            literal = pattern.findall(value)
            yield from literal or (pattern.findall(self._normalize(value)) if self._normalize is not None else ())
        elif isinstance(value, Mapping):
            pattern = self.pattern(value)
            for key, item in value.items():
                yield from self._texts(key, pattern)
                yield from self._texts(item, pattern)
        elif isinstance(value, list | tuple):
            for item in value:
                yield from self._texts(item, pattern)


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of the names at the first place of any. Tokenizers may have thousands: shared beginnings are
    tried once."""
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for character in name:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_alternatives(tree) if tree else r"(?!)")


def _alternatives(node: dict[str, Any]) -> str:
    run = ""
    while len(node) == 1 and "" not in node:
        character, node = next(iter(node.items()))
        run += re.escape(character)
    longer = [re.escape(character) + _alternatives(child) for character, child in sorted(node.items()) if character]
    if not longer:
        return run
    group = f"(?:{'|'.join(longer)})"
    return f"{run}{group}?" if "" in node else f"{run}{group}"


def _normalizer(tokenizer: Any, names: frozenset[str]) -> Callable[[str], str] | None:
    """The tokenizer's normalizer, if some control token is looked for in normalized text."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or core.normalizer is None:
        return None
    if not any(each.normalized for each in core.get_added_tokens_decoder().values() if each.content in names):
        return None
    return lambda text: str(core.normalizer.normalize_str(text))
