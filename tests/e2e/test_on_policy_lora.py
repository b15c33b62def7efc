# SPDX-License-Identifier: Apache-2.0
"""On-policy recipes that train an adapter: learning, the base as reference, PPO's critic, resuming, and generators."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from helpers.adapters import save_peft_adapter
from helpers.on_policy import numbers, rl_recipe, said_by
from helpers.workspace import Workspace

LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}
KL: dict[str, Any] = {"coefficient": 0.2, "where": "loss"}


def adapted(workspace: Workspace, **lora: Any) -> dict[str, Any]:
    return {"path": str(workspace.model), "lora": {**LORA, **lora}}


def trained(workspace: Workspace, recipe: str, *more: str) -> dict[int, dict[str, float]]:
    outcome = workspace.podium("train", recipe, *more)
    assert outcome.code == 0, outcome
    assert "Traceback" not in outcome.out + outcome.err
    return numbers(workspace.path / "runs" / Path(recipe).stem)


def saved_tensors(run: Path, folder: str = "checkpoints") -> set[str]:
    newest = max((run / folder).glob("step-*"))
    with safe_open(str(newest / "rank-00000.safetensors"), framework="np") as file:
        return set(file.keys())


@pytest.mark.slow
def test_grpo_trains_the_adapter_alone_on_the_learners_own_modules(workspace: Workspace) -> None:
    outcome = workspace.podium("train", rl_recipe(workspace, model=adapted(workspace)))
    run = workspace.path / "runs" / "sums"
    assert outcome.code == 0, outcome
    assert "frozen" in outcome.out
    found = numbers(run)
    assert list(found) == [1, 2, 3]
    for values in found.values():
        assert values["gap/max"] < 1e-4  # the engine draws from base and adapter as they are trained
        assert values["grad_norm"] > 0
    names = saved_tensors(run)
    # Seven linear layers in two blocks, A and B of each, with two moments.
    assert len(names) == 7 * 2 * 2 * 3
    assert all(".lora_" in name for name in names)
    exported = workspace.podium("export", "runs/sums", "out", "--adapter")
    assert exported.code == 0, exported
    assert (workspace.path / "out" / "adapter_model.safetensors").is_file()


def test_merged_weights_give_the_numbers_of_base_and_adapter_apart(workspace: Workspace) -> None:
    """In float32 they sample the same tokens, and the gap between engine and learner stays that of rounding."""
    changes = {"model": adapted(workspace), "algorithm": {"kl": KL}, "optimizer": {"lr": 1e-2}}
    apart = trained(workspace, rl_recipe(workspace, "apart", **changes, rollout={"adapter": "auto"}))
    merged = trained(workspace, rl_recipe(workspace, "merged", **changes, rollout={"adapter": "merged"}))
    stored = [(workspace.path / "runs" / name / "recipe.yaml").read_text() for name in ("apart", "merged")]
    assert ["adapter: apart" in text for text in stored] == [True, False]
    assert ["adapter: merged" in text for text in stored] == [False, True]
    for step, values in apart.items():
        assert merged[step]["gap/max"] < 1e-4
        for name in ("reward/mean", "loss", "grad_norm", "kl/rollout_reference", "trained_tokens"):
            assert merged[step][name] == pytest.approx(values[name], rel=1e-3, abs=1e-6), (step, name)
    assert apart[3]["kl/rollout_reference"] > 1e-4  # the adapter is no longer nothing


@pytest.mark.slow
def test_grpo_with_an_adapter_learns(workspace: Workspace) -> None:
    changes = {"steps": 16, "optimizer": {"lr": 2e-2}, "rollout": {"prompts_per_step": 8, "samples_per_prompt": 8}}
    found = trained(workspace, rl_recipe(workspace, model=adapted(workspace), **changes))
    rewards = [found[step]["reward/mean"] for step in sorted(found)]
    # About a fifth of what the untrained model writes are digits; the spread of a step's mean is some 0.02.
    assert sum(rewards[:2]) / 2 < 0.25
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.1, rewards


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loss", pytest.param("reward", marks=pytest.mark.slow)])
def test_the_base_as_reference_gives_the_numbers_of_a_second_model(workspace: Workspace, where: str) -> None:
    """Without a reference of its own the policy scores with its adapter off, and no other model is placed."""
    kl = {**KL, "where": where}
    own = rl_recipe(workspace, "base", model=adapted(workspace), algorithm={"kl": kl})
    other = rl_recipe(
        workspace, "second", model=adapted(workspace), algorithm={"kl": {**kl, "reference": str(workspace.model)}}
    )
    found, wanted = trained(workspace, own), trained(workspace, other)
    assert found == wanted
    assert found[1]["kl/rollout_reference"] == pytest.approx(0.0, abs=1e-6)
    assert found[3]["kl/rollout_reference"] > 1e-5  # the policy has moved away from its base
    assert "reference" not in {path.name for path in (workspace.path / "runs/base").iterdir()}


@pytest.mark.slow
def test_a_reference_that_starts_from_an_adapter_is_base_and_adapter(workspace: Workspace) -> None:
    adapter = save_peft_adapter(workspace.model, workspace.path / "adapter")
    recipe = rl_recipe(workspace, model=adapted(workspace, adapter=str(adapter)), algorithm={"kl": KL})
    found = trained(workspace, recipe)
    assert found[1]["kl/rollout_reference"] == pytest.approx(0.0, abs=1e-6)
    assert found[3]["kl/rollout_reference"] > 1e-5


METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"kl": {"coefficient": 0.2, "target": 0.001, "horizon": 100}, "mini_batches": 2}},
    "merged": {"rollout": {"adapter": "merged"}},
    "refreshed": {"algorithm": {"kl": {"coefficient": 0.2, "refresh_every": 2}}},
    "ppo": {"program": "ppo", "critic": {"warmup_steps": 1}, "algorithm": {"lam": 0.9}},
}


@pytest.mark.slow  # fast: an adapter resumes in tests/spmd/test_adapter_runs.py, GRPO in test_on_policy_resume.py
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_continues_bit_for_bit(workspace: Workspace, method: str) -> None:
    changes = {**METHODS[method], "checkpoint": {"every": 3, "background": False}, "model": adapted(workspace)}
    wanted = trained(workspace, rl_recipe(workspace, "whole", **changes, steps=5))
    trained(workspace, rl_recipe(workspace, "parts", **changes, steps=3))
    outcome = workspace.podium("resume", "runs/parts", "--set", "steps=5")
    assert outcome.code == 0, outcome
    assert numbers(workspace.path / "runs/parts") == wanted
    for folder in ("checkpoints", "critic", "reference"):
        for file in (workspace.path / "runs/whole" / folder).glob("step-00000005/rank-*.safetensors"):
            other = workspace.path / "runs/parts" / folder / "step-00000005" / file.name
            assert other.read_bytes() == file.read_bytes(), folder
    if method == "ppo":
        names = saved_tensors(workspace.path / "runs/whole", "critic")
        assert {name for name in names if ".lora_" not in name} == {
            f"{kind}/score.weight" for kind in ("weight", "first_moment", "second_moment")
        }
    if method == "refreshed":
        assert all(".lora_" in name for name in saved_tensors(workspace.path / "runs/whole", "reference"))


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No cluster but the test's own. Paths of Ray's sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("adapter", ["apart", "merged"])
@pytest.mark.parametrize("layout", ["split", "colocated"])
def test_workers_on_ray_have_the_numbers_of_one_inline(
    workspace: Workspace, ray_folder: None, layout: str, adapter: str
) -> None:
    """Split: a generator of its own reads the base and is sent adapters. Colocated: two ranks shard, and each has a
    whole copy."""
    changes = {"model": adapted(workspace), "algorithm": {"kl": KL}, "rollout": {"adapter": adapter}}
    inline = trained(workspace, rl_recipe(workspace, "inline", **changes))
    placement = {"launcher": "ray", "devices": 2, "layout": layout}
    recipe = rl_recipe(workspace, "workers", **changes, placement=placement)
    said = said_by("train", recipe, output=workspace.path / "said")
    assert "step 3: runs/workers" in said
    found = numbers(workspace.path / "runs" / "workers")
    for step, values in inline.items():
        for name in ("reward/mean", "loss", "grad_norm", "entropy", "kl/rollout_reference", "trained_tokens"):
            assert found[step][name] == pytest.approx(values[name], rel=1e-3, abs=1e-6), (step, name)
