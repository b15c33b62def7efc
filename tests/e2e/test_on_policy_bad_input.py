# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in on-policy runs: rewards that misbehave, data and models that do not fit, impossible recipes."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.messages import facts
from helpers.on_policy import ledger, numbers, rl_recipe, said_by
from helpers.tiny import save_tiny_model, tiny_config, tiny_tokenizer
from helpers.workspace import Workspace
from podium.runs.folder import RunFolder

VERBS = ("check", "train")
# Wrong for the first prompt of the file and right for all others.
FIRST_PROMPT = """
import time
from pathlib import Path

FIRST = "{first}"

def digits(answer, reference, row):
    if row["messages"][0]["content"] == FIRST:
        {deed}
    return 0.25 + sum(letter.isdigit() for letter in answer)

def by_group(answers, rows):
    if rows[0]["messages"][0]["content"] == FIRST:
        return [1.0]
    return [float(len(answer)) for answer in answers]

def one_of_each_group(answers):
    return [float("nan"), *(float(len(answer)) for answer in answers[1:])]

def constant(answer):
    return 0.3

def huge(answer):
    return 1e300 if answer[:1].isdigit() else -1e300

def leaves(answer):
    raise SystemExit(3)
"""
DEEDS = {
    "raises": ("raise KeyError('colour')", ["digits ", "KeyError: 'colour'"]),
    "NaN": ("return float('nan')", ["digits ", "NaN"]),
    "None": ("return None", ["digits ", "None"]),
    "text": ("return 'good'", ["digits ", "'good' (str)"]),
    "hangs": ("\n        while not Path('go').exists(): time.sleep(0.01)", ["digits ", "0.2 s"]),
}
# In the order of the file, so that the first step has the first prompt.
IN_ORDER = {"train": [{"path": "train.jsonl"}], "shuffle": False}


def with_rewards(workspace: Workspace, deed: str = "pass", function: str = "digits", **changes: Any) -> str:
    """A recipe whose reward is one of the functions above."""
    first = json.loads((workspace.path / "train.jsonl").read_text().splitlines()[0])["messages"][0]["content"]
    (workspace.path / "rewards.py").write_text(FIRST_PROMPT.replace("{first}", first).replace("{deed}", deed))
    reward = {"function": f"rewards.py:{function}", **changes.pop("section", {})}
    return rl_recipe(workspace, reward=[reward], **{"steps": 2, "data": IN_ORDER, **changes})


def said(workspace: Workspace, recipe: str) -> str:
    outcome = workspace.podium("train", recipe)
    (workspace.path / "go").touch()  # for whom it still hangs
    assert outcome.code == 0, outcome
    assert "Traceback" not in outcome.out + outcome.err
    return outcome.out + outcome.err


def assert_finite(found: dict[int, dict[str, float]]) -> None:
    assert all(math.isfinite(value) for values in found.values() for value in values.values())


# --- rewards ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "deed", [each if each in ("raises", "hangs") else pytest.param(each, marks=pytest.mark.slow) for each in DEEDS]
)
def test_a_reward_that_fails_leaves_out_its_group(workspace: Workspace, deed: str) -> None:
    code, message = DEEDS[deed]

    text = said(workspace, with_rewards(workspace, code, grading={"timeout_s": 0.2}))

    found = numbers(workspace.path / "runs/sums")
    assert re.search(facts("4 of 16 ", "step 1 ", *message), text)
    assert_finite(found)
    shares = ("episodes", "episodes/failed", "episodes/dropped", "episodes/learned_from", "groups")
    assert [found[1][name] for name in shares] == [16, 4, 4, 12, 3]
    assert [found[2][name] for name in shares] == [16, 0, 0, 16, 4]
    assert sum(row[5] == "consumed" for row in ledger(workspace.path / "runs/sums")) == 28
    assert found[1]["reward/mean"] >= 0.25


@pytest.mark.slow  # fast: tests/unit/controller/test_run_rewards.py
def test_a_reward_that_fails_counts_as_zero_where_the_recipe_says_so(workspace: Workspace) -> None:
    code, message = DEEDS["NaN"]

    text = said(workspace, with_rewards(workspace, code, grading={"on_error": "zero"}))

    found = numbers(workspace.path / "runs/sums")
    assert re.search(facts("4 of 16 ", "step 1 ", *message), text)
    assert_finite(found)
    assert [found[1][name] for name in ("episodes/failed", "episodes/dropped", "episodes/learned_from")] == [4, 0, 16]
    assert found[1]["reward/min"] == 0.0
    assert [row[7] for row in ledger(workspace.path / "runs/sums")][:4] == [0.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("deed", ["raises", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_reward_that_fails_stops_the_run_where_the_recipe_says_so(workspace: Workspace, deed: str) -> None:
    code, message = DEEDS[deed]

    outcome = workspace.podium("train", with_rewards(workspace, code, grading={"on_error": "fail", "timeout_s": 0.2}))

    (workspace.path / "go").touch()
    left = ("sums.stacks.txt",) if deed == "hangs" else ()  # where the reward hung
    workspace.refused(outcome, "4 of 16 ", "step 1 ", *message, "grading.on_error", left=left)


@pytest.mark.slow  # fast: tests/unit/environments/test_grading.py
def test_a_list_of_the_wrong_length_fails_its_group(workspace: Workspace) -> None:
    text = said(workspace, with_rewards(workspace, function="by_group", section={"per": "group"}))
    assert re.search(facts("4 of 16 ", "step 1 ", "by_group ", "1 values ", "4 samples"), text)
    assert numbers(workspace.path / "runs/sums")[1]["episodes/learned_from"] == 12


@pytest.mark.slow  # fast: tests/unit/controller/test_run_rewards.py
def test_more_failures_than_the_recipe_allows_stop_the_run(workspace: Workspace) -> None:
    recipe = with_rewards(workspace, DEEDS["raises"][0], grading={"max_failed_share": 0.2})
    outcome = workspace.podium("train", recipe)
    workspace.refused(outcome, "4 of 16 ", "step 1 ", "grading.max_failed_share 0.2")


@pytest.mark.slow  # fast: tests/unit/controller/test_run_rewards.py and test_run_methods.py
@pytest.mark.parametrize("program", ["ppo", "on_policy_distill", "grpo", "expert_iteration"])
def test_a_step_of_which_every_group_is_left_out_changes_nothing_and_the_run_continues(
    workspace: Workspace, program: str
) -> None:
    """One episode of each group has no reward."""
    changes: dict[str, Any] = {"program": program}
    if program == "on_policy_distill":
        changes["teachers"] = [{"path": str(workspace.model)}]
    recipe = with_rewards(workspace, function="one_of_each_group", section={"per": "group"}, **changes)

    text = said(workspace, recipe)

    found = numbers(workspace.path / "runs/sums")
    assert re.search(facts("4 of 16 ", "step 2 ", "one_of_each_group ", "NaN"), text)
    assert "warning: step 1: " in text
    assert_finite(found)
    for values in found.values():
        assert [values[name] for name in ("episodes", "episodes/dropped", "episodes/learned_from")] == [16, 16, 0]
        assert "loss" not in values


@pytest.mark.slow
def test_equal_rewards_teach_nothing_and_break_nothing(workspace: Workspace) -> None:
    said(workspace, with_rewards(workspace, function="constant"))
    found = numbers(workspace.path / "runs/sums")
    assert_finite(found)
    for values in found.values():
        assert [values[name] for name in ("groups/uniform", "loss", "grad_norm", "advantage/std")] == [1, 0, 0, 0]
    assert found[1]["entropy"] != found[2]["entropy"]  # other prompts
    exported = workspace.podium("export", "runs/sums", "out")
    assert exported.code == 0, exported
    before = transformers.AutoModelForCausalLM.from_pretrained(workspace.model)
    after = transformers.AutoModelForCausalLM.from_pretrained(workspace.path / "out")
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


@pytest.mark.slow  # fast: tests/unit/controller/test_run_rewards.py
def test_dynamic_sampling_gives_up_where_all_rewards_are_equal(workspace: Workspace) -> None:
    recipe = with_rewards(
        workspace, function="constant", algorithm={"dynamic_sampling": True, "max_refills": 2}, steps=1
    )
    text = said(workspace, recipe)
    assert "warning: step 1: " in text
    values = numbers(workspace.path / "runs/sums")[1]
    assert values["episodes"] == 16 + 2 * 16  # every group was replaced twice
    assert values["episodes/learned_from"] == 0


@pytest.mark.slow
def test_rewards_that_float32_cannot_hold_do_not_reach_the_weights_and_stop_the_run(workspace: Workspace) -> None:
    recipe = with_rewards(
        workspace, function="huge", optimizer={"max_skipped_in_a_row": 2}, steps=5,
        algorithm={"advantage": "group_centered"},
    )  # fmt: skip
    outcome = workspace.podium("train", recipe)
    assert outcome.code == 2, outcome
    assert re.search(r"warning: step 1: 1 .*skipped", outcome.out)
    assert "steps 1 to 2" in outcome.err
    assert "rewards" in outcome.err
    assert RunFolder.open(workspace.path / "runs/sums").status == "failed"


@pytest.mark.slow
def test_a_reward_that_ends_its_process_is_reported(workspace: Workspace) -> None:
    outcome = workspace.podium("train", with_rewards(workspace, function="leaves"))
    workspace.refused(outcome, "16 of 16 ", "step 1 ", "leaves ", "SystemExit: 3")


@pytest.mark.slow
def test_a_verifier_whose_rows_have_no_reference(workspace: Workspace) -> None:
    workspace.rows("train.jsonl", [{"prompt": f"what is {number}+1?"} for number in range(20)])
    outcome = workspace.podium("train", rl_recipe(workspace, reward=[{"verifier": "exact_match"}]))
    workspace.refused(outcome, "16 of 16 ", "step 1 ", "exact_match", "reference")


# --- data ---


@pytest.mark.slow  # fast: tests/unit/controller/test_prompt_source.py
def test_prompts_that_are_all_too_long(workspace: Workspace) -> None:
    outcome = workspace.podium("train", rl_recipe(workspace, data={"max_length": 20}))
    workspace.refused(outcome, "data.train: ", "train.jsonl, line ", "rollout.max_new_tokens 6", "data.max_length")


@pytest.mark.slow  # fast: tests/unit/controller/test_prompt_source.py
def test_a_prompt_that_is_too_long_is_left_out_and_counted_or_refused(workspace: Workspace) -> None:
    long = [{"messages": [{"role": "user", "content": "what is 1" + "+1" * 60}]}]
    short = [{"messages": [{"role": "user", "content": f"what is {number}?"}]} for number in range(9)]
    workspace.rows("train.jsonl", [*short[:2], *long, *short[2:]])
    data = {**IN_ORDER, "max_length": 60}

    said(workspace, rl_recipe(workspace, data=data, steps=2))
    assert RunFolder.open(workspace.path / "runs/sums").status == "finished"
    assert numbers(workspace.path / "runs/sums")[2]["prompts/too_long"] == 1.0

    outcome = workspace.podium("train", rl_recipe(workspace, "strict", data={**data, "overlong": "error"}))
    workspace.refused(outcome, "train.jsonl, line 3: ", "data.overlong", left=("sums",))


# --- recipes and plug-ins ---


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"function": "broken.py:digits"}, ("reward.0.function", "broken.py, line 2")),
        ({"function": "none.py:digits"}, ("reward.0.function: ", "none.py")),
        ({"function": "rewards.py:letters"}, ("reward.0.function", "'letters'", "digits")),
        ({"function": "rewards.py"}, ("reward.0.function", "import path")),
        ({"verifier": "exactly"}, ("reward.0.verifier", "exact_match")),
        ({"verifier": "regex"}, ("reward.0.options", "pattern")),
        ({"model": "./no/model"}, ("reward.0.model: ", "./no/model")),
        ({}, ("reward.0: ", "function, verifier, model and judge")),
    ],
)
def test_a_reward_that_is_unavailable_is_found_before_anything_starts(
    workspace: Workspace, verb: str, section: dict[str, Any], message: tuple[str, ...]
) -> None:
    (workspace.path / "broken.py").write_text("def digits(answer):\n    return ]\n")
    workspace.refused(workspace.podium(verb, rl_recipe(workspace, reward=[section])), *message)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"advantage": "grpo"}}, ("algorithm.advantage", "grpo")),
        ({"algorithm": {"loss": "ppo"}}, ("algorithm.loss", "ppo")),
        ({"algorithm": {"loss": "none.py:loss"}}, ("algorithm.loss: ", "none.py")),
        ({"algorithm": {"advantage": "gae"}}, ("algorithm.advantage: ", "group_relative", "'gae'")),
        ({"rollout": {"samples_per_prompt": 1}}, ("rollout.samples_per_prompt: 1 ", "group_relative")),
        ({"rollout": {"top_p": 0.9}, "algorithm": {"correction": "none"}}, ("algorithm.correction: ", "rollout.top_p")),
        ({"rollout": {"top_p": 1.5}}, ("rollout.top_p: ", "1.5")),
        ({"program": "on_policy_distill"}, ("teachers: ", "missing")),
        ({"reward": []}, ("reward: grpo ",)),
        ({"placement": {"launcher": "local"}}, ("placement.launcher: ", "'local'")),
        ({"program": "ppo", "critic": {"path": "./no/critic"}}, ("critic.path: ", "./no/critic")),
        (
            {"program": "on_policy_distill", "teachers": [{"path": "./no/teacher"}]},
            ("teachers.0.path: ", "./no/teacher"),
        ),
        (
            {"algorithm": {"kl": {"coefficient": 0.1, "reference": "./no/reference"}}},
            ("algorithm.kl.reference: ", "./no/reference"),
        ),
    ],
)  # fmt: skip
def test_a_method_that_cannot_be_is_found_before_anything_starts(
    workspace: Workspace, verb: str, changes: dict[str, Any], message: tuple[str, ...]
) -> None:
    workspace.refused(workspace.podium(verb, rl_recipe(workspace, **changes)), *message)


OWN = """
import torch

def raises(rewards_N, group_N):
    raise RuntimeError("no baseline")

def short(rewards_N, group_N):
    return rewards_N[:3]

def infinite(rewards_N, group_N):
    return rewards_N / 0

def loss_raises(tokens):
    raise RuntimeError("no ratio")

def loss_mean(tokens):
    return -(tokens.logprobs_S * tokens.advantages_S).mean()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "RuntimeError: no baseline"),
        # fast: tests/unit/programs/test_estimators.py
        pytest.param("short", "shape (3,)", marks=pytest.mark.slow),
        pytest.param("infinite", "not finite", marks=pytest.mark.slow),
    ],
)
def test_a_custom_estimator_that_is_wrong_is_reported(workspace: Workspace, name: str, message: str) -> None:
    (workspace.path / "own.py").write_text(OWN)
    outcome = workspace.podium("train", rl_recipe(workspace, algorithm={"advantage": f"own.py:{name}"}))
    workspace.refused(outcome, f"algorithm.advantage: {workspace.path}/own.py:{name} ", message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("loss_raises", "no ratio"),
        ("loss_mean", "algorithm.loss"),
    ],
)
def test_a_custom_loss_that_is_wrong_is_reported(workspace: Workspace, name: str, message: str) -> None:
    (workspace.path / "own.py").write_text(OWN)
    outcome = workspace.podium("train", rl_recipe(workspace, algorithm={"loss": f"own.py:{name}"}))
    assert outcome.code == 2, outcome
    assert message in outcome.err
    assert name in outcome.err


def test_torchrun_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    outcome = workspace.podium("train", rl_recipe(workspace))
    workspace.refused(outcome, "program: grpo ", "torchrun")


# --- models ---


def other_model(folder: Path, *, vocabulary: int) -> str:
    save_tiny_model("llama", folder, vocab_size=vocabulary)
    return str(folder)


@pytest.mark.parametrize("program", ["on_policy_distill", "grpo"])
def test_a_teacher_or_reference_with_another_vocabulary_is_refused(workspace: Workspace, program: str) -> None:
    path = other_model(workspace.path / "other", vocabulary=30)
    changes: dict[str, Any] = (
        {"teachers": [{"path": path}]}
        if program == "on_policy_distill"
        else {"algorithm": {"kl": {"coefficient": 0.1, "reference": path}}}
    )
    outcome = workspace.podium("train", rl_recipe(workspace, program=program, **changes))
    workspace.refused(outcome, "other ", "vocabulary", "30 tokens")


def test_a_critic_with_another_vocabulary_is_refused(workspace: Workspace) -> None:
    path = other_model(workspace.path / "other", vocabulary=30)
    outcome = workspace.podium("train", rl_recipe(workspace, program="ppo", critic={"path": path}))
    workspace.refused(outcome, "other", "vocabulary")


@pytest.mark.slow
def test_a_language_model_as_a_reward_model_is_refused(workspace: Workspace) -> None:
    path = other_model(workspace.path / "other", vocabulary=len(tiny_tokenizer()))
    outcome = workspace.podium("train", rl_recipe(workspace, reward=[{"model": path}]))
    workspace.refused(outcome, "other ", "`score.weight`")


@pytest.mark.slow
def test_a_reward_model_of_several_labels_is_refused(workspace: Workspace) -> None:
    config = tiny_config("llama", vocab_size=len(tiny_tokenizer()), num_labels=3)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(workspace.path / "three")
    outcome = workspace.podium("train", rl_recipe(workspace, reward=[{"model": "three"}]))
    workspace.refused(outcome, "three ", "3 labels")


@pytest.mark.slow
def test_a_run_whose_weights_diverged_stops_and_does_not_blame_the_reward(workspace: Workspace) -> None:
    """The weights are not numbers any more after the first step."""
    optimizer = {"lr": 1e38, "clip_norm": None}
    outcome = workspace.podium("train", rl_recipe(workspace, optimizer=optimizer, checkpoint={"every": 1}))
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.out + outcome.err
    assert RunFolder.open(workspace.path / "runs/sums").status == "failed"
    assert "logits" in outcome.err
    assert "reward" not in outcome.err


# --- on Ray ---


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(300)
def test_more_devices_than_there_are_have_no_place(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    recipe = rl_recipe(workspace, placement={"launcher": "ray", "devices": 64})
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        text = said_by("train", recipe, output=workspace.path / "said", code=2)
    assert "error: placement.devices: 64 devices " in text
    assert "Traceback" not in text
    assert not (workspace.path / "runs" / "sums").exists()


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(300)
def test_a_reward_that_kills_its_process_loses_its_group_and_not_the_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reward functions run in a process of their own: it is replaced, and only episodes whose call ended it fail."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    recipe = with_rewards(
        workspace, "import os; os._exit(7)", placement={"launcher": "ray"},
        grading={"workers": 2, "max_failed_share": 0.6}, steps=3,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        text = said_by("train", recipe, output=workspace.path / "said")
    assert re.search(facts("4 of 16 ", "step 1 ", "digits ", "exit code 7"), text)
    found = numbers(workspace.path / "runs/sums")
    assert [values["episodes/learned_from"] for values in found.values()] == [12, 16, 16]
