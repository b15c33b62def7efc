# SPDX-License-Identifier: Apache-2.0
"""Drafts a recipe from a data file and a model, and keeps it if the deep check accepts it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.checks import check_recipe, deep_report
from podium.data.files import format_of
from podium.drafting.columns import (
    METHODS,
    ON_POLICY,
    DataFacts,
    Method,
    fitting_method,
    read_data,
    reference_column,
    renamed_columns,
    unread_columns,
)
from podium.drafting.measuring import (
    Lengths,
    ModelFacts,
    document_lengths,
    fixed_sizes,
    is_chat,
    on_policy_sizes,
    prompt_lengths,
    read_model,
)
from podium.drafting.texts import Choices, epochs_of, functions_text, recipe_text
from podium.errors import ModelError, RecipeError
from podium.recipe import SourceSection, SpmdRecipe, load_recipe, parse_recipe

_NEEDS_TEACHER: tuple[Method, ...] = ("distill", "on_policy_distill")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """What is drafted, and where it is written."""

    data: str
    model: str
    out: Path
    method: str | None = None  # None: what the data's columns fit
    heldout: str | None = None
    teacher: str | None = None
    chat_template: str | None = None
    overwrite: bool = False

    @property
    def functions_file(self) -> Path:
        """The Python file beside the recipe."""
        return self.out.with_name(re.sub(r"\W", "_", self.out.stem) + "_functions.py")


def draft_recipe(request: DraftRequest) -> list[str]:
    """Writes the recipe and returns lines about what was seen and written. Nothing is left if the check fails."""
    _require_free(request.out, request)
    data = read_data(request.data)
    method = _method(request.method, data)
    columns = renamed_columns(data, method)
    model = read_model(request.model, request.chat_template)
    choices, functions = _chosen(request, data, method, columns, model)
    if functions:
        _require_free(request.functions_file, request)
    _write_checked({request.out: recipe_text(choices), **({request.functions_file: functions} if functions else {})})
    unread = unread_columns(data, method)
    template = "a chat template" if model.has_chat_template else "no chat template"
    return [
        f"data: {request.data}, {data.count}, {choices.lengths}",
        f"columns: {', '.join(data.columns)}" + (f" (not read: {', '.join(unread)})" if unread else ""),
        f"model: {model.model_type}, context {model.context or 'unknown'}, tokenizer with {template}",
        f"program: {method}" + ("" if request.method else ", which the columns fit"),
        f"written: {request.out}" + (f" and {request.functions_file}" if functions else ""),
        *_next_lines(request, data, choices),
    ]


def _method(name: str | None, data: DataFacts) -> Method:
    if name is None:
        return fitting_method(data)
    named = next((method for method in METHODS if method == name.replace("-", "_")), None)
    if named is None:
        raise RecipeError(f"there is no program {name!r} to draft. There are {', '.join(METHODS)}.")
    return named


def _chosen(
    request: DraftRequest, data: DataFacts, method: Method, columns: dict[str, str], model: ModelFacts
) -> tuple[Choices, str]:
    """Everything that the recipe says, and the text of the file beside it."""
    if (request.teacher is None) == (method in _NEEDS_TEACHER):
        raise RecipeError(
            f"--teacher: {method} learns from a teacher. Give the folder of one."
            if method in _NEEDS_TEACHER
            else f"--teacher: {method} has no teacher. Remove it, or draft distill or on_policy_distill."
        )
    chats = is_chat(data.rows[0].values, columns)
    if chats and not model.has_chat_template:
        raise ModelError(
            f"--model: the tokenizer of {model.path} has no chat template, and {data.path} has chats. Take a model "
            "that was made for chats, or give a Jinja file with --chat-template."
        )
    on_policy = method in ON_POLICY
    is_prompt = "prompt" in columns or ("prompt" in data.columns and "messages" not in columns)
    as_chat = on_policy and is_prompt and not chats and model.has_chat_template
    has_reward = on_policy and method != "on_policy_distill"
    source = {"path": request.data, **({"columns": columns} if columns else {})}
    lengths, sizes = _measured(source, data, method, model, as_chat=as_chat)
    plugin = request.functions_file  # like other paths, relative to the folder podium is started in
    if as_chat:
        source = {**source, "map": f"{plugin}:as_chat"}
    heldout = None if request.heldout is None else {**source, "path": request.heldout}
    stem = Path(request.data).name.removesuffix(".gz")
    stem = os.path.splitext(stem)[0] if format_of(stem) is not None else stem
    choices = Choices(
        method=method, model=model, source=source, heldout=heldout, teacher=request.teacher, rows=data.count,
        is_counted=data.is_counted, lengths=lengths, sizes=sizes, learns_scores=_learns_scores(method, data),
        skips_template=model.has_chat_template and not on_policy and not chats and "text" not in data.columns,
        reward=f"{plugin}:reward" if has_reward else None,
        run=re.sub(r"[^A-Za-z0-9._-]+", "-", f"{method}-{stem}").strip("-._"),
    )  # fmt: skip
    functions = functions_text(has_reward=has_reward, reference=reference_column(data), as_chat=as_chat)
    return choices, functions


def _measured(
    source: Mapping[str, Any], data: DataFacts, method: Method, model: ModelFacts, *, as_chat: bool
) -> tuple[Lengths, Any]:
    if method in ON_POLICY:
        lengths = prompt_lengths(SourceSection.model_validate(source), data, model.tokenizer, as_chat=as_chat)
        return lengths, on_policy_sizes(lengths, data.num_rows, model.context, data.path)
    recipe = _provisional(source, method, data, model)
    lengths = document_lengths(recipe, data, model.tokenizer)
    sizes = fixed_sizes(
        lengths, data.num_rows, model.context,
        documents_per_row=recipe.documents_per_row, epochs=epochs_of(method),
    )  # fmt: skip
    return lengths, sizes


def _provisional(source: Mapping[str, Any], method: Method, data: DataFacts, model: ModelFacts) -> SpmdRecipe:
    """A recipe that says how rows are read."""
    values: dict[str, Any] = {
        "program": "dpo" if method == "kto" else method,
        "model": {"path": model.path},
        "data": {"train": [dict(source)]},
        "optimizer": {"lr": 1e-5},
        "steps": 1,
    }
    if method == "kto":
        values["preference"] = {"loss": "kto"}
    if method == "distill":
        values["teachers"] = [{"path": model.path}]
    if _learns_scores(method, data):
        values["reward_model"] = {"learns": "scores"}
    recipe = parse_recipe(values)
    assert isinstance(recipe, SpmdRecipe)
    return recipe


def _learns_scores(method: Method, data: DataFacts) -> bool:
    return method == "reward_model" and "score" in data.columns


def _require_free(file: Path, request: DraftRequest) -> None:
    if not file.absolute().parent.is_dir():
        raise RecipeError(f"--out: there is no folder {file.parent}. Make it first.")
    if file.exists() and not request.overwrite:
        raise RecipeError(f"--out: {file} exists already. Choose another name, or give --overwrite to replace it.")


def _write_checked(texts: Mapping[Path, str]) -> None:
    """Writes the files, and puts everything back as it was if `podium check --deep` would refuse the recipe."""
    before = {file: file.read_bytes() if file.exists() else None for file in texts}
    try:
        _write(texts)
        recipe = load_recipe(next(iter(texts)))
        check_recipe(recipe)
        deep_report(recipe)
    except BaseException:
        for file, content in before.items():
            if content is None:
                file.unlink(missing_ok=True)
            else:
                file.write_bytes(content)
        raise


def _write(texts: Mapping[Path, str]) -> None:
    for file, text in texts.items():
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RecipeError(f"--out: {file} cannot be written ({error.strerror or error}).") from error


def _next_lines(request: DraftRequest, data: DataFacts, choices: Choices) -> list[str]:
    lines = []
    if choices.reward is not None:
        todo = "look at the reward" if reference_column(data) is not None else "write the reward (it is empty)"
        lines.append(f"first: {todo} in {request.functions_file}")
    return [*lines, f"next: podium train {request.out}"]
