# SPDX-License-Identifier: Apache-2.0
"""A pipeline: recipes as named stages, each of which may begin with the weights of an earlier one. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from podium.recipe.fields import Place, Section
from podium.recipe.shorthands import in_full
from podium.recipe.variables import WholeRecipe

# No dot: `--set stages.NAME.key` and ${stage.NAME} are split at dots.
NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"
_REFERENCE = re.compile(rf"^\$\{{stage\.({NAME})\}}$")
_LIKE_A_REFERENCE = re.compile(r"^\s*\$\{(?!env)|\$\{\s*stage")

# Keys that may name a checkpoint. A reward model scores texts and cannot generate any.
_TAKES_SCORES = re.compile(r"^(reward\.\d+\.model|critic\.path|model\.tokenizer)$")
_TAKES_LANGUAGE = re.compile(
    r"^(model\.(path|tokenizer)|critic\.path|teachers\.\d+\.path|algorithm\.kl\.reference|preference\.reference_model)$"
)

StageName = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]


class PipelineRunSection(Section):
    """Where the pipeline is recorded. Seeds, loggers and the like belong to its stages."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = Field(
        None, description="Name of the pipeline's folder; default: the recipe file's name."
    )
    folder: Place = Field("runs", description="Folder that holds the pipeline's folder.")


class PipelineRecipe(WholeRecipe):
    """Recipes that run one after the other. `${stage.NAME}` stands for the folder of weights that a stage exports."""

    program: Literal["pipeline"]
    stages: dict[StageName, dict[str, Any]] = Field(
        min_length=1, description="Name -> recipe. A stage's folder is in the pipeline's, under its name."
    )
    defaults: dict[str, Any] = Field(
        default_factory=dict, description="Keys that every stage has unless it says otherwise, section by section."
    )
    run: PipelineRunSection = PipelineRunSection()

    def merged(self, stage: str) -> dict[str, Any]:
        """A stage's own keys over the defaults."""
        return _merged(in_full(self.defaults), in_full(self.stages[stage]))

    def parents(self) -> dict[str, tuple[str, ...]]:
        """Stage -> the stages whose weights it reads, in the order of their names in it."""
        return {
            name: tuple(dict.fromkeys(each.stage for each in references(self.merged(name)))) for name in self.stages
        }

    def order(self) -> tuple[str, ...]:
        """The stages, each after those that it depends on, otherwise in file order."""
        return ordered(self.parents())

    def placed(self, stage: str, places: Mapping[str, str]) -> dict[str, Any]:
        """A stage's values with each reference replaced by the path of that stage's weights."""
        values: dict[str, Any] = _substituted(self.merged(stage), places)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReference:
    """`${stage.NAME}` at a key of a recipe."""

    key: str
    stage: str


def references(values: Mapping[str, Any]) -> list[StageReference]:
    """All references of a stage, in file order."""
    matches = ((key, _REFERENCE.match(text)) for key, text in _texts(values))
    return [StageReference(key=key, stage=match[1]) for key, match in matches if match]


def reference_problems(stages: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """(stage, key, problem) of every reference that does not lead to another stage, then of one cycle."""
    problems = []
    parents: dict[str, tuple[str, ...]] = {}
    for name, values in stages.items():
        problems += [(name, key, text) for key, text in _malformed(values)]
        known = []
        for each in references(values):
            text = _wrong_target(each, name, list(stages)) or _wrong_kind(each, values, stages[each.stage])
            if text is None:
                known.append(each.stage)
            else:
                problems.append((name, each.key, text))
        parents[name] = tuple(known)
    cycle = find_cycle(parents)
    if cycle:
        first = next(each.key for each in references(stages[cycle[0]]) if each.stage == cycle[1])
        path = " -> ".join(cycle)
        problems.append(
            (cycle[0], first, f"the stages wait for each other: {path}. Let one of them begin with other weights.")
        )
    return problems


def ordered(parents: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Each stage after its parents; of those that are free, the first in the file. There must be no cycle."""
    done: list[str] = []
    while len(done) < len(parents):
        done.append(next(name for name in parents if name not in done and set(parents[name]) <= set(done)))
    return tuple(done)


def find_cycle(parents: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """One path from a stage through its dependencies back to itself: (a, b, a). Empty: there is none."""
    clear: set[str] = set()

    def walk(path: tuple[str, ...]) -> tuple[str, ...]:
        for parent in parents[path[-1]]:
            if parent in path:
                return (*path[path.index(parent) :], parent)
            if parent not in clear and (cycle := walk((*path, parent))):
                return cycle
        clear.add(path[-1])
        return ()

    for name in parents:
        if name not in clear and (cycle := walk((name,))):
            return cycle
    return ()


def _wrong_target(reference: StageReference, own: str, stages: Sequence[str]) -> str | None:
    target = reference.stage
    if reference.key.split(".")[0] == "data":
        return f"${{stage.{target}}} is a folder of weights, and data is asked for here. Name a file or dataset."
    if reference.key == "model.lora.adapter":
        return f"what stage {target} makes is a whole model, adapters merged. Set model.path to ${{stage.{target}}}."
    if target not in stages:
        near = difflib.get_close_matches(target, stages, n=1, cutoff=0.6)
        hint = f"Did you mean ${{stage.{near[0]}}}?" if near else f"There are: {', '.join(stages)}."
        return f"there is no stage {target!r}. {hint}"
    if target == own:
        return f"stage {own} cannot begin with its own weights. Name another stage, or a folder or hub id."
    return None


def _wrong_kind(reference: StageReference, values: Mapping[str, Any], target: Mapping[str, Any]) -> str | None:
    """A language model where a reward model is required, or the reverse; otherwise it would show after hours, or
    never."""
    key, is_scorer = reference.key, target.get("program") == "reward_model"
    goes_on = key == "model.path" and values.get("program") == "reward_model"
    if is_scorer and not goes_on and _TAKES_LANGUAGE.match(key) and not _TAKES_SCORES.match(key):
        return (
            f"stage {reference.stage} makes a reward model, which scores texts, and a language model is asked for. "
            "Name another stage, or use it in reward.0.model."
        )
    if not is_scorer and re.match(r"^reward\.\d+\.model$", key):
        return (
            f"stage {reference.stage} ({target.get('program')}) makes a language model, which has no score. Name a "
            "stage of program reward_model, or use a teacher."
        )
    if not _TAKES_LANGUAGE.match(key) and not _TAKES_SCORES.match(key):
        return f"${{stage.{reference.stage}}} is a folder of weights, and {key} takes none. Write out what is meant."
    return None


def _malformed(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, text in _texts(values):
        if _LIKE_A_REFERENCE.search(text) and not _REFERENCE.match(text):
            yield key, f"{text!r} is not a reference. Write ${{stage.NAME}} and nothing beside it, e.g. ${{stage.sft}}."


def _texts(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key path, text) of every text in nested values."""
    if isinstance(value, str):
        yield prefix.rstrip("."), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{prefix}{key}.")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, f"{prefix}{index}.")


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merges sections key by key; lists and plain values are replaced whole."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        both = isinstance(under, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(under, value) if both else value  # type: ignore[arg-type]
    return result


def _substituted(value: Any, places: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        match = _REFERENCE.match(value)
        return places[match[1]] if match else value
    if isinstance(value, Mapping):
        return {key: _substituted(item, places) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_substituted(item, places) for item in value]
    return value
