# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: short texts that change with the content of files, of model folders or of everything that a recipe
names. Torch-free.

A file of up to 64 MiB is hashed whole. For a larger one, the size and 66 windows of 64 KiB count: the first, the last
and others evenly between them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from podium.data import storage
from podium.data.sources import FilesSource, open_source
from podium.errors import RecipeError
from podium.recipe import Recipe, SourceSection, plugins
from podium.recipe.changes import what_matters

_WHOLE_BYTES = 64 << 20
_WINDOW_BYTES = 64 << 10
_NUM_WINDOWS = 66
# Files of a model's folder that a run reads. Cards, licences and Podium's own lineage note are not among them.
_MODEL_SUFFIXES = (
    ".json", ".safetensors", ".jinja", ".txt", ".model", ".py", ".tiktoken", ".v1", ".v2", ".v3", ".v7", ".v11",
)  # fmt: skip
_NOT_THE_MODEL = ("podium.json",)
_MODULE_PLUGIN = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
_FILE_PLUGIN = re.compile(rf"\.(py|{plugins.PICKLED[1:]}):[A-Za-z_]\w*$")
_DATA_PATH = re.compile(r"^data\.(train|heldout)\.(\d+)\.path$")

InputKind = Literal["weights", "data", "code", "file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of a run outside the recipe. `key` is its place in the recipe."""

    key: str
    kind: InputKind
    path: str
    fingerprint: str
    written: str | None = None  # the path as the recipe has it, if it refers to an environment variable

    @property
    def stored_path(self) -> str:
        """The path as it is written to disk: with the name of an environment variable, not its value."""
        return self.path if self.written is None else self.written

    def values(self) -> dict[str, str]:
        """The fields as plain values for JSON."""
        return {"key": self.key, "kind": self.kind, "path": self.stored_path, "fingerprint": self.fingerprint}


def text_fingerprint(text: str) -> str:
    """The fingerprint of a string."""
    return _digest([text.encode()])


def files_fingerprint(paths: Sequence[str | Path]) -> str:
    """Fingerprint of the contents, in the given order; names do not count. Local files or fsspec URLs."""
    return _digest(part for path in paths for part in _content(str(path)))


def folder_fingerprint(folder: Path, *, weights: bool = True) -> str:
    """Fingerprint of a model folder: config, tokenizer and weights, with the names of their files. Its path does not
    count."""
    files = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix in _MODEL_SUFFIXES and file.name not in _NOT_THE_MODEL
    )
    counted = [file for file in files if weights or not file.name.endswith((".safetensors", ".safetensors.index.json"))]
    return _digest(part for file in counted for part in (file.name.encode() + b"\0", *_content(str(file))))


def source_fingerprint(section: SourceSection, key: str) -> str:
    """Fingerprint of a data source's rows: the contents of its files, or the fingerprint of `datasets`."""
    source = open_source(section, key, keep_bad=True)  # rows are not read here
    if isinstance(source, FilesSource):
        return files_fingerprint([file.name for file in source.files])
    return source.fingerprint()


def recipe_inputs(recipe: Recipe, model: Path) -> tuple[Input, ...]:
    """Everything outside a resolved recipe that it names: data, checkpoints, plug-ins, other files. `model` is the
    folder of model.path. Held-out data and files that are only recorded are listed too."""
    inputs = []
    for key, value in _strings(recipe.model_dump(mode="json")):
        if key == "model.path":
            whole = recipe.model.init == "pretrained"
            content = folder_fingerprint(model, weights=whole)
            inputs.append(Input(key=key, kind="weights", path=value, fingerprint=content))
        elif match := _DATA_PATH.match(key):
            sources = recipe.data.train if match[1] == "train" else recipe.data.heldout
            section = sources[int(match[2])]
            content = source_fingerprint(section, key.removesuffix(".path"))
            inputs.append(Input(key=key, kind="data", path=value, fingerprint=content))
        elif not key.startswith("run."):
            inputs += _other_input(key, value)
    return tuple(replace(each, written=recipe.written(each.key)) for each in inputs)


def recipe_fingerprint(recipe: Recipe, inputs: Iterable[Input]) -> str:
    """Equal for recipes that produce the same weights from the same content, wherever that content is stored.

    Keys that cannot change the weights do not count (see recipe/changes.py): placement, checkpoints, evaluation and
    held-out data among them. The value of a key that names an input is that input's content."""
    values: dict[str, Any] = what_matters(recipe)
    for each in inputs:
        if each.key in values:
            name = plugins.split_plugin(each.path)[1] if each.kind == "code" else ""
            values[each.key] = [each.fingerprint, name]
    return text_fingerprint(json.dumps(values, sort_keys=True))


def _other_input(key: str, value: str) -> list[Input]:
    """A resolved recipe has full local paths, so an existing absolute path is treated as an input."""
    if os.path.isabs(value) and os.path.isdir(value):
        is_model = any(os.path.isfile(os.path.join(value, name)) for name in ("config.json", "adapter_config.json"))
        content = folder_fingerprint(Path(value))
        return [Input(key=key, kind="weights" if is_model else "file", path=value, fingerprint=content)]
    if os.path.isabs(value) and os.path.isfile(value):
        return [Input(key=key, kind="file", path=value, fingerprint=files_fingerprint([value]))]
    if _MODULE_PLUGIN.match(value) or (os.path.isabs(value) and _FILE_PLUGIN.search(value)):
        with contextlib.suppress(RecipeError):
            file = plugins.source_file(value, key)
            return [Input(key=key, kind="code", path=value, fingerprint=files_fingerprint([file]))]
    return []


def _strings(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, str):
        yield prefix.rstrip("."), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(item, f"{prefix}{key}.")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, f"{prefix}{index}.")


def _content(name: str) -> Iterable[bytes]:
    size = storage.size_bytes(name)
    yield size.to_bytes(8, "little")
    with storage.open_binary(name) as stream:
        if size <= _WHOLE_BYTES:
            while chunk := stream.read(1 << 20):
                yield chunk
            return
        for window in range(_NUM_WINDOWS):
            stream.seek(window * (size - _WINDOW_BYTES) // (_NUM_WINDOWS - 1))
            yield stream.read(_WINDOW_BYTES)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
