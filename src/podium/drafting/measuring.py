# SPDX-License-Identifier: Apache-2.0
"""Measures a data file with a model's tokenizer, and chooses lengths and sizes of steps from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from podium.data.examples import ExampleMaker, shape_of
from podium.data.prompts import PromptTokenizer
from podium.data.results import MadeExample
from podium.data.tasks import Task, TaskReader
from podium.data.tokenizer import has_tokenizer, load_tokenizer
from podium.drafting.columns import DataFacts
from podium.errors import DataError, ModelError, RunFolderError
from podium.models.folder import check_model_folder, is_hub_id, local_folder, read_config
from podium.recipe import ModelSection, SourceSection, SpmdRecipe
from podium.recipe.resolving import context_of

_NO_LIMIT = 1 << 24
_ROUND_TO = 32
_LARGEST_STEP = 16_384
_STEPS_PER_EPOCH = 20
_NEW_TOKENS, _FEWEST_NEW_TOKENS = 512, 16
_PROMPTS_PER_STEP = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFacts:
    """What a recipe's lengths depend on in a model."""

    path: str
    model_type: str
    context: int | None  # positions
    tokenizer: Any
    chat_template: str | None  # a Jinja file that replaces the tokenizer's own

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self.tokenizer.chat_template is not None


def read_model(path: str, chat_template: str | None) -> ModelFacts:
    """Config and tokenizer of a folder or hub id."""
    if (Path(path) / "run.json").is_file():
        raise RunFolderError(
            f"--model: {path} is a run of Podium and not a Hugging Face checkpoint. Export it first with "
            f"`podium export {path} OUT`, then give OUT."
        )
    check_model_folder(path, "--model", weights=True, tokenizer=False)
    if not is_hub_id(path) and not has_tokenizer(path):
        raise ModelError(
            f"--model: {path} has no tokenizer. Save the one that the model was trained with there: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)."
        )
    config = read_config(local_folder(path, "--model"), "--model")
    tokenizer = load_tokenizer(ModelSection(path=path, chat_template=chat_template))
    return ModelFacts(
        path=path,
        model_type=str(config.get("model_type", "unknown")),
        context=context_of(config),
        tokenizer=tokenizer,
        chat_template=chat_template,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of the measured documents, or of the prompts of an on-policy program."""

    num_measured: int
    mean: float
    longest: int

    def __str__(self) -> str:
        return f"{self.mean:.0f} tokens on average and {self.longest} at most, of {self.num_measured} measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSizes:
    """Sizes of a program on fixed data."""

    max_length: int
    tokens_per_step: int
    steps: int
    epochs: float  # that these steps are


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicySizes:
    """Sizes of an on-policy program."""

    max_length: int
    max_new_tokens: int
    prompts_per_step: int
    steps: int
    epochs: float  # that these steps are


def document_lengths(recipe: SpmdRecipe, data: DataFacts, tokenizer: Any) -> Lengths:
    """Tokens of the documents of the first rows. An invalid row is an error that names it."""
    section = recipe.data.train[0]
    maker = ExampleMaker(tokenizer, shape_of(recipe), recipe.trained, _NO_LIMIT, "truncate")
    results = [maker.make(row, section.columns) for row in data.rows]
    lengths = [
        document.num_inputs
        for result in results
        if isinstance(result, MadeExample)
        for document in result.example.documents
    ]
    if not lengths:
        raise DataError(
            f"--data: none of the first {len(results)} rows of {data.path} has a token to train on. Chats need "
            "assistant turns."
        )
    return _lengths(lengths)


def prompt_lengths(section: SourceSection, data: DataFacts, tokenizer: Any, *, as_chat: bool) -> Lengths:
    """Tokens of the prompts of the first rows. `as_chat`: text is asked as the user's turn of a chat."""
    reader, encoder = TaskReader([section], "--data"), PromptTokenizer(tokenizer)
    lengths = []
    for row in data.rows:
        task = reader.read(0, row)
        assert isinstance(task, Task), "nothing drops rows"
        if as_chat and task.text is not None:
            lengths.append(len(encoder.tokens([{"role": "user", "content": task.text}], None, None, row)))
        else:
            lengths.append(len(task.encode(encoder)))
    return _lengths(lengths)


def fixed_sizes(
    lengths: Lengths, num_rows: int, context: int | None, *, documents_per_row: int, epochs: int
) -> FixedSizes:
    """The longest document fits, as far as the model's context goes. An epoch has about 20 steps of at most 16384
    tokens."""
    longest = _up_to(lengths.longest, _ROUND_TO)
    max_length = longest if context is None else min(longest, context)
    total = num_rows * documents_per_row * min(lengths.mean, max_length)
    smallest = documents_per_row * max_length
    wanted = min(_LARGEST_STEP, _power_of_two(total / _STEPS_PER_EPOCH))
    tokens_per_step = max(_power_of_two(smallest), wanted)
    steps = max(10, math.ceil(epochs * total / tokens_per_step))
    return FixedSizes(
        max_length=max_length, tokens_per_step=tokens_per_step, steps=steps, epochs=steps * tokens_per_step / total
    )


def on_policy_sizes(lengths: Lengths, num_rows: int, context: int | None, where: str) -> OnPolicySizes:
    """The longest prompt fits beside an answer of up to 512 tokens. In a short context, prompts take half of it at
    most."""
    prompt = _up_to(lengths.longest, _ROUND_TO)
    if context is not None and prompt + _NEW_TOKENS > context:
        prompt = min(prompt, max(context // 2, context - _NEW_TOKENS))
    room = _NEW_TOKENS if context is None else min(_NEW_TOKENS, context - prompt)
    if room < _FEWEST_NEW_TOKENS:
        raise DataError(
            f"--data: the prompts of {where} have up to {lengths.longest} tokens, and the model's context of {context} "
            "leaves no room for an answer. Take a model with a longer context."
        )
    prompts_per_step = min(_PROMPTS_PER_STEP, num_rows)
    steps = min(500, max(20, math.ceil(2 * num_rows / prompts_per_step)))
    return OnPolicySizes(
        max_length=prompt + room,
        max_new_tokens=room,
        prompts_per_step=prompts_per_step,
        steps=steps,
        epochs=steps * prompts_per_step / num_rows,
    )


def is_chat(values: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Whether a row holds messages, which need a chat template."""
    names = [columns.get(name, name) for name in ("messages", "prompt", "completion", "chosen")]
    return any(isinstance(values.get(name), list | tuple) for name in names)


def _lengths(lengths: list[int]) -> Lengths:
    return Lengths(num_measured=len(lengths), mean=float(np.mean(lengths)), longest=max(lengths))


def _up_to(number: int, multiple: int) -> int:
    return multiple * math.ceil(number / multiple)


def _power_of_two(number: float) -> int:
    """The next power of two, 256 at least."""
    return max(256, 1 << math.ceil(math.log2(max(1.0, number))))
