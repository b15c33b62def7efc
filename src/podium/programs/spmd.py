# SPDX-License-Identifier: Apache-2.0
"""Program names of the recipe -> the functions that are the methods, of those that every rank runs."""

from __future__ import annotations

from podium.programs.distill import distill
from podium.programs.dpo import dpo
from podium.programs.reward_model import reward_model
from podium.programs.sft import sft
from podium.spmd.rank import Program

PROGRAMS: dict[str, Program] = {"sft": sft, "dpo": dpo, "reward_model": reward_model, "distill": distill}
