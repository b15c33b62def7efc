# SPDX-License-Identifier: Apache-2.0
"""Signs in the metrics of a run that its learning needs a look before its speed does. Torch-free."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from podium.recipe import OnPolicyRecipe, Recipe
from podium.runs.learning_watch import LearningWatch
from podium.weights.canary import GapLimits

# Steps at the beginning and at the end that are compared, as a part of all, and at most.
_PART, _MOST = 4, 10
# Held-out prompts of an evaluation where the recipe does not say how many: there may be few rows.
_PROMPTS = 64
# Steps at the end in which learning is watched, and those in which a sign must still hold: a later good step ends it.
_WATCHED, _LASTING = 12, 3
_JUMP = 10.0  # of the gradient's norm
_ENTROPY_PART, _ENTROPY = 0.2, 0.3  # of the first entropy, and nats
_LENGTHS, _TRUNCATED = 2.5, 0.5  # times the first length; share of episodes
_KL_TIMES, _KL = 5.0, 0.05
_SOLVED = 0.1  # share of solved episodes that is lost while the reward rises
_HELDOUT, _ERRORS = 0.05, 3.0  # share of solved held-out answers that is lost, and standard errors of the difference
_UNLIKE = 0.3  # share of solved episodes by which training may be better than held-out answers, beside those errors
_STALE_KL, _STALE_ESS = 0.05, 0.7  # of the weights that sampled

Metrics = Mapping[str, float]


def alarm_of(
    recipe: Recipe, steps: Sequence[tuple[int, Metrics]], heldout: Sequence[tuple[int, Metrics]] = ()
) -> str | None:
    """The most important sign in the metrics of all steps and evaluations, with its numbers; None if there is none."""
    return next(alarms_of(recipe, steps, heldout), None)


def alarms_of(
    recipe: Recipe, steps: Sequence[tuple[int, Metrics]], heldout: Sequence[tuple[int, Metrics]] = ()
) -> Iterator[str]:
    """All signs, the most important first."""
    if not steps:
        return
    count = max(1, min(_MOST, len(steps) // _PART))
    first, last = [values for _, values in steps[:count]], [values for _, values in steps[-count:]]
    yield from _divergence(first, last)
    yield from _gap(recipe, last)
    yield from _stale(last)
    fallen = list(_heldout(recipe, first, last, heldout))
    yield from fallen or _unlike_heldout(recipe, steps, count, heldout)
    yield from _entropy(first, last)
    yield from _lengths(first, last)
    yield from _cut_heldout(heldout)
    yield from _reward(first, last)
    if next(_warnings(recipe, steps[-_WATCHED:]), None) is not None:
        yield from _warnings(recipe, steps[-_LASTING:])  # what has passed is no alarm


def _warnings(recipe: Recipe, steps: Sequence[tuple[int, Metrics]]) -> Iterator[str]:
    """What the console would say of these steps."""
    watch = LearningWatch.of(recipe)
    for step, values in steps:
        found = watch.check(step, values)
        if found is not None:
            yield found


def _divergence(first: Sequence[Metrics], last: Sequence[Metrics]) -> Iterator[str]:
    skipped = sum(values.get("skipped", 0.0) for values in last)
    finite = all(math.isfinite(values.get(name, 0.0)) for values in last for name in ("loss", "grad_norm"))
    if skipped or not finite:
        yield "the last steps have losses or gradients that are not finite, and updates were skipped"
    before, now = _median(first, "grad_norm"), _median(last, "grad_norm")
    if before and now and now > _JUMP * before:
        yield f"the gradient's norm is {now:.3g} in the last steps, and was {before:.3g} in the first: it may diverge"


def _gap(recipe: Recipe, last: Sequence[Metrics]) -> Iterator[str]:
    gap = _median(last, "gap/mean")
    if gap is None or not isinstance(recipe, OnPolicyRecipe):
        return
    limit = GapLimits.of("float32" if recipe.model.dtype == "float32" else "bfloat16").mean
    if gap > limit:
        yield f"learner and engine differ in their log-probs by {gap:.2g} on average (gap/mean), above {limit:g}"


def _heldout(
    recipe: Recipe, first: Sequence[Metrics], last: Sequence[Metrics], evaluations: Sequence[tuple[int, Metrics]]
) -> Iterator[str]:
    """Fewer held-out answers are right than once, by more than chance."""
    found = [(step, values["heldout/solved"]) for step, values in evaluations if "heldout/solved" in values]
    if len(found) < 2:
        return
    (step, now), (best_step, best) = found[-1], max(found, key=lambda each: each[1])
    error = math.sqrt((best * (1 - best) + now * (1 - now)) / _num_prompts(recipe))
    if not best - now > max(_HELDOUT, _ERRORS * error):  # also where one is not finite
        return
    fall = f"{best:.0%} of the held-out answers were solved at step {best_step}, and {now:.0%} are at step {step}"
    reward_before, reward = _median(first, "reward/mean"), _median(last, "reward/mean")
    if reward_before is not None and reward is not None and reward > reward_before:
        fall += (
            f", while the reward rose from {reward_before:.3g} to {reward:.3g}: the reward may pay for something else"
        )
    yield fall


def _unlike_heldout(
    recipe: Recipe, steps: Sequence[tuple[int, Metrics]], count: int, evaluations: Sequence[tuple[int, Metrics]]
) -> Iterator[str]:
    """In the steps before an evaluation many more episodes are solved than held-out answers in it: an evaluation at the
    begin, from which the share could have fallen, may be missing, or nothing was ever solved."""
    found = [(step, values["heldout/solved"]) for step, values in evaluations if "heldout/solved" in values]
    if not found:
        return
    step, now = found[-1]
    end = bisect.bisect_right(steps, step, key=lambda each: each[0])
    solved = _median([values for _, values in steps[max(0, end - count) : end]], "groups/solve_rate")
    error = math.sqrt(now * (1 - now) / _num_prompts(recipe))
    if solved is None or not solved - now > _UNLIKE + _ERRORS * error:
        return
    yield (
        f"{solved:.0%} of the training episodes are solved, and {now:.0%} of the held-out answers at step {step}: the "
        "reward may pay for something else, or the policy knows the training prompts by heart"
    )


def _num_prompts(recipe: Recipe) -> int:
    """Of an evaluation."""
    generation = recipe.evaluation.generation if isinstance(recipe, OnPolicyRecipe) else None
    return (generation.prompts if generation is not None else None) or _PROMPTS


def _stale(last: Sequence[Metrics]) -> Iterator[str]:
    kl, ess, age = (_median(last, f"staleness/{name}") for name in ("kl", "ess", "mean"))
    if age and ((kl is not None and kl > _STALE_KL) or (ess is not None and ess < _STALE_ESS)):
        signs = [f"staleness/kl {kl:.2g}"] if kl is not None else []
        signs += [f"staleness/ess {ess:.2f}"] if ess is not None else []
        yield (
            f"trained answers are {age:.1f} versions old on average, and the weights have moved far since "
            f"({', '.join(signs)}; medians of the last steps). Lower rollout.staleness or optimizer.lr, or set "
            "algorithm.correction"
        )


def _entropy(first: Sequence[Metrics], last: Sequence[Metrics]) -> Iterator[str]:
    before, now = _median(first, "entropy"), _median(last, "entropy")
    if before and now is not None and now < min(_ENTROPY_PART * before, _ENTROPY):
        yield f"the entropy has fallen from {before:.2f} to {now:.2f} nats: the policy stops exploring"


def _lengths(first: Sequence[Metrics], last: Sequence[Metrics]) -> Iterator[str]:
    before, now = _median(first, "response/mean"), _median(last, "response/mean")
    if before and now and now > _LENGTHS * before:
        paid, pays = _median(first, "reward/mean"), _median(last, "reward/mean")
        why = ""
        if paid is not None and pays is not None and pays > paid:
            why = f", and the reward from {paid:.3g} to {pays:.3g}: it may pay for length"
        yield f"answers have grown from {before:.0f} to {now:.0f} tokens (medians of response/mean){why}"
    cut_before, cut = _median(first, "episodes/truncated") or 0.0, _median(last, "episodes/truncated") or 0.0
    if cut > _TRUNCATED and cut > cut_before + 0.3:
        yield f"{cut:.0%} of the answers are cut off, and {cut_before:.0%} were at first (episodes/truncated)"


def _cut_heldout(evaluations: Sequence[tuple[int, Metrics]]) -> Iterator[str]:
    found = [(step, values["heldout/truncated"]) for step, values in evaluations if "heldout/truncated" in values]
    if len(found) > 1 and found[-1][1] > _TRUNCATED and found[-1][1] > found[0][1] + 0.3:
        (first, before), (last, now) = found[0], found[-1]
        yield f"{now:.0%} of the held-out answers are cut off at step {last}, and {before:.0%} were at step {first}"


def _reward(first: Sequence[Metrics], last: Sequence[Metrics]) -> Iterator[str]:
    """The reward rises, and what it should stand for does not."""
    before, now = _median(first, "reward/mean"), _median(last, "reward/mean")
    if before is None or now is None or now <= before:
        return
    kl_before, kl = _median(first, "kl/reference"), _median(last, "kl/reference")
    if kl_before is not None and kl is not None and kl > max(_KL_TIMES * kl_before, _KL):
        yield (
            f"the policy has moved far from its reference while the reward rose (kl/reference {kl_before:.2g} to "
            f"{kl:.2g}): it may game the reward"
        )
    solved_before, solved = _median(first, "groups/solve_rate"), _median(last, "groups/solve_rate")
    if solved_before is not None and solved is not None and solved < solved_before - _SOLVED:
        yield (
            f"the reward rises, and fewer episodes are solved ({solved_before:.0%} to {solved:.0%}): the policy may "
            "game a reward"
        )


def _median(values: Sequence[Metrics], name: str) -> float | None:
    found = [each[name] for each in values if name in each and math.isfinite(each[name])]
    return statistics.median(found) if found else None
