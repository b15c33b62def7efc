# SPDX-License-Identifier: Apache-2.0
"""Turns pydantic's errors into errors about recipes: the key, the problem, and a suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from podium.recipe.keys import all_keys, is_tag, owners_of, section_at, sibling_branches
from podium.recipe.programs import BUILT_IN, CUSTOM
from podium.recipe.recipes import Recipe
from podium.recipe.retired import new_name

# Names that other trainers use, so that the error can name Podium's key.
_ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "epochs": "steps (count the steps you want; the data repeats)",
    "num_train_epochs": "steps (count the steps you want; the data repeats)",
    "max_steps": "steps",
    "batch_size": "tokens_per_step",
    "per_device_train_batch_size": "micro_batch_tokens",
    "gradient_accumulation_steps": "micro_batch_tokens (accumulation follows from it)",
    "max_seq_length": "data.max_length",
    "max_grad_norm": "optimizer.clip_norm",
    "gradient_checkpointing": "model.activation_checkpointing",
    "disable_dropout": "model.dropout (off unless asked)",
    "lora_dropout": "model.lora.dropout",
    "lr_scheduler_type": "optimizer.schedule",
    "seed": "run.seed",
    "output_dir": "run.folder and run.name",
    "eval_steps": "evaluation.every",
    "save_steps": "checkpoint.every",
    "num_gpus": "placement.devices",
    "bf16": "model.dtype",
    "valid": "heldout",
    "validation": "heldout",
    "test": "heldout",
}


def explained(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line for each problem of values that should be a `root`."""
    lines: list[str] = []
    for detail in error.errors():
        for line in _explained(detail, root):
            if line not in lines:
                lines.append(line)
    return lines


def _explained(detail: ErrorDetails, root: type[BaseModel]) -> list[str]:
    location = [str(part) for part in detail["loc"]]
    while location and is_tag(location[-1]):
        location.pop()
    key = ".".join(part for part in location if not is_tag(part))
    match detail["type"]:
        case "extra_forbidden" if (now := new_name(key)) is not None:
            return [f"{key}: is called {now} now."]
        case "extra_forbidden":
            return [f"{key}: {_suggestion(location, root)}"]
        case "missing":
            return [f"{key}: required, and missing.{_description(location, root)}"]
        case "value_error" if not location:
            return str(detail["msg"]).removeprefix("Value error, ").split("\n")
        case "value_error":
            return [f"{key}: {str(detail['msg']).removeprefix('Value error, ')}"]
        case "union_tag_invalid":
            return [_unknown_branch(key, detail)]
        case "string_pattern_mismatch" if detail["loc"][-1] == "[key]":
            return [f"{key}: the name of a stage is letters, digits, - and _ (it is a folder's name too)."]
        case "model_type" | "model_attributes_type":
            return [f"{key or 'the recipe'}: expected keys and values, found {detail['input']!r}."]
    message = str(detail["msg"]).replace("valid tuple", "list").replace("Tuple", "List")
    message = message[0].lower() + message[1:]
    return [f"{key}: {message}, found {_shown(detail['input'])}.{_description(location, root)}"]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unknown_branch(key: str, detail: ErrorDetails) -> str:
    """An unknown tag of a union. Tags are written `key=value`: the value is none of those that the key may have."""
    name, _, value = str(detail["ctx"]["tag"]).partition("=")
    known = [part.strip(" '").partition("=")[2] for part in str(detail["ctx"]["expected_tags"]).split(",")]
    return f"{key}.{name}: input should be {', '.join(known[:-1])} or {known[-1]}, found {value!r}."


def _suggestion(location: Sequence[str], root: type[BaseModel]) -> str:
    section, name = section_at(location, root), location[-1]
    if section is None:
        return "unknown key."
    path = [part for part in location if not is_tag(part)]
    owners = owners_of(location)
    if not issubclass(root, Recipe) and owners:
        key = ".".join(path)
        return f"unknown key. It belongs to the stages: write defaults.{key} for all of them, or stages.NAME.{key}."
    branch = sibling_branches(location, root)
    if branch is not None and branch[1]:
        return _of_another(*branch)
    if issubclass(root, Recipe) and owners:
        return _of_another(_program_name(root), owners)
    near = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.6)
    if near:
        return f"unknown key. Did you mean {'.'.join([*path[:-1], near[0]])}?"
    if name in _ELSEWHERE:
        return f"unknown key. Podium's name for it is {_ELSEWHERE[name]}."
    elsewhere = [path for path in all_keys(root) if path.rpartition(".")[2] == name]
    if elsewhere:
        return f"unknown key. It belongs at {elsewhere[0]}."
    return f"unknown key. Known here: {', '.join(section.model_fields)}."


def _of_another(own: str, others: Sequence[str]) -> str:
    listed = others[0] if len(others) == 1 else f"{', '.join(others[:-1])} and {others[-1]}"
    return f"{own} has no such key; {listed} {'has' if len(others) == 1 else 'have'}."


def _program_name(root: type[Recipe]) -> str:
    names = {kind: name for name, kind in BUILT_IN.items()}
    names |= {kind: f"a custom program with signal {signal}" for signal, kind in CUSTOM.items()}
    return names[root]


def _description(location: Sequence[str], root: type[BaseModel]) -> str:
    section = section_at(location, root)
    field = section.model_fields.get(location[-1]) if section and location else None
    return f" ({field.description})" if field and field.description else ""
