# SPDX-License-Identifier: Apache-2.0
"""Runs whose episodes are played by agents, through the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.agents import AGENTS
from helpers.on_policy import ledger, numbers, rl_recipe
from helpers.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def trained(workspace: Workspace, name: str, agent: str, **changes: Any) -> Path:
    (workspace.path / "agents.py").write_text(AGENTS)
    values: dict[str, Any] = {
        "environment": {"agent": f"agents.py:{agent}"}, "reward": [], "steps": 2,
        "run": {"rollouts": {"keep": "all"}}, **changes,
    }  # fmt: skip
    outcome = workspace.podium("train", rl_recipe(workspace, name, **values))
    assert outcome.code == 0, outcome
    return workspace.path / "runs" / name


def test_an_agent_of_several_turns_is_trained_and_a_second_run_is_the_same(workspace: Workspace) -> None:
    runs = [trained(workspace, name, "several_turns") for name in ("one", "two")]

    steps = numbers(runs[0])
    for step in (1, 2):
        found = steps[step]
        assert found["turns/mean"] == 3
        assert found["environment/trained_tokens"] == found["environment/sampled_tokens"] > 3
        assert found["environment/sequences"] == 1
        assert found["grad_norm"] > 0
    assert [row[5] for row in ledger(runs[0])].count("consumed") == 32
    assert numbers(runs[1]) == steps
    assert ledger(runs[1]) == ledger(runs[0])
