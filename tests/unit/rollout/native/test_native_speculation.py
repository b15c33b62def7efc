# SPDX-License-Identifier: Apache-2.0
"""Speculation changes no token and no bit of a log-prob on CPU, whatever is proposed, and saves steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_world import CPU, DEADLINE_S, Learner, ask, cache_gib, prompt_of, sequence, sequences

from helpers.tensor_engines import engine_on_threads
from helpers.tiny import VOCABULARY, save_tiny_model, tiny_tokenizer
from podium.data.trajectories import TrajectoryId
from podium.errors import RolloutError
from podium.recipe import RolloutSection
from podium.rollout.native.engine import NativeEngine
from podium.rollout.native.lane_writes import write_lanes
from podium.rollout.native.speculation import Speculation, require_speculation
from podium.rollout.requests import Completion, Request, Sampling

ON = {"tokens": 6}


def requests(new: int = 24) -> list[Request]:
    """Groups that sample almost alike, and rows of every kind of sampling."""
    groups = [
        ask(draw, 9, new=new, sample=sample, temperature=0.05 * sample) for draw in range(2) for sample in range(3)
    ]
    processed = [
        ask(10, 12, new=new, top_k=3, temperature=0.1),
        ask(11, 7, new=new, top_p=0.9, temperature=0.1, repetition_penalty=1.05),
        ask(12, 7, new=new, min_p=0.5, temperature=0.3, logit_bias={3: 2.0, 5: -1.0}),
        ask(13, 1, new=new, temperature=0.5, allowed_tokens=frozenset(range(4))),
    ]
    return [*groups, *processed]


def assert_same(found: dict[TrajectoryId, Completion], wanted: dict[TrajectoryId, Completion]) -> None:
    assert found.keys() == wanted.keys()
    for id, each in wanted.items():
        assert found[id].tokens_L.tolist() == each.tokens_L.tolist(), id
        assert found[id].logprobs_L.tobytes() == each.logprobs_L.tobytes(), id
        assert (found[id].finish, found[id].stop) == (each.finish, each.stop), id


def propose_always(monkeypatch: pytest.MonkeyPatch, tokens: Sequence[int]) -> None:
    """Proposes the same tokens to every sequence, however busy the engine is."""

    def begin_step(self: Speculation, lanes: int) -> int:
        self.per_lane = len(tokens)
        return self.per_lane

    monkeypatch.setattr(Speculation, "begin_step", begin_step)
    monkeypatch.setattr(
        Speculation,
        "propose",
        lambda self, sequence, known, most: [] if self._live[sequence.id].is_stopped else list(tokens)[:most],
    )


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "odd widths": ("qwen3", {"hidden_size": 38, "intermediate_size": 53, "head_dim": 10}),
    "windows": ("gemma3", {}),
    "soft caps": ("gemma2", {}),
    "experts": ("qwen3_moe", {}),
    "sinks and experts": ("gpt_oss", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_architecture_samples_the_same_bits_in_fewer_steps(tmp_path: Path, name: str) -> None:
    architecture, changes = ARCHITECTURES[name]
    learner = Learner.of(save_tiny_model(architecture, tmp_path / "model", **changes))
    plain = learner.engine()
    wanted = sequences(plain, requests())
    num_tokens = plain.load().generated_tokens
    for section in ({}, {"max_running": 3}, {"block_size": 8}):
        engine = learner.engine(speculation=ON, **section)
        steps = []
        for _ in range(2):
            before = engine.load()
            assert_same(sequences(engine, requests()), wanted)
            after = engine.load()
            assert after.generated_tokens - before.generated_tokens == num_tokens
            steps.append(after.lane_steps - before.lane_steps)
        assert 0 < after.accepted_tokens <= after.proposed_tokens
        # Every accepted proposal is a step of a sequence less.
        assert sum(steps) == after.generated_tokens - after.accepted_tokens
        assert sum(steps) < 2 * num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_wrong_proposals_change_nothing(learner: Learner, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    wanted = sequences(learner.engine(), requests())
    draw = np.random.default_rng(seed)

    def propose(self: Speculation, sequence: Any, known: Any, most: int) -> list[int]:
        """Right for a while, then random."""
        answer = [*sequence.request.prompt.tolist(), *wanted[sequence.id].tokens_L.tolist()][len(known) :]
        return [*answer[: draw.integers(0, 4)], *draw.integers(0, VOCABULARY, 3).tolist()][: draw.integers(0, most + 1)]

    propose_always(monkeypatch, range(6))
    monkeypatch.setattr(Speculation, "propose", propose)
    for section in ({}, {"max_running": 4}, {"block_size": 8, "max_running": 2}):
        engine = learner.engine(speculation=ON, **section)
        assert_same(sequences(engine, requests()), wanted)
        load = engine.load()
        assert 0 < load.accepted_tokens < load.proposed_tokens


def test_the_distribution_is_the_models_whatever_is_proposed(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    """3,000 answers of three tokens out of four, while one token is always proposed: chi-square of all 64 answers."""
    tokens, count, prompt = (3, 50, 120, 200), 3000, prompt_of(6)
    propose_always(monkeypatch, [tokens[0], tokens[0]])
    sampling = Sampling(max_new_tokens=3, temperature=1.0, allowed_tokens=frozenset(tokens))
    asked = [Request(id=TrajectoryId(0, n), prompt=prompt, sampling=sampling, seed=5) for n in range(count)]
    engine = learner.engine(speculation=ON, max_length=16)
    seen = dict.fromkeys(product(tokens, repeat=3), 0)
    for completion in sequences(engine, asked).values():
        seen[tuple(completion.tokens_L.tolist())] += 1
    assert 0.1 < engine.load().accepted_tokens / engine.load().proposed_tokens < 0.5
    chances = {answer: np.exp(logprob(learner, prompt, answer, tokens)) for answer in seen}
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-4)
    expected = np.array([chances[answer] * count for answer in seen])
    assert expected.min() > 5
    chi_square = float((((np.array(list(seen.values())) - expected) ** 2) / expected).sum())
    assert chi_square < 113.0  # 63 degrees of freedom: exceeded once in ten thousand


def logprob(learner: Learner, prompt: Any, answer: Sequence[int], allowed: Sequence[int]) -> float:
    """Of an answer, by forwards of the model that know nothing of the engine, over the allowed tokens only."""
    total, known = 0.0, [int(token) for token in prompt]
    for token in answer:
        scores = {each: float(scored(learner, (*known, each))) for each in allowed}
        total += scores[token] - float(np.log(np.sum(np.exp(list(scores.values())))))
        known.append(token)
    return total


_SCORED: dict[tuple[int, ...], float] = {}


def scored(learner: Learner, tokens: tuple[int, ...]) -> float:
    """Log-prob of the last token."""
    if tokens not in _SCORED:
        completion = Completion(
            id=TrajectoryId(0, 0), prompt=np.array(tokens[:-1], np.int32), tokens_L=np.array(tokens[-1:], np.int32),
            logprobs_L=np.zeros(1, np.float32), versions_L=np.zeros(1, np.int32), finish="length",
        )  # fmt: skip
        _SCORED[tokens] = float(learner.logprobs_L(completion)[-1])
    return _SCORED[tokens]


@pytest.mark.slow
def test_stops_inside_a_run_of_right_proposals_end_the_answer_there(learner: Learner) -> None:
    decode = tiny_tokenizer().decode
    first = sequence(learner.engine(), ask(0, 9, new=30, temperature=0.3))
    tokens = first.tokens_L.tolist()
    text = decode(tokens[10:12])
    ways: list[dict[str, Any]] = [
        {"new": 30, "stop_tokens": frozenset(tokens[12:13])},
        {"new": 30, "stop_tokens": frozenset(tokens[3:4]), "min_new_tokens": 8},
        *({"new": new} for new in range(1, 12)),
    ]
    if text.strip():
        ways.append({"new": 30, "stop_strings": (text,)})
    for way in ways:
        request = ask(0, 9, temperature=0.3, **way)
        wanted = sequence(learner.engine(decode=decode), request)
        engine = learner.engine(speculation=ON, decode=decode)
        sequence(engine, ask(0, 9, new=30, temperature=0.3))  # the history goes on behind the stop
        before = engine.load()
        assert_same({request.id: sequence(engine, request)}, {request.id: wanted})
        assert sequence(engine, request).num_tokens <= way["new"]
        if len(wanted.tokens_L) > 2:
            assert engine.load().accepted_tokens > before.accepted_tokens
        # What is behind the stop is not reused as if it had been computed for the answer.
        longer = ask(0, np.concatenate([first.prompt, wanted.tokens_L, [5, 6, 7]]), new=6, temperature=0)
        assert_same({longer.id: sequence(engine, longer)}, {longer.id: sequence(learner.engine(), longer)})


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [4, 8])
def test_a_cache_too_small_for_all_samples_the_same(learner: Learner, block_size: int) -> None:
    wanted = sequences(learner.engine(), requests())
    memory_gib = cache_gib(learner, 96, block_size=block_size)
    engine = learner.engine(speculation=ON, block_size=block_size, memory_gib=memory_gib)
    for _ in range(2):
        assert_same(sequences(engine, requests()), wanted)
    assert engine.load().preemptions > 0
    assert engine.load().accepted_tokens > 0


def test_a_sequence_that_moves_between_engines_goes_on_the_same(learner: Learner) -> None:
    wanted = sequences(learner.engine(), requests())
    one, other = learner.engine(speculation=ON), learner.engine(speculation=ON)
    sequences(one, requests())
    one.submit(requests())
    for given in one.results(deadline_s=DEADLINE_S, tick_s=0.0):
        assert given is None
        partial = one.partial_answers(wanted)
        if len(partial) == len(wanted) and all(len(each.tokens_L) > 3 for each in partial.values()):
            one.cancel(wanted)
            break
    moved = {each.id: each for each in one.results(deadline_s=DEADLINE_S)}
    assert {each.finish for each in moved.values()} == {"cancelled"}
    other.submit(
        [
            Request(id=each.id, prompt=each.prompt, sampling=each.sampling, begun=moved[each.id].so_far)
            for each in requests()
        ]
    )
    assert_same({each.id: each for each in other.results(deadline_s=DEADLINE_S)}, wanted)


def test_weights_in_flight_score_their_own_tokens(own_learner: Learner) -> None:
    """Tokens of each version have the log-probs of that version, and the cache is computed again."""
    asked = [ask(0, 9, new=40, sample=sample, temperature=0.3) for sample in range(4)]
    engine = own_learner.engine(version=1, speculation=ON)
    before_update = sequences(engine, asked)
    engine.submit(asked)
    for given in engine.results(deadline_s=DEADLINE_S, tick_s=0.0):
        assert given is None
        if min(len(each.tokens_L) for each in engine.partial_answers([each.id for each in asked]).values()) > 8:
            break
    old = {id: own_learner.logprobs_L(each, temperature=0.3) for id, each in before_update.items()}
    own_learner.change(1.5)
    engine.install(own_learner.describe(2), None)
    for completion in engine.results(deadline_s=DEADLINE_S):
        versions = completion.versions_L
        assert sorted(versions.tolist()) == versions.tolist()
        count = int((versions == 1).sum())
        assert 8 < count < 40
        assert completion.tokens_L[:count].tolist() == before_update[completion.id].tokens_L[:count].tolist()
        np.testing.assert_allclose(completion.logprobs_L[:count], old[completion.id][:count], atol=1e-4)
        new = own_learner.logprobs_L(completion, temperature=0.3)
        np.testing.assert_allclose(completion.logprobs_L[count:], new[count:], atol=1e-4)
    assert engine.load().accepted_tokens > 0


@pytest.mark.slow
def test_a_proposal_that_gives_no_numbers_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values are NaN, and a mask would not hide them."""
    learner, poison = Learner.of(save_tiny_model("llama", tmp_path / "model")), 77
    with torch.no_grad():
        learner.model.hf.get_input_embeddings().weight[poison] = float("nan")
    asked = [ask(draw, 9, new=12, temperature=0.5, logit_bias={poison: float("-inf")}) for draw in range(4)]
    asked.append(ask(9, 9, new=12, temperature=0.5, allowed_tokens=frozenset([poison])))
    wanted = sequences(learner.engine(), asked)
    assert [each.finish for each in wanted.values()].count("error") == 1
    for tokens in ([poison], [4, poison, 4, 4], [4, 4, 4, poison]):
        propose_always(monkeypatch, tokens)
        for section in ({}, {"block_size": 8}):
            engine = learner.engine(speculation=ON, **section)
            for _ in range(2):
                assert_same(sequences(engine, asked), wanted)
            assert engine.load().proposed_tokens > 0


def test_recorded_experts_are_those_of_the_accepted_tokens(tmp_path: Path) -> None:
    learner = Learner.of(save_tiny_model("qwen3_moe", tmp_path / "model"))

    def engine(**section: Any) -> NativeEngine:
        return NativeEngine(learner.model, CPU, RolloutSection(**section), records_experts=True)

    wanted = sequences(engine(), requests())
    speculating = engine(speculation=ON)
    for _ in range(2):
        found = sequences(speculating, requests())
        assert_same(found, wanted)
        for id, each in wanted.items():
            assert each.experts is not None
            assert found[id].experts is not None
            assert found[id].experts.tolist() == each.experts.tolist(), id
    assert speculating.load().accepted_tokens > 0


def test_an_engine_over_two_ranks_verifies_on_both(qwen3_folder: Path) -> None:
    plain, speculating = (
        engine_on_threads(qwen3_folder, RolloutSection.model_validate({"max_length": 64, "speculation": {"tokens": n}}))
        for n in (0, 6)
    )
    try:
        wanted = sequences(plain, requests())
        for _ in range(2):
            assert_same(sequences(speculating, requests()), wanted)
        assert speculating.load().accepted_tokens > 0
    finally:
        plain.close()
        speculating.close()


def test_without_the_key_nothing_is_proposed(learner: Learner) -> None:
    engine = learner.engine()
    sequences(engine, requests())
    sequences(engine, requests())
    assert (engine.load().proposed_tokens, engine.load().accepted_tokens) == (0, 0)
    assert engine.load().lane_steps == engine.load().generated_tokens


def test_keys_of_lanes_of_one_sequence_are_written_where_the_table_says() -> None:
    """The custom operation that graphs on CUDA call before a layer attends."""
    blocks, heads, page, width = 7, 2, 4, 3
    keys, values = torch.zeros(blocks, heads, page, width), torch.zeros(blocks, heads, page, width + 1)
    table = torch.tensor([[5, 2], [0, 6], [5, 2]], dtype=torch.int32)  # the last row is a copy of the first
    rows, lengths = torch.tensor([0, 2, 1]), torch.tensor([4, 5, 7], dtype=torch.int32)
    key, value = torch.rand(1, heads, 3, width), torch.rand(1, heads, 3, width + 1)
    assert write_lanes(key, value, keys, values, table, rows, lengths).tolist() == [4, 5, 7]
    for store, fresh in ((keys, key), (values, value)):
        wanted = torch.zeros_like(store)
        for lane, (block, offset) in enumerate([(5, 3), (2, 0), (6, 2)]):
            wanted[block, :, offset] = fresh[0, :, lane]
        assert torch.equal(store, wanted)


def test_a_forward_never_has_more_rows_than_allowed(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that begin in the same step count too."""
    propose_always(monkeypatch, [1, 2, 3, 4, 5, 6])
    engine, seen = learner.engine(speculation=ON, max_running=12), []
    assert engine._speculation is not None
    engine._speculation.most_rows = 12
    plan_step = engine._scheduler.plan

    def plan() -> Any:
        step = plan_step()
        seen.append(len(step.decode_rows) + sum(chunk.samples for chunk in step.verified))
        return step

    monkeypatch.setattr(engine._scheduler, "plan", plan)
    sequences(engine, [ask(0, 9, new=3 + sample, sample=sample) for sample in range(20)])
    assert max(seen) == 12


def test_proposals_on_a_device_that_was_not_seen_to_verify_them_are_refused() -> None:
    require_speculation("cpu", 8)
    require_speculation("cuda", 0)
    with pytest.raises(RolloutError, match=r"rollout\.speculation\.tokens: 8 proposals .* on cuda"):
        require_speculation("cuda", 8)
