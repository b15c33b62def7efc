# SPDX-License-Identifier: Apache-2.0
"""Program names of the recipe -> the functions that are the methods, of those that the controller runs."""

from __future__ import annotations

from podium.controller.drive import ControlledProgram
from podium.programs.expert_iteration import expert_iteration
from podium.programs.grpo import grpo
from podium.programs.on_policy_distill import on_policy_distill
from podium.programs.ppo import ppo

PROGRAMS: dict[str, ControlledProgram] = {
    "grpo": grpo,
    "ppo": ppo,
    "on_policy_distill": on_policy_distill,
    "expert_iteration": expert_iteration,
}
