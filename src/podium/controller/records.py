# SPDX-License-Identifier: Apache-2.0
"""Computes the metrics of an on-policy step (docs/metrics.md defines each); pure."""

# N episodes · G groups

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from podium.algorithms.staleness import AgeStatistics, updates_between
from podium.cluster.results import Span
from podium.controller.judging import judge_metrics, split_judged
from podium.controller.ledger import EpisodeRecord, GroupRecord
from podium.recipe.solving import Solving
from podium.roles.carriers import FINISHES, DistanceNote, Floats
from podium.roles.stages import CriticReport, GradedRollouts, Rollouts, UpdateReport

# Of lengths, in percent.
_QUANTILES = (10, 50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """Everything about one step that its metrics and the ledger need."""

    step: int
    lr: float
    graded: GradedRollouts  # generated and graded episodes, before groups were left out
    used: GradedRollouts  # the episodes trained on
    distance: DistanceNote | None  # KL of the policy from the reference
    report: UpdateReport | None  # None: there was nothing to learn from
    critic: CriticReport | None
    kl_coefficient: float | None
    seconds: Mapping[str, float]  # by phase
    step_s: float
    idle_s: float  # time in which all workers were idle
    peak_flops: float  # of all devices that train
    solving: Solving
    groups: Sequence[GroupRecord] = ()  # those that ended with the step
    versions: Sequence[int] = (0,)  # of the weights that there were, ascending
    overlaps: bool = False  # whether generation goes on during updates
    extra: Mapping[str, float] = field(default_factory=dict)


def step_metrics(record: StepRecord) -> dict[str, float]:
    """All metrics of a step, flat."""
    return {
        **_rewards(record),
        **_groups(record.graded, record.solving),
        **_episodes(record),
        **(_overlap(record) if record.overlaps else {}),
        **_updates(record),
        **_distance(record),
        **_speed(record),
        **record.extra,
    }


def _updates(record: StepRecord) -> dict[str, float]:
    """Metrics of the updates. A step that had nothing to learn from has 0 optimizer steps; PPO's critic warm-up has
    metrics of the critic only."""
    if record.report is None and record.critic is None:
        return {"optimizer_steps": 0.0}
    return {
        **(_update(record.report) if record.report is not None else {}),
        **(_critic(record.critic) if record.critic is not None else {}),
    }


def _rewards(record: StepRecord) -> dict[str, float]:
    graded = record.graded
    rewards_N = graded.rewards_N
    metrics = {"lr": record.lr, **_spread("reward", rewards_N)}
    for index, name in enumerate(graded.names):
        values = graded.values_NR[:, index]
        metrics |= _spread(f"reward/{name}", values[np.isfinite(values)])
    if np.any(graded.shaping_N):
        metrics["reward/shaping/mean"] = float(graded.shaping_N.mean())
    sources_N = np.array([graded.rollouts.tasks[prompt_index].source for prompt_index in graded.group_N.tolist()])
    if len(set(sources_N.tolist())) > 1:
        for source in sorted(set(sources_N.tolist())):
            metrics[f"reward/source/{source}/mean"] = float(rewards_N[sources_N == source].mean())
    judged, others = split_judged(graded.extras)
    for name, (total, count) in others.items():
        metrics[f"reward/extra/{name}"] = total / count if count else 0.0
    return metrics | judge_metrics(judged)


def _spread(name: str, values: Floats) -> dict[str, float]:
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/std": float(values.std()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _groups(graded: GradedRollouts, solving: Solving) -> dict[str, float]:
    if not len(graded):
        return {"groups": 0.0}
    _, group = np.unique(graded.group_N, return_inverse=True)
    sizes_G = np.bincount(group)
    solved_G = np.bincount(group, graded.solved_N(solving)) / sizes_G
    uniform_G = np.bincount(group, graded.uniform_N) / sizes_G
    return {
        "groups": float(len(sizes_G)),
        "groups/solved_all": float((solved_G == 1).mean()),
        "groups/solved_none": float((solved_G == 0).mean()),
        "groups/solved_some": float(((solved_G > 0) & (solved_G < 1)).mean()),
        "groups/solve_rate": float(solved_G.mean()),
        "groups/uniform": float(uniform_G.mean()),
    }


def _episodes(record: StepRecord) -> dict[str, float]:
    graded, rollouts = record.graded, record.graded.rollouts
    note = rollouts.note
    total = len(graded) + graded.num_dropped
    metrics = {
        "episodes": float(total),
        "episodes/failed": float(graded.num_failed),
        "episodes/dropped": float(graded.num_dropped),
        "episodes/learned_from": float(len(record.used)),
    }
    if len(graded):
        metrics |= {
            "episodes/truncated": float(rollouts.truncated_N.mean()),
            "response/mean": float(note.sampled_N.mean()),
            "response/max": float(note.sampled_N.max()),
            "response/min": float(note.sampled_N.min()),
            "prompt/mean": float((rollouts.rows.lengths_N - note.sampled_N).mean()),
        }
        staleness_N = updates_between(note.version_N[note.version_N >= 0], rollouts.version, record.versions)
        metrics["staleness/mean"] = float(staleness_N.mean()) if len(staleness_N) else 0.0
        metrics["staleness/max"] = float(staleness_N.max(initial=0))
        if note.turns_N.max() > 1:
            metrics["turns/mean"] = float(note.turns_N.mean())
            metrics["turns/max"] = float(note.turns_N.max())
    for name, counts_N in note.counts.items():
        metrics[f"environment/{name}"] = float(counts_N.mean()) if len(counts_N) else 0.0
    return metrics


def _overlap(record: StepRecord) -> dict[str, float]:
    """How old the trained tokens are and why, and what generators waited for."""
    rollouts = record.graded.rollouts
    metrics = {
        "rollout/idle_s": rollouts.metrics.get("idle_s", 0.0),
        "rollout/install_s": rollouts.metrics.get("install_s", 0.0),
        **{f"rollout/{name}": value for name, value in rollouts.metrics.items() if name.startswith("idle_s/")},
        **{
            name.replace("learner_", "learner/"): value
            for name, value in rollouts.metrics.items()
            if name.startswith("learner_idle_s")
        },
        **_lending(rollouts.metrics),
    }
    if len(record.used):
        metrics["response/trained_mean"] = float(record.used.rollouts.note.sampled_N.mean())
    metrics |= _length_quantiles("offered", [rollouts, *record.graded.left_out])
    metrics |= _length_quantiles("trained", [record.used.rollouts])
    versions = [
        (each.admitted_version, each.newest_version, each.trained_version)
        for each in record.groups
        if each.trained_version is not None and each.newest_version >= 0  # else no token was sampled
    ]
    if versions:
        admitted_N, newest_N, trained_N = np.array(versions, np.int64).T
        metrics |= {
            "staleness/in_flight": float(updates_between(admitted_N, newest_N, record.versions).mean()),
            "staleness/queue": float(updates_between(newest_N, trained_N, record.versions).mean()),
        }
    for reason, count in sorted(Counter(each.void for each in record.groups if each.void is not None).items()):
        metrics[f"groups/void/{reason}"] = float(count)
    ages = record.report.ages if record.report is not None else {}
    if ages:
        everything = AgeStatistics.merge(ages.values())
        metrics |= {"staleness/kl": everything.kl, "staleness/ess": everything.effective_share}
        for age, statistics in sorted(ages.items()):
            metrics[f"staleness/tokens/{age}"] = statistics.count / everything.count
            metrics[f"staleness/kl/{age}"] = statistics.kl
            metrics[f"staleness/ess/{age}"] = statistics.effective_share
    return metrics


def _length_quantiles(name: str, parts: Sequence[Rollouts]) -> dict[str, float]:
    """Of the sampled tokens of an episode; nothing where there is none."""
    sampled_N = np.concatenate([part.note.sampled_N for part in parts])
    if not len(sampled_N):
        return {}
    values = np.percentile(sampled_N, _QUANTILES).tolist()
    return {f"response/{name}_p{quantile}": value for quantile, value in zip(_QUANTILES, values, strict=True)}


def _update(report: UpdateReport) -> dict[str, float]:
    statistics, gap = report.statistics, report.gap
    metrics = {
        "loss": float(np.mean(report.losses)) if report.losses else 0.0,
        "grad_norm": float(np.mean(report.grad_norms)) if report.grad_norms else 0.0,
        "skipped": float(report.skipped),
        "optimizer_steps": float(len(report.losses)),
        "entropy": report.entropy,
        "kl/behavior": statistics.kl_k3,
        "kl/behavior_k1": statistics.kl_k1,
        "clip/high": statistics.clipped_high / max(1.0, statistics.count),
        "clip/low": statistics.clipped_low / max(1.0, statistics.count),
        "clip/dual": statistics.dual_clip_fraction,
        "clip/fraction": statistics.clip_fraction,
        "ratio/mean": statistics.mean_ratio,
        "ratio/max": statistics.max_ratio,
        "ratio/ess": statistics.effective_share,
        "advantage/mean": report.advantages.mean,
        "advantage/std": report.advantages.variance**0.5,
        "imbalance": report.imbalance,
        "micro_steps": float(report.micro_steps),
        "trained_tokens": float(report.num_tokens),
    }
    if gap.count and not gap.is_truncated:
        metrics |= {"gap/mean": gap.mean, "gap/max": gap.largest}
    if report.kept_mass is not None:
        metrics["correction/kept_mass"] = report.kept_mass
    if report.sampling is not None:
        metrics |= {
            "correction/mean": report.sampling.mean,
            "correction/ess": report.sampling.share,
            "correction/dropped": report.sampling.dropped_fraction,
        }
    if report.kl_reference is not None:
        metrics["kl/reference"] = report.kl_reference
    if report.routers is not None:
        metrics |= report.routers.metrics()
    return metrics


def _critic(report: CriticReport) -> dict[str, float]:
    statistics = report.statistics
    return {
        "value/loss": float(np.mean(report.losses)) if report.losses else 0.0,
        "value/grad_norm": float(np.mean(report.grad_norms)) if report.grad_norms else 0.0,
        "value/explained_variance": statistics.explained_variance,
        "value/clip_fraction": statistics.clip_fraction,
        "value/mean": statistics.mean_value,
        "value/return_mean": statistics.mean_return,
    }


def _distance(record: StepRecord) -> dict[str, float]:
    metrics: dict[str, float] = {}
    distance = record.distance
    if distance is not None and distance.tokens_N.sum():
        tokens = float(distance.tokens_N.sum())
        metrics["kl/rollout_reference"] = float(distance.k3_N.sum()) / tokens
        metrics.setdefault("kl/reference", metrics["kl/rollout_reference"])
    if record.report is not None and record.report.kl_reference is not None:
        metrics["kl/reference"] = record.report.kl_reference
    if record.kl_coefficient is not None:
        metrics["kl/coefficient"] = record.kl_coefficient
    return metrics


def _speed(record: StepRecord) -> dict[str, float]:
    rollouts, report = record.graded.rollouts, record.report
    generated = rollouts.metrics.get("generated_tokens", 0.0)
    seconds, step_s = record.seconds, max(record.step_s, 1e-9)
    tokens = float(rollouts.rows.lengths_N.sum())
    metrics = {
        "step_s": record.step_s,
        "idle_s": record.idle_s,
        "tokens": tokens,
        "tokens_per_s": tokens / step_s,
        "rollout/generated_tokens": generated,
        "rollout/reused_tokens": rollouts.metrics.get("reused_tokens", 0.0),
        "rollout/preemptions": rollouts.metrics.get("preemptions", 0.0),
        "rollout/cache_used": rollouts.metrics.get("cache_used", 0.0),
    }
    proposed = rollouts.metrics.get("proposed_tokens", 0.0)
    if proposed:
        accepted = rollouts.metrics["accepted_tokens"]
        metrics["rollout/proposed_tokens"], metrics["rollout/accepted_tokens"] = proposed, accepted
        metrics["rollout/acceptance_rate"] = accepted / proposed
        metrics["rollout/tokens_per_sequence_step"] = 1 + accepted / max(1.0, rollouts.metrics["lane_steps"])
    # Where generation goes on during the update, it takes all of the time.
    generating_s = seconds.get("rollout") or rollouts.metrics.get("seconds", 0.0)
    if generating_s:
        metrics["rollout/tokens_per_s"] = generated / generating_s
    if report is not None and seconds.get("update"):
        metrics["update/tokens_per_s"] = float(record.used.rollouts.rows.lengths_N.sum()) / seconds["update"]
        metrics["mfu"] = report.flops / step_s / record.peak_flops
        metrics["update/mfu"] = report.flops / seconds["update"] / record.peak_flops
    return metrics | {f"time/{phase}_s": spent for phase, spent in seconds.items()}


def _lending(metrics: Mapping[str, float]) -> dict[str, float]:
    """What the learner's devices generated: of layout elastic."""
    if "lent_s" not in metrics:
        return {}
    own_tokens = metrics["generated_tokens"] - metrics["lent_tokens"]
    return {
        "lending/lent_s": metrics["lent_s"],
        "lending/switch_s": metrics["switch_s"],
        "lending/times": metrics["lendings"],
        "lending/tokens": metrics["lent_tokens"],
        "lending/gain": metrics["lent_tokens"] / max(1.0, own_tokens),
        "lending/moved_episodes": metrics["moved_episodes"],
    }


def idle_seconds(spans: Iterable[Span], begin_s: float, end_s: float) -> float:
    """Seconds of an interval in which no worker was busy, from the workers' own spans."""
    cuts = sorted((max(span.begin_s, begin_s), min(span.end_s, end_s)) for span in spans)
    covered, reached = 0.0, begin_s
    for begin, end in cuts:
        if end > max(begin, reached):
            covered += end - max(begin, reached)
            reached = end
    return max(0.0, end_s - begin_s - covered)


def ledger_records(graded: GradedRollouts, used: GradedRollouts, step: int) -> list[EpisodeRecord]:
    """Ledger rows for every episode of a step: consumed, or the reason for leaving it out."""
    taken = set(used.rollouts.rows.ids)
    uniform_by_id = zip(graded.rollouts.rows.ids, graded.uniform_N.tolist(), strict=True)
    states = ["consumed" if id in taken else "uninformative" if uniform else "surplus" for id, uniform in uniform_by_id]
    records = _records(graded.rollouts, graded.rewards_N.tolist(), states, step)
    for part in graded.left_out:
        states = ["failed" if id in graded.failed else "dropped" for id in part.rows.ids]
        records += _records(part, [None] * len(part), states, step)
    return records


def _records(
    rollouts: Rollouts, rewards: Sequence[float | None], states: Sequence[str], step: int
) -> list[EpisodeRecord]:
    note = rollouts.note
    return [
        EpisodeRecord(
            id=id,
            step=step,
            source=rollouts.tasks[id.prompt_index].source,
            state=states[row],
            finish=FINISHES[int(note.finish_N[row])],
            version=int(note.version_N[row]),
            tokens=int(note.sampled_N[row]),
            reward=rewards[row],
        )
        for row, id in enumerate(rollouts.rows.ids)
    ]


def pass_at_k(solved: int, samples: int, k: int) -> float:
    """Probability that at least one of `k` samples, chosen at random, is solved."""
    if samples - solved < k:
        return 1.0
    miss = 1.0
    for number in range(samples - solved - k + 1, samples - solved + 1):
        miss *= number / (number + solved)
    return 1.0 - miss


def powers_up_to(samples: int) -> Sequence[int]:
    """1, 2, 4, ... and the number itself."""
    powers = [1 << power for power in range(samples.bit_length()) if 1 << power <= samples]
    return powers if powers and powers[-1] == samples else [*powers, samples]
