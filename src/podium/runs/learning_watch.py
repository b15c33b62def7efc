# SPDX-License-Identifier: Apache-2.0
"""Watches the metrics of a run for steps that cannot learn, and says once what happens and why that may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from podium.recipe import OnPolicyRecipe, Recipe
from podium.recipe.algorithm import GrpoAlgorithm

# Steps in a row from which on equal rewards are no accident: at the beginning, and in a run that has learned before.
_FIRST_STEPS, _LATER_STEPS = 3, 10
# Learning rates above what any method uses, and so far above that weights do not survive them.
_LARGE_LR, _HUGE_LR = 0.1, 1.0
# Below this temperature the samples of a prompt are mostly the same.
_LOW_TEMPERATURE = 0.3
# From this share of truncated answers on, the limit is a likely cause.
_MOSTLY = 0.9


@dataclass(slots=True)
class _InARow:
    """Number of consecutive steps for which something holds. `seen_other`: it did not hold in an earlier step."""

    count: int = 0
    seen_other: bool = False

    def add(self, holds: bool) -> None:
        self.seen_other = self.seen_other or not holds
        self.count = self.count + 1 if holds else 0

    def is_long(self, lr: float) -> bool:
        """Whether this is no accident. With a huge learning rate it never is."""
        return self.count >= (_LATER_STEPS if self.seen_other and lr < _HUGE_LR else _FIRST_STEPS)


class LearningWatch:
    """Receives the metrics of every step, in order. Each cause is reported once in the life of the process."""

    def __init__(
        self,
        *,
        compares_groups: bool = False,
        learns_from_rewards: bool = False,
        samples_per_prompt: int = 1,
        temperature: float = 1.0,
    ) -> None:
        """`compares_groups`: only differences within a group of samples give advantages."""
        self._compares_groups, self._learns_from_rewards = compares_groups, learns_from_rewards
        self._samples, self._temperature = samples_per_prompt, temperature
        self._equal, self._uniform, self._no_gradient, self._same_loss = (_InARow() for _ in range(4))
        self._reward: float | None = None
        self._loss: float | None = None
        self._reported: set[str] = set()

    @classmethod
    def of(cls, recipe: Recipe) -> LearningWatch:
        """The watch of a recipe."""
        if not isinstance(recipe, OnPolicyRecipe):
            return cls()
        algorithm, rollout = recipe.algorithm, recipe.rollout
        return cls(
            compares_groups=recipe.uses_estimator and isinstance(algorithm, GrpoAlgorithm) and algorithm.needs_groups,
            learns_from_rewards=recipe.learns_from_rewards,
            samples_per_prompt=rollout.samples_per_prompt,
            temperature=rollout.temperature,
        )

    def check(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What is wrong with the last steps; None if nothing is, or if it was reported before."""
        cause, text = self._rewards(step, metrics) or self._gradients(step, metrics) or (None, None)
        if cause is None or cause in self._reported:
            return None
        self._reported |= {cause, "gradient"}  # equal rewards explain a gradient of 0
        return text

    def _rewards(self, step: int, metrics: Mapping[str, float]) -> tuple[str, str] | None:
        if not self._learns_from_rewards or "reward/min" not in metrics or metrics.get("episodes", 2.0) < 2:
            return None
        low, high, lr = metrics["reward/min"], metrics["reward/max"], metrics.get("lr", 0.0)
        self._equal.add(low == high and self._reward in (None, low))
        self._reward = low
        self._uniform.add(metrics.get("groups/uniform", 0.0) == 1.0)
        is_success = self._equal.seen_other and metrics.get("groups/solve_rate") == 1.0  # the run has learned it all
        if self._equal.is_long(lr) and not is_success:
            steps = _steps(step, self._equal.count)
            return "rewards", (
                f"{steps}: every episode has the same total reward, {low:g}, so the rewards do not say which answer is "
                "better. " + " ".join(self._why_equal(metrics))
            )
        # Later a policy that is nearly always right gives such groups too.
        is_from_the_start = not self._uniform.seen_other and self._uniform.is_long(lr)
        if self._compares_groups and self._samples > 1 and is_from_the_start:
            steps = _steps(step, self._uniform.count)
            return "rewards", (
                f"{steps}: the {self._samples} episodes of each prompt have equal rewards, so all advantages are 0 and "
                "nothing is learned. " + " ".join(self._why_uniform(metrics))
            )
        return None

    def _why_equal(self, metrics: Mapping[str, float]) -> list[str]:
        """Likely causes, the likeliest first."""
        causes = self._of_truncation(metrics) + _of_rate(metrics)
        if metrics.get("groups/solve_rate") == 1.0:
            return [*causes, "The model solves every prompt: take harder prompts, or stop here."]
        return [
            *causes,
            "Does the reward function return a constant, or read the wrong column? If not, the prompts are too hard "
            "for this model: begin with SFT, with easier prompts, or with a reward that gives partial credit.",
        ]

    def _why_uniform(self, metrics: Mapping[str, float]) -> list[str]:
        causes = self._of_truncation(metrics) + _of_rate(metrics)
        if self._temperature < _LOW_TEMPERATURE:
            causes.append(
                f"rollout.temperature {self._temperature:g} makes the samples of a prompt the same: raise it to 1."
            )
        return [
            *causes,
            f"Each prompt is too easy or too hard: raise rollout.samples_per_prompt (now {self._samples}), take other "
            "prompts, or use a reward that tells answers apart.",
        ]

    def _of_truncation(self, metrics: Mapping[str, float]) -> list[str]:
        share = metrics.get("episodes/truncated", 0.0)
        if share < _MOSTLY:
            return []
        return [f"{share:.0%} of the answers are cut off at rollout.max_new_tokens: raise it."]

    def _gradients(self, step: int, metrics: Mapping[str, float]) -> tuple[str, str] | None:
        norm, loss = metrics.get("grad_norm"), metrics.get("loss")
        if norm is None or loss is None or metrics.get("skipped"):
            return None
        is_explained = self._learns_from_rewards and metrics.get("groups/uniform") == 1.0  # by equal rewards
        self._no_gradient.add(norm == 0.0 and not is_explained)
        if self._loss is not None:
            self._same_loss.add(loss == self._loss)
        self._loss = loss
        if self._no_gradient.count >= _FIRST_STEPS:
            causes = _of_rate(metrics) or [
                "Is every parameter that the loss depends on frozen, or every token masked? A loss that no longer "
                "changes with the weights (saturated, clipped, or equal pairs) has no gradient either."
            ]
            return "gradient", (
                f"{_steps(step, self._no_gradient.count)}: the gradient is exactly 0 (loss {loss:g}), so nothing is "
                "learned, whatever optimizer.lr is. " + " ".join(causes)
            )
        # On-policy losses are near 0 by construction, and may repeat.
        if "reward/mean" not in metrics and self._same_loss.count >= _FIRST_STEPS:
            lr = metrics.get("lr", 0.0)
            return "loss", (
                f"{_steps(step, self._same_loss.count + 1)}: the loss is exactly {loss:g} in every step. Is "
                f"optimizer.lr ({lr:.2g} in this step) too small to change the weights, or is the loss a constant?"
            )
        return None


def _of_rate(metrics: Mapping[str, float]) -> list[str]:
    lr = metrics.get("lr", 0.0)
    if lr == 0.0:
        return ["The learning rate of these steps is 0: look at optimizer.lr and optimizer.schedule."]
    if lr < _LARGE_LR:
        return []
    return [
        f"The learning rate of this step is {lr:g}. Usual rates are 1e-6 to 1e-3: an earlier step has probably "
        "destroyed the weights. Lower optimizer.lr and start again."
    ]


def _steps(last: int, count: int) -> str:
    return f"steps {last - count + 1} to {last}"
