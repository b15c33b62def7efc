# SPDX-License-Identifier: Apache-2.0
"""Reads weights in parts: each rank reads from the files only the rows that it holds."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from podium.errors import ModelError
from podium.models.tensor_shards import Box, TensorShard
from podium.models.tensor_split import TensorSplit
from podium.progress import mark_progress


class WeightSource(Protocol):
    """Named tensors that can be read in parts."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The full shape of each tensor."""

    def read(self, name: str, box: Box) -> Tensor:
        """A part of one tensor."""


class MemoryWeights:
    """Weights that are already tensors: a random initialisation."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The full shape of each tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """A part of one tensor."""
        return self._tensors[name][box.slices()]


def is_adapter(name: str) -> bool:
    """Whether a parameter is part of a low-rank adapter, by the names that peft gives."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """The name of a parameter in a model without adapters, and so in the base's checkpoint."""
    return name.replace(".base_layer.", ".")


class CheckpointWeights:
    """The safetensors files of a Hugging Face folder under the parameter names of a model without adapters.

    Names that transformers changes on loading (fused experts, for instance) go through its own conversion, one target
    tensor at a time; all others are sliced directly from the file."""

    def __init__(self, folder: Path, model: PreTrainedModel, split: TensorSplit | None = None) -> None:
        """`split`: how the model is divided over ranks."""
        self._model, self._split = model, split
        self._files = _tensor_files(folder)
        self._folder = folder
        self._shapes = {key: self._shape(key) for key in self._files}
        self._plain: dict[str, str] = {}
        self._converted: dict[str, _Conversion] = {}
        self._cache: tuple[str, dict[str, Tensor]] | None = None
        self._map_names()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The full shape of each tensor."""
        shapes = {name: self._shapes[source] for name, source in self._plain.items()}
        known, split = self._state(), self._split
        for name in self._converted:
            part = tuple(known[name].shape)
            shapes[name] = part if split is None else split.shape(name, part)
        return shapes

    def read(self, name: str, box: Box) -> Tensor:
        """A part of one tensor."""
        if name in self._plain:
            source = self._plain[name]
            with _opened(self._files[source]) as file:
                return file.get_slice(source)[box.slices()]  # type: ignore[no-any-return]
        return self._convert(name)[box.slices()]

    def _state(self) -> dict[str, Tensor]:
        return {base_name(name): tensor for name, tensor in self._model.state_dict().items() if not is_adapter(name)}

    def _shape(self, key: str) -> tuple[int, ...]:
        with _opened(self._files[key]) as file:
            return tuple(file.get_slice(key).get_shape())

    def _map_names(self) -> None:
        transforms = get_model_conversion_mapping(self._model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        state, prefix = self._state(), self._model.base_model_prefix
        for source in sorted(self._files, key=dot_natural_key):
            target, pattern = rename_source_key(source, renamings, converters, prefix, state)
            if target not in state and source in state:
                target, pattern = source, None
            if pattern is None:
                self._plain[target] = source
            else:
                conversion = self._converted.setdefault(target, _Conversion(by_pattern[pattern], []))
                conversion.sources.append((source, pattern))
        # One converter may yield several targets; each of them finds the same conversion.
        for first, conversion in list(self._converted.items()):
            patterns = conversion.converter.target_patterns
            for pattern in patterns[1:]:
                self._converted.setdefault(first.replace(patterns[0], pattern), conversion)

    def _convert(self, name: str) -> Tensor:
        if self._cache is None or name not in self._cache[1]:
            conversion = self._converted[name]
            converter = copy.deepcopy(conversion.converter)
            for source, pattern in conversion.sources:
                with _opened(self._files[source]) as file:
                    converter.add_tensor(name, source, pattern, file.get_tensor(source))
            converted = converter.convert(name, model=self._model, config=self._model.config)
            self._cache = (name, {key: v[0] if isinstance(v, list) else v for key, v in converted.items()})
        return self._cache[1][name]


@dataclass(frozen=True, slots=True)
class _Conversion:
    converter: WeightConverter
    sources: list[tuple[str, str]]


def fill(pieces: Iterable[TensorShard], source: WeightSource, *, padded_rows: Mapping[str, int]) -> None:
    """Copies every piece. `padded_rows` gives for some names the number of real leading rows; the rows after them
    become zero."""
    shapes = source.shapes()
    for piece in pieces:
        if piece.name not in shapes:
            raise ModelError(
                f"the checkpoint has no tensor for {piece.name}. Its config and weights do not belong together, or the "
                "folder is incomplete."
            )
        real = Box.whole(shapes[piece.name])
        expected = piece.shape
        if piece.name in padded_rows:
            expected = (padded_rows[piece.name], *piece.shape[1:])
        if real.shape != tuple(expected):
            raise ModelError(
                f"{piece.name} has shape {list(real.shape)} in the checkpoint and {list(expected)} in the config."
            )
        with torch.no_grad():
            part = piece.box.overlap(real)
            if part.shape != piece.box.shape:
                piece.local.zero_()
            if not part.is_empty:
                piece.local[part.slices(piece.box.starts)].copy_(source.read(piece.name, part))
        mark_progress()


def _tensor_files(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{index} is not an index of weights ({error}). Download it again.") from error
        missing = sorted({file for file in names.values() if not (folder / file).is_file()})
        if missing:
            raise ModelError(
                f"{folder}: {index.name} names {', '.join(missing[:3])}, which is not there. Download it again."
            )
        return {key: str(folder / file) for key, file in names.items()}
    files: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _opened(str(path)) as file:
            files.update(dict.fromkeys(file.keys(), str(path)))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors weights.")
    return files


def _opened(path: str) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} cannot be read as safetensors ({error}). It is cut off or damaged: copy it again."
        ) from error
