# SPDX-License-Identifier: Apache-2.0
"""placement.policy: sizes of axes, and shapes that work in place of those that do not."""

from __future__ import annotations

import itertools

import pytest

from helpers.made_batches import on_policy_recipe
from helpers.recipes import make_recipe
from podium.errors import PlacementError, RecipeError
from podium.recipe.policy_mesh import MeshSizes, PolicyMeshSection, nearest, no_place


def test_shard_takes_the_devices_that_the_other_axes_leave() -> None:
    assert PolicyMeshSection().sizes(8) == MeshSizes(shard=8)
    assert PolicyMeshSection(replicate=2, tensor=2).sizes(8) == MeshSizes(replicate=2, shard=2, tensor=2)
    assert PolicyMeshSection(tensor=4).sizes(4) == MeshSizes(tensor=4)
    assert PolicyMeshSection(replicate=2, shard=4).sizes(8) == MeshSizes(replicate=2, shard=4)
    assert PolicyMeshSection(context=2, tensor=2).sizes(8) == MeshSizes(shard=2, context=2, tensor=2)


def test_sizes_count_ranks_data_and_parts() -> None:
    sizes = MeshSizes(replicate=2, shard=3, tensor=4)
    assert (sizes.devices, sizes.data_ranks, sizes.parts) == (24, 6, 12)
    sizes = MeshSizes(replicate=2, shard=3, context=5, tensor=4)  # ranks of a context have the same data, and shard
    assert (sizes.devices, sizes.data_ranks, sizes.parts) == (120, 6, 60)


@pytest.mark.parametrize(
    ("asked", "devices", "wanted"),
    [
        ({"replicate": 3, "shard": 2}, 8, "{replicate: 4, shard: 2, tensor: 1}"),
        ({"replicate": 3}, 8, "{replicate: 4, shard: 2, tensor: 1}"),
        ({"tensor": 3}, 4, "{replicate: 1, shard: 1, tensor: 4}"),
        ({"shard": 8, "tensor": 2}, 8, "{replicate: 1, shard: 8, tensor: 1}"),
        ({"shard": 0}, 4, "{replicate: 1, shard: 4, tensor: 1}"),
        ({"context": 3}, 8, "{replicate: 1, shard: 2, context: 4, tensor: 1}"),
        ({"context": 4, "tensor": 4}, 8, "{replicate: 1, shard: 1, context: 2, tensor: 4}"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_shape(
    asked: dict[str, int], devices: int, wanted: str
) -> None:
    with pytest.raises(PlacementError) as refused:
        PolicyMeshSection(**asked).sizes(devices)
    assert str(refused.value).endswith(f"Use {wanted}.")


def test_the_nearest_shape_always_has_the_devices() -> None:
    axes = itertools.product((1, 2, 3, 5), (-1, 1, 2, 7), (1, 2, 3), (1, 2, 6))
    for (replicate, shard, context, tensor), devices in itertools.product(axes, (1, 4, 6, 7, 8, 12)):
        section = PolicyMeshSection(replicate=replicate, shard=shard, context=context, tensor=tensor)
        found = nearest(section, devices)
        assert found.devices == devices
        if shard > 0 and replicate * shard * context * tensor == devices:
            assert found == MeshSizes(replicate=replicate, shard=shard, context=context, tensor=tensor)


def test_a_model_may_allow_some_sizes_of_the_tensor_axis_only() -> None:
    asked = PolicyMeshSection(shard=2, tensor=4)
    assert nearest(asked, 8, frozenset({1, 2})) == MeshSizes(shard=4, tensor=2)


def test_a_recipe_refuses_axes_that_do_not_give_its_devices() -> None:
    with pytest.raises(RecipeError, match=r"placement\.policy: replicate 1 × tensor 2 × shard 2 = 4, and there are 8"):
        make_recipe("placement.devices=8", "placement.policy={shard: 2, tensor: 2}")
    recipe = make_recipe("placement.devices=8", "placement.policy={shard: 2, tensor: 2, replicate: 2}")
    assert recipe.stored_values()["placement"]["policy"] == {"replicate": 2, "shard": 2, "context": 1, "tensor": 2}


def test_the_vocabulary_is_padded_so_that_the_tensor_axis_divides_it() -> None:
    with pytest.raises(RecipeError, match=r"model\.pad_vocab_to: 1 is no multiple .* Use 2\."):
        make_recipe("placement.devices=2", "placement.policy={tensor: 2}", "model.pad_vocab_to=1")


def test_on_policy_programs_have_the_axes_of_the_devices_that_learn() -> None:
    colocated = on_policy_recipe("placement.devices=4", "placement.policy={tensor: 2}")
    assert colocated.placement.mesh_sizes == MeshSizes(shard=2, tensor=2)
    split = ("placement.layout=split", "placement.devices=6", "placement.rollout_devices=2")
    apart = on_policy_recipe(*split, "placement.policy={tensor: 2, replicate: 2}")
    assert apart.placement.mesh_sizes == MeshSizes(replicate=2, tensor=2)
    assert on_policy_recipe(*split).placement.mesh_sizes == MeshSizes(shard=4)
    with pytest.raises(RecipeError, match=r"there are 4 devices\. Use \{replicate: 1, shard: 2, tensor: 2\}"):
        on_policy_recipe(*split, "placement.policy={shard: 3, tensor: 2}")


def test_the_vocabulary_of_an_on_policy_program_is_divided_too() -> None:
    with pytest.raises(RecipeError, match=r"model\.pad_vocab_to: 1 is no multiple .*Use 2\."):
        on_policy_recipe("placement.devices=2", "placement.policy={tensor: 2}", "model.pad_vocab_to=1")


def test_a_group_without_a_node_is_explained_in_words_of_the_recipe() -> None:
    error = no_place(4, "devices", MeshSizes(shard=2, tensor=2), PlacementError("pool train asks for too much."))
    assert str(error).splitlines() == [
        "placement.devices: 4 devices have no place. pool train asks for too much.",
        "The 2 ranks of a tensor group (placement.policy.tensor) share a node.",
    ]
    text = str(no_place(4, "devices", MeshSizes(shard=4), PlacementError("too much."), generator=2))
    assert text.endswith("\nThe 2 devices of a generator (placement.generator.tensor) share a node.")
    plain = no_place(4, "ranks", MeshSizes(shard=4), PlacementError("pool ranks asks for too much."))
    assert str(plain) == "placement.devices: 4 ranks have no place. pool ranks asks for too much."


def test_auto_is_a_word_beside_sizes() -> None:
    assert make_recipe("placement.devices=8", "placement.policy=auto").placement.policy == "auto"  # type: ignore[attr-defined]
    for wrong, sentence in {
        "automatic": r"placement\.policy: input should be 'auto', found 'automatic'",
        "{tensors: 2}": r"placement\.policy\.tensors: unknown key\. Did you mean placement\.policy\.tensor\?",
        "3": r"placement\.policy: expected keys and values, found 3",
    }.items():
        with pytest.raises(RecipeError, match=sentence):
            make_recipe("placement.devices=8", f"placement.policy={wrong}")


def test_learners_have_the_rules_of_ranks() -> None:
    assert on_policy_recipe("placement.devices=2", "placement.policy=auto").placement.policy == "auto"
    sentence = r"replicate 1 × context 3 × tensor 1 = 3 does not divide 2 devices\. Use"
    with pytest.raises(RecipeError, match=sentence):
        on_policy_recipe("placement.devices=2", "placement.policy={context: 3}")
