# SPDX-License-Identifier: Apache-2.0
"""A judge went down at step 4: the run was lost, and the advice to resume it was refused. Every failure after the first
step saves what Ctrl-C would save, and what a message advises works."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from helpers.messages import facts
from helpers.on_policy import REWARDS, ledger, numbers, rl_recipe
from helpers.workspace import Workspace
from podium.runs.failing import all_failed_after, forget_failures

# Fails from the step's third call on, as long as the file `down` is there. Each step grades 16 answers.
JUDGE = (
    REWARDS
    + """
from pathlib import Path
CALLS = Path(__file__).with_name("calls")

def judge(answer, reference):
    count = int(CALLS.read_text()) + 1 if CALLS.exists() else 1
    CALLS.write_text(str(count))
    if count > 32 and Path(__file__).with_name("down").exists():
        raise ConnectionError("the judge is down")
    return digits(answer, reference)
"""
)
LOSS = """
import torch
from pathlib import Path
from podium.algorithms.policy import policy_gradient

def loss(*args, **kwargs):
    calls = Path(__file__).with_name("loss_calls")
    count = int(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text(str(count))
    if count == 3 and Path(__file__).with_name("down").exists():
        raise RuntimeError("loss 3")
    return policy_gradient(*args, **kwargs)
"""
MAP = """
from pathlib import Path

def checked(row):
    if row.get("bad") and Path(__file__).with_name("down").exists():
        raise ValueError("this row is broken")
    return row
"""


def _down(workspace: Workspace, is_down: bool) -> None:
    file = workspace.path / "down"
    file.touch() if is_down else file.unlink()


def _grpo(workspace: Workspace, name: str, **changes: object) -> str:
    (workspace.path / "rewards.py").write_text(JUDGE)
    (workspace.path / "calls").unlink(missing_ok=True)
    reward = {"reward": [{"function": "rewards.py:judge"}], "grading": {"workers": 1}}
    return rl_recipe(workspace, name, steps=4, **{**reward, **changes})


def _continues_as_if_nothing_happened(workspace: Workspace, failed: str, whole: str) -> None:
    runs = workspace.path / "runs"
    assert numbers(runs / failed) == numbers(runs / whole)
    if (runs / whole / "episodes.sqlite").exists():
        assert ledger(runs / failed) == ledger(runs / whole)


@pytest.mark.slow
def test_a_reward_that_fails_at_step_3_costs_no_step(workspace: Workspace) -> None:
    assert workspace.podium("train", _grpo(workspace, "whole")).code == 0
    _down(workspace, True)

    outcome = workspace.podium("train", _grpo(workspace, "failed"))

    assert outcome.code == 2
    assert "ConnectionError" in outcome.err
    assert "podium resume runs/failed" in outcome.err
    assert [path.name for path in (workspace.path / "runs/failed/checkpoints").iterdir()] == ["step-00000002"]
    _down(workspace, False)
    (workspace.path / "rewards.py").write_text(JUDGE + "# the judge is up again\n")
    resumed = workspace.podium("resume", "runs/failed")
    assert resumed.code == 0
    assert "reward.0.function" in resumed.out  # that its code changed is said
    _continues_as_if_nothing_happened(workspace, "failed", "whole")


@pytest.mark.slow
def test_a_reward_that_fails_in_the_first_step_leaves_no_folder_and_says_so(workspace: Workspace) -> None:
    _down(workspace, True)
    recipe = _grpo(workspace, "failed")
    (workspace.path / "calls").write_text("32")

    outcome = workspace.podium("train", recipe)

    workspace.refused(outcome, "ConnectionError", "first step", "runs/failed")
    assert "resume" not in outcome.err


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_row_that_fails_at_step_3_costs_no_step(workspace: Workspace, devices: int) -> None:
    (workspace.path / "maps.py").write_text(MAP)
    chats = [(f"{number}+1=", str(number + 1)) for number in range(200)]
    workspace.rows(
        "rows.jsonl",
        [
            {
                "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
                "bad": number == 40,
            }
            for number, (question, answer) in enumerate(chats)
        ],
    )
    source = {"path": "rows.jsonl", "map": "maps.py:checked"}
    changes = {
        "data": {"train": [source], "shuffle": False, "packing_window": 1, "prefetch": 1},
        "placement": {"devices": devices},
        "steps": 6,
    }
    assert workspace.podium("train", workspace.recipe("whole", **changes)).code == 0
    _down(workspace, True)

    outcome = workspace.podium("train", workspace.recipe("failed", **changes))

    assert outcome.code == 2
    assert "this row is broken" in outcome.err
    assert "podium resume runs/failed" in outcome.err
    _down(workspace, False)
    assert workspace.podium("resume", "runs/failed").code == 0
    assert workspace.metric("failed", "loss") == workspace.metric("whole", "loss")


@pytest.mark.slow
def test_an_update_that_fails_before_its_first_optimizer_step_is_repeated(workspace: Workspace) -> None:
    (workspace.path / "loss.py").write_text(LOSS)
    changes = {"algorithm": {"loss": "loss.py:loss"}}
    assert workspace.podium("train", _grpo(workspace, "whole", **changes)).code == 0
    (workspace.path / "loss_calls").unlink()
    _down(workspace, True)

    outcome = workspace.podium(
        "train", _grpo(workspace, "failed", **changes, reward=[{"function": "rewards.py:digits"}])
    )

    assert outcome.code == 2
    assert "loss 3" in outcome.err
    assert "step 2 with: podium resume runs/failed" in outcome.err


def test_a_run_that_fails_after_its_last_step_is_exported_not_resumed(workspace: Workspace) -> None:
    (workspace.path / "scores.py").write_text("def score(answer, reference, row):\n    return 1 / 0\n")
    evaluation = {"generation": {"prompts": 2, "score": "scores.py:score"}}
    data = {"heldout": [{"path": "train.jsonl"}]}

    outcome = workspace.podium("train", workspace.recipe("failed", steps=2, evaluation=evaluation, data=data))

    assert outcome.code == 2
    assert "scores.py, line 2" in outcome.err
    assert "resume" not in outcome.err
    assert "podium export runs/failed OUT" in outcome.err
    assert workspace.podium("export", "runs/failed", "out").code == 0


@pytest.mark.slow
@pytest.mark.serial
def test_a_reward_that_fails_on_ray_costs_no_step(workspace: Workspace) -> None:
    ray = {"placement": {"launcher": "ray", "devices": 2, "layout": "split"}}
    assert workspace.podium("train", _grpo(workspace, "whole", **ray)).code == 0
    _down(workspace, True)

    outcome = workspace.podium("train", _grpo(workspace, "failed", **ray))

    assert outcome.code == 2
    assert "podium resume runs/failed" in outcome.err
    _down(workspace, False)
    assert workspace.podium("resume", "runs/failed").code == 0
    _continues_as_if_nothing_happened(workspace, "failed", "whole")


PROGRAMS = """
from podium.algorithms.dense import token_cross_entropy
from podium.spmd.evaluation import mean_token_loss

async def on_policy(run):
    async for step in run.steps():
        batch = step.batch(step.rewards_N)
        report = await run.policy.update(batch)
        if step.number == run.recipe.options["fails_in"]:
            raise KeyError("mine")
        await run.commit(step, batch, policy=report)

def fixed(run):
    for step in run.steps(mean_token_loss(run.engine, token_cross_entropy)):
        report = run.engine.train_step(
            step.micro_batches, token_cross_entropy, normalizer=step.global_tokens, lr=step.lr,
            stop_requested=run.stop_requested,
        )
        if step.number == run.recipe.options["fails_in"]:
            raise KeyError("mine")
        run.record(step, report)
"""


def _failing(workspace: Workspace, signal: str, name: str, *, fails_in: int, every: int | None) -> str:
    (workspace.path / "mine.py").write_text(PROGRAMS)
    changes = {
        "program": f"mine.py:{signal}", "signal": signal, "options": {"fails_in": fails_in},
        "checkpoint": {} if every is None else {"every": every, "background": False}, "steps": 5,
    }  # fmt: skip
    return rl_recipe(workspace, name, **changes) if signal == "on_policy" else workspace.recipe(name, **changes)


@pytest.mark.parametrize(("signal", "line"), [("on_policy", 10), ("fixed", 20)])
class TestACustomProgramThatRaises:
    @pytest.mark.slow
    def test_is_named_with_its_line_and_the_step_that_remains(
        self, workspace: Workspace, signal: str, line: int
    ) -> None:
        """It raises between the update of step 4 and its end: step 3 is gone, because the weights are updated."""
        outcome = workspace.podium("train", _failing(workspace, signal, "failed", fails_in=4, every=2))

        workspace.refused(outcome, "KeyError: 'mine'", f"mine.py, line {line}", left=("failed",))
        assert "no running event loop" not in outcome.err
        assert "checkpoint of step 2 with: podium resume runs/failed" in outcome.err
        assert "after 2" in outcome.err
        log = (workspace.path / "runs/failed/console.log").read_text()
        assert log.count("Traceback") == 1
        assert 'raise KeyError("mine")' in log
        assert "checkpoint.every" not in outcome.out
        state = json.loads((workspace.path / "runs/failed/run.json").read_text())
        assert "KeyError" in state["error"]

    @pytest.mark.slow
    def test_is_warned_of_at_the_start_where_only_the_end_is_saved(
        self, workspace: Workspace, signal: str, line: int
    ) -> None:
        outcome = workspace.podium("train", _failing(workspace, signal, "failed", fails_in=2, every=None))

        workspace.refused(outcome, f"mine.py, line {line}", "no checkpoint", "checkpoint.every", left=("failed",))
        assert outcome.out.count("warning: checkpoint.every") == 1
        assert "podium resume" not in outcome.err


@pytest.mark.slow
def test_a_custom_program_that_raises_on_two_ranks_is_named_with_its_line(workspace: Workspace) -> None:
    recipe = _failing(workspace, "fixed", "failed", fails_in=4, every=2)

    outcome = workspace.podium("train", recipe, "--devices", "2")

    workspace.refused(outcome, "KeyError: 'mine'", "mine.py, line 20", "step 2", left=("failed",))


@pytest.mark.slow
@pytest.mark.serial
def test_a_custom_program_that_raises_on_ray_shows_no_traceback_and_keeps_those_of_all_attempts(
    workspace: Workspace,
) -> None:
    recipe = _failing(workspace, "fixed", "failed", fails_in=4, every=2)

    outcome = workspace.podium(
        "train", recipe, "--set", "placement.launcher=ray", "--set", "placement.restarts=1", "--devices", "2"
    )

    workspace.refused(outcome, "KeyError: 'mine'", "mine.py, line 20", "step 2", left=("failed",))
    assert re.search(facts("restart 1 of 1:", "KeyError: 'mine'"), outcome.out)
    assert "Traceback" not in outcome.out + outcome.err
    log = (workspace.path / "runs/failed/console.log").read_text()
    assert log.count("Traceback") == 2
    assert log.count('raise KeyError("mine")') == 2
    assert "runs/failed/console.log" in outcome.err


def test_a_program_whose_file_raises_when_it_is_loaded_is_named_with_its_line(workspace: Workspace) -> None:
    recipe = _failing(workspace, "fixed", "failed", fails_in=9, every=1)
    (workspace.path / "mine.py").write_text("import missing_package\ndef fixed(run): ...\n")

    workspace.refused(workspace.podium("train", recipe), "program: ", "missing_package", "mine.py, line 1")


class TestRanksThatFail:
    def test_all_after_the_same_step_agree(self, tmp_path: Path) -> None:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(3) as ranks:
            agreed = list(
                ranks.map(lambda rank: all_failed_after(7, tmp_path, rank=rank, world=3, attempt=0), range(3))
            )

        assert agreed == [True] * 3

    @pytest.mark.parametrize("rank", [0, 1])
    def test_one_alone_waits_for_seconds_only(self, tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("podium.runs.failing._OTHERS_S", 0.1)
        monkeypatch.setattr("podium.runs.failing._DECISION_S", 0.1)

        assert not all_failed_after(7, tmp_path, rank=rank, world=2, attempt=0)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_one_that_is_being_ended_does_not_wait(self, tmp_path: Path, rank: int) -> None:
        began = time.monotonic()

        assert not all_failed_after(7, tmp_path, rank=rank, world=2, attempt=0, is_ended=lambda: True)
        assert time.monotonic() - began < 2.0

    def test_what_an_earlier_attempt_left_is_no_agreement(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("podium.runs.failing._OTHERS_S", 0.1)
        monkeypatch.setattr("podium.runs.failing._DECISION_S", 0.1)
        all_failed_after(7, tmp_path, rank=1, world=2, attempt=0)
        (tmp_path / ".failing-0" / "rank-1-after-7").touch()

        assert not all_failed_after(7, tmp_path, rank=0, world=2, attempt=1)
        forget_failures(tmp_path)
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_that_is_stopped_before_its_first_step_leaves_no_folder_and_says_so(workspace: Workspace) -> None:
    """Ctrl-C during start-up advised to resume what cannot be resumed."""
    lines = ["async def stopped(run):", "    run._parts.folder.stop_file.touch()", "    async for step in run.steps():"]
    (workspace.path / "program.py").write_text("\n".join([*lines, "        pass"]))

    outcome = workspace.podium("train", rl_recipe(workspace, "early", program="program.py:stopped", signal="on_policy"))

    assert outcome.code == 0, outcome.err
    assert "first step" in outcome.out
    assert "resume" not in outcome.out
    assert not (workspace.path / "runs/early").exists()
