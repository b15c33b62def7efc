# SPDX-License-Identifier: Apache-2.0
"""The engine records which experts every token goes to: fed, reused from the cache, or fed a second time."""

# T tokens of prompt and answer · L layers with a router · K experts of a token

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_world import CPU, DEADLINE_S, Learner, ask, cache_gib, prompt_of, sequence, sequences

from helpers.tiny import save_tiny_model
from podium.data.documents import Document, pack
from podium.data.routed_experts import Experts
from podium.models.packing import to_device
from podium.models.routing import Routing
from podium.recipe import RolloutSection
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Completion, Request

WAYS = pytest.mark.parametrize(
    "way", [{}, {"block_size": 8}, {"block_size": 8, "prefill_tokens": 10}], ids=["slots", "blocks", "chunks"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3_moe", tmp_path_factory.mktemp("moe"), num_experts=16, num_experts_per_tok=3)


@pytest.fixture(scope="module")
def mixture(folder: Path) -> Learner:
    """Read only."""
    return Learner.of(folder)


@pytest.fixture
def own_mixture(folder: Path) -> Learner:
    return Learner.of(folder)


def recording(learner: Learner, **section: Any) -> NativeEngine:
    return NativeEngine(learner.model, CPU, RolloutSection(**section), records_experts=True)


@torch.no_grad()
def own_choices(learner: Learner, completion: Completion) -> Experts:
    """The learner's, in one packed forward over all but the last token."""
    tokens = np.concatenate([completion.prompt, completion.tokens_L]).astype(np.int32)
    batch = to_device(pack([Document(tokens=tokens, trained=np.arange(len(tokens)) > 0)]), CPU)
    assert learner.model.routers is not None
    shape = learner.model.routers.shape
    recorded = torch.zeros(shape.num_layers, len(tokens) - 1, shape.per_token, dtype=torch.uint8)
    learner.model(
        replace(batch, packing=replace(batch.packing, routing=Routing(recorded_LTK=recorded))), None, "scores"
    )
    return recorded.transpose(0, 1).numpy()


def same(found: Experts | None, wanted: Experts) -> bool:
    assert found is not None
    return found.dtype == wanted.dtype and np.array_equal(np.sort(found), np.sort(wanted))


@WAYS
def test_the_experts_of_all_tokens_but_the_last_are_the_learners(mixture: Learner, way: dict[str, Any]) -> None:
    requests = [
        ask(number, length, new=new) for number, (length, new) in enumerate([(3, 12), (20, 5), (1, 1), (33, 9)])
    ]
    for each in sequences(recording(mixture, **way), requests).values():
        assert each.experts is not None
        assert each.experts.shape == (len(each.prompt) + each.num_tokens - 1, 2, 3)
        assert same(each.experts, own_choices(mixture, each))


@pytest.mark.slow
@WAYS
def test_reused_prompts_have_the_experts_of_the_sequence_that_fed_them(mixture: Learner, way: dict[str, Any]) -> None:
    """A group shares its prompt; a second turn continues behind the first one's answer."""
    engine, prompt = recording(mixture, max_running=3, **way), prompt_of(30)
    group = sequences(engine, [ask(0, prompt, sample=sample, new=6) for sample in range(8)])
    assert sum(each.reused_tokens for each in group.values()) > 7 * 20
    first = group[min(group)]
    turn = sequence(engine, ask(1, np.concatenate([first.prompt, first.tokens_L, prompt_of(5)]), new=7))
    assert turn.reused_tokens >= 30
    for each in (*group.values(), turn):
        assert same(each.experts, own_choices(mixture, each))


def test_preempted_answers_keep_the_experts_they_had(mixture: Learner) -> None:
    """The cache is too small for all: the youngest start over, and nothing of their record is lost or shifted."""
    engine = recording(mixture, block_size=8, memory_gib=cache_gib(mixture, 100, block_size=8))
    found = sequences(engine, [ask(number, 12, new=30) for number in range(5)])
    assert engine.load().preemptions > 0
    for each in found.values():
        assert each.num_tokens == 30
        assert same(each.experts, own_choices(mixture, each))


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_an_update_does_not_change_what_was_recorded_before_it(own_mixture: Learner, in_flight: Any) -> None:
    """Five tokens of twelve are sampled from the first weights. Their experts stay, also if the cache is computed again
    with weights that choose others."""
    long, short = ask(0, 20, new=12, temperature=0), ask(1, 3, new=5)
    before = sequence(recording(own_mixture), long)
    engine = recording(own_mixture)
    engine.submit([long, short])
    results = engine.results(deadline_s=DEADLINE_S)
    assert next(results).id == short.id
    with torch.no_grad():
        for layer in own_mixture.model.hf.model.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
    engine.install(own_mixture.describe(1), None, in_flight=in_flight)
    (found,) = results
    assert found.versions_L.tolist() == [0] * 5 + [1] * 7
    assert before.experts is not None
    assert found.experts is not None
    fed = 20 + 5 - 1  # the fifth token is fed after the update
    assert same(found.experts[:fed], before.experts[:fed])
    new = own_choices(own_mixture, found)
    assert not same(found.experts[:fed], new[:fed])
    assert same(found.experts[fed:, :1], new[fed:, :1]) or in_flight == "keep"


def test_another_engine_continues_the_record(mixture: Learner) -> None:
    whole = sequence(recording(mixture), ask(0, 10, new=12))
    engine = recording(mixture)
    request = ask(0, 10, new=12)
    engine.submit([request, ask(1, 3, new=4)])
    results = engine.results(deadline_s=DEADLINE_S)
    next(results)
    engine.cancel([request.id])
    (part,) = results
    assert (part.finish, part.num_tokens) == ("cancelled", 4)
    assert part.so_far.experts is not None
    assert len(part.so_far.experts) == 13
    marked = replace(part.so_far, experts=part.so_far.experts[:5])  # the rest is recorded when it is fed again
    for begun in (part.so_far, marked):
        found = sequence(recording(mixture), Request(**{**_values(request), "begun": begun}))
        assert found.tokens_L.tolist() == whole.tokens_L.tolist()
        assert same(found.experts, own_choices(mixture, found))


def _values(request: Request) -> dict[str, Any]:
    return {"id": request.id, "prompt": request.prompt, "sampling": request.sampling, "seed": request.seed}


def test_nothing_is_recorded_unless_asked_for_or_of_a_dense_model(mixture: Learner, learner: Learner) -> None:
    assert sequence(mixture.engine(), ask(0, 5)).experts is None
    assert sequence(recording(learner), ask(0, 5)).experts is None


def test_recording_changes_no_token(mixture: Learner) -> None:
    request = ask(0, 9, new=10)
    with_record, without = sequence(recording(mixture), request), sequence(mixture.engine(), request)
    assert with_record.tokens_L.tolist() == without.tokens_L.tolist()
    assert with_record.logprobs_L.tolist() == without.logprobs_L.tolist()
