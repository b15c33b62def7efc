# SPDX-License-Identifier: Apache-2.0
"""What `podium check` says about a context axis, from a model's config alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.made_batches import on_policy_recipe
from helpers.recipes import make_recipe
from podium.checks import problems_of
from podium.errors import RecipeError


def problems(tmp_path: Path, model_type: str, heads: int = 4) -> list[str]:
    folder = tmp_path / model_type
    folder.mkdir()
    config = {"model_type": model_type, "num_attention_heads": heads, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    recipe = make_recipe(f"model.path={folder}", "placement.devices=8", "placement.policy={context: 4}")
    return [str(each) for each in problems_of(recipe) if "placement.policy" in str(each)]


@pytest.mark.parametrize(("model_type", "heads"), [("llama", 4), ("qwen3_moe", 3), ("gpt_oss", 64)])
def test_any_number_of_heads_is_accepted(tmp_path: Path, model_type: str, heads: int) -> None:
    assert not problems(tmp_path, model_type, heads)


def test_an_architecture_that_is_not_tested_is_refused_by_name(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "qwen3_next")
    assert "placement.policy.context: model.path: qwen3_next is not among the architectures that it divides" in problem
    assert "placement.policy.shard" in problem


def test_sizes_that_do_not_give_the_devices_are_refused_with_the_nearest_shape() -> None:
    with pytest.raises(RecipeError, match=r"replicate 1 × context 3 × tensor 1 = 3 does not divide 8 devices\. Use"):
        make_recipe("placement.devices=8", "placement.policy={context: 3}")


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_next"])
def test_every_model_of_an_on_policy_program_is_asked(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    reference = f"algorithm.kl={{coefficient: 0.1, reference: {tmp_path}}}"
    recipe = on_policy_recipe("placement.devices=2", "placement.policy={context: 2}", reference)
    found = [str(each) for each in problems_of(recipe) if "placement.policy" in str(each)]
    assert len(found) == (model_type == "qwen3_next")
    assert all("placement.policy.context: algorithm.kl.reference: qwen3_next is not among" in each for each in found)
