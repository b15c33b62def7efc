# SPDX-License-Identifier: Apache-2.0
"""Whole runs on two ranks that replicate or divide the model, or divide tokens: the losses and answers of one rank,
and checkpoints that continue on any of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers.engines import relative_l2
from helpers.runs import STEPS, losses, tiny_recipe
from helpers.tiny import write_chats
from podium import api
from podium.engine.checkpoint import newest_usable
from podium.observe import read_metrics
from podium.recipe import Recipe

pytestmark = pytest.mark.slow
AXES = ("replicate", "tensor", "context")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "train.jsonl")


def recipe(model: Path, data: Path, runs: Path, name: str, axis: str | None) -> Recipe:
    placement = {} if axis is None else {"devices": 2, "policy": {axis: 2}}
    evaluation = {"every": 4, "max_documents": 6, "generation": {"prompts": 3, "max_new_tokens": 5}}
    return tiny_recipe(
        model, data, runs, name, placement=placement, evaluation=evaluation,
        data={"train": [{"path": str(data)}], "heldout": [{"path": str(data)}]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tiny_folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, axis in (("alone", None), *((axis, axis) for axis in AXES)):
        api.train(recipe(tiny_folder, data, folder, name, axis))
    return folder


@pytest.mark.parametrize("axis", AXES)
def test_a_run_on_two_ranks_has_the_losses_and_answers_of_one(runs: Path, axis: str) -> None:
    found, wanted = losses(runs / axis), losses(runs / "alone")
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, rel=1e-5)
    assert heldout(runs / axis) == pytest.approx(heldout(runs / "alone"), rel=1e-5)
    assert answers(runs / axis) == answers(runs / "alone")


@pytest.mark.parametrize("axis", AXES)
def test_its_export_is_what_a_single_device_exports(runs: Path, axis: str, tmp_path: Path, tiny_folder: Path) -> None:
    api.export(runs / axis, tmp_path / axis)
    api.export(runs / "alone", tmp_path / "alone")
    names = sorted(file.name for file in (tmp_path / "alone").iterdir())
    assert sorted(file.name for file in (tmp_path / axis).iterdir()) == names
    found, wanted = (tensors(tmp_path / each) for each in (axis, "alone"))
    assert found.keys() == wanted.keys()
    base = tensors(tiny_folder)
    assert any(not torch.equal(tensor, base[name]) for name, tensor in wanted.items()), "nothing was trained"
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        # AdamW divides the noise of very small gradients by their size, so single elements differ by more.
        assert relative_l2(found[name], tensor) < 5e-5, name


def test_a_run_continues_on_another_mesh(tiny_folder: Path, data: Path, tmp_path: Path, runs: Path) -> None:
    short = recipe(tiny_folder, data, tmp_path, "parts", "tensor").model_copy(update={"steps": 3})
    api.train(short)
    api.resume(tmp_path / "parts", overrides=["steps=6", "placement.policy={context: 2}"])
    api.resume(tmp_path / "parts", overrides=[f"steps={STEPS}", "placement.policy=null", "placement.devices=1"])
    assert losses(tmp_path / "parts") == pytest.approx(losses(runs / "alone"), rel=1e-5)
    assert newest_usable(tmp_path / "parts" / "checkpoints").step == STEPS


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def heldout(run: Path) -> list[float]:
    found = [metrics.values.get("heldout/loss") for metrics in read_metrics(run / "metrics.jsonl")]
    return [each for each in found if each is not None]


def answers(run: Path) -> list[str]:
    return [line for file in sorted(run.glob("samples*")) for line in file.read_text().splitlines()]
