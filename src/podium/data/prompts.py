# SPDX-License-Identifier: Apache-2.0
"""Prompts for generation from any row: a chat that waits for its answer, a prompt, or a text to go on with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from podium.data.chat import load_map
from podium.data.documents import Tokens
from podium.data.kinds import Message, named_values, parse_messages, parse_text, parse_tools
from podium.data.masks import ChatRenderer, ChatTemplateError
from podium.data.rows import Row
from podium.data.sources import Source, open_source
from podium.errors import DataError
from podium.recipe.schema import SourceSection

_ONE_OF = ("messages", "prompt", "text")
_READ = (*_ONE_OF, "completion", "tools")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptRow:
    """What an answer starts from: as tokens, as a person reads it, and the answer that the data holds, if any."""

    row: int  # number of the row in the input, from 0
    tokens: Tokens
    text: str
    reference: str | None


class PromptRows:
    """A data source read for its prompts. Opening it reads the beginning only."""

    def __init__(self, section: SourceSection, key: str) -> None:
        _check_columns(section, key)
        self.source: Source = open_source(section, key)
        self._section, self._key = section, key

    def read(self, tokenizer: Any, limit: int | None) -> list[PromptRow]:
        """The prompts of the first `limit` rows (None: all); a row that is wrong raises a DataError that names it."""
        maker = _PromptMaker(tokenizer, self._section.columns)
        function = load_map(self._section, self._key)
        prompts: list[PromptRow] = []
        for number, row in islice(enumerate(self._rows()), limit):
            values = named_values(row, self._section.columns, function)
            if values is not None:
                prompts.append(maker.make(number, values, row))
        if not prompts:
            raise DataError(f"{self._key}: the source's `map` drops every row of {self._section.path}.")
        return prompts

    def _rows(self) -> Iterator[Row]:
        for block in range(self.source.num_blocks):
            yield from self.source.read_block(block)


class _PromptMaker:
    def __init__(self, tokenizer: Any, columns: Mapping[str, str]) -> None:
        self._tokenizer, self._renderer, self._columns = tokenizer, ChatRenderer(tokenizer), columns

    def make(self, number: int, values: Mapping[str, Any], row: Row) -> PromptRow:
        try:
            tokens, text, reference = self._parts(values, row)
        except ChatTemplateError as error:
            raise DataError(f"{row.where}: {error}") from error
        except (TypeError, UnicodeError) as error:
            raise DataError(
                f"{row.where}: the tokenizer cannot read this prompt ({type(error).__name__}: {error}). Look for "
                "broken characters in it (half an emoji, for instance); mend the row or take it out."
            ) from error
        return PromptRow(row=number, tokens=np.array(tokens, np.int32), text=text, reference=reference)

    def _parts(self, values: Mapping[str, Any], row: Row) -> tuple[list[int], str, str | None]:
        kind = self._kind(values, row)
        completion = values.get("completion") if kind == "prompt" else None
        if kind == "text" or (kind == "prompt" and isinstance(values["prompt"], str)):
            text = parse_text(values, kind, row)
            return self._encoded(text), text, _reference(completion, row)
        if kind == "prompt" and not isinstance(values["prompt"], list | tuple):
            found = type(values["prompt"]).__name__
            raise DataError(f"{row.where}: `prompt` must be a string or a list of {{role, content}}, found a {found}.")
        messages = parse_messages(values[kind], kind, row)
        reference = _reference(completion, row)
        if messages[-1]["role"] == "assistant":
            if completion is not None:
                raise DataError(
                    f"{row.where}: `prompt` ends in an assistant turn and there is a `completion` too, so which of "
                    "them is the answer cannot be told. Let `prompt` end in a user or tool turn."
                )
            reference = messages[-1].get("content")
            messages = messages[:-1]
        if not messages:
            raise DataError(f"{row.where}: `{kind}` has an assistant turn only, and nothing that it answers.")
        tokens = self._renderer.tokens(messages, parse_tools(values, row), generation_prompt=True)
        return tokens, _as_text(messages), reference

    def _kind(self, values: Mapping[str, Any], row: Row) -> str:
        present = [name for name in _ONE_OF if values.get(name) is not None]
        if len(present) > 1:
            present = [name for name in present if name in self._columns] or present
        if len(present) == 1:
            return present[0]
        found = ", ".join(f"`{name}`" for name, value in values.items() if value is not None) or "nothing"
        if present:
            raise DataError(
                f"{row.where}: the row has {' and '.join(f'`{name}`' for name in present)}, and which of them is the "
                f"prompt cannot be told. Name one: --column {present[0]}={present[0]}."
            )
        raise DataError(
            f"{row.where}: expected `messages`, `prompt` or `text`, found {found}. Say which column is the prompt, for "
            "instance --column prompt=question."
        )

    def _encoded(self, text: str) -> list[int]:
        tokens = list(self._tokenizer(text, verbose=False)["input_ids"])
        end = self._tokenizer.eos_token_id
        # Some tokenizers put their end token behind every text; what is to be continued has not ended.
        return tokens[:-1] if tokens and end is not None and tokens[-1] == end else tokens


def _reference(completion: Any, row: Row) -> str | None:
    """The answer in a `completion`: a string, or the last turn of a list of messages."""
    if completion is None or isinstance(completion, str):
        return completion
    content = parse_messages(completion, "completion", row)[-1].get("content")
    return None if content is None else str(content)


def _as_text(messages: list[Message]) -> str:
    """A lone question as it is; a longer chat with who says what."""
    if len(messages) == 1:
        return str(messages[0].get("content", ""))
    return "\n".join(f"{message['role']}: {message.get('content', '')}" for message in messages)


def _check_columns(section: SourceSection, key: str) -> None:
    if section.map is not None:  # it may read any column
        return
    unknown = [name for name in section.columns if name not in _READ]
    if unknown:
        raise DataError(
            f"{key}: a column is to be read as {unknown[0]!r}, which generation does not know. It reads "
            f"{', '.join(_READ)}; give --column prompt=question to read `question` as the prompt."
        )
