# SPDX-License-Identifier: Apache-2.0
"""Prompts for generation from any row: a chat without its answer, a prompt, or a text to continue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from podium.data.chat import load_map
from podium.data.chat_text import as_text
from podium.data.control_tokens import AS_TEXT, ControlRule
from podium.data.documents import Tokens
from podium.data.kinds import Message, named_values, parse_messages, parse_text, parse_tools
from podium.data.masks import ChatRenderer, ChatTemplateError, Tools, template_error
from podium.data.rows import Row
from podium.data.sources import Source, open_source
from podium.errors import BadRowError, DataError, type_phrase
from podium.recipe.schema import SourceSection

_ONE_OF = ("messages", "prompt", "text")
_READ = (*_ONE_OF, "completion", "tools")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptRow:
    """The start of an answer: as tokens, as readable text, and the answer in the data, if any."""

    row: int  # number of the row in the input, from 0
    tokens: Tokens
    text: str
    reference: str | None


class PromptRows:
    """A data source read for its prompts. Opening it reads only the beginning."""

    def __init__(self, section: SourceSection, key: str) -> None:
        _check_columns(section, key)
        self.source: Source = open_source(section, key)
        self._section, self._key = section, key

    def read(self, tokenizer: Any, limit: int | None, rule: ControlRule = AS_TEXT) -> list[PromptRow]:
        """The prompts of the first `limit` rows (None: all). An invalid row raises a BadRowError that names it."""
        encoder = PromptTokenizer(tokenizer, rule)
        function = load_map(self._section, self._key)
        prompts: list[PromptRow] = []
        for number, row in islice(enumerate(self._rows()), limit):
            values = named_values(row, self._section.columns, function)
            if values is None:
                continue
            parts = prompt_parts(values, self._section.columns, row)
            tokens = encoder.tokens(parts.messages, parts.text, parts.tools, row)
            text = parts.text if parts.messages is None else as_text(parts.messages)
            assert text is not None
            prompts.append(PromptRow(row=number, tokens=tokens, text=text, reference=parts.reference))
        if not prompts:
            raise DataError(f"{self._key}: the source's `map` drops every row of {self._section.path}.")
        return prompts

    def _rows(self) -> Iterator[Row]:
        for block in range(self.source.num_blocks):
            yield from self.source.read_block(block)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptParts:
    """The parts of a row: exactly one of `messages` and `text`, and the answer in the data."""

    messages: list[Message] | None
    text: str | None
    tools: Tools
    reference: str | None


def has_prompt(values: Mapping[str, Any]) -> bool:
    """Whether a row has a column that may be its prompt."""
    return any(values.get(name) is not None for name in _ONE_OF)


def prompt_parts(values: Mapping[str, Any], columns: Mapping[str, str], row: Row) -> PromptParts:
    """The question and the answer in the data; an assistant turn at the end of a chat is the answer."""
    kind = _kind(values, columns, row)
    completion = values.get("completion") if kind == "prompt" else None
    if kind == "text" or (kind == "prompt" and isinstance(values["prompt"], str)):
        text = parse_text(values, kind, row)
        return PromptParts(messages=None, text=text, tools=None, reference=completion_text(completion, row))
    if kind == "prompt" and not isinstance(values["prompt"], list | tuple):
        found = type_phrase(values["prompt"])
        raise BadRowError(f"{row.where}: `prompt` must be a string or a list of {{role, content}}, found {found}.")
    messages = parse_messages(values[kind], kind, row)
    reference = completion_text(completion, row)
    if messages[-1]["role"] == "assistant":
        if completion is not None:
            raise BadRowError(
                f"{row.where}: `prompt` ends in an assistant turn and there is a `completion` too, so which of "
                "them is the answer is ambiguous. Let `prompt` end in a user or tool turn."
            )
        reference = messages[-1].get("content")
        messages = messages[:-1]
    if not messages:
        raise BadRowError(f"{row.where}: `{kind}` has an assistant turn only, and nothing that it answers.")
    return PromptParts(messages=messages, text=None, tools=parse_tools(values, row), reference=reference)


class PromptTokenizer:
    """Turns prompts into tokens. Not shared between threads: tokenizers are not thread-safe."""

    def __init__(self, tokenizer: Any, rule: ControlRule = AS_TEXT) -> None:
        self._tokenizer, self._renderer = tokenizer, ChatRenderer(tokenizer, rule)

    @property
    def own(self) -> Any:
        """The model's tokenizer; None if there is none."""
        return self._tokenizer

    def tokens(self, messages: Sequence[Message] | None, text: str | None, tools: Tools, row: Row) -> Tokens:
        """Tokens of a chat with the generation prompt, or of a text without an end token; errors name the row."""
        try:
            if messages is not None:
                tokens = self._renderer.tokens(messages, tools, generation_prompt=True)
            else:
                assert text is not None
                tokens = self._unended(text)
        except ChatTemplateError as error:
            raise template_error(row, error) from error
        except (TypeError, UnicodeError) as error:
            raise BadRowError(
                f"{row.where}: the tokenizer cannot read this prompt ({type(error).__name__}: {error}). Look for "
                "broken characters in it (half an emoji, for instance); fix the row or remove it."
            ) from error
        return np.array(tokens, np.int32)

    def _unended(self, text: str) -> list[int]:
        return without_end(self._tokenizer, list(self._tokenizer(text, verbose=False)["input_ids"]))


def without_end(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Some tokenizers append their end token to every text, but a text to continue has not ended."""
    end = tokenizer.eos_token_id
    return tokens[:-1] if tokens and end is not None and tokens[-1] == end else tokens


def _kind(values: Mapping[str, Any], columns: Mapping[str, str], row: Row) -> str:
    present = [name for name in _ONE_OF if values.get(name) is not None]
    if len(present) > 1:
        present = [name for name in present if name in columns] or present
    if len(present) == 1:
        return present[0]
    columns_found = ", ".join(f"`{name}`" for name, value in values.items() if value is not None) or "nothing"
    if present:
        raise BadRowError(
            f"{row.where}: the row has {' and '.join(f'`{name}`' for name in present)}, and which of them is the "
            f"prompt is ambiguous. Name one in the source's `columns`: {{{present[0]}: {present[0]}}} (for podium "
            f"generate: --column {present[0]}={present[0]})."
        )
    raise BadRowError(
        f"{row.where}: expected `messages`, `prompt` or `text`, found {columns_found}. Say which column is the prompt "
        "in the source's `columns`: {prompt: question} (for podium generate: --column prompt=question)."
    )


def completion_text(completion: Any, row: Row) -> str | None:
    """The answer in a `completion`: a string, or the last turn of a list of messages."""
    if completion is None or isinstance(completion, str):
        return completion
    content = parse_messages(completion, "completion", row)[-1].get("content")
    return None if content is None else str(content)


def _check_columns(section: SourceSection, key: str) -> None:
    if section.map is not None:  # it may read any column
        return
    unknown = [name for name in section.columns if name not in _READ]
    if unknown:
        raise DataError(
            f"{key}: a column is to be read as {unknown[0]!r}, which generation does not know. It reads "
            f"{', '.join(_READ)}; give --column prompt=question to read `question` as the prompt."
        )
