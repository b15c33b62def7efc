# SPDX-License-Identifier: Apache-2.0
"""The progress of an on-policy run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from podium.recipe import OnPolicyRecipe

# No token that is trained has an older version.
_MOST_VERSIONS = 1_000


@dataclass(slots=True, kw_only=True)
class RunState:
    """State that steps leave for later steps. Only the controller's single task uses it; `commit` advances it."""

    step: int  # committed steps
    versions: list[int]  # of the policy's weights since the run began, the newest last and the oldest forgotten
    kl_coefficient: float
    skipped_in_a_row: int  # steps without a finite loss or gradient, where the run begins
    record: str | None = None  # digest of the last recorded step, where the run begins
    updated_steps: set[int] = field(default_factory=set)  # the step whose policy update is not committed yet
    updated_roles: set[str] = field(default_factory=set)  # policy, critic: those whose last update is not committed

    @property
    def version(self) -> int:
        """Of the policy's weights: the last step that changed them."""
        return self.versions[-1]

    def note_update(self) -> None:
        """The committed step has changed the weights."""
        self.versions = [*self.versions, self.step][-_MOST_VERSIONS:]

    @classmethod
    def begin(cls, recipe: OnPolicyRecipe, step: int = 0, saved: Mapping[str, Any] | None = None) -> RunState:
        """State of a new run, or after the step of a checkpoint that `saved` these values."""
        saved, kl = saved or {}, recipe.full_algorithm.kl
        coefficient = saved.get("kl_coefficient")
        if coefficient is None:
            coefficient = kl.coefficient if kl is not None else 0.0
        return cls(
            step=step,
            versions=[saved.get("version", step)],
            kl_coefficient=coefficient,
            skipped_in_a_row=saved.get("skipped_in_a_row", 0),
            record=saved.get("record"),
        )
