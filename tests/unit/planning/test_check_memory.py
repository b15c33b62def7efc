# SPDX-License-Identifier: Apache-2.0
"""`podium check` refuses a run that cannot fit its device, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.tiny import save_tiny_folder, write_chats
from helpers.trials import write_prompts
from podium import api, cli
from podium.errors import RecipeError
from podium.planning import devices
from podium.planning.memory import BEGIN_ANYHOW, NAME_THE_DEVICE

LLAMA_70B = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Supervised fine-tuning of a folder whose config says 70B."""
    model = save_tiny_folder(tmp_path / "model")
    (model / "config.json").write_text(json.dumps(LLAMA_70B))
    file = tmp_path / "large.yaml"
    values = {
        "program": "sft", "model": str(model), "data": {"train": str(write_chats(tmp_path / "chats.jsonl"))},
        "optimizer": {"lr": 1e-5}, "steps": 2,
    }  # fmt: skip
    file.write_text(json.dumps(values))
    return file


def test_an_impossible_run_is_refused_for_a_named_device(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot fit one H100 SXM of 79\.1 GiB.*optimizer moments 525\.7 GiB"):
        api.check(recipe, device="H100")


def test_it_fits_enough_of_them(recipe: Path) -> None:
    changes = ["placement.devices=64", "model.activation_checkpointing=layers", "tokens_per_step=262144"]
    lines = api.check(recipe, device="H100", overrides=changes)

    assert next(line for line in lines if line.startswith("memory: ")).startswith(
        "memory: training step (learner) takes about "
    )


def test_a_tensor_group_larger_than_a_machine_is_refused_with_the_nearest_shape(recipe: Path) -> None:
    """The 70B model has 8 key-value heads, and machines of H200 have 8 devices."""
    wide = json.loads((recipe.parent / "model" / "config.json").read_text()) | {"num_key_value_heads": 64}
    (recipe.parent / "model" / "config.json").write_text(json.dumps(wide))
    changes = ["placement.devices=32", "model.activation_checkpointing=layers", "tokens_per_step=262144"]

    with pytest.raises(
        RecipeError, match=r"placement\.policy\.tensor: 16 devices compute every layer .* 8 devices"
    ) as refused:
        api.check(recipe, device="H200", overrides=[*changes, "placement.policy={tensor: 16}"])
    assert str(refused.value).endswith("Use placement.policy {replicate: 1, shard: 4, tensor: 8}.")
    api.check(recipe, device="H200", overrides=[*changes, "placement.policy={tensor: 8}"])


def test_a_generator_larger_than_a_machine_is_refused(tmp_path: Path) -> None:
    model = save_tiny_folder(tmp_path / "model")
    values = {
        "program": "grpo", "model": {"path": str(model), "pad_vocab_to": 64}, "steps": 1, "optimizer": {"lr": 1e-6},
        "data": {"train": str(write_prompts(tmp_path / "tasks.jsonl", 4))}, "reward": [{"verifier": "numeric"}],
        "rollout": {"prompts_per_step": 32, "samples_per_prompt": 2, "max_new_tokens": 8, "engine": "vllm"},
        "placement": {"devices": 32, "layout": "split", "generator": {"tensor": 16}},
    }  # fmt: skip
    (tmp_path / "grpo.yaml").write_text(json.dumps(values))
    with pytest.raises(RecipeError, match=r"placement\.generator\.tensor: 16 devices compute .* Use 8\."):
        api.check(tmp_path / "grpo.yaml", device="H200")


def test_stages_of_a_pipeline_are_compared_with_a_machine(recipe: Path) -> None:
    stage = json.loads(recipe.read_text()) | {"placement": {"devices": 32, "policy": {"tensor": 16}}}
    pipeline = recipe.parent / "pipeline.yaml"
    pipeline.write_text(json.dumps({"program": "pipeline", "stages": {"first": stage}}))

    with pytest.raises(RecipeError, match=r"stages\.first\.placement\.policy\.tensor: 16 devices compute every layer"):
        api.check(pipeline, device="H200")


def test_memory_of_this_machine_counts_where_there_is_no_gpu(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="cannot fit this machine's memory"):
        api.check(recipe, overrides=["placement.device=cpu"])


def test_a_gpu_that_is_not_here_is_not_judged(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_GPUS", recipe.parent / "absent")
    lines = api.check(recipe, overrides=["placement.device=cuda"])

    assert not any(line.startswith("memory") for line in lines)


def small_model(folder: Path) -> str:
    return str(save_tiny_folder(folder / "small"))


def pipeline_of(folder: Path, **stages: dict[str, Any]) -> Path:
    """Their file."""
    file = folder / "pipeline.yaml"
    file.write_text(json.dumps({"program": "pipeline", "stages": stages, "run": {"name": "all"}}))
    return file


def test_stages_that_cannot_fit_are_refused_by_name_with_their_largest_terms(recipe: Path) -> None:
    """Before a stage that fits and after it."""
    large = json.loads(recipe.read_text())
    small = large | {"model": small_model(recipe.parent)}
    one = pipeline_of(recipe.parent, small=small, large=large)

    with pytest.raises(RecipeError) as of_one:
        api.check(one, device="H100")
    with pytest.raises(RecipeError) as alone:
        api.check(recipe, device="H100")
    assert str(of_one.value) == f"stages.large.{alone.value}"
    assert "cannot fit one H100 SXM of 79.1 GiB" in str(of_one.value)
    assert "optimizer moments 525.7 GiB" in str(of_one.value)
    with pytest.raises(RecipeError, match=r"(?s)2 problems:\n  stages\.large\.placement.*\n  stages\.other\.placement"):
        api.check(pipeline_of(recipe.parent, large=large, small=small, other=large), device="H100")
    with pytest.raises(RecipeError, match="'H300' is not in the device table"):
        api.check(one, device="H300")


def test_a_stage_that_goes_on_has_the_shape_of_the_model_that_its_ancestors_began_with(
    recipe: Path, tmp_path: Path
) -> None:
    """The first two train adapters on 64 devices, and the third all weights of the same 70B on one."""
    values = json.loads(recipe.read_text())
    many = {"placement": {"devices": 64}, "tokens_per_step": 262_144, "data": values["data"], "optimizer": {"lr": 1e-4}}
    adapter = {"lora": {"rank": 8}, "activation_checkpointing": "layers"}
    first = values | many | {"model": {"path": values["model"], **adapter}}
    second = values | many | {"model": {"path": "${stage.first}", **adapter}}
    lines = api.check(pipeline_of(tmp_path, first=first, second=second), device="H100")
    memory = [line for line in lines if line.startswith("  memory: ")]
    assert len(memory) == 2
    assert memory[0] == memory[1]
    assert memory[0].startswith("  memory: training step (learner) takes about ")

    third = values | {"model": "${stage.second}"}
    with pytest.raises(RecipeError, match=r"^stages\.third\.placement\.devices: .*optimizer moments 525\.7 GiB"):
        api.check(pipeline_of(tmp_path, first=first, second=second, third=third), device="H100")


def test_other_models_that_stages_make_count_too(recipe: Path, tmp_path: Path) -> None:
    """A reward model of 70B beside a small policy: 525.7 GiB / 4 of bfloat16 weights, less 2.0 GiB of the head."""
    large = json.loads(recipe.read_text())
    prompts = str(write_prompts(tmp_path / "tasks.jsonl", 4))
    policy = {
        "program": "grpo", "model": small_model(tmp_path), "steps": 1, "optimizer": {"lr": 1e-6},
        "data": {"train": prompts}, "reward": [{"model": "${stage.judge}"}],
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 8},
    }  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    judge = {
        "program": "reward_model", "model": {"path": large["model"], "lora": {"rank": 8}}, "steps": 1,
        "data": {"train": str(tmp_path / "pairs.jsonl")}, "optimizer": {"lr": 1e-5},
        "placement": {"devices": 8},
    }  # fmt: skip
    with pytest.raises(RecipeError, match=r"^stages\.policy\.placement\.devices: .*reward models 129\.5 GiB"):
        api.check(pipeline_of(tmp_path, judge=judge, policy=policy), device="H100")


def test_a_stage_of_a_model_on_the_hub_is_not_predicted(recipe: Path, tmp_path: Path) -> None:
    first = json.loads(recipe.read_text()) | {"model": "owner/a-name-that-nobody-has"}
    second = first | {"model": "${stage.first}"}
    lines = api.check(pipeline_of(tmp_path, first=first, second=second), device="H100")
    told = "  memory: not predicted. model.path: owner/a-name-that-nobody-has is on the hub"
    assert sum(line.startswith(told) for line in lines) == 2


def test_training_a_pipeline_refuses_what_check_refuses_before_its_first_stage(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[str] = []
    monkeypatch.setattr(api, "_run_pipeline", lambda pipeline, folder, overwrite: run.append(folder.path.name))
    large = json.loads(recipe.read_text()) | {"placement": {"device": "cpu"}}
    small = large | {"model": small_model(recipe.parent)}
    file = pipeline_of(recipe.parent, small=small, large=large)
    with pytest.raises(RecipeError, match=r"(?m)^stages\.large\.placement\.devices: .*--ignore-memory` begins it\.$"):
        api.train(file)
    assert run == []
    api.train(file, ignore_memory=True)
    assert run == ["all"]


def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was begun: training itself is left out."""
    names: list[str] = []
    monkeypatch.setattr(api, "prepare", lambda recipe: recipe)
    monkeypatch.setattr(api, "begin", lambda prepared, overwrite: names.append(prepared.run.name))
    return names


def test_training_refuses_what_check_refuses_unless_told_not_to(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, cpu = begun(monkeypatch), ["placement.device=cpu"]
    with pytest.raises(RecipeError) as of_train:
        api.train(recipe, overrides=cpu)
    with pytest.raises(RecipeError) as of_check:
        api.check(recipe, overrides=cpu)

    assert names == []
    said, checked = str(of_train.value), str(of_check.value)
    assert said.endswith("If you know better, `podium train --ignore-memory` begins it.")
    assert said.removesuffix(BEGIN_ANYHOW) == checked.removesuffix(NAME_THE_DEVICE)
    assert of_train.value.__notes__ == ["in Python: podium.train(ignore_memory=True)"]
    api.train(recipe, overrides=cpu, ignore_memory=True)
    assert names == ["large"]


def test_the_command_insists_with_a_flag(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []
    monkeypatch.setattr(api, "train", lambda recipe, **options: given.append(options))
    monkeypatch.setattr(cli, "_report", lambda result: None)
    for arguments in ([], ["--ignore-memory"]):
        assert CliRunner().invoke(cli.app, ["train", str(recipe), *arguments]).exit_code == 0
    assert [options["ignore_memory"] for options in given] == [False, True]


def test_training_begins_what_the_planner_does_not_know(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture that is not known, a config without sizes, a GPU that is not in the table."""
    names = begun(monkeypatch)
    config = recipe.parent / "model" / "config.json"
    for changed in ({**LLAMA_70B, "model_type": "mamba"}, {"model_type": "llama"}, {**LLAMA_70B, "hidden_size": "?"}):
        config.write_text(json.dumps(changed))
        api.train(recipe, overrides=["placement.device=cpu"])
    config.write_text(json.dumps(LLAMA_70B))
    monkeypatch.setattr(devices, "_GPUS", recipe.parent / "absent")
    monkeypatch.setattr(devices, "_OTHER_GPUS", (recipe,))
    api.train(recipe)
    monkeypatch.setattr(devices, "_OTHER_GPUS", ())
    api.train(recipe, overrides=["placement.device=cuda"])
    assert names == ["large"] * 5
    with pytest.raises(RecipeError, match="cannot fit"):
        api.train(recipe)


def test_training_elsewhere_is_not_judged_by_this_machine(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = begun(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    on_ray = ["placement.device=cpu", "placement.launcher=ray"]
    api.train(recipe, overrides=on_ray)
    with pytest.raises(RecipeError, match="cannot fit"):
        api.train(recipe, overrides=["placement.device=cpu"])  # ranks are processes of this machine
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(RecipeError, match="cannot fit"):
        api.train(recipe, overrides=on_ray)
    for name, value in {"RANK": "0", "WORLD_SIZE": "64", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "a"}.items():
        monkeypatch.setenv(name, value)
    api.train(recipe, overrides=["placement.device=cpu"])
    assert names == ["large"] * 2


@pytest.mark.slow
def test_the_refusal_imports_no_torch(recipe: Path) -> None:
    stage = json.loads(recipe.read_text()) | {"placement": {"device": "cpu"}}
    pipeline = pipeline_of(recipe.parent, first=stage, second=stage | {"model": "${stage.first}"})
    code = (
        "import sys\nfrom podium import api\nfrom podium.errors import RecipeError\n"
        f"for file in {[str(recipe), str(pipeline)]!r}:\n"
        "    for call in (lambda: api.check(file, device='H100'), lambda: api.train(file, overwrite=True)):\n"
        "        try:\n            call()\n"
        "        except RecipeError as error:\n"
        "            assert 'cannot fit' in str(error)\n"
        "            print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "False False\n" * 4
