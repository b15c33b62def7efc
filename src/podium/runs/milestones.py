# SPDX-License-Identifier: Apache-2.0
"""Decides when a run saves and evaluates."""

from __future__ import annotations

from collections.abc import Collection

from podium.recipe import Recipe

# A save that failed is tried again after 1, 2, 4, ... steps, and at most this many.
_LONGEST_PAUSE = 32


class Milestones:
    """Which steps save and evaluate, and which step was saved and evaluated last. Saving comes before evaluating,
    because an evaluation runs user code and may fail."""

    def __init__(
        self, recipe: Recipe, step: int, *, evaluates: bool, saved_step: int | None = None,
        restarted: bool = False, is_evaluated: bool = False,
    ) -> None:  # fmt: skip
        """`step`: after which the run begins. `saved_step`: its newest checkpoint, if that is another one (0: none).
        `restarted`: the run was killed after it, and `is_evaluated` says whether its evaluation was done by then."""
        self._recipe, self._evaluates, self._restarted = recipe, evaluates, restarted
        self.saved_step = step if saved_step is None else saved_step  # or the one that is being saved
        self.evaluated_step: int | None = step if is_evaluated else None
        self.is_saving = False  # as far as is known: the outcome of the last save was not reported yet
        self._whole_step = self.saved_step  # the last that is known to be saved
        self._retry_step: int | None = None
        self._num_failed = 0  # in a row

    @property
    def saving_step(self) -> int | None:
        """The step that is being saved, as far as is known; None: none is."""
        return self.saved_step if self.is_saving else None

    @property
    def whole_step(self) -> int | None:
        """The last step that is known to be saved; None: there is none."""
        return self._whole_step or None

    def starts_with_evaluation(self, step: int) -> bool:
        """Whether the run evaluates before its first step: a new one that is asked to, and a restarted one that was
        killed in an evaluation."""
        if self.evaluated_step == step:
            return False
        return self._recipe.evaluation.at_start if step == 0 else self._restarted and self.evaluation_is_due(step)

    def starts_with_save(self, step: int) -> bool:
        """Whether a restarted run first writes a checkpoint: the last one that was due was not complete when the run
        was killed."""
        every = self._recipe.checkpoint.every
        return self._restarted and every is not None and self.saved_step < step - step % every

    def save_is_due(self, step: int) -> bool:
        """Whether a checkpoint follows this step: it is due, or the last one failed and is tried again."""
        if self._retry_step is not None:
            return step >= self._retry_step
        return _is_due(self._recipe.checkpoint.every, step)

    def saving(self, step: int) -> None:
        """A save of this step has begun."""
        self.saved_step, self.is_saving = step, True

    def save_is_whole(self) -> bool:
        """The save that was begun last is complete. Returns whether one before it had failed."""
        had_failed = self._num_failed > 0
        self._whole_step, self.is_saving = self.saved_step, False
        self._retry_step, self._num_failed = None, 0
        return had_failed

    def save_failed(self, step: int) -> int:
        """The save that was begun last failed, as is known after `step`. Returns the step that tries again."""
        self.saved_step, self.is_saving = self._whole_step, False
        self._retry_step = step + min(2**self._num_failed, _LONGEST_PAUSE)
        self._num_failed += 1
        return self._retry_step

    def forget_saved(self, step: int) -> None:
        """All checkpoints are gone: the next step saves, also if one is being saved now."""
        self._whole_step, self._retry_step = 0, step + 1
        if not self.is_saving:
            self.saved_step = 0

    def rewound(self, saved: Collection[int]) -> None:
        """The run goes on with other workers, after a step that it may not have saved or evaluated. A save that the old
        ones had begun is begun again, unless its step is among those that are `saved` by now."""
        self._restarted = True
        if self.is_saving and self.saved_step in saved:
            self.save_is_whole()
        elif self.is_saving:
            self.saved_step, self.is_saving = self._whole_step, False

    def goes_on_after(self, step: int) -> None:
        """What the run did after this step is not there any more: checkpoints of later steps were damaged, and are set
        aside. Without this they would not be saved again."""
        if self._whole_step > step:
            self._whole_step = 0  # an older one may be there: a restarted run saves at once, and need not know
        if self.saved_step > step:
            self.saved_step = self._whole_step
        if self.evaluated_step is not None and self.evaluated_step > step:
            self.evaluated_step = None

    def evaluation_is_due(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        return self._evaluates and _is_due(self._recipe.evaluation.every, step)

    def last_evaluation_is_due(self, step: int) -> bool:
        """Whether a run that finished all its steps still needs an evaluation."""
        return self._evaluates and step >= self._recipe.steps and self.evaluated_step != step


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
