# SPDX-License-Identifier: Apache-2.0
"""Calls a custom loss and checks what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from podium.errors import RecipeError, what_raised


def call_loss(where: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the function returns. An exception of it becomes a RecipeError that begins with `where` (key and import
    path) and names file and line."""
    try:
        return function(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the user's code
        raise RecipeError(f"{where} {what_raised(error)}.") from error


def require_losses(where: str, losses: Any, like: Tensor, unit: str) -> Tensor:
    """The losses, one for each element of `like`. A single number would count as the loss of each of them."""
    if isinstance(losses, Tensor) and losses.shape == like.shape:
        return losses
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    raise RecipeError(f"{where} gave {shape} for {len(like)} {unit}s. It gives one loss for each {unit}, as a tensor.")


def require_gradient(where: str, losses: Tensor, source: str) -> Tensor:
    """The losses, which must depend on `source`."""
    if not losses.requires_grad:
        raise RecipeError(
            f"{where} gave losses without a gradient: they do not depend on {source}. Compute them with torch, without "
            "detach(), item() or torch.no_grad()."
        )
    return losses
