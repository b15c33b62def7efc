# SPDX-License-Identifier: Apache-2.0
"""Program names of the recipe -> the functions that are the methods."""

from __future__ import annotations

from podium.controller.drive import ControlledProgram
from podium.programs.distill import distill
from podium.programs.dpo import dpo
from podium.programs.expert_iteration import expert_iteration
from podium.programs.grpo import grpo
from podium.programs.on_policy_distill import on_policy_distill
from podium.programs.ppo import ppo
from podium.programs.reward_model import reward_model
from podium.programs.sft import sft
from podium.recipe.schema import ProgramName
from podium.spmd.rank import Program

PROGRAMS: dict[ProgramName, Program] = {"sft": sft, "dpo": dpo, "reward_model": reward_model, "distill": distill}
CONTROLLED: dict[ProgramName, ControlledProgram] = {
    "grpo": grpo,
    "ppo": ppo,
    "on_policy_distill": on_policy_distill,
    "expert_iteration": expert_iteration,
}
