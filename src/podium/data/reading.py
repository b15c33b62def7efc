# SPDX-License-Identifier: Apache-2.0
"""Reads data once in file order: examples for the held-out loss or a pass before training, prompts for generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from podium.data.chat import Dropped, Prompt, load_map
from podium.data.documents import Example
from podium.data.examples import ExampleMaker, MadeExample
from podium.data.kinds import MapFunction
from podium.data.rows import Row
from podium.data.sources import open_source
from podium.errors import DataError
from podium.recipe.schema import SourceSection


def read_examples(sections: Sequence[SourceSection], key: str, maker: ExampleMaker, limit: int | None) -> list[Example]:
    """The first `limit` examples (None: all) of the sources at `key` (`data.heldout`) in the recipe."""
    examples = list(islice(iterate_examples(sections, key, maker), limit))
    if not examples:
        raise DataError(
            f"{key}: no trained token in the whole of {_names(sections)}. Check data.trained (chats need assistant "
            "turns), data.max_length with data.overlong, and the sources' `map`."
        )
    return examples


def iterate_examples(sections: Sequence[SourceSection], key: str, maker: ExampleMaker) -> Iterator[Example]:
    """All examples in file order."""
    for section, function, row in _rows(sections, key):
        match maker.make(row, section.columns, function):
            case MadeExample(example=example):
                yield example
            case Dropped():
                continue


def read_prompts(sections: Sequence[SourceSection], key: str, maker: ExampleMaker, limit: int | None) -> list[Prompt]:
    """The first `limit` prompts (None: all), from the same rows as the documents."""
    prompts: list[Prompt] = []
    for section, function, row in _rows(sections, key):
        prompt = maker.prompt_of(row, section.columns, function)
        if prompt is not None:
            prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise DataError(
            f"{key}: no row of {_names(sections)} has a prompt and an answer. Generation needs `messages` with an "
            "assistant turn, or `prompt` with `completion`; remove evaluation.generation for raw `text`."
        )
    return prompts


def _rows(sections: Sequence[SourceSection], key: str) -> Iterator[tuple[SourceSection, MapFunction | None, Row]]:
    for index, section in enumerate(sections):
        source = open_source(section, f"{key}.{index}")
        function = load_map(section, f"{key}.{index}")
        for block in range(source.num_blocks):
            for row in source.read_block(block):
                yield section, function, row


def _names(sections: Sequence[SourceSection]) -> str:
    return ", ".join(section.path for section in sections)
