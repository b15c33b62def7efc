# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes in programs with fixed data, and on several ranks over gloo: the gradients of whole documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from helpers.dense_steps import Case, DenseTask, random_rows, step_of
from helpers.engines import one_rank, relative_l2
from helpers.meshes import LORA
from helpers.on_policy import CASES, UpdateTask, update_on
from helpers.prefixes import episodes_with_prefixes, shared_update_rank, sharing_always
from helpers.tiny import save_tiny_model, tiny_config
from podium.recipe.dense import (
    DistillSection,
    IpoPreference,
    KtoPreference,
    OrpoPreference,
    RewardModelSection,
    SigmoidPreference,
)
from podium.spmd.launch import launch

SAME = 1e-5
DENSE = {
    "dpo": Case(section=SigmoidPreference(beta=0.3), source="live"),
    "ipo": Case(section=IpoPreference(beta=0.4), source="live"),
    "orpo, in chunks of the head": Case(section=OrpoPreference(beta=0.3), chunk=5),
    "kto": Case(section=KtoPreference(beta=0.3), source="live"),
    "reward model": Case(section=RewardModelSection(center=0.05)),
    "distill": Case(section=DistillSection(temperature=1.5)),
}


def save_critic(folder: Path) -> Path:
    torch.manual_seed(3)
    critic = transformers.AutoModelForSequenceClassification.from_config(tiny_config("qwen3", num_labels=1))
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    critic.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    save_tiny_model("qwen3", folder / "policy")
    save_tiny_model("qwen3", folder / "other", seed=1)
    save_critic(folder / "critic")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_programs_with_fixed_data_have_the_gradient_of_whole_documents(folder: Path, name: str) -> None:
    """Chosen and rejected share their prompt; other rows share what they happen to."""
    case = DENSE[name]
    task = DenseTask(
        policy=folder / "policy", scalar=folder / "critic", others=(folder / "other",), adapter=folder,
        stores=folder, pairs=random_rows("pairs"), labels=random_rows("labels") * 2, scores=random_rows("scores"),
        cases=DENSE,
    )  # fmt: skip
    plain = step_of(one_rank(), task, case)
    with sharing_always() as counts:
        shared = step_of(one_rank(), task, case)
    assert counts["computed"] < counts["packed"]
    assert relative_l2(shared.flat, plain.flat) < SAME
    assert shared.loss == pytest.approx(plain.loss, rel=1e-5)
    assert shared.averages == pytest.approx(plain.averages, rel=1e-4, abs=1e-5)
    assert shared.measured == pytest.approx(plain.measured, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, {"lora": LORA}], ids=["all weights", "adapter"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_have_the_gradients_of_one_that_does_not(folder: Path, ranks: int, model: dict) -> None:
    names = ("clipped", "gspo", "kl", "proximal", "token mask", "reinforce++", "imitation")
    task = UpdateTask(
        policy=folder / "policy", critic=folder / "critic", episodes=episodes_with_prefixes(folder / "policy"),
        cases={name: CASES[name] for name in names}, model=model,
    )  # fmt: skip
    alone = update_on(one_rank(), task)
    several, counts = launch(shared_update_rank, (task,), ranks=ranks, restarts=0, stop_file=folder / "stop")
    assert counts["computed"] < counts["packed"]
    for name in names:
        assert relative_l2(several.by_case[name].flat, alone.by_case[name].flat) < SAME, name
    assert relative_l2(several.four_steps, alone.four_steps) < SAME
    assert several.scored_T == pytest.approx(alone.scored_T, abs=2e-6)
    assert several.estimated.grad_norm == pytest.approx(alone.estimated.grad_norm, rel=SAME)
