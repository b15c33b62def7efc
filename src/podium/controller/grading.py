# SPDX-License-Identifier: Apache-2.0
"""Turns rollouts into rewards: sums the results of graders and reward models, and handles episodes without a reward."""

# N episodes · R rewards of the recipe

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from podium.controller.parts import RewardModels, Roles
from podium.environments.grading import overlong_penalty
from podium.environments.rewards import reward_names
from podium.errors import RewardError, RolloutError
from podium.recipe import GradingSection, OnPolicyRecipe
from podium.roles.carriers import UNANSWERED, Floats, ScoreNote
from podium.roles.grader import Purpose
from podium.roles.grading_handle import GraderHandle, Rewarded
from podium.roles.stages import GradedRollouts, Rollouts

_GO_ON = "Correct the reward or the key."
ModelScores = Mapping[int, ScoreNote]
"""Scores of models in the run, by their positions among the recipe's rewards."""


async def grade_rollouts(
    rollouts: Rollouts, recipe: OnPolicyRecipe, grader: GraderHandle, reward_models: RewardModels
) -> tuple[GradedRollouts, dict[int, str]]:
    """Returns all episodes with their rewards, and by row why an episode has none."""
    rewarded = await grader.grade(rollouts)
    return sum_rewards(rollouts, rewarded, await model_scores(rollouts, reward_models), recipe)


async def model_scores(rollouts: Rollouts, reward_models: RewardModels) -> ModelScores:
    """Scores of all episodes by each reward model."""
    return {index: await model.score(rollouts) for index, model in reward_models}


def sum_rewards(
    rollouts: Rollouts, rewarded: Rewarded, scores: ModelScores, recipe: OnPolicyRecipe
) -> tuple[GradedRollouts, dict[int, str]]:
    """The total reward of each episode, and by row why an episode has none; pure."""
    values_NR = np.full((len(rollouts), len(recipe.reward)), np.nan)
    for at, index in enumerate(rewarded.rewards):
        values_NR[:, index] = rewarded.values_NR[:, at]
    errors = {**rewarded.errors, **rollouts.note.errors}
    for index, scored in scores.items():
        values_NR[:, index] = scored.values_N
        for row, error in _score_errors(scored, index, recipe).items():
            errors.setdefault(row, error)
    weights = np.array([reward.weight for reward in recipe.reward])
    shaping_N = shaping(rollouts, recipe)
    total_N = np.nan_to_num(values_NR) @ weights + np.nan_to_num(rollouts.note.environment_N) + shaping_N
    everything = GradedRollouts(
        rollouts=rollouts,
        rewards_N=total_N,
        values_NR=values_NR,
        shaping_N=shaping_N,
        names=reward_names(recipe.reward),
        num_failed=len(errors),
        num_dropped=0,
        first_error=errors[min(errors)] if errors else None,
        extras=_sums_and_counts({**rewarded.extras, **_score_extras(scores, recipe)}),
        failed=frozenset(rollouts.rows.ids[row] for row in errors),
    )
    return everything, errors


def _score_errors(scored: ScoreNote, index: int, recipe: OnPolicyRecipe) -> dict[int, str]:
    """By row why a model in the run gave no score; a judge without weight is only logged."""
    if index in recipe.reward_models:
        values_N = scored.values_N
        model = recipe.reward_models[index]
        return {
            row: f"reward model {model} gave {values_N[row]}" for row in np.flatnonzero(~np.isfinite(values_N)).tolist()
        }
    reward = recipe.reward[index]
    return {row: f"{reward.metric_name} {error}" for row, error in scored.errors.items() if reward.weight != 0}


def _score_extras(scores: ModelScores, recipe: OnPolicyRecipe) -> dict[str, Floats]:
    """Further numbers of models in the run, named as those of reward functions are."""
    return {
        f"{recipe.reward[index].metric_name}/{name}": values_N
        for index, scored in scores.items()
        for name, values_N in scored.extras.items()
    }


def _sums_and_counts(extras: Mapping[str, Floats]) -> dict[str, tuple[float, float]]:
    return {name: _sum_and_count(values_N) for name, values_N in extras.items()}


def _sum_and_count(values_N: Floats) -> tuple[float, float]:
    values = values_N[np.isfinite(values_N)].tolist()
    return sum(values), float(len(values))


def without_failed(
    everything: GradedRollouts, rows: Collection[int], grading: GradingSection, warn: Callable[[str], None]
) -> GradedRollouts:
    """Applies grading.on_error to the rows without a reward: drops their groups, counts them as 0, or stops the run."""
    if not rows:
        return everything
    failed_N = np.isin(np.arange(len(everything)), list(rows))
    broken = len(everything.rollouts.note.errors) / len(failed_N)
    if broken > grading.max_failed_share:
        errors = everything.rollouts.note.errors
        raise RolloutError(
            f"{len(errors)} of {len(failed_N)} episodes of step {everything.rollouts.step} could not be generated: "
            f"{errors[min(errors)].rstrip('.')}. That is more than grading.max_failed_share "
            f"{grading.max_failed_share:g}, so the run stops."
        )
    message = f"{int(failed_N.sum())} of {len(failed_N)} episodes of step {everything.rollouts.step} have no reward: "
    if grading.on_error == "fail":
        raise RewardError(
            f"{message}{str(everything.first_error).rstrip('.')}. grading.on_error is fail, so the run stops. {_GO_ON}"
        )
    if float(failed_N.mean()) > grading.max_failed_share:
        raise RewardError(
            f"{message}{str(everything.first_error).rstrip('.')}. That is more than grading.max_failed_share "
            f"{grading.max_failed_share:g}, so the run stops. {_GO_ON}"
        )
    warn(f"{message}{everything.first_error}")
    if grading.on_error == "zero":
        everything, rows = failed_as_zero(everything, rows)
        if not rows:
            return everything
        failed_N = np.isin(np.arange(len(everything)), list(rows))
    bad = np.isin(everything.group_N, np.unique(everything.group_N[failed_N]))
    return replace(
        everything.take(np.flatnonzero(~bad)),
        num_dropped=int(bad.sum()),
        left_out=(everything.rollouts.take(np.flatnonzero(bad)),),
    )


def failed_as_zero(everything: GradedRollouts, rows: Collection[int]) -> tuple[GradedRollouts, Collection[int]]:
    """Counts the rewards of these rows as 0, and returns those that remain without one: what the engine did not answer
    is no episode, and as one of reward 0 it would shift the advantages of its group."""
    finish_N = everything.rollouts.note.finish_N
    left = [row for row in rows if finish_N[row] == UNANSWERED]
    zero_N = np.isin(np.arange(len(everything)), sorted(set(rows) - set(left)))
    return replace(everything, rewards_N=np.where(zero_N, 0.0, everything.rewards_N)), left


def shaping(rollouts: Rollouts, recipe: OnPolicyRecipe) -> Floats:
    """Reward added to each episode for the length of its answer."""
    overlong = recipe.full_algorithm.overlong
    if overlong is None:
        return np.zeros(len(rollouts))
    return np.array(
        [
            overlong_penalty(
                int(tokens),
                max_new_tokens=recipe.rollout.max_new_tokens,
                buffer_tokens=overlong.buffer_tokens,
                penalty=overlong.penalty,
            )
            for tokens in rollouts.note.sampled_N
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldoutScores:
    """One score for each held-out answer, and whether it is solved. The score is NaN where grading failed; `num_errors`
    counts those."""

    scores_N: Floats
    solved_N: NDArray[np.bool_]
    texts: tuple[tuple[int, str, str], ...]  # (row, prompt, answer) of the rows that were asked for
    num_errors: int
    first_error: str | None
    extras: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # further numbers: sum and count


async def heldout_scores(rollouts: Rollouts, recipe: OnPolicyRecipe, roles: Roles, *, show: int) -> HeldoutScores:
    """Scores answers with evaluation.generation.score, or with the recipe's rewards."""
    generation = recipe.evaluation.generation
    purpose: Purpose = "train" if generation is None or generation.score is None else "evaluation"
    grades = await roles.grader.grade(rollouts, purpose, show=show)
    errors = {**grades.errors, **rollouts.note.errors}
    model_notes: ModelScores = {}
    solving_N: Floats | None = None  # values that say which answers are solved, if not the scores
    if purpose == "evaluation":
        scores_N = grades.values_NR[:, 0]
    else:
        solving = recipe.solving.reward
        if solving in grades.rewards:
            solving_N = grades.values_NR[:, grades.rewards.index(solving)]
        weights = np.array([recipe.reward[index].weight for index in grades.rewards])
        scores_N = np.nan_to_num(grades.values_NR) @ weights + np.nan_to_num(rollouts.note.environment_N)
        model_notes = await model_scores(rollouts, roles.reward_models)
        for index, scored in model_notes.items():
            for row, error in _score_errors(scored, index, recipe).items():
                errors.setdefault(row, error)
            values_N = scored.values_N if index in recipe.reward_models else np.nan_to_num(scored.values_N)
            scores_N = scores_N + recipe.reward[index].weight * values_N
            solving_N = scored.values_N if index == solving else solving_N
    without = np.isin(np.arange(len(rollouts)), list(errors))
    scores_N = np.where(without, np.nan, np.nan_to_num(scores_N))
    return HeldoutScores(
        scores_N=scores_N,
        solved_N=(scores_N if solving_N is None else np.nan_to_num(solving_N)) >= recipe.grading.solved_at,
        texts=grades.texts,
        num_errors=len(errors),
        first_error=errors[min(errors)] if errors else None,
        extras=_sums_and_counts({**grades.extras, **_score_extras(model_notes, recipe)}),
    )
