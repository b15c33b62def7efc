# SPDX-License-Identifier: Apache-2.0
"""Selective recomputation and offloading on two ranks, sharded and divided: the same gradients and weights to the
bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.memory_ranks import SHAPES, WAYS, SavedMemory, memory_rank
from helpers.ranks import RankCall
from helpers.tiny import save_tiny_model

pytestmark = pytest.mark.slow


def make_folder(folder: Path) -> None:
    save_tiny_model("qwen3", folder)


def on_two_ranks(folder: Path) -> RankCall:
    return memory_rank, (folder,)


@pytest.mark.parametrize("mesh", SHAPES)
def test_gradients_are_those_of_kept_activations(two_ranks: dict[str, SavedMemory], mesh: str) -> None:
    found = two_ranks[mesh]
    assert found.gradients["none"].norm() > 0
    for name in WAYS:
        assert torch.equal(found.gradients[name], found.gradients["none"]), name
    assert found.adapted["none"].norm() > 0
    assert torch.equal(found.adapted["selective"], found.adapted["none"])


@pytest.mark.parametrize("mesh", SHAPES)
def test_weights_and_moments_are_those_of_state_on_the_device(two_ranks: dict[str, SavedMemory], mesh: str) -> None:
    wanted, found = two_ranks[mesh].states["device"], two_ranks[mesh].states["host"]
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name
