# SPDX-License-Identifier: Apache-2.0
"""A newcomer who wanted the held-out numbers of an old checkpoint, or of a model, had to train again or write code.
`podium evaluate` gives the numbers of the evaluation in training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from helpers.on_policy import rl_recipe
from helpers.workspace import Workspace
from podium import api
from podium.errors import RecipeError, RunFolderError

HELDOUT = {"heldout": [{"path": "heldout.jsonl"}]}
EVERY_TWO: dict[str, Any] = {"checkpoint": {"every": 2, "keep": 9}, "evaluation": {"every": 2}}
GENERATED = {"every": 2, "generation": {"prompts": 4, "max_new_tokens": 4, "score": "exact_match"}}
PAIRS: list[dict[str, Any]] = [{"prompt": f"what is {n}?", "chosen": str(n), "rejected": str(n + 1)} for n in range(12)]


def fingerprint(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Path -> size, time of the last change and mode, of everything below."""
    return {
        str(path.relative_to(folder)): (status.st_size, status.st_mtime_ns, status.st_mode)
        for path in sorted(folder.rglob("*"))
        for status in [path.stat()]
    }


def recorded(workspace: Workspace, run: str) -> dict[int, dict[str, float]]:
    """Step -> held-out metrics of the training."""
    lines: dict[int, dict[str, float]] = {}
    for text in (workspace.path / "runs" / run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(text)
        heldout = {name: value for name, value in values.items() if name.startswith("heldout/")}
        if heldout:
            lines[values["step"]] = heldout
    return lines


def evaluated(workspace: Workspace, *arguments: str) -> dict[str, Any]:
    outcome = workspace.podium("evaluate", *arguments, "--json", "metrics.json")
    assert outcome.code == 0, outcome
    values: dict[str, Any] = json.loads((workspace.path / "metrics.json").read_text())
    return values


def test_a_run_of_sft_has_the_numbers_of_its_training_bit_for_bit(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe(data=HELDOUT, **EVERY_TWO | {"evaluation": GENERATED}))
    before, training = fingerprint(workspace.path / "runs"), recorded(workspace, "sums")

    newest = evaluated(workspace, "runs/sums")
    older = evaluated(workspace, "runs/sums", "--step", "2")

    assert (newest["step"], newest["metrics"]) == (4, training[4])
    assert (older["step"], older["metrics"]) == (2, training[2])
    assert training[2]["heldout/loss"] != training[4]["heldout/loss"]
    assert "heldout/score" in newest["metrics"]
    assert [answer["reference"] for answer in newest["answers"]] == [a["reference"] for a in older["answers"]]
    assert len(newest["answers"]) == 4
    assert fingerprint(workspace.path / "runs") == before


def test_the_model_before_training_is_step_0(workspace: Workspace) -> None:
    evaluation = {"at_start": True}
    workspace.podium("train", workspace.recipe(data=HELDOUT, evaluation=evaluation))

    assert evaluated(workspace, "runs/sums", "--step", "0")["metrics"] == recorded(workspace, "sums")[0]


def test_the_best_checkpoint_is_that_of_the_lowest_heldout_loss(workspace: Workspace) -> None:
    recipe = workspace.recipe(data=HELDOUT, optimizer={"lr": 0.3}, **EVERY_TWO)
    workspace.podium("train", recipe)
    training = recorded(workspace, "sums")
    best = min(training, key=lambda step: training[step]["heldout/loss"])

    result = evaluated(workspace, "runs/sums", "--best")

    assert (result["step"], result["metrics"]) == (best, training[best])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"program": "dpo"},
        {"program": "dpo", "model": {"lora": {"rank": 2}}},
        {"program": "dpo", "preference": {"loss": "kto", "reference": "live"}},
        {"program": "reward_model"},
    ],
    ids=["dpo", "dpo with an adapter", "kto", "reward_model"],
)
def test_other_methods_on_fixed_data_too(workspace: Workspace, changes: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = PAIRS
    if changes.get("preference", {}).get("loss") == "kto":
        rows = [{"prompt": f"{n}?", "completion": str(n), "label": n % 2 == 0} for n in range(12)]
    workspace.rows("train.jsonl", rows)
    workspace.rows("heldout.jsonl", rows[:5])
    assert workspace.podium("train", workspace.recipe(data=HELDOUT, **EVERY_TWO, **changes)).code == 0
    before, training = fingerprint(workspace.path / "runs"), recorded(workspace, "sums")

    assert evaluated(workspace, "runs/sums", "--step", "2")["metrics"] == training[2]
    assert evaluated(workspace, "runs/sums")["metrics"] == training[4]
    assert fingerprint(workspace.path / "runs") == before


def test_a_run_that_is_evaluated_elsewhere_reads_its_own_files(
    workspace: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workspace.podium("train", workspace.recipe(data=HELDOUT, **EVERY_TWO))
    run, elsewhere = workspace.path / "runs" / "sums", tmp_path_factory.mktemp("elsewhere")
    os.chdir(elsewhere)

    assert dict(api.evaluate(run).metrics) == recorded(workspace, "sums")[4]
    assert list(elsewhere.iterdir()) == []


ON_POLICY: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"kl": {"coefficient": 0.1, "refresh_every": 2}}},
    "ppo": {"program": "ppo"},
    "grpo on ray": {"placement": {"launcher": "ray", "devices": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "grpo",
        pytest.param("ppo", marks=pytest.mark.slow),
        pytest.param("grpo on ray", marks=[pytest.mark.slow, pytest.mark.serial]),
    ],
)
def test_an_on_policy_run_has_the_rewards_of_its_training_bit_for_bit(workspace: Workspace, method: str) -> None:
    evaluation = {"every": 2, "generation": {"prompts": 6, "max_new_tokens": 6, "samples": 2}}
    checkpoint = {"every": 2, "keep": 9, "background": False}
    # A reward that every token of the answer changes.
    Path("rewards.py").write_text("def digits(answer): return sum(map(ord, answer)) % 97 / 97")
    changes = {
        "steps": 4,
        "optimizer": {"lr": 0.03},
        "data": HELDOUT,
        "evaluation": evaluation,
        "checkpoint": checkpoint,
        **ON_POLICY[method],
    }
    assert workspace.podium("train", rl_recipe(workspace, **changes)).code == 0
    before, training = fingerprint(workspace.path / "runs"), recorded(workspace, "sums")

    result = evaluated(workspace, "runs/sums", "--step", "2")

    assert result["metrics"] == training[2]
    assert training[2]["heldout/score"] not in (0.0, training[4]["heldout/score"])
    assert {"heldout/score", "heldout/pass@2"} <= result["metrics"].keys()
    assert fingerprint(workspace.path / "runs") == before


@pytest.mark.slow
def test_a_model_is_graded_by_the_rewards_of_a_recipe(workspace: Workspace) -> None:
    """The result has every answer; the console shows the first."""
    evaluation = {"generation": {"prompts": 5, "max_new_tokens": 2, "show": 1}}
    recipe = rl_recipe(workspace, program="ppo", data=HELDOUT, evaluation=evaluation)

    outcome = workspace.podium("evaluate", str(workspace.model), "--recipe", recipe, "--json", "all.json")

    assert outcome.code == 0, outcome
    result = json.loads((workspace.path / "all.json").read_text())
    assert {"heldout/score", "heldout/length", "heldout/solved"} <= set(result["metrics"])
    rows = [json.loads(line) for line in (workspace.path / "heldout.jsonl").read_text().splitlines()]
    assert [answer["reference"] for answer in result["answers"]] == [row["messages"][-1]["content"] for row in rows[:5]]
    assert all(answer["prompt"] and answer["answer"] is not None for answer in result["answers"])
    scores = [answer["score"] for answer in result["answers"]]
    assert sum(scores) / len(scores) == pytest.approx(result["metrics"]["heldout/score"])
    assert outcome.out.count("asked: ") == 1
    assert not (workspace.path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_several_ranks_evaluate_together(workspace: Workspace, launcher: str) -> None:
    placement = {"devices": 2, "launcher": launcher}
    assert workspace.podium("train", workspace.recipe(data=HELDOUT, placement=placement, **EVERY_TWO)).code == 0
    before, training = fingerprint(workspace.path / "runs"), recorded(workspace, "sums")

    assert evaluated(workspace, "runs/sums", "--step", "2")["metrics"] == training[2]
    assert fingerprint(workspace.path / "runs") == before


def test_an_exported_model_has_the_numbers_of_its_run(workspace: Workspace) -> None:
    recipe = workspace.recipe(data=HELDOUT, **EVERY_TWO)
    workspace.podium("train", recipe)
    workspace.podium("export", "runs/sums", "out")

    result = evaluated(workspace, "out", "--recipe", recipe)

    assert (result["step"], result["evaluated"]) == (None, "out")
    assert result["metrics"] == pytest.approx(recorded(workspace, "sums")[4], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_a_preference_model_is_compared_with_the_recipes_own_model(workspace: Workspace, adapter: bool) -> None:
    workspace.rows("train.jsonl", PAIRS)
    workspace.rows("heldout.jsonl", PAIRS[:5])
    recipe = workspace.recipe(program="dpo", data=HELDOUT, model={"lora": {"rank": 2}}, **EVERY_TWO)
    workspace.podium("train", recipe)
    workspace.podium("export", "runs/sums", "out", *(["--adapter"] if adapter else []))

    result = evaluated(workspace, "out", "--recipe", recipe)

    expected = recorded(workspace, "sums")[4]
    assert expected["heldout/reward_margin"] != 0
    assert result["metrics"] == pytest.approx(expected, abs=1e-4)


def test_other_heldout_data_is_set_like_any_key(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe())
    with pytest.raises(RecipeError, match=r"data\.heldout"):
        api.evaluate("runs/sums")

    result = api.evaluate("runs/sums", overrides=["data.heldout=[{path: heldout.jsonl}]"])

    assert set(result.metrics) == {"heldout/loss"}


def test_wrong_targets_say_what_to_give(workspace: Workspace) -> None:
    recipe = workspace.recipe(data=HELDOUT, **EVERY_TWO)
    workspace.podium("train", recipe)
    for arguments, part in [
        (("out",), "--recipe"),
        (("runs/sums/checkpoints/step-00000002",), "--step 2"),
        (("runs/sums", "--recipe", recipe), "podium export"),
        (("runs/sums", "--step", "3"), "3"),
        ((str(workspace.model), "--recipe", recipe, "--best"), "--best"),
        (("nowhere", "--recipe", recipe), "nowhere"),
    ]:
        outcome = workspace.podium("evaluate", *arguments)
        workspace.refused(outcome, part, left=("sums",))
    assert workspace.podium("evaluate", "runs/sums", "--best", "--step", "2").code == 2
    assert workspace.podium("evaluate", "runs/sums", "--json", "no/where.json").code == 2
    with pytest.raises(RunFolderError):
        api.evaluate("nowhere")
