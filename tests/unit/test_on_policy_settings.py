# SPDX-License-Identifier: Apache-2.0
"""On-policy recipes: contradictory settings are refused, and each option reaches the part that reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from helpers.made_batches import make_answer
from helpers.on_policy import CASES, Case, make_episodes, recording_engine, rl_recipe, run_update
from helpers.tiny import save_tiny_model
from helpers.workspace import Workspace
from podium.controller.evaluation import DEFAULT_PROMPTS, heldout_limit
from podium.controller.layout import layout_of
from podium.data.trajectories import TrajectoryId
from podium.environments.chat_format import ToolCall
from podium.environments.environment_factory import environment_maker
from podium.environments.protocol import Turn
from podium.errors import RecipeError
from podium.recipe import CorrectionSection, OnPolicyRecipe, parse_recipe
from podium.recipe.on_policy import EnvironmentSection
from podium.recipe.schema import SampledGenerationSection
from podium.roles.engine_summaries import EngineSummaries
from podium.roles.generator import GeneratorRank
from podium.roles.mailboxes import Mailboxes
from podium.rollout.engine import Load
from podium.rollout.requests import Completion, Request, Sampling

RECIPE: dict[str, Any] = {
    "program": "grpo", "model": {"path": "model"}, "data": {"train": [{"path": "train.jsonl"}]},
    "optimizer": {"lr": 1e-3}, "steps": 2, "reward": [{"verifier": "exact_match"}], "run": {"name": "attack"},
    "rollout": {"max_new_tokens": 8, "prompts_per_step": 2, "samples_per_prompt": 2},
}  # fmt: skip


# --- the mathematics ---


@pytest.mark.parametrize("narrowed", [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_truncated_sampling_needs_a_correction(narrowed: dict[str, Any]) -> None:
    """Without one, ratios would compare the policy with a part of it."""
    truncated = {**RECIPE, "rollout": {**RECIPE["rollout"], **narrowed}}
    for algorithm in ({}, {"correction": {}}, {"correction": "auto"}):
        recipe = parse_recipe({**truncated, "algorithm": algorithm})
        assert isinstance(recipe, OnPolicyRecipe)
        assert recipe.correction == CorrectionSection(kind="token_truncate", cap=2.0)
        assert recipe.rollout.truncated_by == tuple(narrowed)
    with pytest.raises(RecipeError, match=rf"algorithm\.correction: .*rollout\.{next(iter(narrowed))}"):
        parse_recipe({**truncated, "algorithm": {"correction": "none"}})


def test_a_custom_loss_is_the_same_for_all_optimizer_steps_of_an_update(tmp_path: Path) -> None:
    """An editor saves the file while an update runs: the loss of a run must not change in the middle of it."""
    file = tmp_path / "own_loss.py"
    body = (
        "def loss(tokens):\n    from pathlib import Path\n    Path({file!r}).write_text({next!r})\n    return {what}\n"
    )
    later = "def loss(tokens):\n    return tokens.logprobs_S * 0\n"
    file.write_text(body.format(file=str(file), next=later, what="-tokens.logprobs_S"))
    case = Case(algorithm={"loss": f"{file}:loss"})
    folder = save_tiny_model("llama", tmp_path / "model")
    engine, episodes = recording_engine(folder), make_episodes(folder)
    expected = run_update(engine, episodes, CASES["imitation"], steps=2)

    found = run_update(engine, episodes, case, steps=2)

    assert torch.allclose(found.flat, expected.flat, atol=1e-5)


# --- recipes: keys that nobody reads, and combinations that cannot work ---


def test_tools_are_run_with_the_options_of_the_recipe(tmp_path: Path) -> None:
    """environment.options: 'with tools: max_chars, max_calls, role'."""
    (tmp_path / "tools.py").write_text("def shout(text: str) -> str:\n    return text * 100\n")
    section = EnvironmentSection(tools=(f"{tmp_path / 'tools.py'}:shout",), options={"max_chars": 5, "role": "user"})
    environment: Any = environment_maker(section)()
    call = ToolCall(name="shout", arguments={"text": "hello"}, text="")

    outcome = asyncio.run(environment.step(Turn(number=0, text="", calls=(call,))))

    assert outcome.messages[0]["role"] == "user"
    assert len(outcome.messages[0]["content"]) < 60


@pytest.mark.parametrize(
    "algorithm",
    [{"loss": "clipped_weights"}, {"entropy": 0.01}, {"clip_high": 0.28}, {"dual_clip": 3.0}, {"proximal": "always"}],
)
def test_expert_iteration_refuses_keys_that_imitation_does_not_read(algorithm: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(algorithm))):
        parse_recipe({**RECIPE, "program": "expert_iteration", "algorithm": algorithm})


@pytest.mark.parametrize(
    "algorithm",
    [
        {"correction": {"kind": "token_mask", "low": 3.0, "cap": 2.0}},  # leaves nothing
        {"correction": {"kind": "token_truncate", "low": 0.5}},  # of the masked kinds
        {"max_refills": 9},
    ],
)
def test_settings_that_mean_nothing_are_refused(algorithm: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        parse_recipe({**RECIPE, "algorithm": algorithm})


def test_asking_for_pass_at_k_does_not_shrink_the_evaluation_to_four_prompts() -> None:
    assert heldout_limit(SampledGenerationSection(samples=8), None) == DEFAULT_PROMPTS


def test_a_length_penalty_of_one_answer_is_refused_for_episodes_of_several() -> None:
    """max_new_tokens is of one turn, and an episode's tokens are those of all turns."""
    with pytest.raises(RecipeError, match=r"algorithm\.overlong"):
        parse_recipe(
            {
                **RECIPE,
                "algorithm": {"overlong": {"buffer_tokens": 2}},
                "environment": {"environment": "worlds.py:World"},
            }
        )


# --- several turns ---

WORLD = """
from podium.environments.protocol import Outcome

class World:
    async def reset(self, task):
        return None
    async def step(self, turn):
        return Outcome(messages="more", reward=1.0, done=turn.number == 1)
"""


@pytest.mark.slow
def test_a_custom_environment_plays_chats(workspace: Workspace) -> None:
    """The first thing in docs/environments.md: a class with reset and step, and prompts that are chats."""
    (workspace.path / "world.py").write_text(WORLD)
    recipe = rl_recipe(workspace, "chats", steps=1, reward=[], environment={"environment": "world.py:World"})

    outcome = workspace.podium("train", recipe)

    assert outcome.code == 0, outcome.err


class BrokenEngine:
    """Fails as an engine without memory does, or refuses what it is asked."""

    def __init__(self, *, refuses: bool) -> None:
        self._refuses = refuses

    def load(self) -> Any:
        return None

    def submit(self, requests: Sequence[Request]) -> None:
        if self._refuses:
            raise RuntimeError("refused")

    def results(self, *, deadline_s: float, tick_s: float | None = None) -> Iterator[Completion]:
        if self._refuses:
            return
        yield make_answer(0)
        raise RuntimeError("out of memory")


def _generator(engine: Any) -> Any:
    generator: Any = object.__new__(GeneratorRank)
    generator._engine, generator._mailboxes, generator._peak_tokens = engine, Mailboxes(), 0

    class Spec:
        deadline_s = 1.0

    generator._spec = Spec()
    generator._engine.load = lambda: Load(**dict.fromkeys(Load.__slots__, 0))
    generator._summaries = EngineSummaries(Mock(), generator._engine.load)
    generator.begin_serving()
    return generator


def _request(draw: int) -> Request:
    return Request(
        id=TrajectoryId(draw, 0), prompt=np.array([1], np.int32), sampling=Sampling(max_new_tokens=1), seed=0
    )


def test_runners_hear_that_their_generator_has_failed() -> None:
    """`serve` has ended with an error; a runner that goes on fetching would wait for ever for its other answer."""
    generator = _generator(BrokenEngine(refuses=False))
    generator.exchange("runner", (_request(0), _request(1)), 0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        generator.serve()
    generator.exchange("runner", (), 0.0)  # the one that was done

    with pytest.raises(Exception, match=r"."):
        generator.exchange("runner", (), 0.05)


def test_serving_ends_after_a_request_that_the_engine_refused() -> None:
    generator = _generator(BrokenEngine(refuses=True))
    with pytest.raises(RuntimeError, match="refused"):
        generator.exchange("runner", (_request(0),), 0.0)
    generator.stop_serving()

    assert not generator._mailboxes.wait_for_work(0.01)


# --- checkpoints ---

WORSE = """
calls = 0

def worse(answer, reference):
    global calls
    calls += 1
    return -float(calls)
"""


@pytest.mark.slow
def test_the_best_checkpoint_of_ppo_can_be_resumed(workspace: Workspace) -> None:
    """keep_best keeps an old step of the policy; its critic and its refreshed reference must be kept with it."""
    (workspace.path / "score.py").write_text(WORSE)
    recipe = rl_recipe(
        workspace, "best", program="ppo", steps=5, data={"train": [{"path": "train.jsonl"}],
        "heldout": [{"path": "heldout.jsonl"}]}, algorithm={"kl": {"coefficient": 0.1, "refresh_every": 1}},
        checkpoint={"every": 1, "keep": 1, "keep_best": True, "background": False},
        evaluation={"every": 1, "generation": {"prompts": 1, "max_new_tokens": 2, "score": "score.py:worse"}},
    )  # fmt: skip
    outcome = workspace.podium("train", recipe)
    assert outcome.code == 0, outcome

    run = workspace.path / "runs" / "best"
    kept = {each.name for each in (run / "checkpoints").glob("step-*")}
    assert "step-00000001" in kept, outcome.out
    for folder in ("critic", "reference"):
        assert kept <= {each.name for each in (run / folder).glob("step-*")}, folder


@pytest.mark.slow
def test_a_critic_begins_at_random_where_the_policy_does(workspace: Workspace, tmp_path: Path) -> None:
    """model.init random reads the config only: a folder without weights is enough for every program."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in workspace.model.iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    recipe = rl_recipe(workspace, "bare", program="ppo", steps=1, model={"path": str(bare), "init": "random"})

    outcome = workspace.podium("train", recipe)

    assert outcome.code == 0, outcome.err


# --- whose code is run ---


def test_trusting_the_policys_code_does_not_trust_a_teachers(tiny_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "teacher"
    other.mkdir()
    (other / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    recipe = parse_recipe(
        {
            **RECIPE, "program": "on_policy_distill", "model": {"path": str(tiny_folder), "trust_remote_code": True},
            "teachers": [{"path": str(other)}], "reward": [],
        }
    )  # fmt: skip
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": 64})})

    class Folder:
        path = tmp_path
        checkpoints = tmp_path / "checkpoints"

    layout = layout_of(recipe, Folder(), device="cpu", resume_step=None)  # type: ignore[arg-type]

    (teacher,) = [role for role in layout.roles if role.name == "teacher-0"]
    assert not teacher.arguments[0].model.trust_remote_code
