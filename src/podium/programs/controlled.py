# SPDX-License-Identifier: Apache-2.0
"""Programs that the controller runs, by their names in the recipe."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from podium.controller.drive import ControlledProgram
from podium.programs.expert_iteration import expert_iteration
from podium.programs.grpo import grpo
from podium.programs.on_policy_distill import on_policy_distill
from podium.programs.ppo import ppo
from podium.recipe import plugins
from podium.recipe.programs import wrong_kind

PROGRAMS: Mapping[str, ControlledProgram] = {
    "grpo": grpo,
    "ppo": ppo,
    "on_policy_distill": on_policy_distill,
    "expert_iteration": expert_iteration,
}


def load_program(name: str) -> ControlledProgram:
    """A built-in program, or the custom one that the recipe names as `file.py:function`."""
    if name in PROGRAMS:
        return PROGRAMS[name]
    program = plugins.load(name, "program")
    if not inspect.iscoroutinefunction(program):
        raise wrong_kind(name, "on_policy")
    return program
