# SPDX-License-Identifier: Apache-2.0
"""Held-out prompts: how many, how they are scored, pass@k, and a score for each source."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_roles import Bandit
from helpers.made_batches import make_task
from helpers.trials import Trial
from podium.controller.evaluation import DEFAULT_PROMPTS, heldout_limit, numbered
from podium.recipe import GenerationSection


@pytest.mark.parametrize(
    ("prompts", "most", "limit"),
    [(None, None, DEFAULT_PROMPTS), (None, 7, 7), (None, 9999, DEFAULT_PROMPTS), (20, None, 20), (20, 7, 7), (5, 7, 5)],
)
def test_how_many_held_out_prompts_are_answered(prompts: int | None, most: int | None, limit: int) -> None:
    generation = None if prompts is None else GenerationSection(prompts=prompts)

    assert heldout_limit(generation, most) == limit


def test_held_out_tasks_have_numbers_of_their_own() -> None:
    assert [(each.prompt_index, each.epoch) for each in numbered([make_task(5), make_task(9)])] == [(0, 0), (1, 0)]


def _evaluated(folder: Path, generation: str, *overrides: str, heldout: int = 4, **changes: Any) -> Trial:
    trial = Trial(
        folder, "steps=1", f"evaluation.generation={generation}", *overrides, heldout=heldout, bandit=Bandit(**changes)
    )
    trial.run()
    return trial


def _heldout(trial: Trial) -> dict[str, float]:
    values = trial.lines[-1].values
    return {name.removeprefix("heldout/"): value for name, value in values.items() if name.startswith("heldout/")}


def test_a_score_is_the_mean_of_greedy_answers(tmp_path: Path) -> None:
    trial = _evaluated(tmp_path, "{prompts: 4, max_new_tokens: 5}", log_odds=2.0)

    # Greedy answers of a policy that is mostly right are all right; sample 0 has one token.
    assert _heldout(trial) == {"score": 1.0, "length": 1.0, "solved": 1.0, "truncated": 0.0}
    plan = trial.bandit.calls("generate")[-1][4]
    assert (plan.max_new_tokens, plan.temperature) == (5, 0.0)
    assert trial.bandit.calls("grade")[-1][2:] == ("train", 4)


def test_where_nothing_scores_answers_there_is_no_score(tmp_path: Path) -> None:
    """Not 0: the metric is missing, and so is that of pass@k."""
    trial = _evaluated(
        tmp_path, "{prompts: 4, samples: 2}", "program=on_policy_distill", "reward=[]", "teachers=[{path: a}]"
    )  # fmt: skip

    assert _heldout(trial).keys() == {"length", "truncated"}


def test_without_a_section_answers_are_as_long_as_those_of_the_steps(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=1", heldout=2)
    trial.run()

    assert trial.bandit.calls("generate")[-1][4].max_new_tokens == 8
    assert trial.metric("heldout/length") == {1: 1.0}


def test_samples_are_generated_too_for_pass_at_k(tmp_path: Path) -> None:
    trial = _evaluated(
        tmp_path, "{prompts: 4, samples: 3, temperature: 0.7}",
        # Held-out prompts 0 and 1 are solved by one of three samples, 2 by all, 3 by none.
        is_right=lambda id, chance: {0: id.sample == 1, 1: id.sample == 2, 2: True}.get(id.prompt_index, False),
    )  # fmt: skip

    found = _heldout(trial)
    assert found["pass@1"] == pytest.approx((1 / 3 + 1 / 3 + 1 + 0) / 4)
    assert found["pass@2"] == pytest.approx((2 / 3 + 2 / 3 + 1 + 0) / 4)
    assert found["pass@3"] == pytest.approx(0.75)
    *_, greedy, sampled = trial.bandit.calls("generate")
    assert (greedy[3], sampled[3]) == (1, 3)
    assert (sampled[4].temperature, sampled[4].seed) == (0.7, greedy[4].seed + 1)


def test_several_sources_have_a_score_each(tmp_path: Path) -> None:
    for name in ("easy", "hard"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "?", "answer": "1"}) + "\n")
    paths = f"data.heldout=[{{path: {tmp_path}/easy.jsonl}}, {{path: {tmp_path}/hard.jsonl}}]"

    found = _heldout(_evaluated(tmp_path, "{prompts: 2}", paths, log_odds=2.0))

    assert (found["easy/score"], found["hard/score"]) == (1.0, 1.0)


def test_a_score_of_its_own_is_graded_for_another_purpose(tmp_path: Path) -> None:
    trial = _evaluated(tmp_path, "{prompts: 4, score: exact_match}", "reward=[{model: judges/long}]", log_odds=2.0)

    grades = trial.bandit.calls("grade")
    assert sum(count for _, _, purpose, count in grades if purpose == "train") == 16
    assert grades[-1] == ("grade", "grader", "evaluation", 4)
    assert _heldout(trial)["score"] == 1.0


def test_models_and_weights_count_in_held_out_scores_as_in_training(tmp_path: Path) -> None:
    trial = _evaluated(
        tmp_path, "{prompts: 4}", "reward=[{verifier: exact_match, weight: 2}, {model: judges/long, weight: 0.5}]",
        log_odds=2.0,
    )  # fmt: skip

    assert _heldout(trial)["score"] == 2.5
    (view,) = trial.console.evaluations
    assert view.score_name == "held-out reward"


def test_an_answer_that_cannot_be_scored_has_no_score_and_is_reported(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=1", heldout=4, bandit=Bandit(log_odds=2.0))
    # Draws 0 and on are of the step, and then again of the evaluation.
    trial.bandit.fails = lambda id: (
        "no luck" if id.prompt_index == 1 and trial.bandit.calls("update") else None
    )  # what is graded after the update is the evaluation's

    trial.run()

    assert trial.metric("heldout/score") == {1: 1.0}
    (warning,) = trial.console.warnings
    assert re.search(r"^1 of 4 .*no luck$", warning)
