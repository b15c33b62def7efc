# SPDX-License-Identifier: Apache-2.0
"""`rollout.adapter: auto`, and the memory of merged weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.adapters import save_peft_adapter
from helpers.engines import one_rank
from helpers.tiny import save_tiny_model
from podium.engine.sharding import place
from podium.models.causal_lm import load_config
from podium.planning import adapter_choice
from podium.planning.adapter_choice import choose_adapter, with_chosen_adapter
from podium.planning.devices import GIB, Device, device_named
from podium.planning.memory import memory_of, refusal
from podium.planning.plans import plan_recipe
from podium.recipe import ModelSection, OnPolicyRecipe, apply_overrides, parse_recipe
from podium.recipe.changes import changes, what_matters

QWEN_8B = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False, "max_position_embeddings": 40_960,
}  # fmt: skip
# Of one layer: queries and outputs, keys and values, the MLP.
MERGED = 2 * 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12_288)
H200, H100 = device_named("H200"), device_named("H100")


def grpo(folder: Path, *overrides: str) -> OnPolicyRecipe:
    values = {
        "program": "grpo", "model": {"path": str(folder), "lora": {"rank": 32}},
        "data": {"train": [{"path": "d.jsonl"}], "max_length": 512}, "optimizer": {"lr": 1e-5},
        "reward": [{"verifier": "exact_match"}], "steps": 3, "rollout": {"adapter": "auto"},
    }  # fmt: skip
    recipe = parse_recipe(apply_overrides(values, overrides))
    assert isinstance(recipe, OnPolicyRecipe)
    return recipe


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_8B))
    return tmp_path


def merged_bytes(recipe: OnPolicyRecipe, device: Device) -> dict[tuple[str, str], int]:
    return {(each.phase, each.place): each.of("merged weights") for each in memory_of(recipe, device).phases}


def test_an_8b_on_an_h200_is_merged_and_the_plan_says_so(qwen: Path) -> None:
    choice = choose_adapter(grpo(qwen), H200)
    assert choice.adapter == "merged"
    assert choice.text.startswith(f"rollout.adapter: auto is merged: its weights take {MERGED / GIB:.1f} GiB")
    assert merged_bytes(grpo(qwen), H200) == {("rollout", "learner"): MERGED, ("update", "learner"): 0}  # it sleeps
    assert any("auto is merged" in line for line in plan_recipe(grpo(qwen), H200).lines())


def test_it_is_apart_where_the_cache_would_lose_a_quarter_of_its_size(qwen: Path) -> None:
    # 16 GiB of weights and 14 GiB of merged ones leave a GPU of 40 GiB too little.
    recipe = grpo(qwen, "micro_batch_tokens=1024")
    choice = choose_adapter(recipe, replace(H100, memory_bytes=40 * GIB))
    assert choice.adapter == "apart"
    assert "would leave a KV cache of" in choice.text
    choice = choose_adapter(recipe, replace(H100, memory_bytes=24 * GIB))
    assert choice.adapter == "apart"
    assert "the rollout takes" in choice.text


def test_cpus_and_divided_generators_keep_it_apart(qwen: Path) -> None:
    cpu = Device(name="CPU", kind="cpu", memory_bytes=400 * GIB, matrix_flops=1e9, bandwidth=1e9)
    assert choose_adapter(grpo(qwen), cpu).text == "rollout.adapter: auto is apart: merged weights are for GPUs"
    divided = grpo(qwen, "placement={devices: 2, policy: {tensor: 2}, generator: {tensor: 2}}")
    assert "divided over several" in choose_adapter(divided, H200).text


def test_what_cannot_fit_with_them_is_told_to_keep_it_apart(qwen: Path) -> None:
    recipe = grpo(qwen, "rollout.adapter=merged", "micro_batch_tokens=1024")
    problem = refusal(memory_of(recipe, replace(H100, memory_bytes=24 * GIB)), recipe)
    assert problem is not None
    assert "set rollout.adapter to apart" in str(problem)


@pytest.mark.parametrize("layout", ["split", "elastic"])
def test_every_generator_of_its_own_has_them(qwen: Path, layout: str) -> None:
    found = merged_bytes(grpo(qwen, f"placement={{layout: {layout}, devices: 2}}", "rollout.adapter=merged"), H200)
    assert found.pop(("rollout", "generator")) == MERGED
    assert found.pop(("update", "learner")) == 0
    assert set(found.values()) == ({MERGED} if layout == "elastic" else set())


def test_the_choice_is_saved_and_only_merged_is_another_run(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = grpo(qwen)
    monkeypatch.setattr(adapter_choice, "found_device", lambda kind: H200)
    merged, text = with_chosen_adapter(recipe, is_here=True)
    assert merged.stored_values()["rollout"]["adapter"] == "merged"
    assert "is merged" in text
    apart, text = with_chosen_adapter(recipe, is_here=False)
    assert apart.rollout.adapter == "apart"
    assert "Ray cluster" in text
    monkeypatch.setattr(adapter_choice, "found_device", lambda kind: None)
    assert with_chosen_adapter(recipe, is_here=True)[0].rollout.adapter == "apart"
    assert what_matters(recipe) == what_matters(apart) != what_matters(merged)
    (change,) = changes(merged, apart)
    assert (change.key, change.breaks) == ("rollout.adapter", "the steps already taken used the old value")


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("has_folder", [False, True])
def test_the_bytes_are_the_engines_own(tmp_path: Path, kind: str, has_folder: bool) -> None:
    from podium.rollout.native.merged_copy import MergedCopy

    folder = save_tiny_model(kind, tmp_path / "model")
    lora: dict[str, Any] = {"rank": 4}
    if has_folder:
        targets = ["q_proj", "v_proj"]
        lora = {"adapter": str(save_peft_adapter(folder, tmp_path / "adapter", target_modules=targets))}
    section = ModelSection(path=str(folder), lora=lora, dtype="float32")
    model, _ = place(section, folder, one_rank(), seed=0)
    copy = MergedCopy(model, section, load_config(folder, trust_remote_code=False), one_rank().device)
    recipe = grpo(folder, "rollout.adapter=merged", "model.dtype=float32", "data.max_length=64",
        "rollout.max_new_tokens=16", *(f"model.lora.{key}={value}" for key, value in lora.items()),
    )  # fmt: skip
    assert merged_bytes(recipe, H200)["rollout", "learner"] == copy.nbytes
