# SPDX-License-Identifier: Apache-2.0
"""Held-out prompts answered and graded during a run: greedy, and sampled for pass@k, per source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from podium.controller.records import pass_at_k, powers_up_to
from podium.data.tasks import DrawnTask, Task
from podium.observe import EvaluationView, SampleView
from podium.recipe import GenerationSection, OnPolicyRecipe
from podium.recipe.schema import SampledGenerationSection
from podium.roles.carriers import SamplingPlan
from podium.roles.stages import Rollouts

if TYPE_CHECKING:
    from podium.controller.run import OnPolicyRun

# Held-out prompts that are answered where the recipe does not say how many.
DEFAULT_PROMPTS = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """One evaluation. `score` is the mean reward of the greedy answers."""

    score: float
    metrics: Mapping[str, float]
    view: EvaluationView
    samples: Sequence[Mapping[str, Any]]


def heldout_limit(generation: GenerationSection | None, most: int | None) -> int:
    """How many held-out prompts are answered."""
    asked = (generation.prompts if generation is not None else None) or DEFAULT_PROMPTS
    return asked if most is None else min(asked, most)


async def summarise(run: OnPolicyRun[OnPolicyRecipe], tasks: Sequence[Task], step: int) -> Evaluation:
    """Answers all tasks, greedily and (where the recipe wants pass@k) by samples, and grades the answers."""
    recipe = run.recipe
    generation = recipe.evaluation.generation or SampledGenerationSection()
    rollout = recipe.rollout
    longest = generation.max_new_tokens or rollout.max_new_tokens
    greedy = SamplingPlan(max_new_tokens=longest, temperature=0.0, stop=rollout.stop, seed=recipe.run.seed)
    rollouts = await run.answer_heldout(tasks, 1, greedy)
    scored = await run.score_heldout(rollouts, show=generation.show)
    scores_N = scored.scores_N
    metrics = {"heldout/score": float(scores_N.mean()), "heldout/length": float(rollouts.note.sampled_N.mean())}
    metrics["heldout/solved"] = float((scores_N >= recipe.grading.solved_at).mean())
    metrics["heldout/truncated"] = float(rollouts.truncated_N.mean())
    metrics |= _by_source(scores_N, rollouts)
    if generation.samples > 1:
        plan = SamplingPlan(
            max_new_tokens=longest, temperature=generation.temperature, stop=rollout.stop, seed=recipe.run.seed + 1
        )
        sampled = await run.answer_heldout(tasks, generation.samples, plan)
        sampled_N = (await run.score_heldout(sampled, show=0)).scores_N
        metrics |= _pass_at(sampled_N >= recipe.grading.solved_at, sampled.group_N, generation.samples)
    draws = rollouts.group_N.tolist()
    views = tuple(
        SampleView(prompt=prompt, answer=answer, reference=tasks[draw].reference, score=score)
        for (prompt, answer), draw, score in zip(scored.texts, draws, scores_N.tolist(), strict=False)
    )
    view = EvaluationView(
        step=step,
        score_name="held-out reward" if not _is_share(scores_N) else "held-out accuracy",
        score=metrics["heldout/score"],
        num_scored=len(scores_N),
        samples=views,
    )
    samples = [
        {"prompt": each.prompt, "answer": each.answer, "reference": each.reference, "score": each.score}
        for each in views
    ]
    return Evaluation(score=metrics["heldout/score"], metrics=metrics, view=view, samples=samples)


def drawn(tasks: Sequence[Task]) -> list[DrawnTask]:
    """Held-out tasks under numbers of their own."""
    return [DrawnTask(draw=number, epoch=0, task=task) for number, task in enumerate(tasks)]


def _by_source(scores_N: np.ndarray, rollouts: Rollouts) -> dict[str, float]:
    sources_N = np.array([rollouts.tasks[draw].source for draw in rollouts.group_N.tolist()])
    names = sorted(set(sources_N.tolist()))
    if len(names) < 2:
        return {}
    return {f"heldout/{name}/score": float(scores_N[sources_N == name].mean()) for name in names}


def _pass_at(solved_N: np.ndarray, group_N: np.ndarray, samples: int) -> dict[str, float]:
    _, group = np.unique(group_N, return_inverse=True)
    solved_G = np.bincount(group, solved_N).astype(int)
    return {
        f"heldout/pass@{k}": float(np.mean([pass_at_k(solved, samples, k) for solved in solved_G]))
        for k in powers_up_to(samples)
    }


def _is_share(scores_N: np.ndarray) -> bool:
    return bool(np.isin(scores_N, (0.0, 1.0)).all())
