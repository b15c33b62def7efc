# SPDX-License-Identifier: Apache-2.0
"""An episode runner that is killed in the middle of its episodes: the others come to their end, and all are the same
as without the kill."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.clusters import Opener, in_cluster
from helpers.scripted_generator import ScriptedGenerator
from helpers.tiny import save_tiny_folder, tiny_tokenizer
from podium.cluster import Cluster, Layout, MeshShape, Pool, RoleSpec, Workers
from podium.controller.recovery import RecoveryPlan
from podium.controller.replacing import WorkerReplacements
from podium.data.tasks import IndexedTask, Task
from podium.data.trajectories import TrajectoryBlock
from podium.recipe import ModelSection
from podium.recipe.on_policy import EnvironmentSection
from podium.roles.carriers import SamplingPlan
from podium.roles.episode_runner import EpisodeRunner, RunnerSpec
from podium.roles.episode_stream import run_all
from podium.roles.handles import GeneratorHandle
from podium.roles.interfaces import Generator
from podium.roles.runner_handle import RunnerHandle
from podium.roles.stages import Rollouts
from podium.runs.events import recoveries

# One draw kills its runner in the second turn, once. Rewards come from what the model said.
ENVIRONMENT = """
import os
import signal

from podium.environments.protocol import Observation, Outcome


def runner():
    # Above this process are two supervisors, and the runner.
    pid = os.getpid()
    for _ in range(3):
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return pid


class Game:
    def __init__(self, flag):
        self._flag = flag

    async def reset(self, task):
        self._draw = task.row["draw"]
        return Observation(messages=f"draw {self._draw}")

    async def step(self, turn):
        if self._draw == 3 and turn.number == 1 and not os.path.exists(self._flag):
            open(self._flag, "x").close()
            os.kill(runner(), signal.SIGKILL)
        return Outcome(messages="and then", reward=float(len(set(turn.text))), done=turn.number == 2)
"""
_DRAWS, _SAMPLES = 8, 2


def _layout(folder: Path, model: Path, flag: Path, runners: int) -> Layout:
    tokenizer = tiny_tokenizer()
    letters = tuple(tokenizer.convert_tokens_to_ids(list("abcdefgh")))
    environment = EnvironmentSection(
        environment=f"{folder / 'game.py'}:Game", options={"flag": str(flag)}, max_turns=3, concurrency=4,
        runners=runners,
    )  # fmt: skip
    spec = RunnerSpec(
        model=ModelSection(path=str(model)), environment=environment, generator="generator", max_length=512
    )
    return Layout(
        pools=(
            Pool(name="gen", slots=1, collectives=False),
            Pool(name="runners", slots=runners, collectives=False),
        ),
        roles=(
            RoleSpec(
                name="generator", kind=ScriptedGenerator, pool="gen", mesh=MeshShape(replica=1),
                arguments=(letters, tokenizer.eos_token_id),
            ),
            RoleSpec(
                name="runner", kind=EpisodeRunner, pool="runners", mesh=MeshShape(replica=runners), arguments=(spec,)
            ),
        ),
    )  # fmt: skip


def _prompts() -> list[IndexedTask]:
    return [
        IndexedTask(
            prompt_index=draw, epoch=0,
            task=Task(
                source="test", messages=({"role": "user", "content": "?"},), text=None, tools=None, reference=None,
                row={"draw": draw}, place="here",
            ),
        )
        for draw in range(_DRAWS)
    ]  # fmt: skip


def _played(opener: Opener, folder: Path, model: Path, flag: Path, runners: int) -> tuple[Rollouts, Any, list[str]]:
    """(the rollouts, their tokens, warnings)."""
    found: list[Any] = []
    warnings: list[str] = []
    notes: list[str] = []

    async def body(cluster: Cluster, workers: Workers) -> None:
        await workers.open_channel("generator", to="runner")
        generator = GeneratorHandle(workers.role("generator", Generator))
        replacements = WorkerReplacements(RecoveryPlan(3), warn=warnings.append, note=notes.append, folder=folder)
        handle = RunnerHandle(
            workers, workers.role("runner", EpisodeRunner), generator, warn=warnings.append, replacements=replacements
        )
        plan = SamplingPlan(max_new_tokens=8, temperature=1.0, seed=5)
        blocks, metrics = await run_all(handle, _prompts(), _SAMPLES, plan)
        tasks = {prompt.prompt_index: prompt.task for prompt in _prompts()}
        rollouts = Rollouts.of(blocks, tasks, step=1, version=0, metrics=metrics)
        block: TrajectoryBlock = rollouts.rows.read()
        found.append((rollouts, block))

    in_cluster(opener, _layout(folder, model, flag, runners), body, limit_s=240.0)
    return (*found[0], warnings)


@pytest.mark.slow
@pytest.mark.parametrize("runners", [1, 2])
def test_a_runner_killed_in_its_episodes_is_replaced_and_its_episodes_are_the_same(
    open_on_ray: Opener, tmp_path: Path, runners: int
) -> None:
    (tmp_path / "game.py").write_text(ENVIRONMENT)
    model = save_tiny_folder(tmp_path / "model")
    (tmp_path / "no-kill").touch()
    expected, tokens, quiet = _played(open_on_ray, tmp_path, model, tmp_path / "no-kill", runners)

    found, again, warnings = _played(open_on_ray, tmp_path, model, tmp_path / "kill", runners)

    assert os.path.exists(tmp_path / "kill"), "the runner was killed"
    assert quiet == []
    assert len(warnings) == 1
    assert re.match(r"runners\[\d\]@", warnings[0])
    (recovery,) = recoveries(tmp_path)
    assert (recovery.part, recovery.remedy) == ("runner", "retry")
    assert 0 < recovery.seconds < 240
    assert not found.note.errors
    ids, wanted = found.rows.ids.array_N4, expected.rows.ids.array_N4
    assert np.array_equal(ids[:, :3], wanted[:, :3])
    assert 1 in ids[ids[:, 0] == 3, 3].tolist(), "a new attempt has a new id"
    for name in ("offsets", "tokens_T", "loss_mask_T", "behavior_logprobs_T", "versions_T"):
        assert np.array_equal(getattr(again, name), getattr(tokens, name)), name
    assert np.array_equal(found.note.environment_N, expected.note.environment_N)
    assert np.array_equal(found.note.turn_rewards.reward_K, expected.note.turn_rewards.reward_K)
