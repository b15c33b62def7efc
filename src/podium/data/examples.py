# SPDX-License-Identifier: Apache-2.0
"""Turns rows into examples: documents that a program compares or scores together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from podium.data.chat import DocumentMaker, Dropped, Made, Overlong, Prompt, Trained, load_map
from podium.data.comparisons import Shape, judged
from podium.data.control_tokens import AS_TEXT, ControlRule
from podium.data.documents import Example
from podium.data.kinds import MapFunction, named_values
from podium.data.remembering import RememberedRows
from podium.data.results import MadeExample, RowResult
from podium.data.rows import Row
from podium.data.scored import ConversationMaker
from podium.data.skipping import SkippedRow
from podium.data.tokenizer import load_tokenizer
from podium.errors import BadRowError
from podium.progress import mark_progress
from podium.recipe import DpoRecipe, ModelSection, RewardModelRecipe, SourceSection, SpmdRecipe

_NO_COLUMNS: Mapping[str, str] = {}


class _TextMaker(Protocol):
    """Turns one text of a row into a document."""

    def document(self, values: Mapping[str, Any], columns: Mapping[str, str], row: Row) -> Made | Dropped: ...


class ExampleMaker:
    """Turns rows into examples of one shape with one tokenizer. Not shared between threads: tokenizers are not
    thread-safe."""

    def __init__(
        self, tokenizer: Any, shape: Shape, trained: Trained, max_length: int, overlong: Overlong,
        rule: ControlRule = AS_TEXT,
    ) -> None:  # fmt: skip
        self._shape: Shape = shape
        # Only completions are compared, even if a row has other columns.
        self._documents = DocumentMaker(
            tokenizer, trained if shape == "documents" else "assistant", max_length, overlong, rule
        )
        scored = shape in ("ranked", "scores")
        self._texts: _TextMaker = (
            ConversationMaker(tokenizer, max_length, overlong, rule) if scored else self._documents
        )

    def make(
        self, row: Row, columns: Mapping[str, str] = _NO_COLUMNS, map: MapFunction | None = None
    ) -> MadeExample | Dropped:
        """The row's example, or why there is none. An invalid row raises a BadRowError that names it."""
        values = named_values(row, columns, map)
        mark_progress()
        if values is None:
            return Dropped.BY_MAP
        judgement = judged(values, self._shape, row)
        parts = []
        for text in judgement.texts:
            document = self._texts.document(text, columns, row)
            if isinstance(document, Dropped):
                return document
            parts.append(document)
        documents, truncated = tuple(each.document for each in parts), any(each.truncated for each in parts)
        if len(documents) == 2 and np.array_equal(documents[0].tokens, documents[1].tokens):
            if truncated:
                return Dropped.OVERLONG  # the difference was truncated
            raise BadRowError(
                f"{row.where}: `chosen` and `rejected` are the same once the chat template and tokenizer had them, so "
                "there is nothing to prefer. Remove the row, or drop it with the source's `map`."
            )
        return MadeExample(example=Example(documents=documents, value=judgement.value), truncated=truncated)

    def prompt_of(
        self, row: Row, columns: Mapping[str, str] = _NO_COLUMNS, map: MapFunction | None = None
    ) -> Prompt | None:
        """The prompt before the row's last (or chosen) answer; None if there is none, and for a dropped row."""
        values = named_values(row, columns, map)
        if values is None:
            return None
        prompt = self._documents.prompt(judged(values, self._shape, row).texts[0], columns, row)
        # The function that scores the answer sees the whole row.
        return None if prompt is None else replace(prompt, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class MakerSpec:
    """Everything that another thread or process needs to make examples of several sources; small and picklable."""

    model: ModelSection
    sections: tuple[SourceSection, ...]
    key: str  # where the sections stand in the recipe: `data.train`
    trained: Trained
    max_length: int
    overlong: Overlong
    shape: Shape = "documents"
    skips: bool = False  # rows that cannot be used are skipped

    @classmethod
    def of(cls, recipe: SpmdRecipe) -> MakerSpec:
        """The spec of a recipe's training data."""
        data = recipe.data
        assert data.max_length is not None, "resolved before launch"
        return cls(
            model=recipe.model, sections=data.train, key="data.train", trained=recipe.trained,
            max_length=data.max_length, overlong=data.overlong, shape=shape_of(recipe), skips=data.on_error == "skip",
        )  # fmt: skip

    def build(self) -> SourcesMaker:
        """Loads a separate tokenizer and the plug-ins: slow, and once per thread or process."""
        maker = ExampleMaker(
            load_tokenizer(self.model), self.shape, self.trained, self.max_length, self.overlong,
            ControlRule.of(self.model),
        )  # fmt: skip
        return SourcesMaker(maker, self.sections, self.key, skips=self.skips)


def shape_of(recipe: SpmdRecipe) -> Shape:
    """The shape of rows that this program needs."""
    match recipe:
        case DpoRecipe():
            return "pairs" if recipe.preference.is_paired else "labels"
        case RewardModelRecipe():
            return "ranked" if recipe.reward_model.learns == "pairs" else "scores"
        case _:
            return "documents"


class SourcesMaker:
    """An ExampleMaker that applies each source's `columns` and `map`, with a bounded cache of examples."""

    def __init__(
        self, maker: ExampleMaker, sections: Sequence[SourceSection], key: str, *, skips: bool = False
    ) -> None:
        self._maker, self._key, self._skips = maker, key, skips
        self._columns = [section.columns for section in sections]
        self._maps = [load_map(section, f"{key}.{index}") for index, section in enumerate(sections)]
        self._remembered = RememberedRows(sections)

    def make(self, source: int, row: Row) -> RowResult:
        """The example of a row, from the cache if it was made before."""
        result = self._remembered.get(source, row)
        if result is None:
            result = self._made(source, row)
            self._remembered.add(source, row, result)
        return result

    def _made(self, source: int, row: Row) -> RowResult:
        try:
            made = self._maker.make(row, self._columns[source], self._maps[source])
        except BadRowError as error:
            if not self._skips:
                raise
            return SkippedRow.of(row, f"{self._key}.{source}", error)
        if isinstance(made, Dropped) or source == 0:
            return made
        return replace(made, example=replace(made.example, source=source))

    def prompt_of(self, source: int, row: Row) -> Prompt | None:
        """The prompt of a row, or None if it has none."""
        return self._maker.prompt_of(row, self._columns[source], self._maps[source])
