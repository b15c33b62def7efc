# SPDX-License-Identifier: Apache-2.0
"""Runs whose rewards come from a judge behind an endpoint on the loopback."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.judge_server import KEY, Reply, blocks_of, judge_server
from helpers.on_policy import rl_recipe
from helpers.workspace import Workspace
from podium.observe import read_metrics

ROOT = Path(__file__).parents[2]


def digits(body: dict[str, Any]) -> Reply:
    """Grades by the share of digits."""
    answer = blocks_of(body)["ANSWER"]
    return Reply(text=json.dumps({"score": sum(letter.isdigit() for letter in answer) / max(1, len(answer))}))


def more_digits(body: dict[str, Any]) -> Reply:
    """Prefers more digits, and the first answer where both have the same."""
    first, second = (len(re.findall(r"\d", blocks_of(body)[name])) for name in ("ANSWER A", "ANSWER B"))
    return Reply(text=json.dumps({"better": "A" if first >= second else "B"}))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_trains_on_a_judge_and_its_key_is_nowhere_in_its_folder(workspace: Workspace) -> None:
    workspace.monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge_server(digits) as server:
        judge = {
            "base_url": server.url, "model": "m", "rubric": "Digits.", "score_range": [0, 1],
            "api_key_env": "JUDGE_KEY", "cache": "run_folder", "price": {"tokens_in": 1, "tokens_out": 2},
        }  # fmt: skip
        beside = [{"function": "rewards.py:digits", "weight": 0}, {"judge": judge, "name": "style"}]
        recipe = rl_recipe(workspace, "judged", reward=beside, steps=2, checkpoint={"every": 1})
        assert workspace.podium("check", recipe).code == 0
        assert workspace.podium("train", recipe).code == 0, workspace.capture.readouterr()
        run = workspace.path / "runs/judged"
        lines = [line.values for line in read_metrics(run) if "reward/mean" in line.values]
        num_asked = len(server.requests)
        assert workspace.podium("resume", "runs/judged", "--step", "1").code == 0
        assert len(server.requests) == num_asked  # the second step was judged before
        repeated = [line.values for line in read_metrics(run) if "reward/mean" in line.values][-1]

    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert [line["reward/style/mean"] for line in lines] == pytest.approx(
        [line["reward/digits/mean"] for line in lines]
    )
    judged = [line["judge/style/requests"] + line["judge/style/cache_hits"] for line in lines]
    assert judged == [16.0, 16.0]
    assert sum(line["judge/style/requests"] for line in lines) == num_asked
    assert [line["judge/style/cost"] for line in lines] == [
        pytest.approx(line["judge/style/requests"] * (100 + 2 * 10) / 1e6) for line in lines
    ]
    assert repeated["judge/style/cache_hits"] == 16.0
    assert repeated["reward/mean"] == lines[1]["reward/mean"]
    files = [path for path in run.rglob("*") if path.is_file()]
    assert any(path.parent.name == "judge_cache" for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_trains_on_win_rates(workspace: Workspace) -> None:
    with judge_server(more_digits) as server:
        judge = {"base_url": server.url, "model": "m", "rubric": "Digits.", "compare": "group"}
        recipe = rl_recipe(workspace, "compared", reward=[{"judge": judge}], steps=1)
        assert workspace.podium("train", recipe).code == 0, workspace.capture.readouterr()
        [line] = [
            each.values for each in read_metrics(workspace.path / "runs/compared") if "reward/mean" in each.values
        ]

    assert line["reward/mean"] == pytest.approx(0.5)  # every win is a loss
    assert 0 < line["judge/judge/comparisons"] <= 24  # 4 groups of 4; equal answers are not judged
    assert 0.0 <= line["judge/judge/agreement"] <= 1.0


def test_the_example_passes_check(workspace: Workspace) -> None:
    demo = workspace.path / "demo"
    shutil.copytree(workspace.model, demo / "export")
    row = {"messages": [{"role": "user", "content": "1+2=?"}, {"role": "assistant", "content": "3"}]}
    (demo / "train.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    shutil.copy(ROOT / "examples/judge/judged.yaml", workspace.path / "judged.yaml")
    shown = workspace.podium("check", "judged.yaml")
    assert shown.code == 0, shown


def test_a_mistake_in_a_judge_is_reported_with_its_key(workspace: Workspace) -> None:
    judge = {"base_url": "http://host/v1", "model": "m", "rubric": "r", "api_key_env": "K"}
    shown = workspace.podium("check", rl_recipe(workspace, "plain", reward=[{"judge": judge}]))
    assert shown.code == 2
    assert "base_url" in shown.err
    assert "without encryption" in shown.err
    alone = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "r", "compare": "group"}
    recipe = rl_recipe(workspace, "alone", reward=[{"judge": alone}], rollout={"samples_per_prompt": 1})
    assert "reward.0.judge.compare: group compares" in workspace.podium("check", recipe).err
