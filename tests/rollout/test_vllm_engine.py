# SPDX-License-Identifier: Apache-2.0
"""What is vLLM's own: its limits, chunked prompts, experts' names, and what it must leave alone in the process."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.tiny import save_tiny_model
from podium.errors import MissingExtraError, ModelError, RolloutError
from podium.rollout.requests import Completion
from podium.rollout.vllm.engine import VllmEngine
from podium.rollout.vllm.sampling import position_seed, sampling_params
from podium.rollout.vllm.settings import VllmSettings, require_vllm
from rollout.judge import DEADLINE_S, PROMPT, Judge, Weights, answer, answers, ask

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed in this environment: run `make test-vllm`"
)


def settings(folder: Path, **changes: Any) -> VllmSettings:
    sizes = {"max_length": 256, "max_running": 8, "cache_bytes": 4 * 2**20, "block_size": 32, "compiled": False}
    return VllmSettings(folder=str(folder), dtype="float32", **{**sizes, **changes})


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"podium\[vllm\]"):
        require_vllm()


def test_seeds_of_positions_and_keys_are_unlike_each_other() -> None:
    seeds = {position_seed(key, position) & 0xFFFF_FFFF for key in range(40) for position in range(50)}
    assert len(seeds) == 2000
    assert all(0 <= position_seed(key, 3) < 2**63 for key in (0, 2**64 - 1))


@needs_vllm
@pytest.mark.vllm
def test_truncated_sampling_is_asked_of_vllm_as_it_is() -> None:
    found = sampling_params(ask(0, temperature=0.7, top_k=40, top_p=0.9, min_p=0.05), max_length=256)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.7, 40, 0.9, 0.05)
    greedy = sampling_params(ask(0, temperature=0.0, top_k=40, top_p=0.9, min_p=0.05), max_length=256)
    assert (greedy.top_k, greedy.top_p, greedy.min_p) == (0, 1.0, 0.0)  # so log-probs are not truncated either


@needs_vllm
@pytest.mark.vllm
def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        VllmEngine(settings(tmp_path / "nowhere"))


@needs_vllm
@pytest.mark.vllm
def test_a_cache_too_small_to_begin_with_says_which_setting(rollout_folder: Path) -> None:
    with pytest.raises(RolloutError, match="cache_bytes"):
        VllmEngine(settings(rollout_folder, cache_bytes=1000))


@needs_vllm
@pytest.mark.vllm
def test_the_rest_of_the_process_stays_as_it_was(rollout_folder: Path) -> None:
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING"), torch.set_num_threads, torch.get_num_threads()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    expected = torch.rand(1).item(), random.random(), float(np.random.rand())
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    engine = VllmEngine(settings(rollout_folder))
    try:
        assert (torch.rand(1).item(), random.random(), float(np.random.rand())) == expected
        after = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING"), torch.set_num_threads, torch.get_num_threads()
        assert after == before
    finally:
        engine.close()


@needs_vllm
@pytest.mark.vllm
def test_limits_of_vllm_are_errors_of_single_requests(other_folder: Path, other_judge: Judge) -> None:
    """The folder has no tokenizer."""
    engine = VllmEngine(settings(other_folder))
    try:
        requests = [ask(0, temperature=2.5), ask(1, temperature=1e-3), ask(2, stop_strings=("a",)), ask(3)]
        found = answers(engine, requests)
        for draw, word in ((0, "temperature"), (1, "temperature"), (2, "tokenizer")):
            assert found[ask(draw).id].finish == "error"
            assert word in (found[ask(draw).id].error or "")
        np.testing.assert_allclose(found[ask(3).id].logprobs_L, other_judge.logprobs_L(found[ask(3).id]), atol=1e-4)
        weights = Weights.of(other_judge.model)
        with pytest.raises(RolloutError, match="delivery"):
            engine.install(weights.version(1), None)
        engine.sleep()
        with pytest.raises(RolloutError, match="wake"):
            engine.install(weights.version(1), weights)
    finally:
        engine.close()


@needs_vllm
@pytest.mark.vllm
def test_a_prompt_taken_in_parts_samples_the_same(rollout_folder: Path, judge: Judge) -> None:
    """Also beside answers that draw meanwhile; vLLM's own generators would not come through this on a CPU."""
    requests = [ask(0, PROMPT, new=60), ask(1, range(1, 200), new=20), ask(2, range(3, 180), new=20)]
    found = []
    for step_tokens in (512, 16):
        engine = VllmEngine(settings(rollout_folder, step_tokens=step_tokens))
        try:
            found.append(answers(engine, requests))
        finally:
            engine.close()
    for request in requests:
        whole, parts = found[0][request.id], found[1][request.id]
        assert whole.tokens_L.tolist() == parts.tokens_L.tolist()
        np.testing.assert_allclose(parts.logprobs_L, judge.logprobs_L(parts), atol=1e-4)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same sizes, whose routers choose 3 of 8 experts. vLLM pads their experts of 48 rows."""
    shape = {
        "head_dim": 32, "max_position_embeddings": 512, "hidden_size": 64, "moe_intermediate_size": 48,
        "num_experts": 8, "num_experts_per_tok": 3,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("mixtures")
    return [save_tiny_model("qwen3_moe", folder / f"{seed}", seed=seed, **shape) for seed in (0, 1)]


@needs_vllm
@pytest.mark.vllm
def test_a_mixture_of_experts_takes_new_weights(mixtures: list[Path]) -> None:
    """On a CPU vLLM packs experts when it loads them, and would not after an update. The same weights, others, and the
    first again."""
    judges, engine = [Judge(folder) for folder in mixtures], VllmEngine(settings(mixtures[0]))
    try:
        for version, judge in enumerate([judges[0], judges[0], judges[1], judges[0]]):
            if version:
                weights = Weights.of(judge.model)
                engine.install(weights.version(version), weights)
            completion = answer(engine, ask(version, new=12))
            np.testing.assert_allclose(completion.logprobs_L, judge.logprobs_L(completion), atol=1e-4)
            assert set(completion.versions_L.tolist()) == {version}
    finally:
        engine.close()


@needs_vllm
@pytest.mark.vllm
def test_answers_of_a_mixture_say_which_experts_their_tokens_went_to(mixtures: list[Path]) -> None:
    """Also of a prompt taken in parts, of one from the prefix cache, and of an answer that was cancelled."""
    judge, engine = Judge(mixtures[0]), VllmEngine(settings(mixtures[0], records_experts=True, step_tokens=64))
    prompt = range(1, 101)
    try:
        found = answers(engine, [ask(0, prompt), ask(1, range(5, 40), new=20), ask(2, PROMPT, new=1)])
        again = answer(engine, ask(3, prompt, seed=3))
        assert again.reused_tokens > 0
        engine.submit([ask(4, new=100), ask(5, new=1)])
        assert next(engine.results(deadline_s=DEADLINE_S)).id.prompt_index == 5
        engine.cancel([ask(4).id])
        [cancelled] = engine.results(deadline_s=DEADLINE_S)
        assert cancelled.finish == "cancelled"
        assert cancelled.num_tokens > 0
        for completion in (*found.values(), again, cancelled):
            _same_experts(completion.experts, judge, completion)
            assert len(completion.experts) == len(completion.prompt) + completion.num_tokens - 1
    finally:
        engine.close()


@needs_vllm
@pytest.mark.vllm
def test_a_token_keeps_the_experts_of_the_weights_that_fed_it_first(mixtures: list[Path]) -> None:
    """Also where its cache is computed again after an update."""
    old, new = (Judge(folder) for folder in mixtures)
    weights, engine = Weights.of(new.model), VllmEngine(settings(mixtures[0], records_experts=True))
    try:
        engine.submit([ask(0, new=60), ask(1, new=5)])
        results = engine.results(deadline_s=DEADLINE_S)
        assert next(results).id.prompt_index == 1
        engine.install(weights.version(1), weights, in_flight="recompute")
        [completion] = results
    finally:
        engine.close()
    fed_by_old = len(PROMPT) + int((completion.versions_L == 0).sum()) - 1
    assert len(PROMPT) < fed_by_old < len(completion.experts)
    _same_experts(completion.experts[:fed_by_old], old, completion)
    chosen = _chosen(new, completion)[fed_by_old:]
    assert np.array_equal(np.sort(completion.experts[fed_by_old:]), chosen)
    assert not np.array_equal(_chosen(old, completion)[fed_by_old:], chosen)


@needs_vllm
@pytest.mark.vllm
def test_a_dense_model_has_no_experts_to_record(rollout_folder: Path) -> None:
    engine = VllmEngine(settings(rollout_folder, records_experts=True))
    try:
        assert answer(engine, ask(0)).experts is None
    finally:
        engine.close()


@torch.no_grad()
def _chosen(judge: Judge, completion: Completion) -> np.ndarray:
    """[T, L, K], sorted: experts that transformers' routers choose for all tokens that were fed."""
    tokens = torch.tensor([[*completion.prompt.tolist(), *completion.tokens_L.tolist()][:-1]])
    logits = judge.model(tokens, output_router_logits=True).router_logits  # of each layer, [T, E]
    return np.stack([np.sort(each.topk(3).indices.numpy()) for each in logits], axis=1)


def _same_experts(experts: np.ndarray | None, judge: Judge, completion: Completion) -> None:
    assert experts is not None
    assert experts.dtype == np.uint8
    assert np.array_equal(np.sort(experts), _chosen(judge, completion)[: len(experts)])


@needs_vllm
@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_two_workers_share_a_model_and_take_new_weights(
    kind: str, rollout_folder: Path, other_folder: Path, mixtures: list[Path]
) -> None:
    """Each rank gets whole weights and loads its part."""
    folders = [rollout_folder, other_folder] if kind == "dense" else mixtures
    old, new = (Judge(folder) for folder in folders)
    weights = Weights.of(new.model)
    engine = VllmEngine(settings(folders[0], tensor_parallel=2, records_experts=kind == "mixture"))
    try:
        for completion in answers(engine, [ask(0, new=12), ask(1, range(3, 40), new=12, temperature=0.7)]).values():
            temperature = 1.0 if completion.id.prompt_index == 0 else 0.7
            expected = old.logprobs_L(completion, temperature=temperature)
            np.testing.assert_allclose(completion.logprobs_L, expected, atol=1e-4)
            if kind == "mixture":
                _same_experts(completion.experts, old, completion)
        engine.submit([ask(2, new=60), ask(3, new=5)])
        results = engine.results(deadline_s=DEADLINE_S)
        assert next(results).id.prompt_index == 3
        engine.install(weights.version(1), weights, in_flight="recompute")
        [completion] = results
        cut = int((completion.versions_L == 0).sum())
        assert completion.versions_L.tolist() == [0] * cut + [1] * (60 - cut)
        for part, judge in ((slice(0, cut), old), (slice(cut, 60), new)):
            assert len(completion.tokens_L[part])
            np.testing.assert_allclose(completion.logprobs_L[part], judge.logprobs_L(completion)[part], atol=1e-4)
    finally:
        engine.close()
