# SPDX-License-Identifier: Apache-2.0
"""Load-balancing loss, statistics and router replay of a mixture whose weights, tokens or experts are divided: what one
rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.engines import one_rank, relative_l2
from helpers.ranks import RankCall
from helpers.router_ranks import RoutedResult, routed_on, routed_rank
from helpers.tiny import save_tiny_model

pytestmark = pytest.mark.slow

SAME = 1e-5
HOW = (
    "sharded", "recomputed", "context", "experts", "experts recomputed", "experts selective", "tensor",
    "tensor recomputed", "tensor selective",
)  # fmt: skip


def make_folder(folder: Path) -> None:
    save_tiny_model("qwen3_moe", folder, num_experts=8)


def on_two_ranks(folder: Path) -> RankCall:
    return routed_rank, (folder,)


@pytest.fixture(scope="module")
def alone(folder: Path) -> RoutedResult:
    return routed_on(one_rank(), folder)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["dealt", "lopsided", "replayed", "few experts"])
def test_ranks_together_have_the_gradient_of_one(
    alone: RoutedResult, two_ranks: dict[str, RoutedResult], name: str, how: str
) -> None:
    assert relative_l2(two_ranks[how].gradients[name], alone.gradients[name]) < SAME


def test_documents_on_one_rank_alone_change_nothing(alone: RoutedResult) -> None:
    assert relative_l2(alone.gradients["lopsided"], alone.gradients["dealt"]) < SAME
    assert relative_l2(alone.gradients["replayed"], alone.gradients["dealt"]) > 1e-2


def test_statistics_are_of_all_ranks(alone: RoutedResult, two_ranks: dict[str, RoutedResult]) -> None:
    assert set(alone.metrics) == {f"router/{name}" for name in METRICS}
    for result in two_ranks.values():
        assert result.metrics == pytest.approx(alone.metrics, rel=1e-5)


METRICS = ("max_load", "dead_experts", "entropy", "aux_loss", "mismatch")
