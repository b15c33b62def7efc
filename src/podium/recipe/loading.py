# SPDX-License-Identifier: Apache-2.0
"""Loads YAML into the recipe of its program, and applies `--set` overrides."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from podium.errors import RecipeError, type_phrase
from podium.recipe.explaining import explained, hinted_keys
from podium.recipe.keys import is_tag
from podium.recipe.programs import likely_program, program_problem, recipe_class
from podium.recipe.recipes import Recipe
from podium.recipe.rules import steps_problem
from podium.recipe.shorthands import in_full
from podium.recipe.variables import KeyParts, WholeRecipe, plain, put, references_of, resolve, value_at

# Top-level keys that begin so are left out: a place for anchors, as in compose files.
EXTENSION = "x-"
_MERGE = "tag:yaml.org,2002:merge"


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and reads 2e-5 as a number."""

    def construct_document(self, node: yaml.Node) -> Any:
        """Looks for duplicate keys first: merge keys (`<<`) change the nodes while they are constructed."""
        self._refuse_duplicates(node, set())
        return super().construct_document(node)

    def _refuse_duplicates(self, node: yaml.Node, done: set[int]) -> None:
        if id(node) in done or not isinstance(node, yaml.CollectionNode):
            return
        done.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self._refuse_duplicates(item, done)
            return
        seen: set[Any] = set()
        for key_node, item in node.value:
            key = "<<" if key_node.tag == _MERGE else self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise RecipeError(f"line {key_node.start_mark.line + 1}: a key must be a word, found {key!r}.")
            if key in seen:
                hint = "Write <<: [*a, *b] for both." if key_node.tag == _MERGE else "Keep one of the two."
                raise RecipeError(f"line {key_node.start_mark.line + 1}: the key {key!r} is written twice. {hint}")
            seen.add(key)
            self._refuse_duplicates(item, done)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes a string which the loader would read as a number: a folder named 0e1."""


for _kind in (_StrictLoader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def load_recipe(file: str | Path, overrides: Sequence[str] = (), *, needs_environment: bool = True) -> Recipe:
    """Reads, overrides and checks a recipe file. The run is named after the file unless the recipe names it. Without
    `needs_environment` a reference to a missing environment variable stays as it is, where its key takes a text."""
    values = apply_overrides(read_values(file), overrides)
    return parse_recipe(named_after(file, values), origin=str(Path(file)), needs_environment=needs_environment)


def read_values(file: str | Path) -> dict[str, Any]:
    """The keys and values of a YAML file, without checks."""
    if not isinstance(file, str | Path):
        raise RecipeError(f"expected the path of a recipe, found {type_phrase(file)}.")
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
        raise RecipeError(f"{path} holds {type_phrase(values)}, not keys and values. Begin with `program: sft`.")
    return values or {}


def named_after(file: str | Path, values: dict[str, Any]) -> dict[str, Any]:
    """Uses the file's name as the run's name if the values have none."""
    run = values.setdefault("run", {})
    if isinstance(run, dict) and run.get("name") is None:
        run["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(file).stem).strip("-._") or "run"
    return values


def parse_recipe(values: Mapping[str, Any], *, origin: str = "the recipe", needs_environment: bool = True) -> Recipe:
    """Checks plain values; every problem is listed at once. The result is of the program's own class."""
    if not isinstance(values, Mapping):
        raise RecipeError(f"{origin}: expected keys and values, found {type_phrase(values)}.")
    result = recipe_or_problems(without_extensions(values), needs_environment=needs_environment)
    if isinstance(result, Recipe):
        return result
    raise not_valid(origin, result)


def without_extensions(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without top-level keys that begin with `x-`."""
    return {key: value for key, value in values.items() if not str(key).startswith(EXTENSION)}


def recipe_or_problems(values: Mapping[str, Any], *, needs_environment: bool = True) -> Recipe | list[str]:
    """The recipe, or one line for each problem. References to environment variables are resolved here."""
    resolved, missing = resolve(values, os.environ, keeps_missing=not needs_environment)
    if missing:
        return missing
    values = in_full(resolved)
    references = references_of(values)
    result = _validated(plain(values), references)
    if isinstance(result, Recipe):
        return result.with_references(references)
    return resolve(values, os.environ)[1] or result  # a variable that is not set is the cause of what follows


def _validated(
    values: dict[str, Any], references: Mapping[KeyParts, str], *, reads_texts: bool = True
) -> Recipe | list[str]:
    kind = recipe_class(values)
    if kind is None:
        return [program_problem(values), *_other_problems(values, references)]
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        typed = _typed(values, references, error) if reads_texts else None
        if typed is not None:
            return _validated(typed, references, reads_texts=False)
        written = {".".join(map(str, parts)): text for parts, text in references.items()}
        lines = explained(error, kind, written)
        # A key of another project that is answered with `epochs` or `steps` is the run's length.
        has_length = not hinted_keys(error, kind).isdisjoint(("steps", "epochs"))
        return list(dict.fromkeys([*lines, *([] if has_length else _length_problem(values))]))


def _other_problems(values: Mapping[str, Any], references: Mapping[KeyParts, str]) -> list[str]:
    """Problems beside that of the program: those of the likely one, or keys that every program requires."""
    program = likely_program(values)
    if program is None:
        return _missing(values)
    result = _validated({**values, "program": program}, references)
    return [] if isinstance(result, Recipe) else result


def _typed(values: dict[str, Any], references: Mapping[KeyParts, str], error: ValidationError) -> dict[str, Any] | None:
    """The values with texts from the environment read as YAML where a key does not take a text; None if there is no
    such key. A variable is a text, and so is a password of digits: the key says what is meant."""
    refused = {tuple(str(part) for part in each["loc"] if not is_tag(str(part))) for each in error.errors()}
    texts = {parts: value_at(values, parts) for parts in references if tuple(map(str, parts)) in refused}
    others = {parts: _read_text(text) for parts, text in texts.items() if not isinstance(_read_text(text), str)}
    result: dict[str, Any] = _copied(values)
    for parts, value in others.items():
        put(result, parts, value)
    return result if others else None


def _read_text(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, RecipeError):
        return text


def _missing(values: Mapping[str, Any]) -> list[str]:
    """Keys that every program requires and that are missing."""
    fields = {name for name, field in Recipe.model_fields.items() if field.is_required()} - {"program"}
    lines = [f"{name}: required, and missing." for name in Recipe.model_fields if name in fields and name not in values]
    return [*lines, *_length_problem(values)]


def _length_problem(values: Mapping[str, Any]) -> list[str]:
    has_steps, has_epochs = values.get("steps") is not None, values.get("epochs") is not None
    problem = steps_problem(has_steps=has_steps, has_epochs=has_epochs)
    return [] if problem is None else [problem]


def not_valid(origin: str, lines: Sequence[str]) -> RecipeError:
    """All problems of one recipe in one error."""
    count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
    return RecipeError(f"{origin} is not a valid recipe ({count}):\n" + "\n".join(f"  {line}" for line in lines))


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`a.b=c` sets one key; the value is read as YAML, a number in the path is a position in a list. Shorthands are
    written in full before, so that a path can lead into them."""
    result: dict[str, Any] = _copied(values)
    for override in overrides:
        result = _copied(in_full(result))
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise RecipeError(f"--set {override}: write it as key.path=value, for example --set optimizer.lr=2e-5.")
        try:
            value = yaml.load(text, Loader=_StrictLoader)
        except (yaml.YAMLError, RecipeError) as error:
            raise RecipeError(f"--set {override}: the value is not valid YAML ({error}).") from error
        _assign(result, path.strip().split("."), value, override)
    return result


def dump_recipe(recipe: WholeRecipe) -> str:
    """The fully resolved recipe as YAML; reading it back gives an equal recipe. It has `${env:NAME}` where the recipe
    refers to an environment variable, and not its value."""
    return yaml.dump(recipe.stored_values(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def dump_values(values: Any) -> str:
    """A value as YAML in one line."""
    text: str = yaml.dump(
        values, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf")
    )
    return text.removesuffix("...\n").strip()


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
    """${stage.NAME} contains braces, which YAML would interpret between braces."""
    mark = getattr(error, "problem_mark", None)
    lines = path.read_text(encoding="utf-8").splitlines()
    if mark is None or mark.line >= len(lines) or "${" not in lines[mark.line]:
        return ""
    return '. Between braces, write a reference in quotes: {path: "${stage.sft}"}'
