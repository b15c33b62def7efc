# SPDX-License-Identifier: Apache-2.0
"""What every rollout engine draws, judged by transformers: the tokens, their log-probs, and what narrows the draw."""

# L new tokens · V vocabulary

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.tiny import VOCABULARY, tiny_tokenizer
from podium.rollout.engine import RolloutEngine
from rollout.conftest import EngineFactory
from rollout.judge import PROMPT, Judge, answer, answers, ask

PROMPTS = [PROMPT, (40,), (3, 3, 3), tuple(range(50, 120)), (249, 0)]


def test_greedy_answers_are_those_of_transformers(engine: RolloutEngine, judge: Judge) -> None:
    found = answers(engine, [ask(n, prompt, new=12, temperature=0.0) for n, prompt in enumerate(PROMPTS)])
    assert len(found) == len(PROMPTS)
    for completion in found.values():
        assert completion.tokens_L.tolist() == judge.greedy(completion.prompt.tolist(), 12)
        assert completion.finish == "length"
        assert completion.error is None


def test_arrays_have_the_documented_types_and_one_entry_per_token(engine: RolloutEngine) -> None:
    completion = answer(engine, ask(0, new=5))
    assert completion.tokens_L.dtype == np.int32
    assert completion.logprobs_L.dtype == np.float32
    assert completion.versions_L.dtype == np.int32
    assert completion.num_tokens == len(completion.logprobs_L) == len(completion.versions_L) == 5
    assert completion.prompt.tolist() == list(PROMPT)
    assert set(completion.versions_L.tolist()) == {engine.version}


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_logprobs_are_of_logits_over_temperature(engine: RolloutEngine, judge: Judge, temperature: float) -> None:
    found = answers(engine, [ask(n, prompt, new=20, temperature=temperature) for n, prompt in enumerate(PROMPTS)])
    for completion in found.values():
        expected_L = judge.logprobs_L(completion, temperature=temperature or 1.0)
        np.testing.assert_allclose(completion.logprobs_L, expected_L, atol=1e-4)


def test_answers_of_several_temperatures_in_one_batch_keep_their_own(engine: RolloutEngine, judge: Judge) -> None:
    temperatures = [0.0, 0.5, 1.0, 1.9]
    found = answers(engine, [ask(n, new=10, temperature=each) for n, each in enumerate(temperatures)])
    for completion in found.values():
        expected_L = judge.logprobs_L(completion, temperature=temperatures[completion.id.prompt_index] or 1.0)
        np.testing.assert_allclose(completion.logprobs_L, expected_L, atol=1e-4)


def test_logprobs_are_of_the_distribution_that_was_sampled_from(engine: RolloutEngine, judge: Judge) -> None:
    end = tiny_tokenizer().eos_token_id  # vLLM suppresses it with the stop tokens
    requests = [
        ask(0, temperature=0.7, top_k=3),
        ask(1, temperature=0.7, top_p=0.2),
        ask(2, min_p=0.5),
        ask(3, repetition_penalty=1.8, temperature=0.7),
        ask(4, logit_bias={9: 4.0}),
        ask(5, allowed_tokens=frozenset({7, 8})),
        ask(6, stop_tokens=frozenset({4, end}), min_new_tokens=6),
        ask(7, temperature=1.4, top_k=40, top_p=0.9),
        ask(8),
    ]
    changed = set()
    for completion in answers(engine, requests).values():
        sampling = requests[completion.id.prompt_index].sampling
        expected_L = judge.sampled_logprobs_L(completion, sampling)
        np.testing.assert_allclose(completion.logprobs_L, expected_L, atol=1e-4)
        if np.abs(completion.logprobs_L - judge.logprobs_L(completion, temperature=sampling.temperature)).max() > 1e-3:
            changed.add(completion.id.prompt_index)
    assert changed >= set(range(8)) - {6}  # a stop token may be too unlikely for its absence to show


def test_greedy_logprobs_are_not_truncated(engine: RolloutEngine, judge: Judge) -> None:
    completion = answer(engine, ask(0, temperature=0.0, top_k=3, top_p=0.2, min_p=0.5))
    np.testing.assert_allclose(completion.logprobs_L, judge.logprobs_L(completion), atol=1e-4)


def test_frequencies_follow_the_policy_at_its_temperature(engine_factory: EngineFactory, rollout_folder: Path) -> None:
    engine = engine_factory(rollout_folder, max_running=64)
    allowed, count, temperature = (7, 8, 60, 200), 600, 0.3
    how = {"new": 1, "temperature": temperature, "allowed_tokens": frozenset(allowed)}
    found = answers(engine, [ask(0, sample=n, **how) for n in range(count)])
    sampled = [int(completion.tokens_L[0]) for completion in found.values()]
    logits_V = Judge(rollout_folder).logits_LV(PROMPT, [0])[0]
    shares = torch.softmax(logits_V[list(allowed)] / temperature, -1).tolist()
    for token, share in zip(allowed, shares, strict=True):
        assert abs(sampled.count(token) - count * share) < 5 * math.sqrt(count * share * (1 - share))


def test_top_k_samples_among_the_k_most_likely(engine: RolloutEngine, judge: Judge) -> None:
    found = answers(engine, [ask(n, prompt, new=15, top_k=3) for n, prompt in enumerate(PROMPTS)])
    for completion in found.values():
        logits_LV = judge.logits_LV(completion.prompt.tolist(), completion.tokens_L.tolist())
        best = logits_LV.topk(3).indices.tolist()
        assert all(token in row for token, row in zip(completion.tokens_L.tolist(), best, strict=True))
    assert any(completion.tokens_L.tolist() != judge.greedy(completion.prompt, 15) for completion in found.values())


def test_top_p_samples_within_the_share(engine: RolloutEngine, judge: Judge) -> None:
    found = answers(engine, [ask(n, prompt, new=15, top_p=0.1, temperature=0.8) for n, prompt in enumerate(PROMPTS)])
    for completion in found.values():
        logits_LV = judge.logits_LV(completion.prompt.tolist(), completion.tokens_L.tolist()) / 0.8
        for token, probabilities_V in zip(completion.tokens_L.tolist(), torch.softmax(logits_LV, -1), strict=True):
            likelier = probabilities_V[probabilities_V > probabilities_V[token]].sum()
            assert likelier < 0.1 + 1e-4


def test_min_p_samples_what_is_near_the_most_likely(engine: RolloutEngine, judge: Judge) -> None:
    found = answers(engine, [ask(n, prompt, new=15, min_p=0.6, temperature=0.8) for n, prompt in enumerate(PROMPTS)])
    for completion in found.values():
        logits_LV = judge.logits_LV(completion.prompt.tolist(), completion.tokens_L.tolist()) / 0.8
        gaps = logits_LV.max(-1).values.numpy() - logits_LV[range(15), completion.tokens_L.tolist()].numpy()
        assert (gaps <= -math.log(0.6) + 1e-4).all()


def test_a_penalty_makes_seen_tokens_of_prompt_and_answer_less_likely(engine: RolloutEngine, judge: Judge) -> None:
    prompt = (*PROMPT, *judge.greedy(PROMPT, 2))
    completion = answer(engine, ask(0, prompt, new=10, temperature=0.0, repetition_penalty=1.5))
    tokens: list[int] = []
    for _ in range(10):
        logits_V = judge.logits_LV(prompt, [*tokens, 0])[-1]
        seen = torch.tensor(sorted({*prompt, *tokens}))
        logits_V[seen] = torch.where(logits_V[seen] > 0, logits_V[seen] / 1.5, logits_V[seen] * 1.5)
        tokens.append(int(logits_V.argmax()))
    assert completion.tokens_L.tolist() == tokens
    assert tokens != judge.greedy(prompt, 10)


def test_a_bias_can_force_and_forbid(engine: RolloutEngine, judge: Judge) -> None:
    [likeliest] = judge.greedy(PROMPT, 1)
    forced = ask(0, new=6, logit_bias={77: 1000.0})
    forbidden = ask(1, new=6, temperature=0.0, logit_bias={likeliest: -math.inf})
    found = answers(engine, [forced, forbidden])
    assert found[forced.id].tokens_L.tolist() == [77] * 6
    assert likeliest not in found[forbidden.id].tokens_L
    second = int(judge.logits_LV(PROMPT, [0])[0].topk(2).indices[1])
    assert found[forbidden.id].tokens_L[0] == second


def test_only_allowed_tokens_are_sampled_and_each_of_them(engine: RolloutEngine) -> None:
    allowed = frozenset({0, 100, VOCABULARY - 1})
    completion = answer(engine, ask(0, new=60, allowed_tokens=allowed))
    assert set(completion.tokens_L.tolist()) == allowed


def test_a_stop_token_ends_the_answer_and_is_part_of_it(engine: RolloutEngine) -> None:
    how = {"new": 60, "allowed_tokens": frozenset({10, 11, 12, 13})}
    free, stopped = ask(0, **how), ask(1, **how, stop_tokens=frozenset({11, 12}))
    found = answers(engine, [free, stopped])
    assert found[free.id].finish == "length"
    assert found[free.id].stop is None
    completion = found[stopped.id]
    assert completion.finish == "stop"
    assert completion.stop == completion.tokens_L[-1]
    assert completion.stop in (11, 12)
    assert not {11, 12} & set(completion.tokens_L[:-1].tolist())


def test_an_end_token_of_the_checkpoint_does_not_end_what_did_not_ask_for_it(engine: RolloutEngine) -> None:
    end = tiny_tokenizer().eos_token_id
    completion = answer(engine, ask(0, new=5, logit_bias={end: 1000.0}))
    assert completion.tokens_L.tolist() == [end] * 5
    assert completion.finish == "length"


def test_an_answer_ends_with_the_token_that_completes_a_stop_string(engine: RolloutEngine) -> None:
    tokenizer = tiny_tokenizer()
    allowed = frozenset(tokenizer.convert_tokens_to_ids(["a", "b", "c"]))
    request = ask(0, new=100, allowed_tokens=allowed, stop_strings=("abc", "cca"))
    completion = answer(engine, request)
    text = tokenizer.decode(completion.tokens_L.tolist())
    assert completion.finish == "stop"
    assert completion.stop in ("abc", "cca")
    assert text.endswith(completion.stop)
    assert "abc" not in text[:-1]
    assert "cca" not in text[:-1]


def test_stops_do_not_end_an_answer_before_its_shortest_length(engine: RolloutEngine) -> None:
    tokenizer = tiny_tokenizer()
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    by_token = ask(0, new=30, min_new_tokens=7, stop_tokens=frozenset({33}), logit_bias={33: 1000.0})
    by_string = ask(1, new=30, min_new_tokens=7, stop_strings=("a",), allowed_tokens=frozenset({a, b}))
    found = answers(engine, [by_token, by_string])
    assert found[by_token.id].finish == "stop"
    assert 7 <= found[by_token.id].num_tokens <= 8
    assert found[by_string.id].finish == "stop"
    assert found[by_string.id].num_tokens >= 7
    assert found[by_string.id].tokens_L[-1] == a


def test_an_answer_ends_where_the_context_does(engine_factory: EngineFactory, rollout_folder: Path) -> None:
    engine = engine_factory(rollout_folder, max_length=32)
    completion = answer(engine, ask(0, range(20), new=100))
    assert completion.num_tokens == 12
    assert completion.finish == "length"


def test_a_request_samples_the_same_whatever_it_is_batched_with(
    engine_factory: EngineFactory, rollout_folder: Path
) -> None:
    engine = engine_factory(rollout_folder, max_running=4)
    chosen = ask(3, new=40, seed=11, top_p=0.9)
    alone = answer(engine, chosen)
    others = [ask(n, range(n, 4 * n), new=5 + 9 * n) for n in range(10, 16)]
    together = answers(engine, [*others[:3], chosen, *others[3:]])[chosen.id]
    assert together.tokens_L.tolist() == alone.tokens_L.tolist()


def test_a_second_attempt_samples_the_same(engine: RolloutEngine) -> None:
    first = ask(3, new=20)
    second = ask(3, new=20)
    object.__setattr__(second, "id", first.id._replace(attempt=1))
    found = answers(engine, [first, second])
    assert found[first.id].tokens_L.tolist() == found[second.id].tokens_L.tolist()


def test_each_sample_prompt_index_branch_and_seed_has_a_separate_stream(engine: RolloutEngine) -> None:
    requests = [ask(0, new=20, sample=n) for n in range(3)] + [ask(1, new=20), ask(2, new=20, seed=5)]
    branch = ask(0, new=20)
    object.__setattr__(branch, "id", branch.id._replace(branch=1))
    found = answers(engine, [*requests, branch])
    assert len({tuple(completion.tokens_L.tolist()) for completion in found.values()}) == 6


def test_a_later_turn_does_not_repeat_the_noise_of_an_earlier_one(engine: RolloutEngine) -> None:
    """The stream is keyed by the position in the sequence: cutting an answer in two changes nothing."""
    whole = answer(engine, ask(0, new=20))
    part = answer(engine, ask(0, new=8))
    assert part.tokens_L.tolist() == whole.tokens_L[:8].tolist()
    rest = answer(engine, ask(0, [*PROMPT, *part.tokens_L.tolist()], new=12))
    assert rest.tokens_L.tolist() == whole.tokens_L[8:].tolist()
