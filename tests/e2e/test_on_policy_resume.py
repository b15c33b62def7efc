# SPDX-License-Identifier: Apache-2.0
"""On-policy runs that are stopped, killed or fail, and go on as if nothing had happened."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.on_policy import ledger, numbers, podium, rl_recipe
from helpers.processes import DEADLINE_S, wait_until
from helpers.workspace import Workspace
from podium.engine.checkpoint_files import saved_steps
from podium.errors import CheckpointError
from podium.roles.handles import LearnerHandle
from podium.runs.folder import RunFolder

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc")

# Loggers run in the controller: there a test can reach into a run. It acts once, as step 3 is recorded.
DEED = """
import os, signal, threading
from pathlib import Path

class Deed:
    def __init__(self, folder):
        self.done = Path(folder) / "done-once"
    def log(self, metrics):
        if metrics.step == 3 and not self.done.exists():
            self.done.touch()
            {deed}
    def text(self, step, name, text): pass
    def close(self): pass
"""
CTRL_C = "os.kill(os.getpid(), signal.SIGINT)"
HANG = "threading.Event().wait()"
FIVE_STEPS: dict[str, Any] = {"steps": 5, "checkpoint": {"every": 2, "keep": 9}}

METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"epochs": 2, "mini_batches": 2}},
    "grpo, kl": {
        "algorithm": {"kl": {"coefficient": 0.2, "target": 0.001, "horizon": 100, "refresh_every": 3}},
        "optimizer": {"schedule": "cosine"},
    },
    "dapo": {"algorithm": {"dynamic_sampling": True}, "rollout": {"samples_per_prompt": 2}},
    "reinforce++": {"algorithm": {"advantage": "reinforce_pp"}},
    "ppo": {"program": "ppo", "critic": {"warmup_steps": 1}, "algorithm": {"lam": 0.9, "epochs": 2}},
    "expert_iteration": {"program": "expert_iteration", "grading": {"solved_at": 0.3}},
    # Evaluation fills the prefix cache of an unbroken run; few lanes make requests wait for each other.
    "evaluated": {
        "data": {"heldout": [{"path": "train.jsonl"}]},
        "evaluation": {"every": 1, "generation": {"prompts": 6, "max_new_tokens": 6}},
        "rollout": {"max_running": 3},
    },
    # Turns arrive in another order each time.
    "environment": {
        "environment": {"environment": "dialogue.py:Dialogue", "max_turns": 3},
        "rollout": {"max_running": 3},
    },
}
DIALOGUE = """
from podium.environments.protocol import Observation, Outcome

class Dialogue:
    async def reset(self, task):
        return Observation()

    async def step(self, turn):
        digits = sum(letter.isdigit() for letter in turn.text)
        return Outcome(messages=f"{digits} digits, more?", reward=digits / 10)
"""


def changed(**changes: Any) -> dict[str, Any]:
    """Five steps, saved every two."""
    merged: dict[str, Any] = {**FIVE_STEPS}
    for key, change in changes.items():
        merged[key] = {**merged.get(key, {}), **change} if isinstance(change, dict) else change
    return merged


def done(workspace: Workspace, *arguments: str) -> Path:
    """Runs a command to its end; returns the folder of the only run whose name it ends with."""
    outcome = workspace.podium(*arguments)
    assert outcome.code == 0, outcome
    assert "Traceback" not in outcome.out + outcome.err
    return workspace.path / "runs" / Path(arguments[1]).stem


def weights(run: Path) -> dict[str, bytes]:
    """The tensors of the newest checkpoints, the policy's and others'."""
    found = {}
    for folder in ("checkpoints", "critic", "reference"):
        for file in sorted((run / folder).glob("step-00000005/rank-*.safetensors")):
            found[f"{folder}/{file.name}"] = file.read_bytes()
    return found


def with_deed(workspace: Workspace, deed: str) -> dict[str, Any]:
    (workspace.path / "deed.py").write_text(DEED.replace("{deed}", deed))
    return {"loggers": ["deed.py:Deed"]}


@pytest.mark.parametrize(
    "method", [each if each == "grpo, kl" else pytest.param(each, marks=pytest.mark.slow) for each in METHODS]
)
def test_a_run_resumed_from_a_checkpoint_is_the_unbroken_one_bit_for_bit(workspace: Workspace, method: str) -> None:
    (workspace.path / "dialogue.py").write_text(DIALOGUE)
    whole = done(workspace, "train", rl_recipe(workspace, "whole", **changed(**METHODS[method])))
    run = Path(shutil.copytree(whole, workspace.path / "runs" / "again"))

    done(workspace, "resume", "runs/again", "--step", "2")

    assert list(numbers(whole)) == [1, 2, 3, 4, 5]
    assert numbers(run) == numbers(whole)
    assert ledger(run) == ledger(whole)
    assert weights(run) == weights(whole)
    assert len(weights(whole)) == 1 + ("kl" in method or method == "ppo")


@pytest.mark.slow  # fast: tests/unit/controller/test_on_policy_run.py; resuming: the test above
def test_ctrl_c_saves_and_stops_at_the_end_of_the_step_and_resume_continues(workspace: Workspace) -> None:
    whole = done(workspace, "train", rl_recipe(workspace, "whole", **changed()))
    recipe = rl_recipe(workspace, "stopped", **changed(run=with_deed(workspace, CTRL_C)))

    outcome = workspace.podium("train", recipe)

    run = workspace.path / "runs" / "stopped"
    assert outcome.code == 0, outcome
    assert "Ctrl-C" in outcome.out
    assert re.search("stopped .*step 3; .*podium resume runs/stopped", outcome.out)
    assert [each.step for each in saved_steps(run / "checkpoints")] == [2, 3]
    assert RunFolder.open(run).status == "stopped"
    assert not (run / "stop-requested").exists()

    done(workspace, "resume", "runs/stopped")
    assert numbers(run) == numbers(whole)
    assert ledger(run) == ledger(whole)


@pytest.mark.slow  # fast: tests/unit/controller/test_run_rewards.py; resuming: see above
def test_a_run_that_its_reward_failed_resumes_with_the_fixed_reward(workspace: Workspace) -> None:
    whole = done(workspace, "train", rl_recipe(workspace, "whole", **changed()))
    good = (workspace.path / "rewards.py").read_text()
    (workspace.path / "rewards.py").write_text(
        "from pathlib import Path\n"
        "def digits(answer, reference):\n"
        "    if '\"step\":4' in Path('runs/broken/metrics.jsonl').read_text().replace(' ', ''):\n"
        "        raise ValueError('the judge is out')\n"
        "    return sum(letter.isdigit() for letter in answer) / max(1, len(answer))\n"
    )
    outcome = workspace.podium("train", rl_recipe(workspace, "broken", **changed(grading={"on_error": "fail"})))
    run = workspace.path / "runs" / "broken"
    workspace.refused(outcome, "step 5", "the judge is out", left=("broken", "whole"))
    assert RunFolder.open(run).status == "failed"
    assert {row[4] for row in ledger(run)} == {1, 2, 3, 4}

    (workspace.path / "rewards.py").write_text(good)
    done(workspace, "resume", "runs/broken", "--set", "grading.timeout_s=20")
    assert numbers(run) == numbers(whole)
    assert ledger(run) == ledger(whole)


@pytest.mark.slow
def test_every_consumed_episode_is_in_the_ledger_exactly_once_after_two_resumes(workspace: Workspace) -> None:
    run = done(workspace, "train", rl_recipe(workspace, "run", **changed()))
    for step in ("4", "2"):
        done(workspace, "resume", "runs/run", "--step", step)
    rows = ledger(run)
    assert [row[:2] for row in rows] == [(draw, sample) for draw in range(20) for sample in range(4)]
    assert {row[5] for row in rows} == {"consumed"}
    assert [row[4] for row in rows] == [1 + draw // 4 for draw in range(20) for _ in range(4)]


CHANGES = {
    "rollout.temperature=0.9": "rollout.temperature: 1.0 -> 0.9",
    "algorithm.clip_high=0.3": "algorithm.clip_high: 0.2 -> 0.3",
    "run.seed=7": "run.seed: 0 -> 7",
    "rollout.samples_per_prompt=8": "rollout.samples_per_prompt: 4 -> 8",
}


@pytest.mark.slow
def test_what_would_make_another_run_of_it_is_refused(workspace: Workspace) -> None:
    run = done(workspace, "train", rl_recipe(workspace, "run", steps=2, checkpoint={"every": 1}))
    before = numbers(run)

    for change, message in CHANGES.items():
        outcome = workspace.podium("resume", "runs/run", "--step", "1", "--set", change)
        workspace.refused(outcome, "runs/run ", message, left=("run",))
    outcome = workspace.podium("resume", "runs/run", "--step", "1", "--set", "program=expert_iteration")
    workspace.refused(outcome, "runs/run/recipe.yaml", "algorithm.loss", left=("run",))  # keys of another program

    assert numbers(run) == before
    assert [each.step for each in saved_steps(run / "checkpoints")] == [1, 2]


@pytest.mark.slow
def test_data_that_changed_is_refused(workspace: Workspace) -> None:
    done(workspace, "train", rl_recipe(workspace, "run", steps=2, checkpoint={"every": 1}))
    file = workspace.path / "train.jsonl"
    file.write_text(file.read_text().replace("what is 1", "what is 2"))

    outcome = workspace.podium("resume", "runs/run", "--step", "1")

    workspace.refused(outcome, "train.jsonl: its content ", left=("run",))


@pytest.mark.slow
def test_more_steps_and_another_engine_size_are_no_other_run(workspace: Workspace) -> None:
    longer = done(workspace, "train", rl_recipe(workspace, "longer", steps=4))
    run = done(workspace, "train", rl_recipe(workspace, "run", steps=2))

    done(workspace, "resume", "runs/run", "--set", "steps=4", "--set", "rollout.max_running=3")

    apart = ("rollout/reused_tokens", "rollout/preemptions")
    for step, values in numbers(longer).items():
        found = numbers(run)[step]
        for name in set(values) - set(apart):
            assert found[name] == pytest.approx(values[name], rel=1e-4, abs=1e-6), (step, name)


# --- the critic ---


@pytest.mark.slow
def test_a_critic_that_is_gone_is_named(workspace: Workspace) -> None:
    run = done(workspace, "train", rl_recipe(workspace, "run", program="ppo", steps=2, checkpoint={"every": 1}))
    shutil.rmtree(run / "critic" / "step-00000001")

    outcome = workspace.podium("resume", "runs/run", "--step", "1")

    workspace.refused(outcome, "critic/step-00000001", "missing", left=("run",))


def crashed_between_critic_and_policy(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, *, keep: int) -> Path:
    """Killed when the critic of step 4 was saved and the policy was not yet."""
    plain = LearnerHandle.save

    async def save(self: LearnerHandle, step: int, values: Any) -> None:
        if step == 4:
            raise CheckpointError("the power went out")
        await plain(self, step, values)

    monkeypatch.setattr(LearnerHandle, "save", save)
    recipe = rl_recipe(workspace, "run", **changed(program="ppo", checkpoint={"keep": keep}))
    workspace.refused(workspace.podium("train", recipe), "the power went out", left=("run", "whole"))
    monkeypatch.setattr(LearnerHandle, "save", plain)
    run = workspace.path / "runs" / "run"
    assert [each.step for each in saved_steps(run / "checkpoints")] == [2]
    return run


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_a_crash_between_the_critics_checkpoint_and_the_policys_loses_nothing(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    whole = done(workspace, "train", rl_recipe(workspace, "whole", **changed(program="ppo")))
    run = crashed_between_critic_and_policy(workspace, monkeypatch, keep=keep)

    done(workspace, "resume", "runs/run")

    assert numbers(run) == numbers(whole)
    assert weights(run) == weights(whole)


# --- processes ---


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No cluster but the test's own. Paths of Ray's sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def steps_so_far(run: Path) -> int:
    return max(numbers(run), default=0) if (run / "metrics.jsonl").exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_ctrl_c_in_a_terminal_saves_exits_0_and_leaves_no_process(
    workspace: Workspace, ray_folder: None, launcher: str
) -> None:
    recipe = rl_recipe(workspace, "long", steps=100_000, placement={"launcher": launcher})
    run, output = workspace.path / "runs" / "long", workspace.path / "said"

    with podium("train", recipe, output=output) as process:
        wait_until(lambda: steps_so_far(run) >= 2 or process.poll() is not None, "the second step")
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes of the job
        assert process.wait(DEADLINE_S) == 0, output.read_text()

    last = steps_so_far(run)
    assert re.search(f"stopped .*step {last}; .*podium resume runs/long", output.read_text())
    assert "Traceback" not in output.read_text()
    assert saved_steps(run / "checkpoints")[-1].step == last
    done(workspace, "resume", "runs/long", "--set", f"steps={last + 1}", "--set", "placement.launcher=inline")
    assert list(numbers(run)) == list(range(1, last + 2))
    assert [row[0] for row in ledger(run)] == [draw for draw in range(4 * (last + 1)) for _ in range(4)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["ray"])
def test_a_second_ctrl_c_ends_a_run_whose_reward_never_returns(
    workspace: Workspace, ray_folder: None, launcher: str
) -> None:
    (workspace.path / "rewards.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def digits(answer, reference):\n"
        "    Path('hangs').touch()\n"
        "    time.sleep(10_000)\n"
    )
    recipe = rl_recipe(workspace, "twice", placement={"launcher": launcher}, grading={"timeout_s": 5000})
    output = workspace.path / "said"

    with podium("train", recipe, output=output) as process:
        wait_until((workspace.path / "hangs").exists, "the call that never returns")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "press Ctrl-C again" in output.read_text(), "the answer to the first Ctrl-C")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, output.read_text()

    assert "Traceback" not in output.read_text()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_kill_9_of_the_whole_process_group_on_ray_loses_nothing_that_was_saved(
    workspace: Workspace, ray_folder: None
) -> None:
    whole = done(workspace, "train", rl_recipe(workspace, "whole", **changed(program="ppo")))
    changes = changed(program="ppo", placement={"launcher": "ray"}, run=with_deed(workspace, HANG))
    recipe = rl_recipe(workspace, "killed", **changes)
    run, output = workspace.path / "runs" / "killed", workspace.path / "said"

    with podium("train", recipe, output=output) as process:
        wait_until(lambda: (run / "done-once").exists() or process.poll() is not None, "the third step")
        assert process.poll() is None, output.read_text()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
    assert [each.step for each in saved_steps(run / "checkpoints")] == [2]
    assert {row[4] for row in ledger(run)} >= {1, 2}  # the third may have been recorded; its weights are gone

    done(workspace, "resume", "runs/killed", "--set", "placement.launcher=inline")

    assert numbers(run) == numbers(whole)
    assert ledger(run) == ledger(whole)
    assert weights(run) == weights(whole)
