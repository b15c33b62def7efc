# SPDX-License-Identifier: Apache-2.0
"""A key that has another name now is refused with it."""

from __future__ import annotations

import re

import pytest

from podium.errors import RecipeError
from podium.recipe import parse_recipe
from podium.recipe.retired import RETIRED_KEYS, new_name


@pytest.mark.parametrize(("old", "new"), sorted(RETIRED_KEYS.items()))
def test_an_old_key_is_refused_with_its_new_name(old: str, new: str) -> None:
    section, key = old.split(".")
    with pytest.raises(RecipeError) as refused:
        parse_recipe({"program": "grpo", section: {key: 1}})
    assert re.search(rf"{old}: .*{new}\b", str(refused.value))


def test_the_new_name_is_given_inside_of_a_stage_too() -> None:
    assert new_name("stages.warm.rollout.page_tokens") == "stages.warm.rollout.block_size"
    assert new_name("rollout.block_size") is None
