# SPDX-License-Identifier: Apache-2.0
"""Answers of many workers become one, by trajectory id; whatever does not add up is refused by id and worker."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.roles import make_block
from podium.cluster.identity import WorkerId
from podium.cluster.meshes import MeshRegistry, MeshShape, RoleMesh
from podium.cluster.objects import InlineStored
from podium.cluster.results import Computed, Metric, ShardResult, merge, reduce_metrics, stored_rows
from podium.data.trajectories import TrajectoryId, TrajectoryIds
from podium.errors import ResultError

# Two ranks, on the slots 0 and 2.
LEARNER = RoleMesh(role="learner", pool="learn", shape=MeshShape(shard=2), slots=(0, 2))


def worker(slot, incarnation=0, pool="learn"):
    return WorkerId(pool, slot, "node-a", "cpu", incarnation)


REGISTRY = MeshRegistry(
    meshes={"learner": LEARNER},
    workers={("learn", slot): worker(slot) for slot in range(4)} | {("gen", 0): worker(0, pool="gen")},
)


def of(*pairs):
    return TrajectoryIds.of(TrajectoryId(*pair) for pair in pairs)


def result(who, rank, ids, metrics=(), *, stored=True):
    block = make_block(ids)
    return ShardResult(
        worker=who,
        rank=rank,
        ids=ids,
        lengths_N=block.lengths_N,
        stored=InlineStored(block) if stored else None,
        metrics=metrics,
    )


FIRST, SECOND = of((0, 0), (2, 0)), of((1, 1), (1, 0), (3, 0))
REQUESTED = [FIRST, SECOND]
GOOD = [result(worker(0), 0, FIRST), result(worker(2), 1, SECOND)]


def refusal(results, requested=REQUESTED, registry=REGISTRY):
    with pytest.raises(ResultError) as refused:
        merge(results, requested, registry, "learner")
    return str(refused.value)


def test_results_are_joined_by_ascending_id():
    merged = merge(GOOD, REQUESTED, REGISTRY, "learner")
    assert list(merged.rows.ids) == [(0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0), (2, 0, 0, 0), (3, 0, 0, 0)]
    # (d, s) has 1 + (7d + 3s) mod 11 tokens of value 100d + s.
    assert merged.rows.lengths_N.tolist() == [1, 8, 11, 4, 11]
    block = merged.rows.read()
    assert block.tokens_T[block.offsets[:-1]].tolist() == [0, 100, 101, 200, 300]
    assert [each.worker for each in merged.results] == [worker(0), worker(2)]


@st.composite
def answered_shards(draw):
    """What two ranks were given and the blocks in which they answered, in any order."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), unique=True, max_size=12))
    cut = draw(st.integers(0, len(pairs)))
    requested = [of(*pairs[:cut]), of(*pairs[cut:])]
    answers = []
    for rank, ids in enumerate(requested):
        order = draw(st.permutations(range(len(ids))))
        middle = draw(st.integers(0, len(ids)))
        for part in (order[:middle], order[middle:]):
            mine = ids.take(np.array(part, np.int64))
            metrics = (
                Metric(name="loss", value=float(len(answers) + 1), reduction="mean", weight=float(len(mine))),
                Metric(name="rows", value=float(len(mine)), reduction="sum"),
            )
            answers.append(result(worker(2 * rank), rank, mine, metrics))
    return requested, answers


@settings(deadline=None)
@given(answered_shards(), st.data())
def test_the_order_of_the_answers_does_not_matter(shards, data):
    requested, answers = shards
    merged = merge(answers, requested, REGISTRY, "learner")
    again = merge(data.draw(st.permutations(answers)), requested, REGISTRY, "learner")
    everything = sorted(each for ids in requested for each in ids)
    assert list(merged.rows.ids) == list(again.rows.ids) == everything
    assert merged.rows.lengths_N.tolist() == again.rows.lengths_N.tolist()
    assert merged.metrics == again.metrics or math.isnan(merged.metrics["loss"]) == math.isnan(again.metrics["loss"])
    assert merged.metrics["rows"] == len(everything)
    if everything:
        wanted = make_block(TrajectoryIds.of(everything))
        for found in (merged.rows.read(), again.rows.read()):
            assert found.ids.same_as(wanted.ids)
            assert found.tokens_T.tolist() == wanted.tokens_T.tolist()


def test_a_missing_trajectory_is_named_with_who_should_have_sent_it():
    lost = result(worker(2), 1, of((1, 1), (3, 0)))
    head, line = refusal([GOOD[0], lost]).splitlines()
    assert "role learner" in head
    assert re.search(r"missing .*learn\[2\]@node-a/cpu#0: 1\.0#0$", line)


def test_an_answer_that_never_came_is_named_with_all_its_trajectories():
    assert re.search(r"missing .*learn\[2\]@node-a/cpu#0: 1\.1#0, 1\.0#0, 3\.0#0", refusal([GOOD[0]]))


def test_a_repeated_trajectory_is_named_with_who_sent_it():
    twice = result(worker(0), 0, of((0, 0), (2, 0), (2, 0)))
    assert re.search(r"once.* learn\[0\]@node-a/cpu#0: 2\.0#0$", refusal([twice, GOOD[1]]))


def test_a_block_that_is_sent_twice_is_caught():
    text = refusal([GOOD[0], GOOD[0], GOOD[1]])
    assert re.search(r"once.* learn\[0\]@node-a/cpu#0, learn\[0\]@node-a/cpu#0: 0\.0#0, 2\.0#0", text)


def test_a_foreign_trajectory_is_named_with_who_sent_it():
    foreign = result(worker(0), 0, of((0, 0), (2, 0), (9, 9)))
    assert re.search(r"foreign.* learn\[0\]@node-a/cpu#0 .*rank 0.*: 9\.9#0", refusal([foreign, GOOD[1]]))


def test_another_attempt_at_the_same_trajectory_is_foreign():
    again = result(worker(0), 0, of((0, 0), (2, 0, 0, 1)))
    text = refusal([again, GOOD[1]])
    assert re.search(r"missing .*learn\[0\]@node-a/cpu#0: 2\.0#0", text)
    assert re.search(r"foreign.* learn\[0\]@node-a/cpu#0 .*rank 0.*: 2\.0#1", text)


def test_rows_that_were_exchanged_between_ranks_are_caught_on_both():
    text = refusal([result(worker(0), 0, SECOND), result(worker(2), 1, FIRST)])
    assert re.search(r"missing .*learn\[0\]@node-a/cpu#0: 0\.0#0, 2\.0#0", text)
    assert re.search(r"foreign.* learn\[2\]@node-a/cpu#0 .*rank 1.*: 0\.0#0, 2\.0#0", text)


def test_an_answer_for_another_rank_is_refused_with_its_worker_and_ids():
    text = refusal([result(worker(2), 0, FIRST), GOOD[1]])
    assert re.search(r"learn\[2\]@node-a/cpu#0 .*0\.0#0, 2\.0#0.* rank 1\b.* 0\b", text)


def test_an_answer_for_a_rank_that_there_is_not_is_refused():
    text = refusal([*GOOD, result(worker(2), 7, of((9, 9)))])
    assert re.search(r"learn\[2\]@node-a/cpu#0 .*rank 7\b.* 2\b", text)


def test_an_answer_of_a_dead_incarnation_is_refused_with_its_worker_its_heir_and_its_ids():
    registry = REGISTRY.with_workers([worker(2, incarnation=1)])
    text = refusal(GOOD, registry=registry)
    assert re.search(r"learn\[2\]@node-a/cpu#0 .*1\.1#0, 1\.0#0, 3\.0#0.*learn\[2\]@node-a/cpu#1", text)


def test_rows_of_a_worker_without_the_role_are_refused_with_their_ids():
    text = refusal([result(worker(1), 0, FIRST), GOOD[1]])
    assert re.search(r"learn\[1\]@node-a/cpu#0 .*0\.0#0, 2\.0#0.*\blearner\b", text)


def test_an_answer_of_another_pool_is_refused_with_its_ids():
    text = refusal([result(worker(0, pool="gen"), 0, FIRST), GOOD[1]])
    assert re.search(r"gen\[0\]@node-a/cpu#0 .*0\.0#0, 2\.0#0.*\blearner\b", text)


def test_an_answer_of_a_slot_without_the_role_is_refused():
    registry = replace(REGISTRY, workers={**REGISTRY.workers, ("learn", 9): worker(9)})
    text = refusal([result(worker(9), 0, FIRST), GOOD[1]], registry=registry)
    assert re.search(r"learn\[9\]@node-a/cpu#0 .*0\.0#0, 2\.0#0.*\blearner\b", text)


def test_a_trajectory_that_was_given_to_two_ranks_is_named_with_both():
    requested = [of((0, 0)), of((0, 0), (1, 0))]
    text = refusal([result(worker(0), 0, requested[0]), result(worker(2), 1, requested[1])], requested)
    assert re.search(r"several ranks.*learn\[0\]@node-a/cpu#0, learn\[2\]@node-a/cpu#0.*: 0\.0#0$", text)


def test_every_problem_of_a_call_is_reported_at_once():
    text = refusal([result(worker(0), 0, of((0, 0), (8, 8))), result(worker(2), 1, of((1, 1)))])
    assert text.count("\n  ") == 3
    for pattern in (r"missing .*learn\[0\]", r"foreign.* learn\[0\]", r"missing .*learn\[2\]"):
        assert re.search(pattern, text)


CORRUPTIONS = ["missing", "duplicate", "foreign", "wrong rank", "dead incarnation", "another slot", "other pool"]


@settings(deadline=None)
@given(answered_shards(), st.sampled_from(CORRUPTIONS), st.data())
def test_every_corruption_of_any_result_is_caught_and_names_a_worker(shards, kind, data):
    requested, answers = shards
    filled = [at for at, answer in enumerate(answers) if len(answer.ids)]
    if not filled:
        return
    at = data.draw(st.sampled_from(filled))
    row = data.draw(st.integers(0, len(answers[at].ids) - 1))
    victim = answers[at]
    if kind == "missing":
        ids = victim.ids.take(np.delete(np.arange(len(victim.ids)), row))
        spoiled = result(victim.worker, victim.rank, ids)
    elif kind in ("duplicate", "foreign"):
        more = victim.ids.take(np.array([row])) if kind == "duplicate" else of((77, 0))
        spoiled = result(victim.worker, victim.rank, TrajectoryIds.concatenate([victim.ids, more]))
    elif kind == "wrong rank":
        spoiled = replace(victim, rank=1 - victim.rank)
    elif kind == "dead incarnation":
        spoiled = replace(victim, worker=worker(victim.worker.index, incarnation=3))
    elif kind == "another slot":
        spoiled = replace(victim, worker=worker(victim.worker.index + 1))
    else:
        spoiled = replace(victim, worker=worker(victim.worker.index, pool="gen"))
    text = refusal([*answers[:at], spoiled, *answers[at + 1 :]], requested)
    assert str(spoiled.worker) in text
    if kind in ("missing", "duplicate"):
        assert str(victim.ids[row]) in text
    if kind == "foreign":
        assert "77.0#0" in text


def test_an_empty_shard_may_be_answered_without_rows():
    empty = of()
    merged = merge([GOOD[0], result(worker(2), 1, empty, stored=False)], [FIRST, empty], REGISTRY, "learner")
    assert list(merged.rows.ids) == list(FIRST)
    assert len(merged.rows.pieces) == 1


def test_results_without_rows_are_only_counted():
    merged = merge(
        [result(worker(0), 0, FIRST, stored=False), result(worker(2), 1, SECOND, stored=False)],
        REQUESTED,
        REGISTRY,
        "learner",
    )
    assert merged.rows is None


def test_rows_from_some_and_none_from_others_are_refused():
    with pytest.raises(ResultError, match=r"learn\[2\]@node-a/cpu#0 .*\brows\b"):
        merge([GOOD[0], result(worker(2), 1, SECOND, stored=False)], REQUESTED, REGISTRY, "learner")


def test_blocks_of_a_stream_are_joined_by_ascending_id():
    rows = stored_rows([GOOD[1], GOOD[0]])
    assert [each.prompt_index for each in rows.ids] == [0, 1, 1, 2, 3]
    assert len(stored_rows([])) == 0


def test_a_computed_block_has_rows_or_ids_and_not_both():
    assert Computed(done=FIRST).ids is FIRST
    block = make_block(FIRST)
    assert Computed(rows=block).ids is FIRST
    with pytest.raises(AssertionError):
        Computed(rows=block, done=FIRST)
    with pytest.raises(AssertionError):
        Computed()


def reduced(*metrics):
    return reduce_metrics([(worker(slot), metric) for slot, metric in enumerate(metrics)])


def metric(value, reduction, weight=1.0, name="x"):
    return Metric(name=name, value=value, reduction=reduction, weight=weight)


def test_metrics_are_reduced_as_they_declare():
    assert reduced(metric(2.0, "sum"), metric(3.5, "sum")) == {"x": 5.5}
    assert reduced(metric(2.0, "max"), metric(-3.0, "max")) == {"x": 2.0}
    assert reduced(metric(2.0, "min"), metric(-3.0, "min")) == {"x": -3.0}
    # (1·10 + 4·30) / 40
    assert reduced(metric(1.0, "mean", 10.0), metric(4.0, "mean", 30.0)) == {"x": 3.25}
    assert reduced(metric(1.0, "sum", name="a"), metric(5.0, "max", name="b")) == {"a": 1.0, "b": 5.0}
    assert reduced() == {}


def test_a_rank_without_rows_does_not_count_in_a_mean_whatever_it_says():
    assert reduced(metric(2.0, "mean", 3.0), metric(math.nan, "mean", 0.0)) == {"x": 2.0}
    assert reduced(metric(math.inf, "mean", 0.0), metric(2.0, "mean", 3.0)) == {"x": 2.0}


def test_a_mean_over_nothing_is_not_a_number():
    assert math.isnan(reduced(metric(0.0, "mean", 0.0), metric(7.0, "mean", 0.0))["x"])


def test_a_metric_that_is_not_a_number_where_it_counts_stays_one():
    assert math.isnan(reduced(metric(2.0, "mean", 3.0), metric(math.nan, "mean", 1.0))["x"])


def test_workers_that_disagree_about_a_reduction_are_named():
    with pytest.raises(ResultError) as refused:
        reduced(metric(1.0, "mean"), metric(1.0, "sum"))
    assert str(refused.value) == (
        "metric x: learn[0]@node-a/cpu#0 declares mean and learn[1]@node-a/cpu#0 declares sum. A name has one "
        "reduction."
    )
