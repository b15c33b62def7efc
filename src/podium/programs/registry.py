# SPDX-License-Identifier: Apache-2.0
"""Program names of the recipe -> the functions that are the methods."""

from __future__ import annotations

from podium.programs.sft import sft
from podium.recipe.schema import ProgramName
from podium.spmd.rank import Program

PROGRAMS: dict[ProgramName, Program] = {"sft": sft}
