# SPDX-License-Identifier: Apache-2.0
"""What `podium check` says about divided experts, from sizes and a model's config alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.engines import one_rank
from helpers.recipes import make_recipe
from podium.checks import problems_of
from podium.engine.sharding import place
from podium.errors import ModelError, PlacementError, RecipeError
from podium.models.expert_axis import ExpertAxis, ExpertGroups
from podium.models.expert_plan import nearest, num_experts
from podium.recipe import ModelSection
from podium.recipe.policy_mesh import MeshSizes, with_experts


def problems(tmp_path: Path, *settings: str, **config: Any) -> list[str]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 4, **config}))
    recipe = make_recipe(f"model.path={folder}", *settings)
    return [str(each) for each in problems_of(recipe) if "placement.experts" in str(each)]


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("qwen3_moe", "num_experts"), ("gpt_oss", "num_local_experts"), ("deepseek_v3", "n_routed_experts")],
)
def test_experts_that_divide_are_accepted(tmp_path: Path, model_type: str, name: str) -> None:
    assert not problems(tmp_path, "placement.devices=8", "placement.experts=4", model_type=model_type, **{name: 12})


def test_a_number_that_does_not_divide_the_experts_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (problem,) = problems(
        tmp_path, "placement.devices=8", "placement.experts=8", model_type="qwen3_moe", num_experts=12
    )
    assert "placement.experts: 8 does not divide the 12 experts of model.path" in problem
    assert problem.endswith("Use 4.")


def test_beside_a_tensor_axis_each_part_of_the_experts_divides(tmp_path: Path) -> None:
    settings = ("placement.devices=8", "placement.policy={tensor: 2}", "placement.experts=4")
    sizes = {"model_type": "qwen3_moe", "num_key_value_heads": 4}
    (problem,) = problems(tmp_path, *settings, num_experts=12, **sizes)
    assert "placement.experts: 4 does not divide the 6 experts of a tensor part of model.path" in problem
    assert problem.endswith("Use 2.")
    (tmp_path / "other").mkdir()
    assert not problems(tmp_path / "other", *settings, num_experts=16, **sizes)


def test_dense_models_and_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    settings = ("placement.devices=2", "placement.experts=2")
    (problem,) = problems(tmp_path, *settings, model_type="qwen3")
    assert "has no experts. Remove it." in problem
    (tmp_path / "other").mkdir()
    (problem,) = problems(tmp_path / "other", *settings, model_type="jamba", num_experts=4)
    assert "jamba is not among the mixtures of experts that it divides (deepseek_v3, " in problem


def test_a_dense_model_that_check_has_not_seen_is_refused_when_it_is_placed(tiny_folder: Path) -> None:
    """One of the hub. A dense model that is not trained may stand beside a mixture."""
    group: Any = None
    axis = ExpertAxis(group=group, rank=0, size=2)
    mesh, section = replace(one_rank(), experts=ExpertGroups(holders=axis, exchange=axis)), ModelSection(path="a/b")
    with pytest.raises(ModelError, match=r"placement\.experts: 2 is for mixtures, and a/b has no experts"):
        place(section, tiny_folder, mesh, seed=0)
    place(section, tiny_folder, mesh, seed=0, masters=False)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (
            ("placement.devices=8", "placement.experts=3"),
            r"does not divide the 8 ranks of shard 8 × context 1\. Use 4\.",
        ),
        (("placement.experts=2",), r"does not divide the 1 ranks .* Use 1\."),
        (
            ("placement.devices=8", "placement.policy={replicate: 4}", "placement.experts=4"),
            r"does not divide the 2 ranks of shard 2 × context 1\. Use 2\.",
        ),
        (
            ("placement.devices=4", "placement.policy={tensor: 2}", "placement.experts=4"),
            r"does not divide the 2 ranks of shard 2 × context 1\. Use 2\.",
        ),
        (("placement.devices=4", "placement.policy=auto", "placement.experts=2"), r"placement\.policy is auto"),
        (("placement.experts=0",), r"placement\.experts"),
    ],
)
def test_bad_sizes_are_refused_with_what_works(settings: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(RecipeError, match=wanted):
        make_recipe(*settings)


def test_context_ranks_hold_experts_too() -> None:
    assert with_experts(MeshSizes(shard=2, context=2), 4).experts == 4
    with pytest.raises(PlacementError, match=r"Use 4\."):
        with_experts(MeshSizes(shard=2, context=2), 8)


def test_experts_are_counted_by_any_name() -> None:
    assert num_experts({"moe_num_experts": 6}) == 6
    assert num_experts({"num_experts": None, "n_routed_experts": 5}) == 5
    assert num_experts({"hidden_size": 3}) == 0
    assert nearest(5, 12, 8) == 4
