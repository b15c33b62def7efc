# SPDX-License-Identifier: Apache-2.0
"""A judge in the run: what it asks its model, and what becomes of the answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scripted import CHATML, byte_tokenizer

from helpers.gateways import ScriptedEngine
from helpers.tiny import save_tiny_model, tiny_tokenizer
from podium.cluster import MeshShape, WorkerContext
from podium.cluster.identity import WorkerId
from podium.cluster.meshes import RoleMesh
from podium.cluster.spans import SpanRecorder
from podium.data.trajectories import TrajectoryId
from podium.environments.judges import Judge, judge_reward
from podium.environments.reward_results import RewardResult
from podium.environments.signatures import Sample
from podium.gateway.backend import EngineThread
from podium.gateway.chat import ModelService
from podium.gateway.conversation import Conversations
from podium.recipe import ModelSection
from podium.recipe.judges import JudgeSection
from podium.roles.carriers import ScoreNote
from podium.roles.interfaces import JudgeModelSpec
from podium.roles.judge_model import JudgeModelRank, LocalModel, judged, note_of

TOKENIZER = byte_tokenizer(CHATML)


def sample(answer: str, *, group: int = 0, at: int = 0, reference: str | None = None) -> Sample:
    return Sample(
        id=TrajectoryId(group, at), group=group, prompt_text="2+2?", messages=None, answer=answer, reference=reference,
        row={}, source="s", num_tokens=1, truncated=False, tokens=np.zeros(0, np.int32), turns=None,
        environment_reward=None,
    )  # fmt: skip


def block(prompt: str, name: str) -> str:
    """What a prompt shows as ANSWER, ANSWER A, ..."""
    found = re.search(rf"<<<{name} [0-9a-f]+>>>\n(.*?)\n<<<END", prompt, re.DOTALL)
    assert found is not None, prompt
    return found[1]


def context_of_one() -> WorkerContext:
    return WorkerContext(
        worker=WorkerId("train", 0, "here", "cpu"), role="reward-0",
        mesh=RoleMesh(role="reward-0", pool="train", shape=MeshShape(replica=1), slots=(0,)),
        device="cpu", devices=None, recorder=SpanRecorder(), transfers={}, colocated_roles={}, channels={},
    )  # fmt: skip


def judge_all(
    section: JudgeSection, samples: list[Sample], script: Callable[[str], str], *, seed: int = 0, max_length: int = 4096
) -> tuple[list[RewardResult], ScriptedEngine]:
    engine = ScriptedEngine(TOKENIZER, script)
    engine.capacity = type(engine.capacity)(
        vocab_size=len(TOKENIZER), max_length=max_length, max_running=8, cache_tokens=9999, cache_bytes=0
    )

    async def run() -> list[RewardResult]:
        backend = EngineThread(engine, owns=False)  # type: ignore[arg-type]
        service = ModelService("judge", Conversations(TOKENIZER), backend, stop_tokens=frozenset({engine.end}))
        judge = Judge(section, None, make=lambda: LocalModel(section, service, identity="m", seed=seed))
        try:
            async with asyncio.timeout(30):
                return await judged(judge_reward(judge), samples)
        finally:
            await asyncio.to_thread(backend.close)

    return asyncio.run(run()), engine


def local(**changes: Any) -> JudgeSection:
    return JudgeSection(model="m", rubric="Longer is better.", **changes)


def by_length(prompt: str) -> str:
    return json.dumps({"score": len(block(prompt, "ANSWER"))})


def test_scores_become_rewards_between_0_and_1_and_equal_answers_are_judged_once() -> None:
    samples = [sample("aaaa"), sample("aaaaaaaaaa", at=1), sample("aaaa", at=2)]
    results, engine = judge_all(local(), samples, by_length)

    assert [result.value for result in results] == [0.4, 1.0, 0.4]
    assert len(engine.requests) == 2
    assert all(request.sampling.temperature == 0 for request in engine.requests)
    totals = {name: sum((result.extras or {})[name] for result in results) for name in results[0].extras or {}}
    assert totals["judge/requests"] == 2.0
    assert totals["judge/cache_hits"] == 1.0
    assert totals["judge/tokens_out"] == len('{"score": 4}') + 1 + len('{"score": 10}') + 1
    assert not engine.closed  # it is the generators', or is used again


def test_groups_are_compared_with_themselves_in_both_orders() -> None:
    def longer(prompt: str) -> str:
        first, second = len(block(prompt, "ANSWER A")), len(block(prompt, "ANSWER B"))
        return json.dumps({"better": "A" if first > second else "B"})

    samples = [sample("a", group=0), sample("aa", group=1), sample("aaa", group=0, at=1), sample("a", group=1, at=1)]
    results, engine = judge_all(local(compare="group"), samples, longer)

    assert [result.value for result in results] == [0.0, 1.0, 1.0, 0.0]
    assert len(engine.requests) == 4
    note = note_of(results)
    assert np.nansum(note.extras["judge/comparisons"]) == np.nansum(note.extras["judge/agreeing"]) == 2.0


def test_a_greedy_answer_that_cannot_be_read_is_asked_for_once_and_a_sampled_one_twice() -> None:
    results, engine = judge_all(local(), [sample("a")], lambda prompt: "good")
    assert len(engine.requests) == 1
    assert "the judge's answer cannot be read: there is no JSON object" in str(results[0].failure)

    said = iter(["good", '{"score": 5}'])
    section = local(request={"temperature": 0.7})
    results, engine = judge_all(section, [sample("a")], lambda prompt: next(said))
    assert [result.value for result in results] == [0.5]
    assert engine.requests[0].seed != engine.requests[1].seed


def test_seeds_depend_on_the_run_and_the_request_alone() -> None:
    section = local(request={"temperature": 1.0})

    def seeds(answers: list[str], seed: int) -> dict[str, int]:
        samples = [sample(answer, at=at) for at, answer in enumerate(answers)]
        _, engine = judge_all(section, samples, by_length, seed=seed)
        return {block(TOKENIZER.decode(request.prompt.tolist()), "ANSWER"): request.seed for request in engine.requests}

    assert seeds(["a", "bb"], 1) == seeds(["bb", "a"], 1)
    assert seeds(["a"], 1)["a"] == seeds(["a", "bb"], 1)["a"]
    assert seeds(["a"], 1) != seeds(["a"], 2)


def test_an_answer_that_is_cut_off_or_does_not_fit_is_a_failure_with_its_reason() -> None:
    results, _ = judge_all(local(request={"max_tokens": 3}), [sample("a")], by_length)
    assert "cut off after 3 tokens" in str(results[0].failure)
    results, engine = judge_all(local(), [sample("a")], by_length, max_length=100)
    assert "longer than the 100 tokens that the judge reads" in str(results[0].failure)
    assert engine.requests == []


def test_control_tokens_in_an_answer_stay_text() -> None:
    results, engine = judge_all(local(), [sample("<|im_end|>")], lambda prompt: '{"score": 1}')
    (request,) = engine.requests
    ends = int((request.prompt == engine.end).sum())
    assert ends == 2  # of the system message and of the user's
    assert [result.value for result in results] == [0.1]


def test_notes_are_cut_and_joined_by_row() -> None:
    first = ScoreNote(values_N=np.array([0.1, np.nan]), errors={1: "why"}, extras={"n": np.array([1.0, 2.0])})
    second = ScoreNote(values_N=np.array([0.3]))
    joined = ScoreNote.join([first, second])

    assert joined.errors == {1: "why"}
    np.testing.assert_array_equal(joined.extras["n"], [1.0, 2.0, np.nan])
    turned = joined.take(np.array([2, 1]))
    np.testing.assert_array_equal(turned.values_N, [0.3, np.nan])
    assert turned.errors == {1: "why"}


@pytest.mark.parametrize("changes", [{"temperature": 0.5}, {"max_tokens": 7, "stop": ["\n"]}])
def test_the_request_says_how_the_model_samples(changes: dict[str, Any]) -> None:
    _, engine = judge_all(local(request=changes), [sample("a")], by_length)
    sampling = engine.requests[0].sampling
    assert sampling.temperature == changes.get("temperature", 0)
    assert sampling.max_new_tokens == changes.get("max_tokens", 1024)
    assert sampling.stop_strings == tuple(changes.get("stop", ()))


def test_a_judge_with_its_own_weights_says_what_transformers_generates(tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    tokenizer = tiny_tokenizer()
    save_tiny_model("llama", folder, vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=None)
    tokenizer.save_pretrained(folder)
    section = local(request={"max_tokens": 12, "stop": None})
    samples = [sample("12"), sample("a longer answer", at=1)]
    rank = JudgeModelRank(
        context_of_one(),
        JudgeModelSpec(
            section=section, key="reward.0.judge", policy=ModelSection(path=str(folder)),
            model=ModelSection(path=str(folder), dtype="float32"), folder=folder, generator=None, seed=0,
        ),
    )  # fmt: skip
    said: list[list[int]] = []
    shown = Conversations.message

    def noted(self: Conversations, prompt_T: Any, answer: Any, *rest: Any, **named: Any) -> Any:
        said.append([*prompt_T.tolist(), -1, *answer.tokens_L.tolist()])
        return shown(self, prompt_T, answer, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Conversations, "message", noted)
        asyncio.run(rank._results(samples))
    rank.close()

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert len(said) == 2
    for each in said:
        cut = each.index(-1)
        prompt = torch.tensor([each[:cut]])
        with torch.no_grad():
            wanted = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert each[cut + 1 :] == wanted[0, cut:].tolist()
