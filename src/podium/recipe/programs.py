# SPDX-License-Identifier: Apache-2.0
"""The shape of each program's learning signal, which decides how the program is executed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from podium.recipe.schema import ProgramName


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalShape:
    """`density`: a loss at every token, or a score per episode. `data`: known in advance, or made by the weights."""

    density: Literal["dense", "sparse"]
    data: Literal["fixed", "on_policy"]

    @property
    def execution(self) -> Literal["spmd", "controlled"]:
        """Data decides: what is known in advance needs no controller."""
        return "spmd" if self.data == "fixed" else "controlled"


SIGNALS: dict[ProgramName, SignalShape] = {
    "sft": SignalShape(density="dense", data="fixed"),
    "dpo": SignalShape(density="sparse", data="fixed"),
    "reward_model": SignalShape(density="sparse", data="fixed"),
    "distill": SignalShape(density="dense", data="fixed"),
    "grpo": SignalShape(density="sparse", data="on_policy"),
    "ppo": SignalShape(density="sparse", data="on_policy"),
    "on_policy_distill": SignalShape(density="dense", data="on_policy"),
    "expert_iteration": SignalShape(density="sparse", data="on_policy"),
}
