# SPDX-License-Identifier: Apache-2.0
"""What `podium check` says about a tensor axis, from a model's config alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.made_batches import on_policy_recipe
from helpers.recipes import make_recipe
from podium.checks import problems_of
from podium.models.tensor_plan import possible_sizes, undivided

CONFIG = {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 48}


def problems(tmp_path: Path, tensor: int, **config: Any) -> list[str]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    recipe = make_recipe(
        f"model.path={folder}", "placement.devices=8", f"placement.policy={{shard: {8 // tensor}, tensor: {tensor}}}"
    )
    return [str(each) for each in problems_of(recipe) if "placement.policy" in str(each)]


def test_heads_that_do_not_divide_are_refused_with_the_nearest_shape(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, 4)
    assert "placement.policy.tensor: 4 does not divide num_key_value_heads 2 of model.path" in problem
    assert problem.endswith("Use placement.policy {replicate: 1, shard: 4, tensor: 2}.")


def test_on_policy_programs_are_refused_by_the_devices_that_learn_and_by_models_beside(tmp_path: Path) -> None:
    for name, heads in (("model", 4), ("judge", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, "num_key_value_heads": heads}))
    recipe = on_policy_recipe(
        f"model.path={tmp_path / 'model'}", f"reward=[{{model: {tmp_path / 'judge'}}}]", "placement.layout=split",
        "placement.devices=6", "placement.rollout_devices=2", "placement.policy={tensor: 4}",
    )  # fmt: skip
    (problem,) = [str(each) for each in problems_of(recipe) if "placement.policy" in str(each)]
    assert "placement.policy.tensor: 4 does not divide num_key_value_heads 2 of reward.0.model" in problem
    assert problem.endswith("Use placement.policy {replicate: 1, shard: 2, tensor: 2}.")


def test_what_divides_is_accepted(tmp_path: Path) -> None:
    assert not problems(tmp_path, 2)


def test_an_architecture_without_a_tested_plan_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, 2, model_type="phimoe")
    assert "phimoe is not among the architectures that it divides" in problem
    assert "placement.policy.shard" in problem


def test_the_text_part_of_a_multimodal_config_counts(tmp_path: Path) -> None:
    text = {**CONFIG, "model_type": "gemma3_text", "num_key_value_heads": 3}
    (problem,) = problems(tmp_path, 2, model_type="gemma3", text_config=text)
    assert "num_key_value_heads 3" in problem


def test_the_experts_of_a_mixture_divide_and_their_width_need_not(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "num_key_value_heads": 8, "moe_intermediate_size": 9, "intermediate_size": 3}
    (problem,) = problems(tmp_path, 4, **config, num_experts=6)
    assert "placement.policy.tensor: 4 does not divide number of experts 6 of model.path" in problem
    assert problem.endswith("Use placement.policy {replicate: 1, shard: 4, tensor: 2}.")


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, ["intermediate_size 9"]),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [], "decoder_sparse_step": 2}, ["intermediate_size 9"]),
        ({"model_type": "qwen3_moe"}, []),
        ({"model_type": "mixtral"}, []),
        ({"model_type": "glm4_moe", "first_k_dense_replace": 0}, []),
        ({"model_type": "glm4_moe"}, ["intermediate_size 9"]),
        ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 7}, ["shared_expert_intermediate_size 7"]),
        (
            {
                "model_type": "deepseek_v3",
                "first_k_dense_replace": 1,
                "moe_intermediate_size": 3,
                "n_shared_experts": 1,
            },
            ["intermediate_size 9", "moe_intermediate_size × n_shared_experts 3"],
        ),
    ],
)
def test_dense_layers_and_shared_experts_of_a_mixture_divide_by_width(config: dict[str, Any], left: list[str]) -> None:
    assert undivided({"num_attention_heads": 4, "intermediate_size": 9, "num_experts": 4, **config}, 2) == left


@pytest.mark.parametrize(("size", "left"), [(1, []), (2, []), (3, ["num_attention_heads 8", "num_key_value_heads 2"])])
def test_sizes_that_divide_heads_and_width(size: int, left: list[str]) -> None:
    assert undivided(CONFIG, size) == left


def test_without_key_value_heads_the_heads_count() -> None:
    config = {"num_attention_heads": 6, "intermediate_size": 12}
    assert possible_sizes(config, 8) == {1, 2, 3, 6}
