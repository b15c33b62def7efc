# SPDX-License-Identifier: Apache-2.0
"""What can be known of a recipe before a run: files, model folder, plug-ins; with `deep` also tokenizer and data."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from podium.data.checking import check_source
from podium.data.control_counts import ControlCounter
from podium.data.control_tokens import ControlRule
from podium.data.documents import Document
from podium.data.dropping import no_trained_token, reasons_of
from podium.data.examples import shape_of
from podium.data.masks import ChatRenderer
from podium.data.prompts import PromptTokenizer
from podium.data.skipping import RowSkipper, SkipPolicy
from podium.data.surveying import ExampleSurvey, SourceRows, TaskSurvey, require_usable
from podium.data.tasks import Task, TaskReader, check_task_source, no_task, prompt_room, read_tasks
from podium.data.tokenizer import listed_tokens, marked_text
from podium.environments.field_packages import require_package
from podium.environments.reward_columns import require_reward_columns
from podium.environments.rewards import check_rewards, declared_reward
from podium.environments.sandbox.pool import require_section
from podium.environments.signatures import require_options
from podium.errors import PodiumError, RecipeError, counted
from podium.mesh_checks import check_generator_mesh, check_machines, check_mesh
from podium.models.adapter_folder import check_adapter
from podium.models.folder import check_model_folder, check_speaks, read_config
from podium.observe.row_progress import RowProgress
from podium.observe.tracking import TRACKERS, require_tracker
from podium.recipe import (
    CustomOnPolicyRecipe,
    CustomSpmdRecipe,
    DistillRecipe,
    DpoRecipe,
    EnvironmentSection,
    FunctionReward,
    GrpoRecipe,
    ModelSection,
    OnPolicyRecipe,
    Recipe,
    RewardModelRecipe,
    SftRecipe,
    SourceSection,
    SpmdRecipe,
    TeacherSection,
    plugins,
)
from podium.recipe.definitions import definition_of
from podium.recipe.dense import CustomPreference
from podium.recipe.losses import PAIR_INPUTS, TOKEN_INPUTS, declared_inputs
from podium.recipe.programs import wrong_kind
from podium.recipe.schema import NewTokensSection

_DEEP_ROWS = 2000
_SHOWN_CHARACTERS = 400


def check_recipe(recipe: Recipe, *, per_machine: int | None = None) -> None:
    """Torch-free and quick. All problems are raised together. `per_machine`: devices of a machine, where known."""
    raise_together(problems_of(recipe, per_machine=per_machine))


def problems_of(recipe: Recipe, *, per_machine: int | None = None) -> list[PodiumError]:
    """Everything that is wrong, each beginning with its key."""
    problems: list[PodiumError] = []
    for look in _looks(recipe, per_machine):
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


def _looks(recipe: Recipe, per_machine: int | None) -> Iterator[Callable[[], None]]:
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
        skips = recipe.data.on_error == "skip"
        if isinstance(recipe, SpmdRecipe):
            yield partial(check_source, source, key, shape_of(recipe), skips=skips)
        elif isinstance(recipe, OnPolicyRecipe):
            yield partial(check_task_source, source, key, skips=skips, needs_prompt=recipe.needs_prompts)
        if source.map is not None:
            yield lambda key=key, path=source.map: plugins.locate(path, f"{key}.map")  # type: ignore[misc]
    if isinstance(recipe, OnPolicyRecipe):
        yield lambda: check_rewards(recipe.reward)
        if recipe.runs_programs:
            yield lambda: require_section(recipe.sandbox_section)
        for index, reward in enumerate(recipe.reward):
            if isinstance(reward, FunctionReward):
                yield partial(_check_function, reward, f"reward.{index}")
        if recipe.environment is not None:
            yield partial(_check_environment, recipe.environment)
            if recipe.environment.gymnasium is not None:
                yield partial(require_package, "gymnasium", "gymnasium", "environment.gymnasium")
            if recipe.environment.openenv is not None:
                yield partial(require_package, "openenv", "openenv", "environment.openenv")
            if (verifiers := recipe.environment.verifiers) is not None:
                yield partial(require_package, "verifiers", "verifiers", "environment.verifiers")
                if verifiers.taskset.endswith(".py"):
                    yield partial(_check_exists, verifiers.taskset, "environment.verifiers.taskset", hub=False)
    if isinstance(recipe, CustomSpmdRecipe | CustomOnPolicyRecipe):
        yield lambda: _check_kind(recipe)
    for index, name in enumerate(recipe.run.loggers):
        for tracker in TRACKERS:
            if name == tracker:
                yield partial(require_tracker, tracker, f"run.loggers.{index}")
    for key, plugin in _plugins(recipe):
        yield lambda key=key, plugin=plugin: plugins.locate(plugin, key)  # type: ignore[misc]
    if isinstance(recipe, GrpoRecipe | CustomOnPolicyRecipe) and isinstance(recipe.algorithm.advantage, plugins.Plugin):
        estimator = recipe.algorithm.advantage
        yield lambda: _check_estimator(estimator)
    for key, path, inputs in _losses(recipe):
        yield partial(_check_loss, path, key, inputs)
    if isinstance(recipe, DpoRecipe) and isinstance(recipe.preference, CustomPreference):
        preference = recipe.preference
        yield lambda: _check_reference(preference)
    for model_beside in _other_models(recipe):
        yield partial(
            check_model_folder, model_beside.path, model_beside.key, weights=True, tokenizer=model_beside.judges
        )
        if model_beside.gives_logprobs or model_beside.judges:
            yield partial(check_speaks, model_beside.path, model_beside.key)
    if not isinstance(recipe, RewardModelRecipe):
        yield lambda: check_speaks(model.path, "model.path")
    models = {"model.path": model.path, **{each.key: each.path for each in _other_models(recipe) if not each.judges}}
    yield lambda: check_mesh(recipe, models)
    if per_machine is not None:
        yield lambda: check_machines(recipe, models, per_machine)
    if isinstance(recipe, OnPolicyRecipe):
        yield lambda: check_generator_mesh(recipe)


def _check_kind(recipe: CustomSpmdRecipe | CustomOnPolicyRecipe) -> None:
    """That a custom program's function fits its signal; one that cannot be found is another look's."""
    with suppress(RecipeError):
        plugins.locate(recipe.program, "program")
        is_async = plugins.is_async(recipe.program, "program")
        if is_async is not None and is_async != (recipe.signal == "on_policy"):
            raise wrong_kind(recipe.program, recipe.signal)


def _check_function(reward: FunctionReward, key: str) -> None:
    """That something fills the parameters of a reward function, and that its options are parameters."""
    declared_reward(reward, key)


def _check_environment(section: EnvironmentSection) -> None:
    """That the environment can be made with its options, as far as its file's text tells. One that cannot be found is
    another look's."""
    key = "environment.options"
    if section.agent is not None:
        _check_agent(section.agent)
    if section.is_agent:
        return
    if section.tools:
        from podium.environments.tools import ToolEnvironment

        making = inspect.signature(ToolEnvironment)
        limits = [each for each in making.parameters.values() if each.kind is each.KEYWORD_ONLY]
        require_options("tools", making.replace(parameters=limits), section.options, key)
        return
    definition = None
    made = section.environment if section.gymnasium is None else section.gymnasium.id
    if not isinstance(made, plugins.Plugin):
        return
    with suppress(RecipeError):
        definition = definition_of(made, key)
    if definition is not None:
        require_options(f"{definition.place}: {made.name}", definition.signature, section.options, key)


def _check_agent(path: str) -> None:
    if not _takes(path, "environment.agent", 3):
        raise RecipeError(
            f"environment.agent: {path} cannot be called with three arguments. An agent takes (task, base_url, "
            "api_key) and returns a reward, or None if the recipe's rewards grade the episode."
        )


def _check_estimator(path: str) -> None:
    if not _takes(path, "algorithm.advantage", 2):
        raise RecipeError(
            f"algorithm.advantage: {path} cannot be called with two arguments. An estimator takes (rewards_N, group_N) "
            "and gives one advantage for each episode."
        )


def _takes(path: str, key: str, count: int) -> bool:
    """Whether a function can be called with so many arguments. One that cannot be found is another look's."""
    try:
        plugins.locate(path, key)
        return plugins.takes(path, key, count)
    except RecipeError:
        return True


def _losses(recipe: Recipe) -> Iterator[tuple[str, str, Mapping[str, str] | None]]:
    """Custom losses: key, import path, and what they may read by name. None: a loss of PolicyTokens."""
    if isinstance(recipe, SftRecipe) and isinstance(recipe.algorithm.loss, plugins.Plugin):
        yield "algorithm.loss", recipe.algorithm.loss, TOKEN_INPUTS
    if isinstance(recipe, DpoRecipe) and isinstance(recipe.preference, CustomPreference):
        yield "preference.loss", recipe.preference.loss, PAIR_INPUTS
    if isinstance(recipe, OnPolicyRecipe) and isinstance(recipe.full_algorithm.loss, plugins.Plugin):
        yield "algorithm.loss", recipe.full_algorithm.loss, None


def _check_loss(path: str, key: str, inputs: Mapping[str, str] | None) -> None:
    """One that cannot be found is another look's."""
    try:
        plugins.locate(path, key)
    except RecipeError:
        return
    if inputs is not None:
        declared_inputs(path, key, inputs)
    elif not plugins.takes(path, key, 1):
        raise RecipeError(
            f"{key}: {path} cannot be called with one argument. A loss takes PolicyTokens and gives the loss of each "
            "token."
        )


def _check_reference(preference: CustomPreference) -> None:
    """That a reference is read where keys of it are set. A loss that is wrong in itself is another look's."""
    is_read = True
    with suppress(RecipeError):
        is_read = preference.reads_reference
    for key in ("reference", "reference_model"):
        if not is_read and getattr(preference, key) not in (None, "auto"):
            raise RecipeError(
                f"preference.{key}: {preference.loss} does not take reference_chosen_R or reference_rejected_R, so "
                "nothing would read the reference. Remove the key, or add the parameter."
            )


def _plugins(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Custom pieces by import path, with their keys."""
    named: list[tuple[str, object]] = [("program", recipe.program)]
    named += [(f"run.loggers.{index}", logger) for index, logger in enumerate(recipe.run.loggers)]
    if recipe.generation is not None:
        named.append(("evaluation.generation.score", recipe.generation.score))
    if isinstance(recipe, OnPolicyRecipe):
        named += _on_policy_plugins(recipe)
    named += [(key, path) for key, path, inputs in _losses(recipe) if inputs is not None]
    return ((key, value) for key, value in named if isinstance(value, plugins.Plugin))


def _on_policy_plugins(recipe: OnPolicyRecipe) -> Iterator[tuple[str, object]]:
    for index, reward in enumerate(recipe.reward):
        if isinstance(reward, FunctionReward):
            yield f"reward.{index}.function", reward.function
    yield "algorithm.advantage", recipe.full_algorithm.advantage
    yield "algorithm.loss", recipe.full_algorithm.loss
    if recipe.environment is not None:
        yield "environment.environment", recipe.environment.environment
        yield "environment.agent", recipe.environment.agent
        if (gymnasium := recipe.environment.gymnasium) is not None:
            for key in ("id", "render", "parse"):
                yield f"environment.gymnasium.{key}", getattr(gymnasium, key)
        if (openenv := recipe.environment.openenv) is not None:
            for key in ("client", "action", "render"):
                yield f"environment.openenv.{key}", getattr(openenv, key)
        for index, tool in enumerate(recipe.environment.tools):
            yield f"environment.tools.{index}", tool


@dataclass(frozen=True, slots=True, kw_only=True)
class _OtherModel:
    """A checkpoint beside the policy's."""

    key: str
    path: str
    gives_logprobs: bool = False  # of the policy's tokens: a language model that shares the tokenizer
    judges: bool = False  # it generates with a tokenizer of its own, whole on each device


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
    for index, judge in recipe.local_judges.items():
        if judge.folder is not None:
            yield _OtherModel(key=f"reward.{index}.judge.model", path=judge.folder, judges=True)
    critic, kl = recipe.critic_section, recipe.full_algorithm.kl
    if critic is not None and critic.path is not None:
        yield _OtherModel(key="critic.path", path=critic.path)
    if kl is not None and kl.reference is not None:
        yield _OtherModel(key="algorithm.kl.reference", path=kl.reference, gives_logprobs=True)


def deep_report(recipe: Recipe, *, all_rows: bool = False, progress: TextIO | None = None) -> list[str]:
    """Loads tokenizer and model config and tokenizes the first rows of every source, or all; one line for each.
    `progress` shows how far it is."""
    from podium.data.tokenizer import load_tokenizer, require_embeddings, require_same_tokens
    from podium.models.causal_lm import load_config
    from podium.models.folder import local_folder
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
        if other.judges:
            from podium.roles.judge_model import require_template

            require_template(
                load_tokenizer(ModelSection(path=other.path)), other.key.removesuffix(".model"), other.path
            )
    if isinstance(recipe, OnPolicyRecipe) and recipe.data.heldout:
        from podium.roles.grader import require_scorable_heldout

        skipper = RowSkipper(SkipPolicy.of(recipe.data), "data.heldout")
        heldout = read_tasks(
            recipe.data.heldout, "data.heldout", _DEEP_ROWS, skipper=skipper, needs_prompt=recipe.needs_prompts
        )
        require_scorable_heldout(recipe, heldout)
    if isinstance(recipe, OnPolicyRecipe):
        from podium.environments.environment_factory import environment_maker

        environment_maker(recipe.environment)  # loads a custom class: its text may not tell what making it takes
    shown = RowProgress(progress if all_rows else None)
    reports = []
    rule = ControlRule.of(recipe.model)
    search = ChatRenderer(tokenizer, rule).control_search
    for key, section in _sources(recipe):
        counter = ControlCounter(search, rule, section, key)
        source_rows = SourceRows(section, key, None if all_rows else _DEEP_ROWS, shown, counter.look)
        match recipe:
            case SpmdRecipe():
                reports.append((key, source_rows, counter, partial(_source_report, recipe, key, section, tokenizer)))
            case OnPolicyRecipe():
                reports.append((key, source_rows, counter, partial(_task_report, recipe, key, section, tokenizer)))
    source_lines = []
    for _, source_rows, counter, report in reports:
        source_lines += report(source_rows)
        source_lines += counter.lines()
        source_lines += [f"  note: {source_rows.note}"] if source_rows.note is not None else []
    shown.close()
    if isinstance(recipe, OnPolicyRecipe):
        require_reward_columns(recipe)
    bad = [(key, source_rows.bad) for key, source_rows, _, _ in reports]
    return lines + source_lines + require_usable(bad, recipe.data)


def _task_report(
    recipe: OnPolicyRecipe, key: str, section: SourceSection, tokenizer: Any, rows: SourceRows
) -> list[str]:
    """The prompts of a source: how long they are, whether answers fit behind them, what is known to be right."""
    encoder = PromptTokenizer(tokenizer, ControlRule.of(recipe.model))
    room = prompt_room(recipe)
    longest = room + recipe.rollout.max_new_tokens
    reader = TaskReader([section], key.rpartition(".")[0], needs_prompt=recipe.needs_prompts)
    survey = TaskSurvey.of(rows, reader, encoder, room=room)
    if survey.first is None:
        if not survey.bad.num_bad:
            raise no_task(key)
        return [f"{key}: {counted(survey.bad.num_read, 'row')} read, no prompt"]
    if not survey.num_fitting:
        raise RecipeError(
            f"{key}: none of the first {counted(survey.num_tasks, 'prompt')} of {section.path} leaves room for "
            f"rollout.max_new_tokens {recipe.rollout.max_new_tokens}: the shortest has {survey.shortest} tokens and "
            f"{longest} is the longest sequence. Lower rollout.max_new_tokens, or raise data.max_length as far as the "
            "model allows."
        )
    _check_tools_shown(recipe, survey.first, tokenizer)
    if survey.first.has_prompt:
        first = tokenizer.decode(survey.first.encode(encoder).tolist()).replace("\n", "\\n")
    else:
        first = json.dumps(dict(survey.first.row), ensure_ascii=False, default=str)
    counts = [f"{survey.num_answered} with a reference answer"]
    if survey.num_prompts < survey.num_tasks:
        counts.append(f"{survey.num_tasks - survey.num_prompts} without a prompt, which the environment makes")
    if survey.num_prompts:
        mean = survey.num_tokens / survey.num_prompts
        counts.insert(0, f"{survey.num_tasks - survey.num_fitting} too long")
        counts.insert(0, f"{mean:.0f} tokens on average and {survey.longest} at most")
    read = counted(survey.num_prompts, "prompt") if survey.num_prompts else counted(survey.num_tasks, "row")
    return [f"{key}: {read} read, {', '.join(counts)}", f"  the first: {first[:_SHOWN_CHARACTERS]}"]


def _check_tools_shown(recipe: OnPolicyRecipe, task: Task, tokenizer: Any) -> None:
    """That the chat template shows the model the tools of the recipe."""
    from podium.environments.tools import all_tools, load_tools
    from podium.environments.transcript import check_tools_shown

    environment = recipe.environment
    if environment is not None and environment.tools and not environment.hidden_tools and task.messages is not None:
        check_tools_shown(tokenizer, task.messages, [tool.schema for tool in all_tools(load_tools(environment.tools))])


def _source_report(recipe: SpmdRecipe, key: str, section: SourceSection, tokenizer: Any, rows: SourceRows) -> list[str]:
    """What became of a source's rows, and one of its documents with the trained part in brackets."""
    from podium.data.endings import missing_stop_token
    from podium.data.examples import MakerSpec
    from podium.data.tokenizer import stop_tokens
    from podium.models.folder import local_folder

    spec = replace(MakerSpec.of(recipe), sections=(section,), key=key.rpartition(".")[0], skips=False)
    survey = ExampleSurvey.of(rows, spec.build())
    if not survey.num_documents:
        if survey.bad.num_bad:
            return [f"{key}: {counted(survey.bad.num_read, 'row')} read, no document"]
        raise no_trained_token(
            f"the first {counted(survey.bad.num_read, 'row')} of {section.path}", survey.dropped, key=key
        )
    warning = None
    if not isinstance(recipe, RewardModelRecipe):  # which scores texts and learns no token
        stops = stop_tokens(tokenizer, local_folder(recipe.model.path, key))
        warning = missing_stop_token(survey.whole, tokenizer, stops)
    return [
        f"{key}: {counted(survey.bad.num_read, 'row')} read, {counted(survey.num_documents, 'document')}, "
        f"{survey.num_tokens / survey.num_documents:.0f} tokens on average, "
        f"{survey.num_trained / survey.num_tokens:.0%} of them trained, {survey.num_truncated} truncated, "
        f"{reasons_of(survey.dropped) or 'none dropped'}",
        *(
            f"  the first, with what is trained in brackets: {_marked(document, tokenizer)}"
            for document in survey.first
        ),
        *([f"  warning: {warning}"] if warning is not None else []),
    ]


def _marked(document: Document, tokenizer: Any) -> str:
    marked = marked_text(tokenizer, document.tokens.tolist(), document.trained.tolist())
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
