# SPDX-License-Identifier: Apache-2.0
"""A reward function that is slower than its deadline, on real Ray, while generation goes on."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from helpers.on_policy import rl_recipe
from helpers.workspace import Workspace
from podium import api
from podium.errors import RewardError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SLOW = 9  # in the order of the file: a prompt of the third step, or of the second where it was generated early
REWARD = """
import time

def judge(answer, row):
    if row["messages"] == {messages!r}:
        time.sleep(3)
    return sum(letter.isdigit() for letter in answer) / max(1, len(answer))
"""


def test_a_run_that_a_slow_reward_stopped_resumes_with_every_group_once(workspace: Workspace, local_ray: None) -> None:
    rows = (workspace.path / "train.jsonl").read_text().splitlines()
    (workspace.path / "slow.py").write_text(REWARD.format(messages=json.loads(rows[SLOW])["messages"]))
    recipe = rl_recipe(
        workspace, "slow", steps=5, reward=[{"function": "slow.py:judge"}],
        data={"train": [{"path": "train.jsonl"}], "shuffle": False},
        rollout={"staleness": 1}, grading={"on_error": "fail", "timeout_s": 0.5}, checkpoint={"every": 100},
        placement={"launcher": "ray", "layout": "split", "devices": 2},
    )  # fmt: skip
    run = workspace.path / "runs" / "slow"
    with pytest.raises(RewardError) as raised:
        api.train(workspace.path / recipe)
    assert all(fact in str(raised.value) for fact in ("judge", "0.5 s", "grading.timeout_s", "grading.on_error"))
    assert SLOW not in _steps(run)

    api.resume(run, overrides=["grading.timeout_s=30"])
    steps = _steps(run)
    assert list(steps) == list(range(20))
    assert Counter(steps.values()) == dict.fromkeys(range(1, 6), 4)
    with closing(sqlite3.connect(run / "episodes.sqlite")) as ledger:
        episodes = ledger.execute("SELECT prompt_index, sample FROM episodes WHERE state = 'consumed' ORDER BY 1, 2")
        assert episodes.fetchall() == [(prompt, sample) for prompt in range(20) for sample in range(4)]


def _steps(run: Path) -> dict[int, int]:
    """Prompt index -> the step that trained on it."""
    with closing(sqlite3.connect(run / "episodes.sqlite")) as ledger:
        rows = ledger.execute("SELECT prompt_index, step FROM groups ORDER BY prompt_index").fetchall()
    assert len(dict(rows)) == len(rows)
    return dict(rows)
