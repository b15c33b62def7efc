# SPDX-License-Identifier: Apache-2.0
"""A request that fails affects no other request, and no failure is followed by wrong answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_world import Learner, ask, assert_same, cache_gib, prompt_of, sequence, sequences
from tokenizers import Tokenizer, decoders, models

from helpers.engines import make_engine
from podium.data.trajectories import TrajectoryId
from podium.errors import PodiumError, RolloutError
from podium.recipe import ModelSection, RolloutSection
from podium.rollout.answers_file import AnswerRecord, AnswersFile
from podium.rollout.native.engine import NativeEngine
from podium.rollout.native.runner import Known, StepSamples
from podium.rollout.native.scheduler import StepPlan
from podium.rollout.requests import Completion, Request, Sampling
from podium.spmd.answering import Answerer

WAYS = pytest.mark.parametrize("way", [{}, {"block_size": 4}], ids=["slots", "blocks"])
# It may draw token 7 alone, which as a stop comes too early: a mistake of this request and of nobody else.
NOTHING_LEFT: dict[str, Any] = {
    "allowed_tokens": frozenset([7]),
    "stop_tokens": frozenset([7]),
    "min_new_tokens": 3,
}


def read(engine: NativeEngine, *, seconds: float = 10.0) -> list[Completion]:
    """All results, or TookTooLong when the engine turns on the spot; closing it ends the thread that reads."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: list(engine.results(deadline_s=2.0)))
        try:
            return found.result(seconds)
        except TookTooLong:
            engine.close()
            raise


# One request's trouble


def test_an_answer_that_breaks_leaves_the_pages_that_it_shares_as_they_are(learner: Learner) -> None:
    """Both have three full pages of the prompt in common, and the second breaks at its first draw."""
    prompt = prompt_of(13)
    sound, broken = ask(1, prompt, new=20), ask(2, prompt, **NOTHING_LEFT)
    found = sequences(learner.engine(block_size=4), [sound, broken])
    assert found[broken.id].finish == "error"
    assert learner.gap(found[sound.id]) < 1e-4


@WAYS
def test_what_a_broken_answer_leaves_is_not_reused(learner: Learner, way: dict[str, Any]) -> None:
    prompt = prompt_of(13)
    wanted = sequence(learner.engine(**way), ask(1, prompt, new=20))
    engine = learner.engine(**way)
    assert sequence(engine, ask(2, prompt, **NOTHING_LEFT)).finish == "error"
    assert_same(sequence(engine, ask(1, prompt, new=20)), wanted)


def test_a_prompt_half_taken_in_by_broken_weights_leaves_nothing_behind(own_learner: Learner) -> None:
    """It has drawn nothing yet, so nobody has noticed; then it is cancelled and right weights come."""
    how = {"prefill_tokens": 4, "max_running": 4}
    requested = [ask(10 + i, 3 + 4 * i, new=6) for i in range(4)]
    wanted = sequences(own_learner.engine(**how), requested)
    engine = own_learner.engine(**how)
    weight = own_learner.model.hf.get_decoder().layers[0].self_attn.v_proj.weight
    right = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    long = [ask(0, 40), ask(1, 40)]
    engine.submit(long)
    for _ in range(5):
        engine._advance()
    engine.cancel([each.id for each in long])
    with torch.no_grad():
        weight.copy_(right)
    engine.install(own_learner.describe(1), None)
    assert len(list(engine.results(deadline_s=2.0))) == 2
    found = sequences(engine, requested)
    for id, each in wanted.items():
        assert_same(found[id], each)


ODD_PROMPTS: dict[str, Any] = {
    "two dimensions": np.ones((2, 3), np.int32),
    "no dimension": np.array(3),
    "a list": [1, 2, 3],
    "fractions": np.array([1.7, 2.2]),
    "no numbers": np.array([1.0, np.nan]),
}


@pytest.mark.parametrize("kind", list(ODD_PROMPTS))
def test_a_prompt_that_is_no_row_of_token_ids_is_an_error_of_its_request(learner: Learner, kind: str) -> None:
    """A list could as well be taken for what it is."""
    odd = Request(id=TrajectoryId(1, 0), prompt=ODD_PROMPTS[kind], sampling=Sampling(max_new_tokens=4))
    engine = learner.engine()
    engine.submit([ask(0), odd, ask(2)])
    found = {each.id.prompt_index: each.finish for each in read(engine)}
    assert (found[0], found[2]) == ("length", "length")
    assert found[1] == "error" or kind == "a list"


def test_absurdly_many_new_tokens_are_cut_to_the_context(learner: Learner) -> None:
    engine = learner.engine(max_length=32)
    engine.submit([ask(0, 3, new=2**70, min_new_tokens=2**70), ask(1, 3)])
    assert sorted(each.num_tokens for each in read(engine)) == [8, 29]


@pytest.mark.parametrize("how", [{"logit_bias": {3: 1e39}}, {"logit_bias": {3: 1e38}, "temperature": 0.1}])
def test_a_bias_beyond_float32_samples_its_token_or_is_an_error(learner: Learner, how: dict[str, Any]) -> None:
    found = sequence(learner.engine(), ask(0, **how))
    assert found.finish == "error" or set(found.tokens_L.tolist()) == {3}


def test_a_prompt_that_the_caller_writes_over_is_reported_as_it_was(learner: Learner) -> None:
    prompt = prompt_of(6)
    engine = learner.engine()
    engine.submit([Request(id=TrajectoryId(0, 0), prompt=prompt, sampling=Sampling(max_new_tokens=3))])
    prompt[:] = 0
    (found,) = read(engine)
    assert found.prompt.tolist() == prompt_of(6).tolist()


# A failure within a step


@WAYS
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_a_step_that_failed_answers_are_right_or_refused(
    learner: Learner, way: dict[str, Any], error: type[BaseException]
) -> None:
    requested = [ask(i, 5 + i, new=10) for i in range(4)]
    wanted = sequences(learner.engine(**way), requested)
    engine = learner.engine(**way)
    engine.submit(requested)
    _fail_once(engine, step=4, error=error)
    with pytest.raises(error):
        list(engine.results(deadline_s=2.0))
    try:
        found = read(engine, seconds=5.0)
    except PodiumError:
        return
    assert sorted(each.id for each in found) == sorted(wanted)
    for each in found:
        assert_same(each, wanted[each.id])


def _fail_once(engine: NativeEngine, *, step: int, error: type[BaseException]) -> None:
    """As where memory runs out, or Ctrl-C comes."""
    run, count = engine._runner.run, 0

    def run_or_fail(plan: StepPlan) -> Any:
        nonlocal count
        count += 1
        if count == step:
            raise error("in the middle of a step")
        return run(plan)

    engine._runner.run = run_or_fail  # type: ignore[method-assign]


def test_a_tokenizer_that_fails_ends_its_answer_and_no_other(learner: Learner) -> None:
    calls: Iterator[int] = iter(range(1000))

    def decode(tokens: Any) -> str:
        if next(calls) == 2:
            raise ValueError("an id that this tokenizer does not know")
        return "".join(chr(0x4E00 + token) for token in tokens)

    engine = learner.engine(decode=decode)
    engine.submit([ask(0, new=2, stop_strings=("zz",)), ask(1, new=8)])
    try:
        found = read(engine, seconds=5.0)
    except ValueError:
        found = read(engine, seconds=5.0)
    assert {each.id.prompt_index: each.num_tokens for each in found}[1] == 8


# Stop strings


def byte_fallback() -> Callable[[Any], str]:
    """What it has no token for is spelt in bytes, as with SentencePiece: bytes in a row are decoded all or none."""
    tokens = ["<unk>", "a", *(f"<0x{byte:02X}>" for byte in range(247))]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def test_a_stop_string_behind_characters_spelt_in_bytes_is_seen(learner: Learner) -> None:
    """Two characters of four bytes each, then a new line, which is a byte token too."""
    text = "\U0001f642\U0001f642\n"
    script = [2 + byte for byte in text.encode()] + [1] * 4
    decode = byte_fallback()
    assert decode(script[:9]) == text
    engine = learner.engine(decode=decode)
    _follow(engine, script)
    found = sequence(engine, ask(0, 3, new=len(script), stop_strings=("\n",)))
    assert (found.finish, found.num_tokens) == ("stop", 9)


def _follow(engine: NativeEngine, script: list[int]) -> None:
    """Draws these tokens instead."""
    run, rows = engine._runner.run, engine._rows

    def run_and_replace(plan: StepPlan) -> Any:
        sampled = run(plan).read()
        at = rows.length_R[plan.sample_rows] - 1 - rows.prompt_R[plan.sample_rows]
        return Known(StepSamples(tokens_B=np.array(script, np.int32)[at], logprobs_B=sampled.logprobs_B))

    engine._runner.run = run_and_replace  # type: ignore[method-assign]


# Evaluation during training


def answerer(folder: Path, **rollout: Any) -> tuple[Answerer, Any]:
    engine = make_engine(folder)
    made = Answerer(
        engine, ModelSection(path=str(folder)), RolloutSection(**rollout), folder,
        [prompt_of(5, seed) for seed in range(3)],
        max_new_tokens=4, stop_tokens=frozenset(), max_batch_tokens=64,
    )  # fmt: skip
    return made, engine


@pytest.mark.parametrize("why", ["too little memory", "broken weights"])
def test_an_evaluation_without_answers_says_why(learner: Learner, qwen3_folder: Path, why: str) -> None:
    how: dict[str, dict[str, Any]] = {
        "too little memory": {"memory_gib": cache_gib(learner, 8, block_size=4), "block_size": 4},
        "broken weights": {},
    }
    made, engine = answerer(qwen3_folder, **how[why])
    if why == "broken weights":
        with torch.no_grad():
            engine.model.hf.get_decoder().layers[0].self_attn.v_proj.weight.fill_(torch.nan)
    with pytest.raises(PodiumError):
        made.answers()


@pytest.mark.parametrize("rollout", [{"memory_gib": 1e5}, {"memory_gib": 1e-9}, {"max_length": 8}])
def test_an_unavailable_size_is_reported_before_the_first_step(qwen3_folder: Path, rollout: dict[str, float]) -> None:
    """Prompts of 5 tokens and 4 new ones are 9."""
    with pytest.raises(PodiumError, match="rollout"):
        answerer(qwen3_folder, **rollout)


def test_optimizer_state_comes_back_when_an_evaluation_fails(qwen3_folder: Path) -> None:
    made, engine = answerer(qwen3_folder, offload_optimizer=True)
    made.answers()
    assert made._native is not None
    _fail_once(made._native, step=1, error=RuntimeError)
    with pytest.raises(RuntimeError):
        made.answers()
    assert engine.optimizer.first_moments[0].untyped_storage().nbytes() > 0


# The file of `podium generate`


def test_an_out_that_is_no_plain_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A pipe stands for every special file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RolloutError), AnswersFile.open(pipe, {"seed": 0}, about={}):
        pass
    assert pipe.is_fifo()


def test_a_start_that_leaves_nothing_takes_nothing_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start begins at the moment when the first has removed its empty file."""
    out, unlink, entered = tmp_path / "a.jsonl", Path.unlink, list[Any]()
    record = AnswerRecord(
        row=0, sample=0, prompt="p", answer="a", finish="stop", stop=2, num_prompt_tokens=1, num_tokens=1
    )

    def and_then(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        if path == out and not entered:
            entered.append(AnswersFile.open(out, {"seed": 1}, about={}))
            entered[0].__enter__().write(record)

    monkeypatch.setattr(Path, "unlink", and_then)
    with AnswersFile.open(out, {"seed": 0}, about={}):
        pass
    monkeypatch.undo()
    entered[0].__exit__(None, None, None)
    with AnswersFile.open(out, {"seed": 1}, about={}) as file:
        assert (0, 0) in file


def test_an_invalid_id_is_refused_where_the_request_is_made() -> None:
    with pytest.raises(RolloutError, match="TrajectoryId"):
        Request(id=(0, 1), prompt=np.arange(3, dtype=np.int32), sampling=Sampling(max_new_tokens=1))  # type: ignore[arg-type]
