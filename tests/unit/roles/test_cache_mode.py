# SPDX-License-Identifier: Apache-2.0
"""A generator does with the cache of running sequences what the recipe says, whatever it is told."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from podium.controller.scheduling import OnNewWeights
from podium.errors import InvariantError
from podium.roles.generator import check_cache_mode


@pytest.mark.parametrize("on_new_weights", get_args(OnNewWeights))
def test_a_generator_keeps_a_cache_only_if_the_recipe_says_so(on_new_weights: Any) -> None:
    check_cache_mode("recompute", on_new_weights)  # also of a generator that has just started
    if on_new_weights == "keep":
        check_cache_mode("keep", on_new_weights)
        return
    with pytest.raises(InvariantError, match=f"rollout.on_new_weights is {on_new_weights}"):
        check_cache_mode("keep", on_new_weights)
