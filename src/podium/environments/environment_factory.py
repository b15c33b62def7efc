# SPDX-License-Identifier: Apache-2.0
"""The factory of environments of a recipe: of a custom class, of tools, of another package, or of a single turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from podium.environments.agents import agent_maker
from podium.environments.episode import MakeEnvironment
from podium.environments.gymnasium_episodes import GymnasiumEnvironment, GymnasiumSpec
from podium.environments.openenv_episodes import OpenEnvEnvironment, OpenEnvSpec
from podium.environments.protocol import SingleTurn
from podium.environments.signatures import require_options_of
from podium.environments.tools import ToolEnvironment, load_tools
from podium.environments.verifiers_episodes import VerifiersAgent, VerifiersHost
from podium.errors import RecipeError
from podium.recipe import plugins
from podium.recipe.on_policy import EnvironmentSection


def environment_maker(section: EnvironmentSection | None, key: str = "environment") -> MakeEnvironment:
    """The factory of environments, one for each episode, from a recipe's section: a custom class, tools, an
    environment of another package, or (no section) a single turn."""
    if section is None:
        return SingleTurn
    if section.verifiers is not None:
        player: Callable[[], Any] = partial(VerifiersAgent, VerifiersHost(section, section.verifiers, key))
        return player  # it has no `step`, as all agents
    if section.is_agent:
        return agent_maker(section, key)
    if section.gymnasium is not None:
        return partial(GymnasiumEnvironment, GymnasiumSpec.of(section.gymnasium, section.options, key))
    if section.openenv is not None:
        return partial(OpenEnvEnvironment, OpenEnvSpec.of(section, section.openenv, key))
    if section.environment is None:
        tools = load_tools(section.tools, f"{key}.tools")
        options = {"timeout_s": section.timeout_s, **section.options}
        try:
            ToolEnvironment(tools, **options)
        except TypeError as error:
            raise RecipeError(
                f"{key}.options: tools cannot be run with these ({error}). They take max_chars, max_calls and role."
            ) from error
        return lambda: ToolEnvironment(tools, **options)
    factory: Any = plugins.load(section.environment, f"{key}.environment")
    for name in ("reset", "step"):
        if isinstance(factory, type) and not callable(getattr(factory, name, None)):
            raise RecipeError(
                f"{key}.environment: {section.environment} has no method {name!r}. An environment has reset(task) and "
                "step(turn), see docs/environments.md."
            )
    require_options_of(factory, section.options, f"{key}.options")
    return lambda: factory(**section.options)
