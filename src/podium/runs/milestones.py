# SPDX-License-Identifier: Apache-2.0
"""When a run saves and evaluates."""

from __future__ import annotations

from podium.recipe import Recipe


class Milestones:
    """What is due at which step, and which step was saved and evaluated last. A step that is saved and evaluated is
    saved first: an evaluation runs the user's code, and may fail."""

    def __init__(self, recipe: Recipe, step: int, *, evaluates: bool) -> None:
        self._recipe, self._evaluates = recipe, evaluates
        self.saved_step = step
        self.evaluated_step: int | None = None

    def starts_with_evaluation(self, step: int) -> bool:
        """Before the first step of a new run, if the recipe says so."""
        return step == 0 and self._recipe.evaluation.at_start

    def save_is_due(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        return _is_due(self._recipe.checkpoint.every, step)

    def evaluation_is_due(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        return self._evaluates and _is_due(self._recipe.evaluation.every, step)

    def last_evaluation_is_due(self, step: int) -> bool:
        """At the end of a run whose steps are all done."""
        return self._evaluates and step >= self._recipe.steps and self.evaluated_step != step


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
