# SPDX-License-Identifier: Apache-2.0
"""Names and layouts of Hugging Face checkpoints for tensors that transformers keeps differently in memory.

Loaders of other engines expect checkpoints: one tensor for each expert, gate and up separate. Tensors that transformers
fuses on loading are split again by its own reversed conversions, one tensor (or group of related tensors) at a time."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

from podium.errors import UnsupportedModelError
from podium.models.buffers import persistent_buffers


def checkpoint_tensors(model: PreTrainedModel, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Published tensors under their names in memory -> the same values with the names and layout of a checkpoint. Like
    the input, a tensor is valid only until the next one is requested."""
    names = CheckpointNames(model)
    for name, tensor in tensors:
        yield from names.converted(name, tensor)
    names.finish()


class CheckpointNames:
    """The reversed conversions of one model. Holds tensors back only if several form one of the checkpoint's."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Prefixes that only some checkpoints have stay as in the model.
        known = list(get_model_conversion_mapping(model, add_legacy=False))[::-1]
        reverse = [each.reverse_transform() for each in known if not isinstance(each, PrefixChange)]
        self._renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
        self._converters = [each for each in reverse if isinstance(each, WeightConverter)]
        self._by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        all_names = [name for name, _ in model.named_parameters()] + list(persistent_buffers(model))
        self._awaited = Counter(target for name in all_names if (target := self._target(name)[0]))
        self._held: dict[str, list[_Held]] = {}

    def converted(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint tensors of this tensor and those held back for it; nothing while others are still missing."""
        target, pattern = self._target(name)
        if not target:
            yield self._renamed(name), tensor
            return
        held = self._held.setdefault(target, [])
        held.append(_Held(name=name, pattern=pattern, tensor=tensor))
        if len(held) < self._awaited[target]:
            held[-1].tensor = tensor.clone()  # the caller's tensor is invalid when the next one comes
            return
        yield from self._convert(target, self._held.pop(target))

    def finish(self) -> None:
        """Called after the last tensor: checks that none is still held back."""
        if self._held:
            waiting = ", ".join(each.name for held in self._held.values() for each in held)
            raise UnsupportedModelError(
                f"{waiting}: a checkpoint of {type(self._model).__name__} joins these with tensors that were not among "
                "the published ones, so its names cannot be given to an engine that loads checkpoints. Use the native "
                "engine for this model."
            )

    def _target(self, name: str) -> tuple[str, str]:
        """The first checkpoint name that this tensor is part of, and its pattern; empty if it is only renamed."""
        for converter in self._converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return target, pattern
        return "", ""

    def _convert(self, target: str, held: list[_Held]) -> Iterator[tuple[str, Tensor]]:
        converter = copy.deepcopy(self._by_pattern[held[0].pattern])
        for each in held:
            converter.add_tensor(target, each.name, each.pattern, each.tensor)
        converted = converter.convert(target, model=self._model, config=self._model.config)
        for name, value in converted.items():
            yield self._renamed(name), value[0] if isinstance(value, list) else value

    def _renamed(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    name: str
    pattern: str
    tensor: Tensor
