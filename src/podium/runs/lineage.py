# SPDX-License-Identifier: Apache-2.0
"""Lineage of weights: the recipe, data, parent weights and code that produced them. Torch-free.

A run keeps its lineage in run.json. An exported folder carries it in podium.json. A run that begins with those weights
thus knows their whole lineage, even if the earlier folders are gone."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from podium.data.fingerprints import (
    Input,
    files_fingerprint,
    folder_fingerprint,
    recipe_fingerprint,
    recipe_inputs,
    text_fingerprint,
)
from podium.errors import RunFolderError
from podium.models.folder import local_folder
from podium.recipe import Recipe
from podium.recipe.changes import is_training_data
from podium.runs.folder import RunFolder, write_atomically

NOTE = "podium.json"
_FORMAT = 1
_SHORT = 12


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A resolved recipe and its input files, which are read on first use."""

    recipe: Recipe
    model: Path  # the folder of model.path
    mesh_reason: str | None = None  # why the planner chose the axes of placement.policy, where it did

    @functools.cached_property
    def inputs(self) -> tuple[Input, ...]:
        """All files that the recipe reads, with their fingerprints."""
        return recipe_inputs(self.recipe, self.model)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the recipe and its inputs."""
        return recipe_fingerprint(self.recipe, self.inputs)

    def lineage(self, before: Mapping[str, Any] | None = None, *, step: int = 0) -> dict[str, Any]:
        """Lineage for run.json. `before`: the lineage of a run that continues after `step`. Different code may have
        produced its earlier steps, or (`podium resume --accept-changed-data`) other training data."""
        codes = list((before or {}).get("code", ()))
        now = code_version()
        if not codes or {**codes[-1], "after_step": 0} != {**now, "after_step": 0}:
            codes.append({**now, "after_step": step})
        return {
            "fingerprint": self.fingerprint,
            "code": codes,
            "inputs": [each.values() for each in self.inputs],
            "ancestors": self._ancestors(),
            **self._changed_data(before or {}, step),
        }

    def _changed_data(self, before: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Training data that changed between parts of a run, with both fingerprints; nothing if none did."""
        changed = list(before.get("changed_data", ()))
        known = {each["key"]: each for each in inputs_of(before)}
        for each in self.inputs:
            old = known.get(each.key)
            if old is not None and old["fingerprint"] != each.fingerprint and is_training_data(each.key):
                entry = {"after_step": step, "key": each.key, "path": each.path}
                changed.append(entry | {"old": old["fingerprint"], "new": each.fingerprint})
        return {"changed_data": changed} if changed else {}

    def changed_code(self, before: Mapping[str, Any]) -> list[str]:
        """Keys and files of custom code that is not what it was in the lineage of an earlier part of the run."""
        known = {each["key"]: each for each in inputs_of(before)}
        return [
            f"{each.key}: {each.path}"
            for each in self.inputs
            if each.kind == "code" and each.key in known and known[each.key]["fingerprint"] != each.fingerprint
        ]

    def _ancestors(self) -> dict[str, Any]:
        """Fingerprint of weights -> note of the run that produced them, for all ancestors of these weights. Flat,
        because two of them may share an ancestor."""
        ancestors: dict[str, Any] = {}
        for each in self.inputs:
            folder = self.model if each.key == "model.path" else Path(each.path)
            note = read_note(folder) if each.kind == "weights" else None
            if note is not None:
                ancestors |= note.pop("ancestors", {})
                ancestors[each.fingerprint] = note
        return ancestors


@functools.cache
def code_version() -> Mapping[str, str]:
    """Podium's version, and a hash of its Python files that identifies a changed checkout. Computed on first use: this
    process does not run later changes."""
    source = Path(__file__).parents[1]
    files = sorted(source.rglob("*.py"))
    names = "\n".join(str(file.relative_to(source)) for file in files)
    return {"podium": _version(), "source": short(text_fingerprint(names + files_fingerprint(files)))}


def short(fingerprint: str | None) -> str:
    """A shortened fingerprint for display."""
    return "-" if fingerprint is None else fingerprint[:_SHORT]


def write_note(run: RunFolder, out: Path, *, step: int) -> None:
    """Writes a run's lineage beside the weights that were exported from it."""
    state = run.state()
    note = {
        "format": _FORMAT,
        "run": _stored_path(run),
        "program": state.get("program"),
        "step": step,
        **state.get("lineage", {}),
    }
    write_atomically(out / NOTE, json.dumps(note, indent=1))


def _stored_path(run: RunFolder) -> str:
    """The run's folder, with the name of an environment variable and not its value."""
    path, folder, name = run.path.absolute(), None, None
    if run.recipe_file.is_file():
        recipe = run.recipe(needs_environment=False)
        folder, name = recipe.written("run.folder"), recipe.written("run.name")
    return os.path.join(folder or path.parent, name or path.name)


def require_what_export_reads(run: RunFolder) -> None:
    """Checks files that are not in a checkpoint but are read again: the base of an adapter and the list of new tokens.
    Raises an error if they differ from those of the training run, because the exported weights would then match no
    trained model."""
    model = run.recipe(needs_environment=False).model
    known = {each["key"]: each["fingerprint"] for each in inputs_of(run.state().get("lineage", {}))}
    inputs: dict[str, tuple[str, str]] = {}
    if model.lora is not None:
        inputs["model.path"] = model.path, folder_fingerprint(local_folder(model.path, "model.path"))
        if model.lora.adapter is not None:
            folder = local_folder(model.lora.adapter, "model.lora.adapter")
            inputs["model.lora.adapter"] = model.lora.adapter, folder_fingerprint(folder)
    if model.new_tokens is not None and model.new_tokens.file is not None and Path(model.new_tokens.file).is_file():
        inputs["model.new_tokens.file"] = model.new_tokens.file, files_fingerprint([model.new_tokens.file])
    for key, (path, fingerprint) in inputs.items():
        if known.get(key, fingerprint) != fingerprint:
            raise RunFolderError(
                f"{key}: {path} is not what {run.path} was trained with (fingerprint {short(fingerprint)}, it was "
                f"{short(known[key])}), and the checkpoint means nothing without it. Restore it, or set {key} in "
                f"{run.recipe_file} to where it is now."
            )


def read_note(folder: str | Path) -> dict[str, Any] | None:
    """The lineage of an exported folder; None if it is missing or unreadable."""
    try:
        note = json.loads((Path(folder) / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) and note.get("format") == _FORMAT else None


def inputs_of(lineage: Mapping[str, Any], kind: str | None = None) -> Sequence[Mapping[str, Any]]:
    """Inputs of a run, of one kind or of all; incomplete entries are left out."""
    inputs = lineage.get("inputs", ()) if isinstance(lineage, Mapping) else ()
    needed = {"key", "kind", "path", "fingerprint"}
    whole = [each for each in inputs if isinstance(each, Mapping) and needed <= each.keys()]
    return [each for each in whole if kind in (None, each["kind"])]


def _version() -> str:
    try:
        return version("podium")
    except PackageNotFoundError:
        return "unknown"
