# SPDX-License-Identifier: Apache-2.0
"""`podium plan` for programs on fixed data, and options that a plan has no use for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.tiny import save_tiny_folder, write_chats
from podium.cli import app
from podium.errors import RecipeError, RunFolderError
from podium.planning.devices import device_named
from podium.planning.fixed_data_plans import fixed_data_step, suited
from podium.planning.plans import device_numbers, plan_recipe, plan_runs
from podium.recipe import SftRecipe, parse_recipe
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


QWEN_17B = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 40_960, "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip


def large(recipe: Path, **changes: object) -> SftRecipe:
    """The same with a model of 1.7B and documents of at most 2048 tokens."""
    values = json.loads(recipe.read_text())
    Path(values["model"], "config.json").write_text(json.dumps(QWEN_17B))
    values["data"]["max_length"] = 2048
    loaded = parse_recipe({**values, "tokens_per_step": 65_536, **changes})
    assert isinstance(loaded, SftRecipe)
    return loaded


def test_a_micro_batch_that_does_not_fit_is_halved_until_it_does(recipe: Path) -> None:
    """Weights, moments and sums of gradients take 29 GiB, logits 7, and 16,384 tokens 32 GiB of activations: 69 GiB.
    With 8,192 tokens it is 53 GiB."""
    found = plan_recipe(large(recipe), device_named("L40S:60"), steps=100)

    assert found.values["fits"] is False
    (choice,) = found.values["choices"]
    assert (choice["devices"], choice["micro_batch_tokens"], choice["micro_batches"]) == (1, 8192, 8)
    text = "\n".join(found.lines())
    assert "as it is, it cannot run. placement.devices: the run cannot fit one L40S of 60.0 GiB" in text
    assert "1 device with micro_batch_tokens: 8192: " in text
    with pytest.raises(RecipeError, match="cannot fit one L40S of 20"):
        plan_recipe(large(recipe), device_named("L40S:20"))


def test_a_larger_micro_batch_is_taken_where_it_gathers_less(recipe: Path) -> None:
    """Two learners on slow links: each micro-batch gathers all weights twice, and half as many halve that."""
    device = replace(device_named("H200"), link=5e9)
    own, best = fixed_data_step(large(recipe, placement={"devices": 2}), device), suited(large(recipe), device, 2)

    assert best is not None
    assert (own.micro_batch, own.passes, best.micro_batch, best.passes) == (None, 2, 32_768, 1)
    assert best.memory.share <= 0.95
    assert best.parts["collectives"] < own.parts["collectives"]
    fast = suited(large(recipe), device_named("H200"), 2)
    assert fast is not None
    assert fast.micro_batch is None  # nothing to gain


def test_numbers_of_devices_are_compared(recipe: Path) -> None:
    plan = plan_recipe(large(recipe), device_named("H100"), devices=(1, 4, 16), steps=3600)

    lines = [line for line in plan.lines() if " devices: " in line]
    assert [line.split()[0] for line in lines] == ["4", "16"]
    steps = {each["devices"]: each["step_s"] for each in plan.values["choices"]}
    assert steps[4] < steps[1]
    assert f"{4 * steps[4]:.3g} device-hours" in lines[0]


def test_a_run_that_generates_nothing_has_no_staleness(recipe: Path) -> None:
    run = ran(recipe, [400.0, 500.0, 600.0])
    with pytest.raises(RunFolderError, match=r"--staleness: .* is a run of sft, which generates nothing"):
        plan_runs([run], stalenesses=(1,))
    with pytest.raises(RunFolderError, match="a second --from: "):
        plan_runs([run, run])
    result = CliRunner().invoke(app, ["plan", "--from", str(run), "--staleness", "0"])
    assert isinstance(result.exception, RunFolderError)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
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
