# SPDX-License-Identifier: Apache-2.0
"""Rules about agents that are trained through the gateway: each gives a sentence with key path, value and fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from podium.recipe.algorithm import GrpoAlgorithm, PolicySection
from podium.recipe.on_policy import EnvironmentSection

if TYPE_CHECKING:
    from podium.recipe.recipes import OnPolicyRecipe


def agent_rules(recipe: OnPolicyRecipe, environment: EnvironmentSection) -> Iterator[str]:
    """What an agent excludes."""
    if environment.options and environment.verifiers is None:
        yield "environment.options: an agent is given none. Remove it, or read a file or a variable in the agent."
    if environment.max_episode_tokens is not None:
        yield (
            f"environment.max_episode_tokens: {environment.max_episode_tokens} has no meaning with an agent, which "
            "holds the conversation itself. Remove it; data.max_length limits each request."
        )
    if environment.hidden_tools:
        yield "environment.hidden_tools: an agent sends tools with its requests. Remove it."
    yield from _several_sequences(recipe)


def _several_sequences(recipe: OnPolicyRecipe) -> Iterator[str]:
    """An episode of an agent may have several token sequences, which have no common order."""
    if recipe.critic_section is not None:
        yield (
            f"environment.agent: {recipe.program} has a critic, which values one sequence of each episode, and an "
            "agent's episode may have several. Use grpo."
        )
    algorithm = recipe.algorithm
    if isinstance(algorithm, PolicySection) and algorithm.kl is not None and algorithm.kl.where == "reward":
        yield (
            "algorithm.kl.where: with the KL in the reward a token is trained with the KL of those after it, and the "
            "tokens of an agent's episode may branch. Set it to loss."
        )
    if isinstance(algorithm, GrpoAlgorithm) and algorithm.gamma != 1.0:
        yield (
            f"algorithm.gamma: {algorithm.gamma} discounts over the tokens of one sequence, and an agent's episode may "
            "have several. Remove it."
        )
    if recipe.rollout.router_replay == "on":
        yield (
            "rollout.router_replay: the gateway does not record which experts tokens went to. Set it to off with an "
            "agent."
        )
