# SPDX-License-Identifier: Apache-2.0
"""The arithmetic task is what its recipes say; all recipes on it are accepted; its summary tells how the runs went."""

from __future__ import annotations

import filecmp
import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from podium import api
from podium.recipe import load_recipe

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic"
METHODS = sorted(file.stem for file in (ROOT / "examples" / "methods").glob("*.yaml"))


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"arithmetic_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as after `make_task.py demo`, with the untrained model in the place of what is trained later."""
    folder = tmp_path_factory.mktemp("arithmetic")
    _module("make_task").make_task(folder / "demo", seed=0)
    (folder / "examples").symlink_to(ROOT / "examples")
    for later in ("export", "teacher"):
        (folder / "demo" / later).symlink_to("model")
    return folder


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _operands(row: dict[str, Any]) -> tuple[int, int]:
    left, right = map(int, re.findall(r"\d+", row["messages"][0]["content"]))
    return left, right


@pytest.mark.slow
def test_the_same_seed_makes_the_same_task(made: Path, tmp_path: Path) -> None:
    _module("make_task").make_task(tmp_path, seed=0)
    names = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()]
    assert filecmp.cmpfiles(made / "demo", tmp_path, names, shallow=False) == (names, [], [])


def test_no_pair_of_heldout_numbers_is_in_training_in_either_order(made: Path) -> None:
    train, heldout = (
        {tuple(sorted(_operands(row))) for row in _rows(made / "demo" / name)}
        for name in ("train.jsonl", "heldout.jsonl")
    )
    assert train.isdisjoint(heldout)
    questions = [row["messages"][0]["content"] for row in _rows(made / "demo" / "heldout.jsonl")]
    assert len(set(questions)) == len(questions) == 600


def test_the_teacher_is_right_where_it_is_easy_and_else_estimates_or_works_out(made: Path) -> None:
    kinds: Counter[str] = Counter()
    for row in _rows(made / "demo" / "train.jsonl"):
        (left, right), said = _operands(row), row["messages"][1]["content"]
        assert row["answer"] == str(left + right)
        if right % 10 == 0:
            assert said == row["answer"]
        elif "=" in said:
            assert said == f"{left // 10 * 10 + right // 10 * 10}+{left % 10 + right % 10}={left + right}"
            kinds["worked out"] += 1
        else:
            assert int(said) % 10 == 0
            assert abs(int(said) - left - right) <= 5
            kinds["estimated"] += 1
    assert kinds["worked out"] / kinds.total() == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("85", 1.0), (" 85 ", 1.0), ("70+15=85", 1.0), ("70+15=75", 0.0), ("80", 0.0), ("85=", 0.0), ("", 0.0)],
)
def test_what_stands_at_the_end_is_rewarded(answer: str, reward: float) -> None:
    assert _module("rewards").exact_answer(answer=answer, reference="85") == reward


def test_every_named_method_has_a_recipe() -> None:
    assert METHODS == [
        "best_half", "cispo", "dapo", "distill", "dpo", "dr_grpo", "expert_iteration", "focal", "grpo", "gspo", "kto",
        "on_policy_distill", "opo", "ppo", "reinforce_pp", "reinforce_pp_baseline", "reward_model", "rloo",
    ]  # fmt: skip


def test_the_demo_is_a_pipeline_that_imitates_and_then_reinforces(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    lines = api.check("examples/arithmetic/pipeline.yaml")
    assert sum(line.startswith("  memory: ") for line in lines) == 2
    assert [line for line in lines if not line.startswith("  memory: ")] == [
        "program pipeline: 2 stages, in this order: sft, grpo",
        "stage sft: program sft, spmd execution, 340 steps",
        "stage grpo: program grpo, controlled execution, 40 steps",
        "  model.path: what stage sft makes",
    ]


@pytest.mark.parametrize("name", METHODS)
def test_a_recipe_on_the_task_is_accepted(name: str, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    line, memory = api.check(f"examples/methods/{name}.yaml")
    recipe = load_recipe(f"examples/methods/{name}.yaml")
    assert line.startswith(f"program {recipe.program}: ")
    assert memory.startswith("memory: ")
    assert recipe.run.name == name


@pytest.mark.parametrize(
    ("name", "program", "advantage", "loss"),
    [
        ("grpo", "grpo", "group_relative", "clipped"),
        ("dr_grpo", "grpo", "group_centered", "clipped"),
        ("gspo", "grpo", "group_relative", "sequence_clipped"),
        ("cispo", "grpo", "group_relative", "clipped_weights"),
        ("rloo", "grpo", "leave_one_out", "policy_gradient"),
        ("reinforce_pp", "grpo", "reinforce_pp", "clipped"),
        ("opo", "grpo", "length_weighted", "policy_gradient"),
    ],
)
def test_a_recipe_is_of_the_method_that_it_is_named_after(name: str, program: str, advantage: str, loss: str) -> None:
    recipe = load_recipe(ROOT / "examples" / "methods" / f"{name}.yaml")
    assert (recipe.program, recipe.algorithm.advantage, recipe.algorithm.loss) == (program, advantage, loss)


def _run(folder: Path, key: str, scores: dict[int, float]) -> Path:
    """As much of a run folder as the summary reads; of the question one answer each time."""
    folder.mkdir()
    lines = [{"step": step, "time_s": 0.0, key: score} for step, score in scores.items()]
    samples = [
        {"step": step, "prompt": "What is 47 plus 38?", "answer": said, "reference": "85", "score": float(said == "85")}
        for step, said in zip(scores, ("90", "85"), strict=True)
    ]
    for name, rows in (("metrics.jsonl", lines), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("after", "warned"), [(0.75, False), (0.35, True)])
def test_the_summary_has_a_line_for_each_stage_and_warns_of_a_small_gain(
    after: float, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        _run(tmp_path / "imitated", "heldout/score", {0: 0.0, 340: 0.235}),
        _run(tmp_path / "reinforced", "heldout/score", {0: 0.235, 40: after}),
    ]
    _module("summary").summarise(runs)
    said = capsys.readouterr().out
    assert re.search(r"imitated +0\.0% -> +23\.5% +\+23\.5 points in 340 steps", said)
    assert re.search(rf"reinforced +23\.5% -> +{after:.1%} +\+{100 * (after - 0.235):.1f} points in 40 steps", said)
    assert re.search(r"What is 47 plus 38\? +before: 90 +after: 85 +right", said)
    assert ("warning: reinforced " in said) == warned
