# SPDX-License-Identifier: Apache-2.0
"""A model's buffers: those that a checkpoint holds, and those that are computed when the model is built."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from podium.errors import UnsupportedModelError


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds and that are not trained (a router's correction bias, for instance), by name."""
    passing = _computed(model)
    return {name: buffer for name, buffer in model.named_buffers() if name not in passing}


def computed_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Buffers that no checkpoint holds (rotary frequencies and the like), by name."""
    passing = _computed(model)
    return {name: buffer for name, buffer in model.named_buffers() if name in passing}


def restore_buffers(model: PreTrainedModel) -> None:
    """Computes the buffers that no checkpoint holds, whose values `to_empty` left undefined. Raises an error if the
    model's class cannot compute them: none may keep undefined values."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers then leaves it alone
    buffers = computed_buffers(model)
    left = buffers
    for number in (0, 1):  # a buffer that legitimately holds one mark everywhere does not hold the other
        for buffer in left.values():
            buffer.fill_(_mark(buffer.dtype, number))
        _compute(model)
        left = {name: buffer for name, buffer in left.items() if _holds(buffer, _mark(buffer.dtype, number))}
        if not left:
            return
    raise UnsupportedModelError(
        f"{type(model).__name__} does not compute its buffer {next(iter(left))} in `_init_weights`, and no checkpoint "
        "holds it: its values are unknown, so this architecture is not supported."
    )


@torch.no_grad()
def _compute(model: PreTrainedModel) -> None:
    for owner, module in _owned(model, model):
        if not module._non_persistent_buffers_set:
            continue
        try:
            owner._init_weights(module)
        except Exception as error:  # a model's own code can raise anything
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot compute the buffers of its {type(module).__name__} "
                f"({type(error).__name__}: {error}), so this architecture is not supported."
            ) from error


def _owned(module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Every module with the innermost model that contains it: a model of several (a text model in a multimodal one)
    initialises each part by the part's own class."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        yield from _owned(child, owner)
    yield owner, module


def _computed(model: PreTrainedModel) -> set[str]:
    return {
        f"{name}.{buffer}" if name else buffer
        for name, module in model.named_modules()
        for buffer in module._non_persistent_buffers_set
    }


def _mark(dtype: torch.dtype, number: int) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return bool(number)
    return torch.iinfo(dtype).max - number


def _holds(buffer: Tensor, mark: float | int | bool) -> bool:
    """Whether every value is still the mark; for floating-point numbers, whether any is."""
    if buffer.numel() == 0:
        return False
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().any())
    return bool((buffer == mark).all())
