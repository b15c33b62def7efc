# SPDX-License-Identifier: Apache-2.0
"""One update of a policy from a batch of rollouts, as one rank computes it: advantages, weights, optimizer steps."""

# N episodes · T tokens of all of them · S trained tokens of one micro-batch

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.algorithms.behavior_check import BehaviorCheck
from podium.algorithms.corrections import effective_sample_size, importance_weights
from podium.algorithms.distillation import several_teachers_advantages
from podium.algorithms.kl import kl_estimate
from podium.algorithms.policy import policy_statistics
from podium.algorithms.reduction import normalizer, token_weights
from podium.algorithms.returns import moments_of, rewards_to_go
from podium.algorithms.router_statistics import RouterStatistics
from podium.algorithms.staleness import AgeStatistics, merge_ages, statistics_by_age, updates_between
from podium.algorithms.statistics import EffectiveSampleSize, Moments, PolicyStatistics
from podium.cluster import RowRefs
from podium.data.documents import PackedBatch
from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock
from podium.engine.scoring import score
from podium.engine.train_step import ObjectiveBatch, PendingReport, TrainEngine
from podium.recipe import AlgorithmSection, CorrectionSection
from podium.roles.carriers import UpdatePlan, UpdateShard
from podium.roles.interfaces import UpdateNote
from podium.roles.policy_objective import Loss, PolicyObjective, imitation, loss_of
from podium.roles.token_rows import packed_rows, spread_over_turns, token_rewards
from podium.weights.canary import LogprobGap


def _has_stale(versions_S: NDArray[np.int32], plan: UpdatePlan) -> bool:
    return bool(((versions_S >= 0) & (versions_S != plan.version)).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stale:
    """Sampled tokens against the policy before the update. Empty if no token is stale."""

    ages: Mapping[int, AgeStatistics] = field(default_factory=dict)
    check: BehaviorCheck = field(default_factory=BehaviorCheck)

    @classmethod
    def of(
        cls,
        learner_S: NDArray[np.float32],
        behavior_S: NDArray[np.float32],
        versions_S: NDArray[np.int32],
        group_S: Ints,
        plan: UpdatePlan,
    ) -> _Stale:
        """Of tokens that were all sampled."""
        if not _has_stale(versions_S, plan):
            return cls()
        ages_S = updates_between(versions_S, plan.version, plan.versions)
        return cls(
            ages=statistics_by_age(learner_S, behavior_S, ages_S),
            check=BehaviorCheck.of_policy(learner_S, behavior_S, group_S),
        )

    @classmethod
    def merge(cls, parts: Sequence[_Stale]) -> _Stale:
        """Several micro-batches as one."""
        return cls(
            ages=merge_ages([part.ages for part in parts]),
            check=BehaviorCheck.merge([part.check for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Columns:
    """Everything known about each token before the first forward of the update."""

    trained_T: NDArray[np.bool_]
    advantages_T: NDArray[np.float32]
    behavior_T: NDArray[np.float32]
    old_T: NDArray[np.float32]
    correction_T: NDArray[np.float32] | None
    sampling: EffectiveSampleSize | None
    kept_mass: tuple[float, float]  # sum and count
    gap: LogprobGap | None  # None: the learner's log-probs are not known yet
    stale: _Stale | None  # None: the learner's log-probs are not known yet
    check: BehaviorCheck  # of each log-prob by itself
    reference_T: NDArray[np.float32] | None


class PolicyUpdate:
    """Runs updates on one engine."""

    def __init__(self, engine: TrainEngine, *, max_tokens: int) -> None:
        self._engine, self._mesh, self._max_tokens = engine, engine.mesh, max_tokens
        self._losses: dict[str, Loss] = {}  # a custom loss file is read once: a run keeps the loss it began with

    def run(self, block: TrajectoryBlock, shard: UpdateShard, plan: UpdatePlan) -> UpdateNote:
        """Runs an update. Collective. The gradient is the same for any number of ranks and any split into
        micro-batches."""
        began = time.perf_counter()
        columns, proximal_s = self._columns(block, shard, plan)
        counts = self._counts(columns, block, shard)
        pending: list[PendingReport] = []
        seen: list[tuple[_Micro, Tensor, Tensor]] = []
        for batch, (num_tokens, num_sequences) in zip(shard.batches, counts, strict=True):
            if num_tokens == 0:
                continue  # no rank has anything to learn from: no step, so that moments do not move the weights
            micro = [self._micro(block, columns, rows, plan) for rows in batch]
            divisor = normalizer(
                plan.algorithm.reduction,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                constant=plan.algorithm.constant or float(plan.max_new_tokens),
            )
            report, outputs = self._engine.objective_step(
                [ObjectiveBatch(packed=each.packed, objective=each.objective) for each in micro],
                normalizer=divisor,
                lr=plan.lr,
            )
            pending.append(report)
            first = len(pending) == 1
            seen += [
                (dataclasses.replace(each, is_first=first), logprobs, entropy)
                for each, (logprobs, entropy) in zip(micro, outputs, strict=True)
            ]
        reports = [each.resolve() for each in pending]
        stale = columns.stale if columns.stale is not None else _stale_of(seen, plan)
        return UpdateNote(
            statistics=PolicyStatistics.merge([_statistics(each, logprobs, plan) for each, logprobs, _ in seen]),
            gap=columns.gap if columns.gap is not None else _gap(seen if _is_comparable(plan) else (), plan),
            sampling=columns.sampling,
            kept_mass=columns.kept_mass,
            ages=stale.ages,
            behavior=BehaviorCheck.merge([columns.check, stale.check]),
            entropy=(float(sum(entropy.double().sum().item() for _, _, entropy in seen)), _num_seen(seen)),
            kl_reference=_distance(seen),
            advantages=moments_of(torch.from_numpy(columns.advantages_T), torch.from_numpy(columns.trained_T)),
            losses=tuple(report.loss for report in reports),
            grad_norms=tuple(report.grad_norm for report in reports),
            skipped=sum(report.skipped for report in reports),
            num_tokens=int(columns.trained_T.sum()),
            num_sequences=len(block.ids),
            seconds=time.perf_counter() - began,
            proximal_s=proximal_s,
            routers=RouterStatistics.mean([each.routers for each in reports if each.routers is not None]),
        )

    def _columns(self, block: TrajectoryBlock, shard: UpdateShard, plan: UpdatePlan) -> tuple[_Columns, float]:
        algorithm = plan.algorithm
        trained_T = block.loss_mask_T.copy()
        trained_T[block.first_T] = False  # nothing predicts a sequence's first token
        reference_T = _column(shard.reference, block)
        behavior_T = block.behavior_logprobs_T
        old_T, proximal_s = behavior_T, 0.0
        if algorithm.proximal == "always" or (algorithm.proximal == "auto" and plan.correction is not None):
            began = time.perf_counter()
            old_T = score(
                self._engine.language_model, self._mesh, block, temperature=plan.temperature,
                max_tokens=self._max_tokens, replays=True,
            ).values_T  # fmt: skip
            proximal_s = time.perf_counter() - began
        advantages_T = self._advantages(block, shard, plan, trained_T, reference_T, old_T)
        correction_T = sampling = stale = gap = None
        kept_mass = 0.0, 0.0
        group_T, sampled_T = _group_T(block), trained_T & (block.versions_T >= 0)
        check = BehaviorCheck.of_logprobs(behavior_T[sampled_T], group_T[sampled_T])
        if old_T is not behavior_T:
            stale = _Stale.of(
                old_T[sampled_T], behavior_T[sampled_T], block.versions_T[sampled_T], group_T[sampled_T], plan
            )
            current_T = trained_T & _comparable_T(block, plan)
            delta_S = old_T[current_T].astype(np.float64) - behavior_T[current_T]
            gap = LogprobGap.of(delta_S, group_T[current_T], is_truncated=plan.is_truncated)
            if plan.is_truncated:
                kept_mass = _kept_mass(old_T[current_T], behavior_T[current_T])
        if plan.correction is not None:
            correction_T = _correction(block, trained_T, old_T, plan.correction)
            sampling = effective_sample_size(torch.from_numpy(correction_T[trained_T]))
            trained_T &= correction_T > 0  # dropped tokens do not count either; the gap has them
        in_loss = algorithm.kl is not None and algorithm.kl.where == "loss"
        columns = _Columns(
            trained_T=trained_T,
            advantages_T=advantages_T,
            behavior_T=behavior_T,
            old_T=old_T,
            correction_T=correction_T,
            sampling=sampling,
            kept_mass=kept_mass,
            gap=gap,
            stale=stale,
            check=check,
            reference_T=reference_T if in_loss else None,
        )
        return columns, proximal_s

    def _advantages(
        self,
        block: TrajectoryBlock,
        shard: UpdateShard,
        plan: UpdatePlan,
        trained_T: NDArray[np.bool_],
        reference_T: NDArray[np.float32] | None,
        old_T: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        values_T: NDArray[Any]
        if shard.advantages_N is not None:
            values_T = np.repeat(shard.advantages_N, block.lengths_N)
        elif shard.turn_advantages is not None:
            values_T = spread_over_turns(shard.turn_advantages, block)
        elif shard.advantages is not None:
            values_T = shard.advantages.read().advantages_T if len(block.ids) else np.empty(0, np.float32)
        elif shard.teachers:
            values_T = _taught(shard, old_T)
        else:
            assert shard.rewards_N is not None
            rewards_T = token_rewards(
                block, trained_T, shard.rewards_N, shard.turn_rewards, reference_T, plan.algorithm, plan.kl_coefficient
            )
            values_T = rewards_to_go(
                torch.from_numpy(rewards_T),
                torch.from_numpy(trained_T),
                torch.from_numpy(block.offsets.copy()),
                gamma=plan.algorithm.gamma,
            ).numpy()
        values_T = np.asarray(values_T, np.float32)
        if plan.whitening is not None:
            shift, scale = plan.whitening
            return np.where(trained_T, (values_T - shift) * scale, 0).astype(np.float32)
        if plan.whiten:
            mine = moments_of(torch.from_numpy(values_T.copy()), torch.from_numpy(trained_T))
            total = torch.tensor([mine.count, mine.sum, mine.sum_squares], dtype=torch.float64)
            total = self._mesh.sum_of_data(total.to(self._mesh.device)).cpu()
            whitening = Moments(*total.tolist()).whitening()
            values_T = whitening.apply(torch.from_numpy(values_T.copy()), torch.from_numpy(trained_T)).numpy()
        return values_T.astype(np.float32)

    def _counts(self, columns: _Columns, block: TrajectoryBlock, shard: UpdateShard) -> list[tuple[int, int]]:
        """Trained tokens, and episodes that have any, of each optimizer step over all ranks."""
        before_T = np.concatenate([[0], np.cumsum(columns.trained_T)])
        trained_N = before_T[block.offsets[1:]] - before_T[block.offsets[:-1]]
        mine = torch.zeros(len(shard.batches), 2, dtype=torch.int64)
        for number, batch in enumerate(shard.batches):
            rows = np.concatenate(batch) if batch else np.empty(0, np.int64)
            if len(rows):
                mine[number, 0], mine[number, 1] = int(trained_N[rows].sum()), int((trained_N[rows] > 0).sum())
        total = self._mesh.sum_of_data(mine.to(self._mesh.device)).cpu()
        return [
            (int(tokens) + absent[0], int(sequences) + absent[1])
            for (tokens, sequences), absent in zip(total.tolist(), shard.absent or repeat((0, 0)), strict=False)
        ]

    def _loss(self, algorithm: AlgorithmSection) -> Loss:
        if algorithm.loss not in self._losses:
            self._losses[algorithm.loss] = loss_of(algorithm)
        return self._losses[algorithm.loss]

    def _micro(self, block: TrajectoryBlock, columns: _Columns, rows: Ints, plan: UpdatePlan) -> _Micro:
        replays = plan.loss == "policy"  # imitated tokens count like data, and routers choose
        packed, places_S, sequence_S, num_sequences = packed_rows(block, columns.trained_T, rows, replays=replays)
        device = self._mesh.device
        lengths_N = np.bincount(sequence_S, minlength=num_sequences)
        weights_S = token_weights(plan.algorithm.reduction, torch.from_numpy(lengths_N[sequence_S])).numpy()
        weights_T = packed.weights_T.copy()
        weights_T[packed.weights_T > 0] = weights_S
        kl = plan.algorithm.kl

        def moved(values_T: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values_T[places_S])).to(device)

        objective = PolicyObjective(
            # Imitated tokens count like data, however they were sampled.
            temperature=plan.temperature if plan.loss == "policy" else 1.0,
            entropy=plan.algorithm.entropy if plan.loss == "policy" else 0.0,
            ties_tokens=plan.loss == "policy" and plan.algorithm.loss_spans_tokens,
            loss=imitation if plan.loss == "imitation" else self._loss(plan.algorithm),
            old_S=moved(columns.old_T),
            advantages_S=moved(columns.advantages_T),
            sequence_S=torch.from_numpy(sequence_S).to(device),
            num_sequences=num_sequences,
            correction_S=None if columns.correction_T is None else moved(columns.correction_T),
            reference_S=None if columns.reference_T is None else moved(columns.reference_T),
            kl_estimator=(kl.estimator or "k3_straight") if kl is not None else "k3_straight",
            kl_coefficient=plan.kl_coefficient,
        )
        return _Micro(
            packed=dataclasses.replace(packed, weights_T=weights_T),
            objective=objective,
            behavior_S=moved(columns.behavior_T),
            versions_S=block.versions_T[places_S],
            is_comparable_S=_comparable_T(block, plan)[places_S],
            group_S=_group_T(block)[places_S],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Micro:
    packed: PackedBatch
    objective: PolicyObjective
    behavior_S: Tensor
    versions_S: NDArray[np.int32]
    is_comparable_S: NDArray[np.bool_]
    group_S: Ints
    is_first: bool = False  # computed before any of the batch's optimizer steps


def _taught(shard: UpdateShard, student_T: NDArray[np.float32]) -> NDArray[np.float32]:
    if not len(student_T):
        return np.empty(0, np.float32)
    teachers = torch.stack([torch.from_numpy(refs.read().values_T.copy()) for refs, _ in shard.teachers])
    weights = torch.tensor([weight for _, weight in shard.teachers])
    return several_teachers_advantages(teachers, torch.from_numpy(student_T.copy()), weights).numpy()


def _column(refs: RowRefs[TokenColumn] | None, block: TrajectoryBlock) -> NDArray[np.float32] | None:
    if refs is None:
        return None
    values: NDArray[np.float32] = refs.read().values_T if len(refs) else np.empty(0, np.float32)
    assert len(values) == len(block.tokens_T)
    return values


def _correction(
    block: TrajectoryBlock, trained_T: NDArray[np.bool_], old_T: NDArray[np.float32], correction: CorrectionSection
) -> NDArray[np.float32]:
    sequence_T = np.repeat(np.arange(len(block.ids)), block.lengths_N)
    weights_S = importance_weights(
        torch.from_numpy(old_T[trained_T]),
        torch.from_numpy(block.behavior_logprobs_T[trained_T]),
        torch.from_numpy(sequence_T[trained_T].astype(np.int64)),
        len(block.ids),
        kind=correction.kind,
        cap=correction.cap,
        low=correction.low,
    )
    weights_T = np.zeros(len(trained_T), np.float32)
    weights_T[trained_T] = weights_S.numpy()
    return weights_T


def _kept_mass(policy_S: NDArray[np.float32], behavior_S: NDArray[np.float32]) -> tuple[float, float]:
    """Sum and count. The engine's probability of a token is the policy's divided by the kept mass, so that the policy's
    divided by the engine's is the kept mass."""
    return float(np.exp(policy_S.astype(np.float64) - behavior_S).sum()), float(len(policy_S))


def _group_T(block: TrajectoryBlock) -> Ints:
    return np.repeat(block.ids.array_N4[:, 0].astype(np.int64), block.lengths_N)


def _comparable_T(block: TrajectoryBlock, plan: UpdatePlan) -> NDArray[np.bool_]:
    """Tokens of which engine and learner compute the same: those that the current weights sampled. Where a cache is
    kept over new weights, that holds only for sequences that were sampled by them as a whole."""
    current_T: NDArray[np.bool_] = block.versions_T == plan.version
    if plan.keeps_cache:
        sequence_T = np.repeat(np.arange(len(block.ids)), block.lengths_N)
        older_T = (block.versions_T >= 0) & ~current_T
        current_T = current_T & ~np.isin(sequence_T, sequence_T[older_T])
    return current_T


def _is_comparable(plan: UpdatePlan) -> bool:
    """Whether the loss computes log-probs at the temperature of the engine. Imitation has temperature 1."""
    return plan.loss == "policy" or plan.temperature == 1.0


def _statistics(micro: _Micro, logprobs_S: Tensor, plan: UpdatePlan) -> PolicyStatistics:
    algorithm = plan.algorithm
    return policy_statistics(
        micro.objective.tokens(logprobs_S, slice(None)),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip if algorithm.loss == "clipped" else None,
        level="sequence" if algorithm.loss == "sequence_clipped" else "token",
    )


def _gap(seen: Sequence[tuple[_Micro, Tensor, Tensor]], plan: UpdatePlan) -> LogprobGap:
    """Gap between engine and learner over tokens that the current weights sampled, before the first optimizer step."""
    parts = []
    for micro, logprobs_S, _ in seen:
        if micro.is_first:
            current_S = micro.is_comparable_S
            delta_S = (logprobs_S - micro.behavior_S).double().cpu().numpy()[current_S]
            parts.append(LogprobGap.of(delta_S, micro.group_S[current_S], is_truncated=plan.is_truncated))
    return LogprobGap.merge(parts)


def _stale_of(seen: Sequence[tuple[_Micro, Tensor, Tensor]], plan: UpdatePlan) -> _Stale:
    """Over the tokens that were computed before the first optimizer step."""
    parts = []
    for micro, logprobs_S, _ in seen:
        sampled_S = micro.versions_S >= 0
        if micro.is_first and _has_stale(micro.versions_S, plan):
            learner_S, behavior_S = (each.float().cpu().numpy()[sampled_S] for each in (logprobs_S, micro.behavior_S))
            parts.append(_Stale.of(learner_S, behavior_S, micro.versions_S[sampled_S], micro.group_S[sampled_S], plan))
    return _Stale.merge(parts)


def _num_seen(seen: Sequence[tuple[_Micro, Tensor, Tensor]]) -> float:
    return float(sum(len(entropy) for _, _, entropy in seen))


def _distance(seen: Sequence[tuple[_Micro, Tensor, Tensor]]) -> tuple[float, float]:
    """k3 to the reference if it is in the loss: sum and count."""
    total, count = 0.0, 0.0
    for micro, logprobs_S, _ in seen:
        if micro.objective.reference_S is not None:
            total += float(kl_estimate(logprobs_S, micro.objective.reference_S, "k3").double().sum())
            count += len(logprobs_S)
    return total, count
