# SPDX-License-Identifier: Apache-2.0
"""How every rollout engine behaves: streaming, cancelling, pausing, new weights, sleeping, bad input, ending."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from podium.errors import RolloutError, WeightMismatchError
from podium.rollout.engine import InFlight, RolloutEngine
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Completion, PartialAnswer
from rollout.conftest import EngineFactory
from rollout.judge import (
    DEADLINE_S,
    PROMPT,
    Judge,
    Weights,
    answer,
    answers,
    ask,
    collected,
    in_background,
    wait_for_tokens,
)

LONG = 150
LONG_PROMPT = tuple(range(1, 101))


@pytest.mark.slow
def test_all_requests_end_once_also_when_they_outnumber_the_places(
    engine_factory: EngineFactory, rollout_folder: Path
) -> None:
    engine = engine_factory(rollout_folder, max_running=3)
    requests = [ask(n, range(1, 2 + 5 * n), new=1 + 7 * n) for n in range(12)]
    found = answers(engine, requests)
    assert found.keys() == {request.id for request in requests}
    for request in requests:
        assert found[request.id].num_tokens == request.sampling.max_new_tokens


@pytest.mark.slow
def test_answers_are_right_when_the_cache_is_too_small_for_all_at_once(
    engine_factory: EngineFactory, rollout_folder: Path, judge: Judge
) -> None:
    """Some wait or are put back; nothing fails, and what is computed anew is the same."""
    engine = engine_factory(rollout_folder, max_running=8, cache_bytes=300 * 1024)
    requests = [ask(n, range(n, n + 30), new=90, temperature=0.0) for n in range(6)]
    assert engine.capacity.cache_tokens < 6 * 120
    for completion in answers(engine, requests).values():
        assert completion.num_tokens == 90
        assert judge.has_greedy(completion)


def test_results_end_at_once_without_requests(engine: RolloutEngine) -> None:
    assert list(engine.results(deadline_s=DEADLINE_S)) == []
    engine.submit([])
    assert list(engine.results(deadline_s=DEADLINE_S)) == []


def test_a_short_answer_comes_before_a_long_one_that_was_submitted_earlier(engine: RolloutEngine) -> None:
    long, short = ask(0, new=LONG), ask(1, new=3)
    engine.submit([long, short])
    assert [completion.id for completion in engine.results(deadline_s=DEADLINE_S)] == [short.id, long.id]


def test_requests_may_come_while_results_are_read(engine: RolloutEngine) -> None:
    engine.submit([ask(0, new=30)])
    results = engine.results(deadline_s=DEADLINE_S)
    other = in_background(lambda: (wait_for_tokens(engine, 3), engine.submit([ask(1, new=3)])))
    assert [completion.id.prompt_index for completion in results] == [1, 0]
    other.result(DEADLINE_S)


def test_results_can_be_left_and_taken_up_again(engine: RolloutEngine) -> None:
    """Also where several end in the same step."""
    engine.submit([ask(n, new=0 if n < 3 else 6) for n in range(9)])
    found = [next(iter(engine.results(deadline_s=DEADLINE_S))).id for _ in range(9)]
    assert sorted(found) == [ask(n).id for n in range(9)]
    assert list(engine.results(deadline_s=DEADLINE_S)) == []


def test_an_id_that_is_under_way_is_refused_and_nothing_of_its_batch_is_taken(engine: RolloutEngine) -> None:
    engine.submit([ask(0)])
    for batch in ([ask(1), ask(0)], [ask(2), ask(2)]):
        with pytest.raises(RolloutError, match=r"already|twice"):
            engine.submit(batch)
    assert collected(engine.results(deadline_s=DEADLINE_S)).keys() == {ask(0).id}
    assert answer(engine, ask(0)).finish == "length"


def test_cancelling_gives_what_has_been_sampled(engine: RolloutEngine) -> None:
    whole = answer(engine, ask(0, new=LONG))
    long, short = ask(0, new=LONG), ask(1, new=6)
    engine.submit([long, short])
    results = engine.results(deadline_s=DEADLINE_S)
    assert next(results).id == short.id
    engine.cancel([long.id, ask(77).id])
    [cut] = results
    assert cut.id == long.id
    assert cut.finish == "cancelled"
    assert 1 <= cut.num_tokens < LONG
    assert cut.tokens_L.tolist() == whole.tokens_L[: cut.num_tokens].tolist()
    assert len(cut.logprobs_L) == len(cut.versions_L) == cut.num_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "temperature"),
    [
        (0, 0.0),
        (1, 1.0),
        (40, 0.0),
        (LONG - 1, 1.0),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, 1.0), (1, 0.0), (40, 1.0), (LONG - 1, 0.0))),
    ],
)
def test_an_answer_that_another_engine_has_begun_ends_as_if_it_had_stayed_there(
    engine_factory: EngineFactory, rollout_folder: Path, kept: int, temperature: float
) -> None:
    first = engine_factory(rollout_folder)
    if not isinstance(first, NativeEngine):
        pytest.skip("vLLM does not continue answers of another engine")
    request = ask(0, new=LONG, temperature=temperature)
    whole = answer(first, request)
    begun = PartialAnswer(
        tokens_L=whole.tokens_L[:kept], logprobs_L=whole.logprobs_L[:kept], versions_L=np.full(kept, -7, np.int32)
    )
    continued = answer(engine_factory(rollout_folder), replace(request, begun=begun))
    assert (continued.id, continued.finish, continued.num_tokens) == (request.id, "length", LONG)
    assert continued.prompt.tolist() == whole.prompt.tolist()
    assert continued.tokens_L.tolist() == whole.tokens_L.tolist()
    assert continued.versions_L.tolist() == [-7] * kept + [0] * (LONG - kept)
    assert continued.logprobs_L == pytest.approx(whole.logprobs_L, abs=1e-5)


def test_what_waits_can_be_cancelled_even_in_a_pause(engine_factory: EngineFactory, rollout_folder: Path) -> None:
    engine = engine_factory(rollout_folder, max_running=1)
    engine.submit([ask(0), ask(1)])
    engine.pause()
    engine.cancel([ask(1).id])
    results = engine.results(deadline_s=DEADLINE_S)
    cancelled = next(results)
    assert (cancelled.id, cancelled.finish, cancelled.num_tokens) == (ask(1).id, "cancelled", 0)
    engine.resume()
    assert [completion.finish for completion in results] == ["length"]


def test_a_pause_that_lasts_longer_than_the_deadline_raises(engine: RolloutEngine) -> None:
    engine.submit([ask(0)])
    engine.pause()
    with pytest.raises(RolloutError, match="paused"):
        list(engine.results(deadline_s=0.05))
    assert engine.load().generated_tokens == 0
    engine.resume()
    assert len(list(engine.results(deadline_s=DEADLINE_S))) == 1


@pytest.mark.slow
def test_a_pause_stops_generation_and_resuming_gives_the_same_tokens(engine: RolloutEngine) -> None:
    request = ask(0, new=LONG)
    expected = answer(engine, request).tokens_L.tolist()
    before = engine.load().generated_tokens

    def pause() -> int:
        wait_for_tokens(engine, before + 5)
        engine.pause()
        return engine.load().generated_tokens

    engine.submit([request])
    pausing = in_background(pause)
    with pytest.raises(RolloutError, match="paused"):
        list(engine.results(deadline_s=0.2))
    assert before + 5 <= pausing.result(DEADLINE_S) == engine.load().generated_tokens < before + LONG
    engine.resume()
    [completion] = engine.results(deadline_s=DEADLINE_S)
    assert completion.tokens_L.tolist() == expected


def test_a_reader_that_waits_in_a_pause_continues_when_another_thread_resumes(engine: RolloutEngine) -> None:
    engine.submit([ask(0, new=LONG)])
    engine.pause()
    resuming = in_background(engine.resume)
    assert len(list(engine.results(deadline_s=DEADLINE_S))) == 1
    resuming.result(DEADLINE_S)


@pytest.mark.slow
def test_areal_1569_after_an_update_between_steps_every_token_is_of_the_version_it_names(
    engine: RolloutEngine, judge: Judge, other_judge: Judge
) -> None:
    """There, the version was read again when the answer was back: an update in between labelled its tokens with weights
    that had not sampled them. Greedy, so that tokens as well as log-probs tell which weights sampled them."""
    weights, old, new = Weights.of(other_judge.model), engine.version, engine.version + 7
    requests = [ask(n, range(n, n + 10 + n), new=LONG, temperature=0.0) for n in range(3)]

    def update() -> None:
        wait_for_tokens(engine, 20)
        engine.install(weights.version(new), weights, in_flight="recompute")

    engine.submit(requests)
    updating = in_background(update)
    found = collected(engine.results(deadline_s=DEADLINE_S))
    updating.result(DEADLINE_S)
    assert engine.version == new
    for completion in found.values():
        cut = int((completion.versions_L == old).sum())
        assert 1 <= cut < LONG
        assert completion.versions_L.tolist() == [old] * cut + [new] * (LONG - cut)
        for part, by in ((slice(0, cut), judge), (slice(cut, LONG), other_judge)):
            logits_LV = by.logits_LV(completion.prompt.tolist(), completion.tokens_L.tolist())
            assert completion.tokens_L[part].tolist() == logits_LV.argmax(-1)[part].tolist()
            np.testing.assert_allclose(completion.logprobs_L[part], by.logprobs_L(completion)[part], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_what_begins_after_an_update_finds_nothing_of_older_weights(
    engine_factory: EngineFactory, rollout_folder: Path, judge: Judge, other_judge: Judge, in_flight: InFlight
) -> None:
    """Also when it was asked for before, and when an answer with the same prompt is under way."""
    engine = engine_factory(rollout_folder, max_running=2)
    weights, new = Weights.of(other_judge.model), engine.version + 1
    first = ask(0, LONG_PROMPT, new=4)
    assert answer(engine, first).reused_tokens == 0
    assert answer(engine, ask(1, LONG_PROMPT, new=4)).reused_tokens > 0
    # One ends at once and hands control to this thread; one goes on; one has not begun.
    engine.submit([ask(2, new=1), ask(3, LONG_PROMPT, new=LONG), ask(4, LONG_PROMPT, new=20)])
    results = engine.results(deadline_s=DEADLINE_S)
    assert next(results).id.prompt_index == 2
    engine.install(weights.version(new), weights, in_flight=in_flight)
    engine.submit([ask(5, LONG_PROMPT, new=20)])
    found = {completion.id.prompt_index: completion for completion in results}
    for draw in (4, 5):
        completion = found[draw]
        np.testing.assert_allclose(completion.logprobs_L, other_judge.logprobs_L(completion), atol=1e-4)
        assert set(completion.versions_L.tolist()) == {new}
    assert found[3].num_tokens == LONG
    assert found[3].versions_L[-1] == new
    assert np.isfinite(found[3].logprobs_L).all()


def test_updates_may_follow_one_another(engine: RolloutEngine, judge: Judge, other_judge: Judge) -> None:
    for number, by in enumerate((other_judge, judge, other_judge), start=engine.version + 1):
        weights = Weights.of(by.model)
        engine.install(weights.version(number), weights)
        completion = answer(engine, ask(0, new=12, temperature=0.0))
        assert completion.tokens_L.tolist() == by.greedy(PROMPT, 12)
        assert set(completion.versions_L.tolist()) == {number}


def _changed(weights: Weights) -> Weights:
    name = "model.layers.1.mlp.down_proj.weight"
    changed = weights.tensors_by_name[name].clone()
    changed[3, 5] += 1e-3
    return Weights(weights.tensors_by_name, sent={name: changed})


def _of_another_shape(weights: Weights) -> Weights:
    name = "model.layers.0.self_attn.q_proj.weight"
    return Weights(weights.tensors_by_name, sent={name: weights.tensors_by_name[name].T.contiguous()[:, :7]})


def _cut_short(weights: Weights) -> Weights:
    return Weights(weights.tensors_by_name, stop_after=9)


def _interrupted(weights: Weights) -> Weights:
    return Weights(weights.tensors_by_name, stop_after=9, error=RolloutError("the sender is gone"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (_changed, "down_proj"),
        (_of_another_shape, "q_proj"),
        (_cut_short, "ends before"),
        (_interrupted, "sender is gone"),
    ],
)
def test_wrong_weights_are_refused_and_nothing_is_sampled_until_right_ones_come(
    engine: RolloutEngine, other_judge: Judge, broken: Callable[[Weights], Weights], named: str
) -> None:
    weights, old = Weights.of(other_judge.model), engine.version
    wrong = broken(weights)
    engine.submit([ask(0, new=4), ask(1, new=40, temperature=0.0)])
    results = engine.results(deadline_s=DEADLINE_S)
    next(results)
    with pytest.raises(RolloutError, match=named) as refusal:
        engine.install(weights.version(old + 1), wrong)
    assert isinstance(refusal.value, WeightMismatchError) or broken is _interrupted
    sampled = engine.load().generated_tokens
    with pytest.raises(RolloutError):
        list(engine.results(deadline_s=0.2))
    assert engine.load().generated_tokens == sampled
    engine.install(weights.version(old + 2), weights)
    [completion] = engine.results(deadline_s=DEADLINE_S)
    cut = int((completion.versions_L == old).sum())
    assert 1 <= cut < 40
    assert completion.versions_L[cut:].tolist() == [old + 2] * (40 - cut)
    np.testing.assert_allclose(completion.logprobs_L[cut:], other_judge.logprobs_L(completion)[cut:], atol=1e-4)
    assert answer(engine, ask(2, new=9, temperature=0.0)).tokens_L.tolist() == other_judge.greedy(PROMPT, 9)


@pytest.mark.slow
def test_sleeping_keeps_answers_under_way(engine: RolloutEngine) -> None:
    requests = [ask(0, new=3), ask(1, new=LONG), ask(2, LONG_PROMPT, new=LONG)]
    expected = {each: completion.tokens_L.tolist() for each, completion in answers(engine, requests).items()}
    engine.submit(requests)
    results = engine.results(deadline_s=DEADLINE_S)
    next(results)
    freed = engine.sleep()
    assert freed.measured_bytes >= 0
    assert freed.accounted_bytes >= 0
    sampled = engine.load().generated_tokens
    with pytest.raises(RolloutError, match="sleep"):
        list(engine.results(deadline_s=0.05))
    assert engine.load().generated_tokens == sampled
    taken = engine.wake()
    assert taken.accounted_bytes == freed.accounted_bytes
    found = collected(engine.results(deadline_s=DEADLINE_S))
    assert {each: completion.tokens_L.tolist() for each, completion in found.items()} == {
        request.id: expected[request.id] for request in requests[1:]
    }


def test_sleeping_twice_and_waking_twice_change_nothing_more(engine: RolloutEngine) -> None:
    engine.sleep()
    assert (engine.sleep().measured_bytes, engine.sleep().accounted_bytes) == (0, 0)
    engine.wake()
    assert (engine.wake().measured_bytes, engine.wake().accounted_bytes) == (0, 0)
    assert answer(engine, ask(0)).finish == "length"


BAD: dict[str, Any] = {
    "empty": {"prompt": ()},
    "max_length|context": {"prompt": (1,) * 300},
    "token 250": {"prompt": (1, 250)},
    "token -1": {"prompt": (-1,)},
    "stop_tokens": {"stop_tokens": frozenset({9999})},
    "temperature": {"temperature": -0.5},
    "temperature is": {"temperature": float("nan")},
    "max_new_tokens": {"new": 0},
    "top_p": {"top_p": 0.0},
    "allowed_tokens": {"allowed_tokens": frozenset()},
    "nothing to sample": {"allowed_tokens": frozenset({5}), "logit_bias": {5: float("-inf")}},
}


def test_bad_requests_get_an_error_of_their_own_and_the_others_go_on(engine: RolloutEngine, judge: Judge) -> None:
    good = [ask(n, new=9, temperature=0.0) for n in range(3)]
    bad = {reason: ask(100 + n, **{"prompt": PROMPT, **how}) for n, (reason, how) in enumerate(BAD.items())}
    found = answers(engine, [good[0], *bad.values(), *good[1:]])
    for request in good:
        assert found[request.id].tokens_L.tolist() == judge.greedy(PROMPT, 9)
    for reason, request in bad.items():
        completion = found[request.id]
        assert completion.finish == "error", reason
        assert any(word in (completion.error or "") for word in reason.split("|")), completion.error
        assert completion.num_tokens == 0


def test_a_request_larger_than_the_whole_cache_is_refused_alone(
    engine_factory: EngineFactory, rollout_folder: Path
) -> None:
    engine = engine_factory(rollout_folder, max_length=512, cache_bytes=160 * 1024)
    room = engine.capacity.cache_tokens
    assert 32 <= room < 400
    found = answers(engine, [ask(0, [3] * 400, new=5), ask(1, new=room), ask(2, new=5)])
    for draw in (0, 1):
        assert found[ask(draw).id].finish == "error"
        assert "cache" in (found[ask(draw).id].error or "")
    assert found[ask(2).id].finish == "length"


@pytest.mark.slow
def test_logits_that_are_not_numbers_end_their_own_answer_only(
    engine_factory: EngineFactory, untied_folder: Path
) -> None:
    """Token 9 has an embedding of NaN: a sequence that meets it fails, and keeps its tokens. Those who are given its
    place in the cache afterwards find nothing of it."""
    engine, judge = engine_factory(untied_folder, cache_bytes=200 * 1024), Judge(untied_folder)
    with torch.no_grad():
        judge.model.get_input_embeddings().weight[9] = torch.nan
    weights = Weights.of(judge.model)
    engine.install(weights.version(engine.version + 1), weights)
    meets = ask(1, new=50, allowed_tokens=frozenset({8, 9, 10}))
    found = answers(engine, [ask(0, (5, 9, 7)), meets, ask(2, temperature=0.0), ask(3, (9,), temperature=0.0)])
    for draw in (0, 3):
        assert (found[ask(draw).id].finish, found[ask(draw).id].num_tokens) == ("error", 0)
        assert "not numbers" in (found[ask(draw).id].error or "")
    cut = found[meets.id]
    assert cut.finish == "error"
    assert cut.tokens_L.tolist().index(9) == cut.num_tokens - 1
    assert np.isfinite(cut.logprobs_L).all()
    assert found[ask(2).id].tokens_L.tolist() == judge.greedy(PROMPT, 8)
    later = answers(engine, [ask(n, range(n, n + 7), temperature=0.0, new=20) for n in range(20, 32)])
    for completion in later.values():
        assert completion.tokens_L.tolist() == judge.greedy(completion.prompt.tolist(), 20)


def test_capacity_says_what_was_requested(engine_factory: EngineFactory, rollout_folder: Path) -> None:
    capacity = engine_factory(rollout_folder, max_length=200, max_running=5, cache_bytes=2**20).capacity
    assert (capacity.vocab_size, capacity.max_length, capacity.max_running) == (250, 200, 5)
    # Two layers of two heads of 32 keys and 32 values in float32: 1024 bytes a token.
    assert 0.8 * 2**20 <= capacity.cache_bytes <= 1.05 * 2**20  # a page for itself may come on top
    assert 0.8 * 1024 <= capacity.cache_tokens <= 1024


def test_load_counts(engine_factory: EngineFactory, rollout_folder: Path) -> None:
    engine = engine_factory(rollout_folder, max_running=2)
    idle = engine.load()
    assert (idle.waiting, idle.running, idle.cache_tokens_used, idle.finished, idle.generated_tokens) == (0, 0, 0, 0, 0)
    engine.submit([ask(0, LONG_PROMPT, new=2)] + [ask(n, LONG_PROMPT, new=20) for n in range(1, 5)])
    assert engine.load().waiting + engine.load().running == 5
    results = engine.results(deadline_s=DEADLINE_S)
    next(results)
    busy = engine.load()
    assert (busy.finished, busy.waiting + busy.running) == (1, 4)
    assert 1 <= busy.running <= 2
    assert busy.cache_tokens_used >= len(LONG_PROMPT)
    assert len(list(results)) == 4
    done = engine.load()
    assert (done.waiting, done.running, done.cache_tokens_used, done.finished) == (0, 0, 0, 5)
    assert done.generated_tokens == 2 + 4 * 20
    # The last token of a prompt draws the first of its answer, and may be counted with neither.
    assert 5 * len(LONG_PROMPT) - 5 <= done.prefilled_tokens + done.reused_tokens <= 5 * len(LONG_PROMPT)
    assert done.reused_tokens > 0
    assert done.cache_tokens_kept > 0


@pytest.mark.slow
def test_any_schedule_of_cancels_pauses_updates_and_naps_ends_every_request_once(
    engine_factory: EngineFactory, rollout_folder: Path, judge: Judge, other_judge: Judge
) -> None:
    engine = engine_factory(rollout_folder, max_running=3, cache_bytes=400 * 1024)
    chance = random.Random(4)
    both = [Weights.of(by.model) for by in (judge, other_judge)]
    requests = [ask(n, range(1, 3 + n % 50), new=chance.randint(1, 60)) for n in range(24)]

    def disturb() -> None:
        for n in range(16):
            wait_for_tokens(engine, 20 * n)
            match chance.choice(["cancel", "pause", "update", "nap"]):
                case "cancel":
                    engine.cancel([chance.choice(requests).id])
                case "pause":
                    engine.pause()
                    engine.resume()
                case "update":
                    weights = both[n % 2]
                    how = chance.choice(["recompute", "keep"])
                    engine.install(weights.version(engine.version + 1), weights, in_flight=how)
                case "nap":
                    engine.sleep()
                    engine.wake()

    engine.submit(requests)
    disturbing = in_background(disturb)
    found = collected(engine.results(deadline_s=DEADLINE_S))
    engine.submit([ask(1000, new=200)])  # so that the disturber sees as many tokens as it waits for
    found |= collected(engine.results(deadline_s=DEADLINE_S))
    disturbing.result(DEADLINE_S)
    assert found.keys() >= {request.id for request in requests}
    for request in requests:
        _check_whole(found[request.id], request.sampling.max_new_tokens)


def _check_whole(completion: Completion, wanted: int) -> None:
    assert completion.finish in ("length", "cancelled")
    assert completion.num_tokens == wanted or completion.finish == "cancelled"
    assert (np.diff(completion.versions_L) >= 0).all()
    assert np.isfinite(completion.logprobs_L).all()


def test_a_closed_engine_says_so(engine: RolloutEngine) -> None:
    engine.submit([ask(0, new=LONG), ask(1, new=1)])
    results = engine.results(deadline_s=DEADLINE_S)
    next(results)
    engine.close()
    engine.close()
    with pytest.raises(RolloutError, match="closed"):
        next(results)
    with pytest.raises(RolloutError, match="closed"):
        engine.submit([ask(2)])
    with pytest.raises(RolloutError, match="closed"):
        list(engine.results(deadline_s=DEADLINE_S))
