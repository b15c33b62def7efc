# SPDX-License-Identifier: Apache-2.0
"""Evaluates held-out prompts during a run: greedy answers, and samples for pass@k, per source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from podium.cluster import ObjectScope
from podium.cluster.deadlines import now_s
from podium.controller.devices import Devices
from podium.controller.episodes import Episodes
from podium.controller.grading import HeldoutScores
from podium.controller.judging import judge_metrics, split_judged
from podium.controller.parts import OnPolicyParts
from podium.controller.records import pass_at_k, powers_up_to
from podium.data.tasks import IndexedTask, Task
from podium.observe import EvaluationView, SampleView
from podium.recipe import GenerationSection, OnPolicyRecipe
from podium.recipe.schema import SampledGenerationSection
from podium.roles.carriers import SamplingPlan
from podium.roles.stages import Rollouts

# Default number of held-out prompts to answer.
DEFAULT_PROMPTS = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnPolicyEvaluation:
    """Results of one evaluation. `score` is the mean reward of the greedy answers that could be graded; None if there
    is none. `answers` are those to record; the view has those to show."""

    score: float | None
    metrics: Mapping[str, float]
    answers: tuple[SampleView, ...]
    view: EvaluationView


def heldout_limit(generation: GenerationSection | None, most: int | None) -> int:
    """Number of held-out prompts to answer."""
    prompts = (generation.prompts if generation is not None else None) or DEFAULT_PROMPTS
    return prompts if most is None else min(prompts, most)


class OnPolicyEvaluator:
    """Answers held-out prompts with the newest weights and grades the answers. Decodes greedily, and samples for
    pass@k. Held-out episodes count in no step. Records the answers that the console shows, or with `records_all` all
    greedy ones."""

    def __init__(
        self, parts: OnPolicyParts[OnPolicyRecipe], devices: Devices, episodes: Episodes, *, records_all: bool = False
    ) -> None:
        self._parts, self._devices, self._episodes = parts, devices, episodes
        self._records_all = records_all
        self._prompts = numbered(parts.heldout)

    async def evaluate(self, step: int) -> OnPolicyEvaluation:
        """Evaluates the weights after `step` steps."""
        parts, began_s = self._parts, now_s()
        parts.log.console.doing("evaluating")
        with (
            parts.watch.span("evaluation"),
            parts.cluster.scope(f"the evaluation at step {step}") as objects,
            self._devices.evaluating(),
        ):
            evaluation = await self._evaluate(step, objects)
        parts.log.console.doing(None)
        return replace(evaluation, view=replace(evaluation.view, seconds=now_s() - began_s))

    async def _evaluate(self, step: int, objects: ObjectScope) -> OnPolicyEvaluation:
        recipe, rollout = self._parts.recipe, self._parts.recipe.rollout
        generation = recipe.evaluation.generation or SampledGenerationSection()
        longest = generation.max_new_tokens or rollout.max_new_tokens
        greedy = SamplingPlan(max_new_tokens=longest, temperature=0.0, stop=rollout.stop, seed=recipe.run.seed)
        rollouts = await self._episodes.generate(self._prompts, 1, greedy, step, objects)
        num_recorded = len(rollouts) if self._records_all else generation.show
        scores = await self._episodes.score_heldout(rollouts, show=num_recorded)
        pass_at: dict[str, float] = {}
        if generation.samples > 1:
            plan = SamplingPlan(
                max_new_tokens=longest, temperature=generation.temperature, stop=rollout.stop, seed=recipe.run.seed + 1
            )
            sampled = await self._episodes.generate(self._prompts, generation.samples, plan, step, objects)
            sampled_scores = await self._episodes.score_heldout(sampled, show=0)
            pass_at = pass_at_metrics(sampled_scores, sampled.group_N, generation.samples)
        has_own_score = generation.score is not None
        return summarise(
            step, rollouts, scores, self._parts.heldout, pass_at, show=generation.show,
            has_scores=recipe.gives_rewards or has_own_score,
            shows_solved=recipe.solving.is_clear and not has_own_score,
        )  # fmt: skip


def summarise(
    step: int,
    rollouts: Rollouts,
    scores: HeldoutScores,
    tasks: Sequence[Task],
    pass_at: Mapping[str, float],
    *,
    show: int = 0,
    has_scores: bool = True,
    shows_solved: bool = False,
) -> OnPolicyEvaluation:
    """Turns held-out answers and their scores into metrics and console samples; pure. `show`: how many answers the
    console shows. Without `has_scores` nothing scores answers, and there is no metric of scores. `shows_solved`: the
    console shows the share of solved answers where the score is none."""
    scores_N = scores.scores_N if has_scores else np.full(len(rollouts), np.nan)
    is_scored_N = np.isfinite(scores_N)
    metrics = {"heldout/length": float(rollouts.note.sampled_N.mean())}
    metrics["heldout/truncated"] = float(rollouts.truncated_N.mean())
    if is_scored_N.any():
        metrics["heldout/score"] = float(scores_N[is_scored_N].mean())
        metrics["heldout/solved"] = float(scores.solved_N[is_scored_N].mean())
    if has_scores and not is_scored_N.all():
        metrics["heldout/unscored"] = float((~is_scored_N).sum())
    metrics |= _by_source(scores_N, rollouts)
    metrics |= pass_at if has_scores else {}
    metrics |= {f"heldout/{name}": value for name, value in judge_metrics(split_judged(scores.extras)[0]).items()}
    answers = tuple(
        SampleView(
            prompt=prompt,
            answer=answer,
            reference=tasks[int(rollouts.group_N[row])].reference,
            score=None if np.isnan(scores_N[row]) else float(scores_N[row]),
        )
        for row, prompt, answer in scores.texts
    )
    is_share = bool(np.isin(scores_N[is_scored_N], (0.0, 1.0)).all())
    view = EvaluationView(
        step=step,
        score_name="held-out accuracy" if is_share else "held-out reward",
        score=metrics.get("heldout/score"),
        score_is_share=is_share,
        solved=metrics.get("heldout/solved") if shows_solved and not is_share else None,
        num_scored=int(is_scored_N.sum()),
        samples=answers[:show],
    )
    return OnPolicyEvaluation(score=metrics.get("heldout/score"), metrics=metrics, answers=answers, view=view)


def numbered(tasks: Sequence[Task]) -> list[IndexedTask]:
    """Gives held-out tasks separate prompt indices."""
    return [IndexedTask(prompt_index=number, epoch=0, task=task) for number, task in enumerate(tasks)]


def _by_source(scores_N: np.ndarray, rollouts: Rollouts) -> dict[str, float]:
    sources_N = np.array([rollouts.tasks[prompt_index].source for prompt_index in rollouts.group_N.tolist()])
    names = sorted(set(sources_N.tolist()))
    if len(names) < 2:
        return {}
    by_name = {name: scores_N[(sources_N == name) & np.isfinite(scores_N)] for name in names}
    return {f"heldout/{name}/score": float(scores.mean()) for name, scores in by_name.items() if len(scores)}


def pass_at_metrics(scores: HeldoutScores, group_N: np.ndarray, samples: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... and the number of samples of each prompt. Leaves out prompts with a sample that has
    no score (NaN)."""
    is_whole_N = ~np.isin(group_N, group_N[np.isnan(scores.scores_N)])
    if not is_whole_N.any():
        return {}
    _, group = np.unique(group_N[is_whole_N], return_inverse=True)
    solved_G = np.bincount(group, scores.solved_N[is_whole_N]).astype(int)
    return {
        f"heldout/pass@{k}": float(np.mean([pass_at_k(solved, samples, k) for solved in solved_G]))
        for k in powers_up_to(samples)
    }
