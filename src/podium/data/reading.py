# SPDX-License-Identifier: Apache-2.0
"""Reads data once in file order: examples for the held-out loss or a pass before training, prompts for generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from podium.data.chat import Dropped, Prompt, load_map
from podium.data.documents import Example
from podium.data.dropping import no_trained_token
from podium.data.examples import ExampleMaker
from podium.data.kinds import MapFunction
from podium.data.results import MadeExample
from podium.data.rows import Row
from podium.data.skipping import RowSkipper, SkipPolicy
from podium.data.sources import open_source
from podium.errors import DataError
from podium.recipe.schema import SourceSection


class OrderedRows:
    """The rows of the sources at `key` (`data.heldout`) in the recipe, in file order. Rows that cannot be used are
    skipped if the policy says so; `skipper` has them."""

    def __init__(self, sections: Sequence[SourceSection], key: str, policy: SkipPolicy | None = None) -> None:
        self._sections, self._key, self._policy = sections, key, policy or SkipPolicy()
        self.skipper = RowSkipper(self._policy, key)

    def examples(self, maker: ExampleMaker, limit: int | None) -> list[Example]:
        """The first `limit` examples (None: all); without any it raises a DataError."""
        dropped: Counter[Dropped] = Counter()
        examples = list(islice(self.iterate(maker, dropped), limit))
        if not examples:
            raise no_trained_token(self._names, dropped, self.skipper.counts.first, key=self._key)
        return examples

    def iterate(self, maker: ExampleMaker, dropped: Counter[Dropped] | None = None) -> Iterator[Example]:
        """All examples. `dropped` counts the rows that give none."""
        for source, section, function, row in self._rows():
            made = self.skipper.attempt(source, row, partial(maker.make, row, section.columns, function))
            if isinstance(made, MadeExample):
                yield replace(made.example, source=source)
            elif made is not None and dropped is not None:
                dropped[made] += 1

    def prompts(self, maker: ExampleMaker, limit: int | None) -> list[Prompt]:
        """The first `limit` prompts (None: all), from the same rows as the documents."""
        prompts: list[Prompt] = []
        for source, section, function, row in self._rows():
            prompt = self.skipper.attempt(source, row, partial(maker.prompt_of, row, section.columns, function))
            if prompt is not None:
                prompts.append(prompt)
            if len(prompts) == limit:
                break
        if not prompts:
            raise DataError(
                f"{self._key}: no row of {self._names} has a prompt and an answer. Generation needs `messages` with an "
                "assistant turn, or `prompt` with `completion`; remove evaluation.generation for raw `text`."
            )
        return prompts

    def _rows(self) -> Iterator[tuple[int, SourceSection, MapFunction | None, Row]]:
        for index, section in enumerate(self._sections):
            key = f"{self._key}.{index}"
            source = open_source(section, key, keep_bad=self._policy.skips)
            function = load_map(section, key)
            for block in range(source.num_blocks):
                for row in source.read_block(block):
                    yield index, section, function, row

    @property
    def _names(self) -> str:
        return ", ".join(section.path for section in self._sections)
