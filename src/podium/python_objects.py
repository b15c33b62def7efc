# SPDX-License-Identifier: Apache-2.0
"""Objects in a recipe that is written in Python: functions, classes, and rows in memory.

Each becomes text before the recipe is checked: an import path, or the path of a file in the cache folder of the run.
Ranks, workers and resumed runs then read it as they read any other."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from podium.data.python_rows import is_dataset, write_rows
from podium.errors import RecipeError, type_phrase
from podium.observe.loggers import Logger, OpenedLogger
from podium.recipe import SourceSection, plugins
from podium.recipe.loading import apply_overrides
from podium.recipe.pipeline_loading import is_pipeline, overridden
from podium.recipe.programs import recipe_class

_LOGGERS = "run.loggers"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionArguments:
    """Arguments of the Python API that replace sections of the recipe. Of `data`, only the keys that are there."""

    data: Mapping[str, Any] | None = None
    reward: Any = None
    environment: Any = None
    loggers: Any = None

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return all(each is None for each in (self.data, self.reward, self.environment, self.loggers))

    def within(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's values with these sections."""
        result = dict(values)
        if self.is_empty:
            return result
        if is_pipeline(values):
            raise RecipeError(
                "data, reward, environment, loggers: this recipe is a pipeline, and these belong to one run. Give them "
                "in the stage: {'stages': {NAME: {'reward': [...]}}}."
            )
        for key, section in (("data", self.data), ("run", None if self.loggers is None else {"loggers": self.loggers})):
            if section is not None:
                _require_mapping(section, key)
                before = result.get(key)
                result[key] = {**(before if isinstance(before, Mapping) else {}), **section}
        result |= {key: value for key in ("reward", "environment") if (value := getattr(self, key)) is not None}
        return result

    def within_run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a run that is resumed, with the code of its rewards and its environment replaced. A function
        replaces that of the reward at its place, which keeps its other keys."""
        result = SectionArguments(loggers=self.loggers).within(values)
        if self.reward is not None:
            before = values.get("reward") or []
            rewards = self.reward if isinstance(self.reward, list | tuple) else [self.reward]
            if len(rewards) != len(before):
                raise RecipeError(
                    f"reward: the number of rewards is {len(before)} in the run, and {len(rewards)} are given."
                )
            result["reward"] = [
                {**old, "function": new} if callable(new) else new for old, new in zip(before, rewards, strict=True)
            ]
        if self.environment is not None:
            section = {"environment": self.environment} if callable(self.environment) else self.environment
            _require_mapping(section, "environment")
            result["environment"] = {**(values.get("environment") or {}), **section}
        return result


def without_objects(
    values: Mapping[str, Any], overrides: Sequence[str] = (), *, cache: Path | None = None
) -> dict[str, Any]:
    """The recipe's values as plain values, with overrides applied. `cache`: where files are written; default: the cache
    folder of the recipe's run."""
    cache = cache or _cache_folder(values, overrides)
    stages = values.get("stages")
    if is_pipeline(values) and isinstance(stages, Mapping):
        parts = {**{f"stages.{name}": part for name, part in stages.items()}, "defaults": values.get("defaults")}
        written = {key: _spelled_out(part, cache, f"{key}.") for key, part in parts.items()}
        values = {**values, "stages": {name: written[f"stages.{name}"] for name in stages}}
        if written["defaults"] is not None:
            values["defaults"] = written["defaults"]
    else:
        values = _spelled_out(values, cache, "")
    values = overridden(values, overrides)
    writer = _PluginWriter(cache, logs_here=_logs_here(values))
    return {key: writer.replaced(value, key) for key, value in values.items()}


def _cache_folder(values: Mapping[str, Any], overrides: Sequence[str]) -> Path:
    run = values.get("run")
    own = [text for text in overrides if re.match(r"\s*run(\.folder|\.cache)?\s*=", text)]
    values = apply_overrides({"run": dict(run) if isinstance(run, Mapping) else {}}, own)["run"] or {}
    folder = values.get("cache") or Path(str(values.get("folder") or "runs")) / ".cache"
    return Path(os.path.abspath(os.path.expanduser(folder)))


def _logs_here(values: Mapping[str, Any]) -> bool:
    """Whether the run's loggers are in this process: the controller is, and so is the only rank of a run without
    launcher."""
    if is_pipeline(values):
        return False
    kind = recipe_class(values)
    placement = values.get("placement")
    placement = placement if isinstance(placement, Mapping) else {}
    is_controlled = values.get("signal") == "on_policy" or (kind is not None and kind.execution == "controlled")
    is_alone = placement.get("devices", 1) == 1 and placement.get("launcher") != "ray" and not placement.get("restarts")
    return is_controlled or is_alone


# --- short forms ---


def _spelled_out(values: Any, cache: Path, prefix: str) -> Any:
    """One recipe's values with short forms written out, and rows in files."""
    if not isinstance(values, Mapping):
        return values
    result = dict(values)
    if (reward := result.get("reward")) is not None:
        rewards = reward if isinstance(reward, list | tuple) else [reward]
        result["reward"] = [
            {"function": each} if callable(each) or plugins.Plugin.has_shape(each) else each for each in rewards
        ]
    if callable(environment := result.get("environment")):
        result["environment"] = {"environment": environment}
    if isinstance(run := result.get("run"), Mapping) and run.get("loggers") is not None:
        loggers = run["loggers"] if isinstance(run["loggers"], list | tuple) else [run["loggers"]]
        result["run"] = {**run, "loggers": [_as_factory(each) for each in loggers]}
    if isinstance(data := result.get("data"), Mapping):
        sources = {
            part: _sources(data[part], cache, f"{prefix}data.{part}") for part in ("train", "heldout") if part in data
        }
        result["data"] = {**data, **sources}
    return result


def _as_factory(logger: Any) -> Any:
    """A logger that is open already, as the plug-in that gives it."""
    return OpenedLogger(logger) if isinstance(logger, Logger) and not isinstance(logger, type) else logger


def _sources(value: Any, cache: Path, key: str) -> Any:
    """Sources with a path each: rows in memory are written to files."""
    if is_dataset(value) or _are_rows(value):
        return [{"path": str(write_rows(value, cache, key))}]
    if not isinstance(value, list | tuple):
        if value is None or isinstance(value, str | Mapping):
            return value
        raise RecipeError(
            f"{key}: expected a list of sources, a list of rows (dicts), or a datasets.Dataset, found "
            f"{type_phrase(value)}. (Of a DataFrame, give frame.to_dict('records').)"
        )
    return [_source(each, cache, f"{key}.{index}") for index, each in enumerate(value)]


def _source(source: Any, cache: Path, key: str) -> Any:
    if is_dataset(source) or _are_rows(source):
        return {"path": str(write_rows(source, cache, key))}
    if isinstance(source, Mapping) and (is_dataset(source.get("path")) or _are_rows(source.get("path"))):
        return {**source, "path": str(write_rows(source["path"], cache, key))}
    return source


def _are_rows(value: Any) -> bool:
    """Whether a list holds rows and not sources, which have a `path` and only keys of sources."""
    if not isinstance(value, list | tuple) or not value or not all(isinstance(each, Mapping) for each in value):
        return False
    return not any("path" in each and each.keys() <= SourceSection.model_fields.keys() for each in value)


def _require_mapping(value: Any, key: str) -> None:
    if not isinstance(value, Mapping):
        raise RecipeError(f"{key}: expected keys and values, found {type_phrase(value)}.")


# --- functions and classes ---


class _PluginWriter:
    """Replaces callables by import paths, and values of `pathlib` and NumPy by plain ones."""

    def __init__(self, cache: Path, *, logs_here: bool) -> None:
        self._cache, self._logs_here = cache, logs_here
        self._taken: dict[Path, Callable[..., Any]] = {}

    def replaced(self, value: Any, key: str) -> Any:
        """The value without objects; `key` is its place in the recipe."""
        if isinstance(value, Mapping):
            return {name: self.replaced(item, f"{key}.{name}") for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.replaced(item, f"{key}.{index}") for index, item in enumerate(value)]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, np.generic):
            return value.item()
        return self._import_path(value, key) if callable(value) else value

    def _import_path(self, value: Callable[..., Any], key: str) -> str:
        path = plugins.import_path(value) or self._file(value, key)
        plugins.register(path, value)
        return path

    def _file(self, value: Callable[..., Any], key: str) -> str:
        from podium.cluster.pickling import pickled  # imports the cluster's modules

        name = _name_of(value)
        try:
            content = pickled(value)
        except Exception as error:  # the pickler runs code of the object
            if key.startswith(_LOGGERS) and self._logs_here:  # a resume in another process is given it again
                return f"{self._free(f'{name}-not-saved', value)}:{name}"
            raise RecipeError(
                f"{key}: {name} cannot be sent to the processes of a run ({type(error).__name__}: {error}). Put it "
                "into a .py file as a function or class at its top level, or remove what it holds (locks, open files, "
                "connections): a class can open them when it is made."
            ) from error
        file = self._free(f"{name}-{hashlib.blake2b(content, digest_size=8).hexdigest()}", value)
        try:
            if not file.is_file():
                self._cache.mkdir(parents=True, exist_ok=True)
                temporary = file.with_name(f".{file.name}.{os.getpid()}")
                temporary.write_bytes(content)
                temporary.replace(file)
        except OSError as error:
            raise RecipeError(f"{key}: {file} cannot be written ({error.strerror or error}). Set run.cache.") from error
        return f"{file}:{name}"

    def _free(self, stem: str, value: Callable[..., Any]) -> Path:
        """A file for this object alone: two of equal content are two objects, which may change apart."""
        names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
        files = (self._cache / f"{name}{plugins.PICKLED}" for name in names)
        file = next(file for file in files if self._taken.get(file, value) is value)
        self._taken[file] = value
        return file


def _name_of(value: Any) -> str:
    """An identifier for an object: its name, or that of its class."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, OpenedLogger):
        value = value.logger
    name = getattr(value, "__name__", None) or type(value).__name__
    return name if name.isidentifier() else "function"
