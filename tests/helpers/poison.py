# SPDX-License-Identifier: Apache-2.0
"""Memory that a model is given and nobody has filled, made visible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

_to_empty = nn.Module.to_empty


def poison_empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on `to_empty` leaves NaN (the largest integer, True) in every parameter and buffer."""
    monkeypatch.setattr(nn.Module, "to_empty", _poisoned)


def _poisoned(self: nn.Module, **arguments: Any) -> nn.Module:
    model = _to_empty(self, **arguments)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            else:
                tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)
    return model
