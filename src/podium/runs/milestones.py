# SPDX-License-Identifier: Apache-2.0
"""Decides when a run saves and evaluates."""

from __future__ import annotations

from podium.recipe import Recipe


class Milestones:
    """Which steps save and evaluate, and which step was saved and evaluated last. Saving comes before evaluating,
    because an evaluation runs user code and may fail."""

    def __init__(self, recipe: Recipe, step: int, *, evaluates: bool) -> None:
        self._recipe, self._evaluates = recipe, evaluates
        self.saved_step = step
        self.evaluated_step: int | None = None

    def starts_with_evaluation(self, step: int) -> bool:
        """Whether a new run evaluates before its first step."""
        return step == 0 and self._recipe.evaluation.at_start and self.evaluated_step is None

    def save_is_due(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        return _is_due(self._recipe.checkpoint.every, step)

    def evaluation_is_due(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        return self._evaluates and _is_due(self._recipe.evaluation.every, step)

    def last_evaluation_is_due(self, step: int) -> bool:
        """Whether a run that finished all its steps still needs an evaluation."""
        return self._evaluates and step >= self._recipe.steps and self.evaluated_step != step


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
