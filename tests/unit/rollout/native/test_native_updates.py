# SPDX-License-Identifier: Apache-2.0
"""Updates and naps: weights change under answers in flight, memory is given back, tokens stay what they would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from native_world import DEADLINE_S, Learner, ask, assert_same, sequence, sequences

from podium.errors import RolloutError, WeightMismatchError
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Completion

WAYS = pytest.mark.parametrize("way", [{}, {"block_size": 8}], ids=["slots", "blocks"])
LONG = ask(0, 20, new=12, temperature=0)


def half_way(engine: NativeEngine) -> Any:
    """The long request and one of five tokens that has just ended: five tokens of twelve are drawn."""
    engine.submit([LONG, ask(1, 3, new=5)])
    results = engine.results(deadline_s=DEADLINE_S)
    assert next(results).num_tokens == 5
    return results


@WAYS
def test_sleeping_frees_the_cache_and_waking_continues_to_the_same_tokens(
    learner: Learner, way: dict[str, Any]
) -> None:
    engine = learner.engine(**way)
    wanted = sequence(learner.engine(**way), LONG)
    results = half_way(engine)
    freed = engine.sleep()
    assert freed.accounted_bytes == engine.capacity.cache_bytes >= engine.capacity.cache_tokens
    assert freed.measured_bytes == 0  # a CPU cannot tell
    assert engine.load().cache_tokens_used == engine.load().cache_tokens_kept == 0
    assert engine.wake().accounted_bytes == freed.accounted_bytes
    (found,) = results
    assert_same(found, wanted)


def test_an_engine_that_sleeps_takes_requests_and_no_weights(learner: Learner) -> None:
    engine = learner.engine()
    engine.sleep()
    engine.submit([LONG])
    with pytest.raises(RolloutError, match="asleep"):
        engine.install(learner.describe(1), None)
    with pytest.raises(RolloutError, match=r"asleep.*\b0\.01 s\b.*\b1 answers"):
        next(engine.results(deadline_s=0.01))
    engine.wake()
    assert [each.finish for each in engine.results(deadline_s=DEADLINE_S)] == ["length"]


def updated(learner: Learner, way: dict[str, Any], in_flight: Any) -> tuple[NativeEngine, Completion]:
    """Half of the long answer from the first weights, half from the second."""
    engine = learner.engine(**way)
    results = half_way(engine)
    learner.change(1.3)
    engine.install(learner.describe(1), None, in_flight=in_flight)
    assert engine.version == 1
    (found,) = results
    assert found.versions_L.tolist() == [0] * 5 + [1] * 7
    return engine, found


@WAYS
def test_recomputed_answers_go_on_as_the_learner_scores_them(own_learner: Learner, way: dict[str, Any]) -> None:
    before = sequence(own_learner.engine(**way), LONG)
    _, found = updated(own_learner, way, "recompute")
    assert found.tokens_L[:5].tolist() == before.tokens_L[:5].tolist()
    np.testing.assert_allclose(found.logprobs_L[:5], before.logprobs_L[:5], atol=1e-5)
    np.testing.assert_allclose(found.logprobs_L[5:], own_learner.logprobs_L(found)[5:], atol=1e-4)


@WAYS
def test_kept_answers_go_on_over_keys_and_values_of_older_weights(own_learner: Learner, way: dict[str, Any]) -> None:
    """Nothing is computed again, and later tokens are not quite what the learner scores."""
    engine, found = updated(own_learner, way, "keep")
    assert engine.load().prefilled_tokens == 20 + 3
    gap = np.abs(found.logprobs_L - own_learner.logprobs_L(found))[5:]
    assert gap.max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
@WAYS
def test_what_begins_after_an_update_finds_nothing_of_older_weights(
    own_learner: Learner, way: dict[str, Any], in_flight: str
) -> None:
    """The same prompt again, and a further turn, after the answer in flight has ended."""
    engine, ended = updated(own_learner, way, in_flight)
    again = ask(5, LONG.prompt, new=6)
    turn = ask(6, np.concatenate([ended.prompt, ended.tokens_L, LONG.prompt]), new=6)
    for each in (again, turn):
        found = sequence(engine, each)
        assert own_learner.gap(found) < 1e-4
        assert_same(found, sequence(own_learner.engine(**way), each))


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
@WAYS
def test_what_begins_beside_an_answer_of_older_weights_finds_nothing_of_it(
    own_learner: Learner, way: dict[str, Any], in_flight: Any
) -> None:
    """The first prompt is taken in in parts: one before the update, the rest after."""
    engine = own_learner.engine(prefill_tokens=12, **way)
    prompt = ask(0, 40).prompt
    engine.submit([ask(1, 3, new=1), ask(0, prompt, new=12)])
    results = engine.results(deadline_s=DEADLINE_S)
    assert next(results).id.prompt_index == 1
    assert 3 < engine.load().prefilled_tokens < 43
    own_learner.change(1.3)
    engine.install(own_learner.describe(1), None, in_flight=in_flight)
    late = ask(7, prompt, new=6)
    engine.submit([late])
    found = {each.id: each for each in results}
    assert own_learner.gap(found[late.id]) < 1e-4


def test_weights_that_are_not_the_version_stop_the_engine_until_right_ones_come(own_learner: Learner) -> None:
    engine = own_learner.engine()
    results = half_way(engine)
    version = own_learner.describe(1)
    own_learner.change(1.1)
    with pytest.raises(WeightMismatchError, match=r"\d+ of \d+ .*version 1\b"):
        engine.install(version, None)
    with pytest.raises(WeightMismatchError, match=r"\d+ of \d+ .*version 1\b"):
        next(results)
    engine.install(own_learner.describe(2), None)
    (found,) = engine.results(deadline_s=DEADLINE_S)
    assert found.versions_L.tolist() == [0] * 5 + [2] * 7


def test_a_learner_that_trains_in_between_finds_its_model_as_it_left_it(own_learner: Learner) -> None:
    """Drawing changes no weight and leaves no gradient; the next draw switches dropout and the like off again."""
    before = {name: value.clone() for name, value in own_learner.model.state_dict().items()}
    engine = own_learner.engine()
    sequences(engine, [ask(i) for i in range(3)])
    own_learner.model.train()
    sequences(engine, [ask(i) for i in range(3)])
    assert not own_learner.model.training
    for name, value in own_learner.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(each.parameter.grad is None for each in own_learner.trained)
    assert all(not each.parameter.is_inference() for each in own_learner.trained)
