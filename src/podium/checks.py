# SPDX-License-Identifier: Apache-2.0
"""What can be known of a recipe before a run: files, model folder, plug-ins; with `deep` also tokenizer and data."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from podium.data.checking import check_source
from podium.data.documents import Document
from podium.data.examples import shape_of
from podium.data.prompts import PromptTokenizer
from podium.data.tasks import check_task_source, prompt_room, read_tasks
from podium.data.tokenizer import listed_tokens
from podium.environments.rewards import check_rewards
from podium.errors import PodiumError, RecipeError
from podium.models.adapter_folder import check_adapter
from podium.models.folder import check_model_folder, check_speaks
from podium.recipe import (
    CustomOnPolicyRecipe,
    CustomSpmdRecipe,
    DistillRecipe,
    DpoRecipe,
    FunctionReward,
    GrpoRecipe,
    ModelSection,
    OnPolicyRecipe,
    Recipe,
    RewardModelRecipe,
    SourceSection,
    SpmdRecipe,
    TeacherSection,
    plugins,
)
from podium.recipe.programs import wrong_kind
from podium.recipe.schema import NewTokensSection

_DEEP_ROWS = 2000
_SHOWN_CHARACTERS = 400


def check_recipe(recipe: Recipe) -> None:
    """Torch-free and quick. All problems are raised together."""
    raise_together(problems_of(recipe))


def problems_of(recipe: Recipe) -> list[PodiumError]:
    """Everything that is wrong, each beginning with its key."""
    problems: list[PodiumError] = []
    for look in _looks(recipe):
        try:
            look()
        except PodiumError as error:
            problems.append(error)
    return problems


def raise_together(problems: Sequence[PodiumError]) -> None:
    """One as itself, several in one error, none not at all."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise RecipeError(f"{len(problems)} problems:\n" + "\n".join(f"  {problem}" for problem in problems))


def _looks(recipe: Recipe) -> Iterator[Callable[[], None]]:
    model = recipe.model
    yield lambda: check_model_folder(
        model.path, "model.path", weights=model.init == "pretrained", tokenizer=model.tokenizer is None
    )
    if model.tokenizer is not None:
        tokenizer = model.tokenizer
        yield lambda: _check_exists(tokenizer, "model.tokenizer", hub=True)
    if model.chat_template is not None:
        template = model.chat_template
        yield lambda: _check_exists(template, "model.chat_template", hub=False)
    if model.lora is not None:
        yield lambda: check_adapter(model)
    if model.new_tokens is not None:
        new_tokens = model.new_tokens
        yield lambda: _check_new_tokens(new_tokens)
    for key, source in _sources(recipe):
        look = partial(check_source, shape=shape_of(recipe)) if isinstance(recipe, SpmdRecipe) else check_task_source
        yield lambda key=key, source=source, look=look: look(source, key)  # type: ignore[misc]
        if source.map is not None:
            yield lambda key=key, path=source.map: plugins.locate(path, f"{key}.map")  # type: ignore[misc]
    if isinstance(recipe, OnPolicyRecipe):
        yield lambda: check_rewards(recipe.reward)
    if isinstance(recipe, CustomSpmdRecipe | CustomOnPolicyRecipe):
        yield lambda: _check_kind(recipe)
    for key, plugin in _plugins(recipe):
        yield lambda key=key, plugin=plugin: plugins.locate(plugin, key)  # type: ignore[misc]
    if isinstance(recipe, GrpoRecipe | CustomOnPolicyRecipe) and isinstance(recipe.algorithm.advantage, plugins.Plugin):
        estimator = recipe.algorithm.advantage
        yield lambda: _check_estimator(estimator)
    for model_beside in _other_models(recipe):
        yield partial(check_model_folder, model_beside.path, model_beside.key, weights=True, tokenizer=False)
        if model_beside.gives_logprobs:
            yield partial(check_speaks, model_beside.path, model_beside.key)
    if not isinstance(recipe, RewardModelRecipe):
        yield lambda: check_speaks(model.path, "model.path")


def _check_kind(recipe: CustomSpmdRecipe | CustomOnPolicyRecipe) -> None:
    """That a custom program's function fits its signal; one that cannot be found is another look's."""
    with suppress(RecipeError):
        plugins.locate(recipe.program, "program")
        is_async = plugins.is_async(recipe.program, "program")
        if is_async is not None and is_async != (recipe.signal == "on_policy"):
            raise wrong_kind(recipe.program, recipe.signal)


def _check_estimator(path: str) -> None:
    """One that cannot be found is another look's."""
    fits = True
    with suppress(RecipeError):
        plugins.locate(path, "algorithm.advantage")
        fits = plugins.takes(path, "algorithm.advantage", 2)
    if not fits:
        raise RecipeError(
            f"algorithm.advantage: {path} cannot be called with two arguments. An estimator takes (rewards_N, group_N) "
            "and gives one advantage for each episode."
        )


def _plugins(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Custom pieces by import path, with their keys."""
    named: list[tuple[str, object]] = [("program", recipe.program)]
    named += [(f"run.loggers.{index}", logger) for index, logger in enumerate(recipe.run.loggers)]
    if recipe.generation is not None:
        named.append(("evaluation.generation.score", recipe.generation.score))
    if isinstance(recipe, OnPolicyRecipe):
        named += _on_policy_plugins(recipe)
    return ((key, value) for key, value in named if isinstance(value, plugins.Plugin))


def _on_policy_plugins(recipe: OnPolicyRecipe) -> Iterator[tuple[str, object]]:
    for index, reward in enumerate(recipe.reward):
        if isinstance(reward, FunctionReward):
            yield f"reward.{index}.function", reward.function
    yield "algorithm.advantage", recipe.full_algorithm.advantage
    yield "algorithm.loss", recipe.full_algorithm.loss
    if recipe.environment is not None:
        yield "environment.environment", recipe.environment.environment
        for index, tool in enumerate(recipe.environment.tools):
            yield f"environment.tools.{index}", tool


@dataclass(frozen=True, slots=True, kw_only=True)
class _OtherModel:
    """A checkpoint beside the policy's."""

    key: str
    path: str
    gives_logprobs: bool = False  # of the policy's tokens: a language model that shares the tokenizer


def _other_models(recipe: Recipe) -> Iterator[_OtherModel]:
    if isinstance(recipe, DpoRecipe) and recipe.reference_model is not None:
        yield _OtherModel(key="preference.reference_model", path=recipe.reference_model, gives_logprobs=True)
    teachers: Sequence[TeacherSection] = ()
    match recipe:
        case DistillRecipe() | CustomSpmdRecipe():
            teachers = recipe.teachers
        case OnPolicyRecipe():
            teachers = recipe.teacher_sections
    for index, teacher in enumerate(teachers):
        yield _OtherModel(key=f"teachers.{index}.path", path=teacher.path, gives_logprobs=True)
    if isinstance(recipe, OnPolicyRecipe):
        yield from _on_policy_models(recipe)


def _on_policy_models(recipe: OnPolicyRecipe) -> Iterator[_OtherModel]:
    for index, path in recipe.reward_models.items():
        yield _OtherModel(key=f"reward.{index}.model", path=path)
    critic, kl = recipe.critic_section, recipe.full_algorithm.kl
    if critic is not None and critic.path is not None:
        yield _OtherModel(key="critic.path", path=critic.path)
    if kl is not None and kl.reference is not None:
        yield _OtherModel(key="algorithm.kl.reference", path=kl.reference, gives_logprobs=True)


def deep_report(recipe: Recipe) -> list[str]:
    """Loads tokenizer and model config and tokenizes the first rows of every source; one line for each."""
    from podium.data.tokenizer import load_tokenizer, require_embeddings, require_same_tokens
    from podium.models.causal_lm import load_config
    from podium.models.folder import local_folder, read_config
    from podium.models.new_tokens import grown_vocabulary
    from podium.recipe.resolving import resolved

    folder = local_folder(recipe.model.path, "model.path")
    config = load_config(folder, trust_remote_code=recipe.model.trust_remote_code)
    recipe = resolved(recipe, read_config(folder, "model.path"))
    tokenizer = load_tokenizer(recipe.model)
    rows = grown_vocabulary(recipe.model, config.get_text_config().vocab_size)
    assert recipe.data.max_length is not None
    lines = [
        f"model: {config.model_type}, vocabulary {rows}, tokenizer {type(tokenizer).__name__} "
        f"of {len(tokenizer)} tokens, documents of up to {recipe.data.max_length} tokens"
    ]
    require_embeddings(tokenizer, rows)
    for other in _other_models(recipe):
        if other.gives_logprobs:
            require_same_tokens(tokenizer, load_tokenizer(ModelSection(path=other.path)), other.key)
    for key, section in _sources(recipe):
        match recipe:
            case SpmdRecipe():
                lines += _source_report(recipe, key, section, tokenizer)
            case OnPolicyRecipe():
                lines += _task_report(recipe, key, section, tokenizer)
    return lines


def _task_report(recipe: OnPolicyRecipe, key: str, section: SourceSection, tokenizer: Any) -> list[str]:
    """The first prompts of a source: how long they are, whether answers fit behind them, what is known to be right."""
    encoder = PromptTokenizer(tokenizer)
    tasks = read_tasks([section], key.rpartition(".")[0], _DEEP_ROWS)
    lengths = [len(task.encode(encoder)) for task in tasks]
    room = prompt_room(recipe)
    longest = room + recipe.rollout.max_new_tokens
    fitting = sum(length <= room for length in lengths)
    if not fitting:
        raise RecipeError(
            f"{key}: none of the first {len(tasks)} prompts of {section.path} leaves room for rollout.max_new_tokens "
            f"{recipe.rollout.max_new_tokens}: the shortest has {min(lengths)} tokens and {longest} is the longest "
            "sequence. Lower rollout.max_new_tokens, or raise data.max_length as far as the model allows."
        )
    answered = sum(task.reference is not None for task in tasks)
    first = tokenizer.decode(tasks[0].encode(encoder).tolist()).replace("\n", "\\n")
    return [
        f"{key}: {len(tasks)} prompts read, {sum(lengths) / len(tasks):.0f} tokens on average and {max(lengths)} at "
        f"most, {len(tasks) - fitting} too long, {answered} with a reference answer",
        f"  the first: {first[:_SHOWN_CHARACTERS]}",
    ]


def _source_report(recipe: SpmdRecipe, key: str, section: SourceSection, tokenizer: Any) -> list[str]:
    """What became of a source's first rows, and one of its documents with the trained part in brackets."""
    from podium.data.chat import Dropped
    from podium.data.endings import missing_stop_token
    from podium.data.examples import MadeExample, MakerSpec
    from podium.data.sources import open_source
    from podium.data.tokenizer import stop_tokens
    from podium.models.folder import local_folder

    spec = replace(MakerSpec.of(recipe), sections=(section,), key=key.rpartition(".")[0])
    maker, source = spec.build(), open_source(section, key)
    rows = islice((row for block in range(source.num_blocks) for row in source.read_block(block)), _DEEP_ROWS)
    results = [maker.make(0, row) for row in rows]
    examples = [result for result in results if isinstance(result, MadeExample)]
    dropped = Counter(result.value for result in results if isinstance(result, Dropped))
    reasons = ", ".join(f"{count} dropped ({reason})" for reason, count in dropped.items())
    if not examples:
        raise RecipeError(
            f"{key}: none of the first {len(results)} rows of {section.path} gives a document: {reasons}. Check "
            "data.trained (chats need assistant turns), data.max_length with data.overlong, and the source's `map`."
        )
    documents = [document for each in examples for document in each.example.documents]
    tokens = sum(len(document.tokens) for document in documents)
    trained = sum(document.num_trained for document in documents)
    truncated = sum(each.truncated for each in examples)
    whole = [document for each in examples if not each.truncated for document in each.example.documents]
    warning = None
    if not isinstance(recipe, RewardModelRecipe):  # which scores texts and learns no token
        warning = missing_stop_token(whole, tokenizer, stop_tokens(tokenizer, local_folder(recipe.model.path, key)))
    return [
        f"{key}: {len(results)} rows read, {len(documents)} documents, {tokens / len(documents):.0f} tokens on "
        f"average, {trained / tokens:.0%} of them trained, {truncated} truncated, {reasons or 'none dropped'}",
        *(
            f"  the first, with what is trained in brackets: {_marked(document, tokenizer)}"
            for document in examples[0].example.documents
        ),
        *([f"  warning: {warning}"] if warning is not None else []),
    ]


def _marked(document: Document, tokenizer: Any) -> str:
    parts = []
    for trained, places in groupby(range(len(document.tokens)), key=lambda place: bool(document.trained[place])):
        text = tokenizer.decode([int(document.tokens[place]) for place in places])
        parts.append(f"[[{text}]]" if trained else text)
    marked = "".join(parts).replace("\n", "\\n")
    return marked if len(marked) <= _SHOWN_CHARACTERS else marked[:_SHOWN_CHARACTERS] + " ..."


def _sources(recipe: Recipe) -> Iterator[tuple[str, SourceSection]]:
    for part, sources in (("train", recipe.data.train), ("heldout", recipe.data.heldout)):
        for index, source in enumerate(sources):
            yield f"data.{part}.{index}", source


def _check_new_tokens(section: NewTokensSection) -> None:
    listed_tokens(section)


def _check_exists(path: str, key: str, *, hub: bool) -> None:
    if not os.path.exists(Path(path).expanduser()) and not (hub and path.count("/") == 1):
        raise RecipeError(f"{key}: there is no {path}.")
