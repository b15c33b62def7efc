# SPDX-License-Identifier: Apache-2.0
"""`podium plan` for programs on fixed data, and options that a plan has no use for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.tiny import save_tiny_folder, write_chats
from podium.cli import app
from podium.errors import RecipeError
from podium.planning.devices import device_named
from podium.planning.plans import device_numbers, plan_recipe, plan_runs
from podium.recipe.loading import load_recipe
from podium.runs.folder import RunFolder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "sft.yaml"
    values = {
        "program": "sft", "model": str(save_tiny_folder(tmp_path / "model")),
        "data": {"train": str(write_chats(tmp_path / "chats.jsonl"))}, "tokens_per_step": 64,
        "optimizer": {"lr": 1e-5}, "steps": 36, "run": {"name": "a", "folder": str(tmp_path / "runs")},
    }  # fmt: skip
    file.write_text(json.dumps(values))
    return file


def ran(recipe: Path, tokens: list[float]) -> Path:
    """A run whose steps take 0.2 s and 1 ms a token. The first one is not counted."""
    folder = RunFolder.create(load_recipe(recipe))
    lines = [
        {"step": step, "time_s": 1.7e9 + step, "step_s": 0.2 + count / 1000, "tokens": count}
        for step, count in enumerate([5000.0, *tokens], start=1)
    ]
    folder.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder.path


def test_the_parts_of_a_step_add_up(recipe: Path) -> None:
    plan = plan_recipe(load_recipe(recipe), device_named("H100"), steps=1000)

    assert sum(plan.values["parts_s"].values()) == pytest.approx(plan.values["step_s"])
    text = "\n".join(plan.lines())
    assert "a step of 64 tokens takes " in text
    assert " device-hours for 1,000 steps" in text
    assert "this is a lower bound" in text  # microseconds of products
    assert "its datasheet's" in text


def test_step_time_of_a_run_on_other_numbers_of_devices(recipe: Path) -> None:
    plan = plan_runs([ran(recipe, [400.0, 500.0, 600.0, 700.0, 800.0])], devices=(1, 4), steps=3600)

    assert plan.values["step_s"] == pytest.approx({1: 0.8, 4: 0.35})
    assert plan.title.endswith("sft on 1 device")
    assert "1 device: 800 ms a step, 750 tokens/s, 0.8 device-hours for 3,600 steps" in plan.lines()[3]
    assert not any("cannot be told" in line for line in plan.lines())


def test_equal_steps_do_not_tell_what_is_constant(recipe: Path) -> None:
    plan = plan_runs([ran(recipe, [600.0, 601.0, 600.0])])

    assert "cannot be told" in plan.lines()[-1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["RECIPE", "--devices", "2"], "--devices: sft generates nothing"),
        (["RECIPE", "--staleness", "1", "--grading", "0"], "--grading, --staleness: sft"),
        (["--from", "a", "--device", "H100", "--answer-tokens", "9"], "--device, --answer-tokens: only with a recipe"),
        (["--from", "a", "--set", "steps=2"], "--set: only with a recipe"),
        (["RECIPE", "--calibrate"], "--calibrate measures this machine"),
    ],
)
def test_options_without_use_are_refused(recipe: Path, arguments: list[str], text: str) -> None:
    changed = [str(recipe) if each == "RECIPE" else each for each in arguments]
    result = CliRunner().invoke(app, ["plan", *changed], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})

    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("│", " ").split())


def test_a_range_that_ends_before_it_begins_is_refused() -> None:
    assert device_numbers("3-3") == (3,)
    with pytest.raises(RecipeError, match="8-2 is not a number of devices"):
        device_numbers("8-2")
