# SPDX-License-Identifier: Apache-2.0
"""An engine that would sample over keys and values of other weights than it was told to stops: each way in which that
could happen is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from native_world import DEADLINE_S, Learner, ask, sequence

from podium.errors import InvariantError
from podium.rollout.native.block_manager import BlockManager, _Node
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Request

WAYS = pytest.mark.parametrize("way", [{}, {"block_size": 8}], ids=["slots", "blocks"])
LONG = ask(0, 20, new=12)


def half_way(engine: NativeEngine, *, new: int = 5) -> Any:
    """The long request, and a short one that has just ended."""
    engine.submit([LONG, ask(1, 3, new=new)])
    results = engine.results(deadline_s=DEADLINE_S)
    next(results)
    return results


def ended(engine: NativeEngine, request: Request) -> None:
    assert sequence(engine, request).finish == "length"


@WAYS
@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_what_survives_new_weights_in_the_prefix_cache_is_not_reused(
    own_learner: Learner, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any], in_flight: Any
) -> None:
    """Broken: the tree of remembered blocks is kept over the update."""

    def forget_only_the_age(manager: BlockManager, version: int | None = None) -> None:
        manager._age, manager._version = manager._age + 1, manager._version if version is None else version

    engine = own_learner.engine(**way)
    ended(engine, LONG)
    monkeypatch.setattr(BlockManager, "forget", forget_only_the_age)
    engine.install(own_learner.describe(1), None, in_flight=in_flight)

    with pytest.raises(InvariantError, match=r"block \d+ of the prefix cache.*before .*version 1.*explicit cache"):
        sequence(engine, ask(2, LONG.prompt))


@pytest.mark.parametrize("in_flight", ["recompute", "keep", "adopt"])
def test_a_prefix_cache_that_is_not_of_the_weights_that_sample_is_noticed(
    own_learner: Learner, monkeypatch: pytest.MonkeyPatch, in_flight: Any
) -> None:
    """Broken: nothing is forgotten."""
    engine = own_learner.engine()
    ended(engine, LONG)
    monkeypatch.setattr(BlockManager, "forget", lambda manager, version=None: None)
    if in_flight == "adopt":
        engine.adopt(own_learner.describe(1))
    else:
        engine.install(own_learner.describe(1), None, in_flight=in_flight)

    with pytest.raises(InvariantError, match=r"weights of version 1, and its prefix cache is of version 0"):
        sequence(engine, ask(2))


@WAYS
@pytest.mark.parametrize("install", ["install", "adopt"])
def test_an_answer_whose_cache_was_to_be_computed_again_does_not_go_on_over_the_old_one(
    own_learner: Learner, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any], install: str
) -> None:
    """Broken: running sequences are not preempted."""
    engine = own_learner.engine(**way)
    results = half_way(engine)
    monkeypatch.setattr(NativeEngine, "_preempt_all", lambda engine: None)
    version = own_learner.describe(1)
    engine.adopt(version) if install == "adopt" else engine.install(version, None, in_flight="recompute")

    with pytest.raises(InvariantError, match=r"answer 0\.0#0 would .* replaced, 1 updates ago.*explicit cache"):
        list(results)


@WAYS
def test_a_kept_cache_is_kept_until_one_update_has_it_computed_again(own_learner: Learner, way: dict[str, Any]) -> None:
    """Kept over two updates, which is allowed; then recomputed, over a sleep too."""
    engine = own_learner.engine(**way)
    results = half_way(engine, new=2)
    for version in (1, 2):
        engine.install(own_learner.describe(version), None, in_flight="keep")
        engine.submit([ask(1 + version, 3, new=2)])
        next(results)
    engine.install(own_learner.describe(3), None, in_flight="recompute")
    engine.submit([ask(4, 3, new=2)])
    next(results)
    engine.sleep()
    engine.wake()
    (found,) = results
    assert sorted(set(found.versions_L.tolist())) == [0, 1, 2, 3]


def test_blocks_of_a_sequence_that_began_before_an_update_are_not_reused_after_it() -> None:
    """Broken: they are remembered, as if nothing had been forgotten since."""
    manager, tokens = BlockManager(num_blocks=4, block_size=2, version=7), np.array([1, 2, 3], np.int32)
    kept = manager.begin(tokens, 3)
    assert kept is not None
    manager.forget(8)
    manager.remember(kept, tokens)
    assert manager.common_with_remembered(tokens) == 0
    remember_though_older(manager, lambda: manager.remember(kept, tokens))
    assert manager.common_with_remembered(tokens) == 3

    with pytest.raises(InvariantError, match=r"block 0 .*weights of version 8 came \(1 updates"):
        manager.begin(tokens, 3)


def remember_though_older(manager: BlockManager, remember: Callable[[], None]) -> None:
    manager._age -= 1
    remember()
    manager._age += 1
    assert all(isinstance(node, _Node) and node.age == 0 for node in manager._nodes.values())
