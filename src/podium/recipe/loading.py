# SPDX-License-Identifier: Apache-2.0
"""YAML -> Recipe, `--set` overrides, and errors that name the key, the value and the fix."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from podium.errors import RecipeError
from podium.recipe.retired import new_name
from podium.recipe.schema import Recipe

# Names that other trainers use, so that a newcomer's guess is answered and not only refused.
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


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice and reads 2e-5 as the number that it is."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise RecipeError(f"line {key_node.start_mark.line + 1}: a key must be a word, found {key!r}.")
            if key in seen:
                raise RecipeError(
                    f"line {key_node.start_mark.line + 1}: the key {key!r} is written twice. Keep one of the two."
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes a string which the loader would take for a number: a folder named 0e1."""


for _kind in (_StrictLoader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def load_recipe(file: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads, overrides and checks a recipe file. The run is named after the file unless the recipe names it."""
    values = apply_overrides(read_values(file), overrides)
    return parse_recipe(named_after(file, values), origin=str(Path(file)))


def read_values(file: str | Path) -> dict[str, Any]:
    """The keys and values of a YAML file, whatever they are."""
    path = Path(file)
    if not path.is_file():
        raise RecipeError(f"there is no recipe {path}. Give the path of a YAML file; `podium schema` prints the keys.")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not valid YAML: {_yaml_problem(error)}{_braces(path, error)}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    except RecipeError as error:
        raise RecipeError(f"{path}, {error}") from error
    if values is not None and not isinstance(values, dict):
        raise RecipeError(f"{path} holds a {type(values).__name__}, not keys and values. Begin with `program: sft`.")
    return values or {}


def named_after(file: str | Path, values: dict[str, Any]) -> dict[str, Any]:
    """With the file's name as the run's where the values name none."""
    run = values.setdefault("run", {})
    if isinstance(run, dict) and run.get("name") is None:
        run["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(file).stem).strip("-._") or "run"
    return values


def parse_recipe(values: Mapping[str, Any], *, origin: str = "the recipe") -> Recipe:
    """Checks plain values; every problem is listed at once."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise not_valid(origin, explained(error)) from None


def not_valid(origin: str, lines: Sequence[str]) -> RecipeError:
    """All problems of one recipe in one error."""
    count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
    return RecipeError(f"{origin} is not a valid recipe ({count}):\n" + "\n".join(f"  {line}" for line in lines))


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`a.b=c` sets one key; the value is read as YAML, a number in the path is a position in a list."""
    result: dict[str, Any] = _copied(values)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise RecipeError(f"--set {override}: write it as key.path=value, for example --set optimizer.lr=2e-5.")
        try:
            value = yaml.load(text, Loader=_StrictLoader)
        except (yaml.YAMLError, RecipeError) as error:
            raise RecipeError(f"--set {override}: the value is not valid YAML ({error}).") from error
        _assign(result, path.strip().split("."), value, override)
    return result


def dump_recipe(recipe: BaseModel) -> str:
    """The fully resolved recipe as YAML; reading it back gives an equal recipe."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value


def _assign(root: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    here: Any = root
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(here, list):
            if not key.isdigit() or int(key) >= len(here):
                positions = f"0 to {len(here) - 1}" if here else "it is empty: set the whole list"
                raise RecipeError(
                    f"--set {override}: {'.'.join(keys[:depth])} is a list of {len(here)}; "
                    f"{key!r} is not a position in it ({positions})."
                )
            position: Any = int(key)
        else:
            position = key
            if here.get(key) is None and not last:
                here[key] = {}
        if last:
            here[position] = value
        elif not isinstance(here[position], dict | list):
            raise RecipeError(
                f"--set {override}: {'.'.join(keys[: depth + 1])} is a plain value and has no keys below it."
            )
        else:
            here = here[position]


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem


def _braces(path: Path, error: yaml.YAMLError) -> str:
    """${stage.NAME} has braces of its own, which YAML takes for its own between braces."""
    mark = getattr(error, "problem_mark", None)
    lines = path.read_text(encoding="utf-8").splitlines()
    if mark is None or mark.line >= len(lines) or "${" not in lines[mark.line]:
        return ""
    return '. Between braces, write a reference in quotes: {path: "${stage.sft}"}'


def explained(error: ValidationError, root: type[BaseModel] = Recipe) -> list[str]:
    """One line for each problem: its key, what is wrong, and a guess at what was meant."""
    lines: list[str] = []
    for detail in error.errors():
        for line in _explained(detail, root):
            if line not in lines:
                lines.append(line)
    return lines


def _explained(detail: ErrorDetails, root: type[BaseModel]) -> list[str]:
    location = [str(part) for part in detail["loc"] if not _is_union_tag(str(part))]
    key = ".".join(location)
    match detail["type"]:
        case "extra_forbidden" if (now := new_name(key)) is not None:
            return [f"{key}: is called {now} now."]
        case "extra_forbidden":
            return [f"{key}: unknown key.{_suggestion(location, root)}"]
        case "missing":
            return [f"{key}: required, and missing.{_description(location, root)}"]
        case "value_error" if not location:
            return str(detail["msg"]).removeprefix("Value error, ").split("\n")
        case "value_error":
            return [f"{key}: {str(detail['msg']).removeprefix('Value error, ')}"]
        case "string_pattern_mismatch" if detail["loc"][-1] == "[key]":
            return [f"{key}: the name of a stage is letters, digits, - and _ (it is a folder's name too)."]
        case "model_type":
            return [f"{key or 'the recipe'}: expected keys and values, found {detail['input']!r}."]
    message = str(detail["msg"]).replace("valid tuple", "list").replace("Tuple", "List")
    message = message[0].lower() + message[1:]
    return [f"{key}: {message}, found {_shown(detail['input'])}.{_description(location, root)}"]


def _is_union_tag(part: str) -> bool:
    return part == "[key]" or part.startswith(("literal[", "function-", "constrained-", "str", "nullable"))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _section_at(location: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """The model class that holds the key at the end of `location`."""
    here: type[BaseModel] | None = root
    for part in location[:-1]:
        if part.isdigit():
            continue
        field = here.model_fields.get(part) if here else None
        here = _model_in(field.annotation) if field else None
    return here


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        for part in get_args(annotation):
            found = _model_in(part)
            if found:
                return found
    return None


def _suggestion(location: Sequence[str], root: type[BaseModel]) -> str:
    section, name = _section_at(location, root), location[-1]
    if section is None:
        return ""
    if root is not Recipe and ".".join(location) in all_keys(Recipe):
        key = ".".join(location)
        return f" It belongs to the stages: write defaults.{key} for all of them, or stages.NAME.{key}."
    near = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {'.'.join([*location[:-1], near[0]])}?"
    if name in _ELSEWHERE:
        return f" Podium's name for it is {_ELSEWHERE[name]}."
    elsewhere = [path for path in all_keys(Recipe) if path.rpartition(".")[2] == name]
    if elsewhere:
        return f" It belongs at {elsewhere[0]}."
    return f" Known here: {', '.join(section.model_fields)}."


def all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Key paths of a section and of all below it."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        inner = _model_in(field.annotation)
        if inner:
            keys += all_keys(inner, f"{prefix}{name}.")
    return keys


def _description(location: Sequence[str], root: type[BaseModel]) -> str:
    section = _section_at(location, root)
    field = section.model_fields.get(location[-1]) if section and location else None
    return f" ({field.description})" if field and field.description else ""
