# SPDX-License-Identifier: Apache-2.0
"""Compiled layers that are run as they are: of several threads too, and compiled again afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from podium.models.compiling import uncompiled


class Seen:
    """A backend that runs what it is given, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        def run(*inputs: Tensor) -> object:
            self.calls += 1
            return graph(*inputs)

        return run


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def layer(seen: Seen) -> nn.Module:
    layer = Layer()
    torch._dynamo.reset()
    layer.compile(backend=seen)
    return layer


def test_a_layer_is_compiled_outside_only(layer: nn.Module, seen: Seen) -> None:
    layer(torch.ones(2))
    with uncompiled():
        layer(torch.ones(2))
    assert seen.calls == 1
    layer(torch.ones(2))
    assert seen.calls == 2


def test_those_that_overlap_leave_layers_compiled(layer: nn.Module, seen: Seen) -> None:
    """As two threads do: the first one in is the first one out."""
    first, second = uncompiled(), uncompiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    layer(torch.ones(2))
    assert seen.calls == 0
    second.__exit__(None, None, None)
    layer(torch.ones(2))
    assert seen.calls == 1


def test_an_error_inside_leaves_layers_compiled(layer: nn.Module, seen: Seen) -> None:
    with pytest.raises(ZeroDivisionError), uncompiled():
        raise ZeroDivisionError
    layer(torch.ones(2))
    assert seen.calls == 1
