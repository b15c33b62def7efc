# SPDX-License-Identifier: Apache-2.0
"""Counts the steps of a recipe that asks for epochs: passes over the rows of `data.train`. Torch-free.

An epoch is as many rows as all sources have together, without those that are dropped. With several sources, weights say
which rows those are: a source with a larger weight is gone through more often."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from podium.data.chat import Dropped
from podium.data.composing import RowChunk, StepComposer, StepSize, chunk_rows, first_state
from podium.data.control_tokens import ControlRule
from podium.data.documents import Document, Example
from podium.data.examples import MakerSpec
from podium.data.prompts import PromptTokenizer
from podium.data.results import MadeExample
from podium.data.rows import LinePlace
from podium.data.skipping import RowSkipper, SkippedRow, SkipPolicy
from podium.data.sources import Source, open_source
from podium.data.stream import MixedStream
from podium.data.tasks import prompt_room, tasks_in_order
from podium.data.tokenizer import load_tokenizer
from podium.errors import DataError
from podium.recipe import OnPolicyRecipe, Recipe, SpmdRecipe

_Lengths = dict[tuple[int, str | LinePlace], int | Dropped | SkippedRow]
"""Source and place of a row -> input positions of its example, or why it has none."""


def steps_of_epochs(recipe: Recipe) -> int:
    """The first step by which a run of this resolved recipe has used `recipe.epochs` times its rows. Steps are whole:
    the last one may begin another pass."""
    assert recipe.epochs is not None
    match recipe:
        case OnPolicyRecipe():
            num_prompts = math.ceil(recipe.epochs * _count_prompts(recipe))
            return math.ceil(num_prompts / recipe.rollout.prompts_per_step)
        case SpmdRecipe():
            return _packed_steps(recipe, recipe.epochs)
    raise AssertionError(type(recipe))


def _count_prompts(recipe: OnPolicyRecipe) -> int:
    """Prompts that leave room for an answer; a source's `map` may drop others."""
    encoder = PromptTokenizer(load_tokenizer(recipe.model), ControlRule.of(recipe.model))
    room = prompt_room(recipe)
    lengths: list[int] = []
    skipper = RowSkipper(SkipPolicy.of(recipe.data), "data.train")
    for _ in tasks_in_order(
        recipe.data.train, "data.train", skipper, lambda task: lengths.append(len(task.encode(encoder))),
        needs_prompt=recipe.needs_prompts,
    ):  # fmt: skip
        pass
    return max(1, sum(length <= room for length in lengths))  # the run itself says if there is none


def _packed_steps(recipe: SpmdRecipe, epochs: float) -> int:
    """Tokenizes every row once. With `tokens_per_step` the steps are then composed as the loader does it, of documents
    that have only a length."""
    data = recipe.data
    skips = data.on_error == "skip"
    sources = [open_source(section, f"data.train.{at}", keep_bad=skips) for at, section in enumerate(data.train)]
    lengths = _measured(recipe, sources)
    num_made = sum(isinstance(length, int) for length in lengths.values())
    if num_made == 0:
        raise DataError(
            "epochs: no row of data.train can be trained on: all are dropped. Check data.trained (chats need assistant "
            "turns), data.max_length with data.overlong, and the sources' `map`; `podium check --deep` counts them."
        )
    num_wanted = math.ceil(epochs * num_made)
    if recipe.rows_per_step is not None:
        return math.ceil(num_wanted / recipe.rows_per_step)
    num_taken = steps = 0
    for num_examples in _composed(recipe, sources, lengths):
        num_taken, steps = num_taken + num_examples, steps + 1
        if num_taken >= num_wanted:
            break
    return steps


def _measured(recipe: SpmdRecipe, sources: list[Source]) -> _Lengths:
    maker = MakerSpec.of(recipe).build()
    lengths: _Lengths = {}
    for index, source in enumerate(sources):
        for block in range(source.num_blocks):
            for row in source.read_block(block):
                result = maker.make(index, row)
                length = result.example.num_inputs if isinstance(result, MadeExample) else result
                lengths[index, row.place] = length
    return lengths


def _composed(recipe: SpmdRecipe, sources: list[Source], lengths: _Lengths) -> Iterator[int]:
    """Numbers of examples of steps 1, 2, ...: the loader's order and packing."""
    data = recipe.data
    stream = MixedStream(
        sources, [section.weight for section in data.train], seed=recipe.run.seed, shuffle=data.shuffle,
        shuffle_rows=data.shuffle_rows,
    )  # fmt: skip
    composer = StepComposer(
        [source.name for source in sources], StepSize(tokens=recipe.tokens_per_step), data.packing_window,
        first_state(stream.position), SkipPolicy.of(data),
    )  # fmt: skip
    num_rows = chunk_rows(data.packing_window)
    while True:
        while not composer.is_ready:
            rows = tuple(stream.draw() for _ in range(num_rows))
            measured = [lengths[each.source, each.row.place] for each in rows]
            examples = [_of_length(each) if isinstance(each, int) else each for each in measured]
            composer.add(RowChunk(rows=rows, position=stream.position), examples)
        yield len(composer.take()[0])


@functools.cache
def _of_length(num_inputs: int) -> MadeExample:
    """An example that only has a length."""
    shape = (num_inputs + 1,)
    document = Document(tokens=np.broadcast_to(np.int32(0), shape), trained=np.broadcast_to(np.bool_(False), shape))
    return MadeExample(example=Example(documents=(document,)), truncated=False)
