# SPDX-License-Identifier: Apache-2.0
"""Programs that every rank runs, by their names in the recipe."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from podium.programs.distill import distill
from podium.programs.dpo import dpo
from podium.programs.reward_model import reward_model
from podium.programs.sft import sft
from podium.recipe import plugins
from podium.recipe.programs import wrong_kind
from podium.spmd.rank import SpmdProgram

PROGRAMS: Mapping[str, SpmdProgram] = {"sft": sft, "dpo": dpo, "reward_model": reward_model, "distill": distill}


def load_program(name: str) -> SpmdProgram:
    """A built-in program, or the custom one that the recipe names as `file.py:function`."""
    if name in PROGRAMS:
        return PROGRAMS[name]
    program = plugins.load(name, "program")
    if inspect.iscoroutinefunction(program):
        raise wrong_kind(name, "fixed")
    return program
