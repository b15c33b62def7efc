# SPDX-License-Identifier: Apache-2.0
"""`podium try`: a dry run of a recipe that generates. A few episodes in one process, with its real rewards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from podium.checks import check_recipe
from podium.cluster.blocking import run_to_end
from podium.environments.reward_columns import require_reward_columns
from podium.errors import RecipeError
from podium.recipe import OnPolicyRecipe, Recipe

if TYPE_CHECKING:
    from podium.controller.trial import Trial

# Of a stand-in, where the recipe has no data.max_length.
_MAX_LENGTH = 4096


def run_trial(
    recipe: Recipe, *, num_prompts: int, samples: int, stand_in: bool, warn: Callable[[str], None] = lambda text: None
) -> Trial:
    """Checks the recipe, then generates and grades. With `stand_in`, a tiny random model has the place of the recipe's
    own, and reward models are left out."""
    if not isinstance(recipe, OnPolicyRecipe):
        raise RecipeError(
            f"program: {recipe.program} generates no episodes, so there is nothing to try. `podium check --deep` shows "
            "what it trains on."
        )
    check_recipe(recipe)
    require_reward_columns(recipe)
    with tempfile.TemporaryDirectory(prefix="podium-try-") as scratch:
        tried = _with_stand_in(recipe, Path(scratch)) if stand_in else recipe
        from podium.models.folder import local_folder, read_config
        from podium.recipe.resolving import resolved

        folder = local_folder(tried.model.path, "model.path")
        tried = resolved(tried, read_config(folder, "model.path"))
        assert isinstance(tried, OnPolicyRecipe)
        from podium.controller.trial import try_episodes  # heavy: imported after all cheap checks

        return run_to_end(try_episodes(tried, num_prompts=num_prompts, samples=samples, warn=warn))


def _with_stand_in(recipe: OnPolicyRecipe, scratch: Path) -> OnPolicyRecipe:
    from podium.models.stand_in import make_stand_in

    model = make_stand_in(recipe.model, scratch, max_length=recipe.data.max_length or _MAX_LENGTH)
    rewards = tuple(reward for index, reward in enumerate(recipe.reward) if index not in recipe.device_rewards)
    return recipe.model_copy(update={"model": model, "reward": rewards})
