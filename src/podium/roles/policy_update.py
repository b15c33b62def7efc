# SPDX-License-Identifier: Apache-2.0
"""One update of a policy from a batch of rollouts, as one rank computes it: advantages, weights, optimizer steps."""

# N episodes · T tokens of all of them · S trained tokens of one micro-batch

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.algorithms import policy
from podium.algorithms.corrections import EffectiveSampleSize, effective_sample_size, importance_weights
from podium.algorithms.distillation import several_teachers_advantages
from podium.algorithms.kl import KlEstimator, kl_estimate
from podium.algorithms.policy import PolicyStatistics, PolicyTokens, policy_statistics
from podium.algorithms.reduction import normalizer, token_weights
from podium.algorithms.returns import Moments, rewards_to_go
from podium.cluster import RowRefs
from podium.data.documents import Document, PackedBatch, pack
from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock
from podium.engine.scoring import score
from podium.engine.train_step import ObjectiveBatch, PendingReport, TrainEngine
from podium.errors import RecipeError
from podium.recipe import AlgorithmSection, plugins
from podium.roles.carriers import TurnRewards, UpdatePlan, UpdateShard
from podium.roles.interfaces import UpdateNote
from podium.weights.canary import LogprobGap

Loss = Callable[[PolicyTokens], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyObjective:
    """The loss of one micro-batch's trained tokens. What it is given is constant but for the log-probs."""

    temperature: float
    entropy: float
    ties_tokens: bool
    watches_entropy: bool = True
    loss: Loss
    old_S: Tensor
    advantages_S: Tensor
    sequence_S: Tensor
    num_sequences: int
    correction_S: Tensor | None
    reference_S: Tensor | None
    kl_estimator: KlEstimator
    kl_coefficient: float

    def tokens(self, logprobs_C: Tensor, part: slice) -> PolicyTokens:
        """What the loss reads about one part of the trained tokens."""
        return PolicyTokens(
            logprobs_S=logprobs_C,
            old_logprobs_S=self.old_S[part],
            advantages_S=self.advantages_S[part],
            sequence_S=self.sequence_S[part],
            num_sequences=self.num_sequences,
        )

    def __call__(self, logprobs_C: Tensor, tokens: slice) -> Tensor:
        """The loss of each token: correction · policy loss + β · KL. The head (models/head.py) subtracts the entropy
        bonus, multiplies by the token's weight and sums; the train step divides by the count of the reduction."""
        loss_C = self.loss(self.tokens(logprobs_C, tokens))
        if self.correction_S is not None:
            loss_C = loss_C * self.correction_S[tokens]
        if self.reference_S is not None:
            distance_C = kl_estimate(logprobs_C, self.reference_S[tokens], self.kl_estimator)
            loss_C = loss_C + self.kl_coefficient * distance_C
        return loss_C


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Columns:
    """Everything known of each token before the first forward of the update."""

    trained_T: NDArray[np.bool_]
    advantages_T: NDArray[np.float32]
    behavior_T: NDArray[np.float32]
    old_T: NDArray[np.float32]
    correction_T: NDArray[np.float32] | None
    sampling: EffectiveSampleSize | None
    reference_T: NDArray[np.float32] | None


class PolicyUpdate:
    """Runs updates on one engine."""

    def __init__(self, engine: TrainEngine, *, max_tokens: int) -> None:
        self._engine, self._mesh, self._max_tokens = engine, engine.mesh, max_tokens
        self._losses: dict[str, Loss] = {}  # a file of the user's is read once: a run keeps the loss it began with

    def run(self, block: TrajectoryBlock, shard: UpdateShard, plan: UpdatePlan) -> UpdateNote:
        """Collective. The same gradient for any number of ranks and any cut into micro-batches."""
        began = time.perf_counter()
        columns, proximal_s = self._columns(block, shard, plan)
        counts = self._counts(columns, block, shard)
        pending: list[PendingReport] = []
        seen: list[tuple[_Micro, Tensor, Tensor]] = []
        for batch, (num_tokens, num_sequences) in zip(shard.batches, counts, strict=True):
            if num_tokens == 0:
                continue  # nothing to learn from on any rank: no step, so that moments do not move the weights
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
        return UpdateNote(
            statistics=PolicyStatistics.merge([_statistics(each, logprobs, plan) for each, logprobs, _ in seen]),
            gap=_gap(seen if plan.loss == "policy" or plan.temperature == 1.0 else (), plan.version),
            sampling=columns.sampling,
            entropy=(float(sum(entropy.double().sum().item() for _, _, entropy in seen)), _num_seen(seen)),
            kl_reference=_distance(seen),
            advantages=Moments.of(torch.from_numpy(columns.advantages_T), torch.from_numpy(columns.trained_T)),
            losses=tuple(report.loss for report in reports),
            grad_norms=tuple(report.grad_norm for report in reports),
            skipped=sum(report.skipped for report in reports),
            num_tokens=int(columns.trained_T.sum()),
            num_sequences=len(block.ids),
            seconds=time.perf_counter() - began,
            proximal_s=proximal_s,
        )

    def _columns(self, block: TrajectoryBlock, shard: UpdateShard, plan: UpdatePlan) -> tuple[_Columns, float]:
        algorithm = plan.algorithm
        trained_T = block.loss_mask_T.copy()
        trained_T[block.offsets[:-1][block.lengths_N > 0]] = False  # nothing predicts a row's first token
        reference_T = _column(shard.reference, block)
        behavior_T = block.behavior_logprobs_T
        old_T, proximal_s = behavior_T, 0.0
        if algorithm.proximal == "always" or (algorithm.proximal == "auto" and algorithm.correction is not None):
            began = time.perf_counter()
            old_T = score(
                self._engine.language_model, self._mesh, block, temperature=plan.temperature,
                max_tokens=self._max_tokens,
            ).values_T  # fmt: skip
            proximal_s = time.perf_counter() - began
        advantages_T = self._advantages(block, shard, plan, trained_T, reference_T)
        correction_T = sampling = None
        if algorithm.correction is not None:
            correction_T = _correction(block, trained_T, old_T, algorithm)
            sampling = effective_sample_size(torch.from_numpy(correction_T[trained_T]))
            trained_T &= correction_T > 0  # what is dropped leaves the count too
        in_loss = algorithm.kl is not None and algorithm.kl.where == "loss"
        columns = _Columns(
            trained_T=trained_T,
            advantages_T=advantages_T,
            behavior_T=behavior_T,
            old_T=old_T,
            correction_T=correction_T,
            sampling=sampling,
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
    ) -> NDArray[np.float32]:
        values_T: NDArray[Any]
        if shard.advantages_N is not None:
            values_T = np.repeat(shard.advantages_N, block.lengths_N)
        elif shard.advantages is not None:
            values_T = shard.advantages.read().advantages_T if len(block.ids) else np.empty(0, np.float32)
        elif shard.teachers:
            values_T = _taught(shard, block)
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
            mine = Moments.of(torch.from_numpy(values_T.copy()), torch.from_numpy(trained_T))
            total = torch.tensor([mine.count, mine.sum, mine.sum_squares], dtype=torch.float64)
            total = self._mesh.sum(total.to(self._mesh.device)).cpu()
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
        total = self._mesh.sum(mine.to(self._mesh.device)).cpu()
        return [
            (int(tokens) + absent[0], int(sequences) + absent[1])
            for (tokens, sequences), absent in zip(total.tolist(), shard.absent or repeat((0, 0)), strict=False)
        ]

    def _loss(self, algorithm: AlgorithmSection) -> Loss:
        if algorithm.loss not in self._losses:
            self._losses[algorithm.loss] = loss_of(algorithm)
        return self._losses[algorithm.loss]

    def _micro(self, block: TrajectoryBlock, columns: _Columns, rows: Ints, plan: UpdatePlan) -> _Micro:
        packed, places_S, sequence_S, num_sequences = packed_rows(block, columns.trained_T, rows)
        device = self._mesh.device
        lengths_N = np.bincount(sequence_S, minlength=num_sequences)
        weights_S = token_weights(plan.algorithm.reduction, torch.from_numpy(lengths_N[sequence_S])).numpy()
        weights_T = packed.weights_T.copy()
        weights_T[packed.weights_T > 0] = weights_S
        kl = plan.algorithm.kl

        def moved(values_T: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values_T[places_S])).to(device)

        objective = PolicyObjective(
            # What is imitated counts as data does, whatever it was sampled with.
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
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Micro:
    packed: PackedBatch
    objective: PolicyObjective
    behavior_S: Tensor
    versions_S: NDArray[np.int32]
    is_first: bool = False  # computed before any of the batch's optimizer steps


def packed_rows(
    block: TrajectoryBlock, trained_T: NDArray[np.bool_], rows: Ints
) -> tuple[PackedBatch, Ints, Ints, int]:
    """(micro-batch, place in the block of each trained token, its sequence, number of sequences). What follows a row's
    last trained token is left out; rows without one are left out whole."""
    documents: list[Document] = []
    begins: list[int] = []
    for row in rows.tolist():
        begin, end = int(block.offsets[row]), int(block.offsets[row + 1])
        trained = trained_T[begin:end]
        trained_places = np.flatnonzero(trained)
        if len(trained_places):
            last = int(trained_places[-1]) + 1
            documents.append(Document(tokens=block.tokens_T[begin : begin + last], trained=trained[:last]))
            begins.append(begin)
    # Neighbours of one length are attended to in one call.
    order = sorted(range(len(documents)), key=lambda at: documents[at].num_inputs)
    places = [begins[at] + np.flatnonzero(documents[at].trained) for at in order]
    places_S = np.concatenate(places) if places else np.empty(0, np.int64)
    sequence_S = np.repeat(np.arange(len(places)), [len(each) for each in places]).astype(np.int64)
    return pack([documents[at] for at in order]), places_S, sequence_S, len(places)


def token_rewards(
    block: TrajectoryBlock,
    trained_T: NDArray[np.bool_],
    rewards_N: NDArray[np.float64],
    turn_rewards: TurnRewards,
    reference_T: NDArray[np.float32] | None,
    algorithm: AlgorithmSection,
    kl_coefficient: float,
) -> NDArray[np.float32]:
    """Each episode's reward on its last trained token, turns' rewards on their own, less the KL where it is in the
    reward."""
    rewards_T = np.zeros(len(block.tokens_T), np.float32)
    places = np.where(trained_T, np.arange(len(trained_T)), -1)
    if len(block.ids):
        last_N = np.maximum.reduceat(np.append(places, -1), block.offsets[:-1])
        last_N = np.where(block.lengths_N > 0, last_N, -1)
        has = last_N >= block.offsets[:-1]
        np.add.at(rewards_T, last_N[has], rewards_N[has])
        np.add.at(rewards_T, block.offsets[:-1][turn_rewards.row_K] + turn_rewards.token_K, turn_rewards.reward_K)
    kl = algorithm.kl
    if kl is not None and kl.where == "reward" and reference_T is not None:
        distance_T = kl_estimate(
            torch.from_numpy(block.behavior_logprobs_T.copy()),
            torch.from_numpy(reference_T.copy()),
            kl.estimator or "k1",
        ).numpy()
        rewards_T -= np.where(trained_T, kl_coefficient * distance_T, 0).astype(np.float32)
    return rewards_T


def loss_of(algorithm: AlgorithmSection) -> Loss:
    """The loss that the recipe names, with its constants."""
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "clipped":
            return functools.partial(policy.clipped, clip_low=low, clip_high=high, dual_clip=algorithm.dual_clip)
        case "sequence_clipped":
            return functools.partial(policy.sequence_clipped, clip_low=low, clip_high=high)
        case "clipped_weights":
            return functools.partial(policy.clipped_weights, clip_low=low, clip_high=high)
        case "policy_gradient":
            return policy.policy_gradient
        case path:
            return _own_loss(plugins.load(path, "algorithm.loss"), path)


def _own_loss(function: Callable[..., Any], path: str) -> Loss:
    """A loss of the user's; one number for all tokens would be taken for the loss of each."""

    def loss(tokens: PolicyTokens) -> Tensor:
        loss_S: Tensor = function(tokens)
        if not isinstance(loss_S, Tensor) or loss_S.shape != tokens.logprobs_S.shape:
            given = tuple(loss_S.shape) if isinstance(loss_S, Tensor) else type(loss_S).__name__
            raise RecipeError(
                f"algorithm.loss: {path} gave {given} for {len(tokens.logprobs_S)} tokens. It takes PolicyTokens and "
                "gives one loss for each token; the recipe's reduction adds them up."
            )
        return loss_S

    return loss


def imitation(tokens: PolicyTokens) -> Tensor:
    """Cross-entropy: what supervised fine-tuning minimises."""
    return -tokens.logprobs_S


def _taught(shard: UpdateShard, block: TrajectoryBlock) -> NDArray[np.float32]:
    if not len(block.ids):
        return np.empty(0, np.float32)
    teachers = torch.stack([torch.from_numpy(refs.read().values_T.copy()) for refs, _ in shard.teachers])
    weights = torch.tensor([weight for _, weight in shard.teachers])
    student = torch.from_numpy(block.behavior_logprobs_T.copy())
    return several_teachers_advantages(teachers, student, weights).numpy()


def _column(refs: RowRefs[TokenColumn] | None, block: TrajectoryBlock) -> NDArray[np.float32] | None:
    if refs is None:
        return None
    values: NDArray[np.float32] = refs.read().values_T if len(refs) else np.empty(0, np.float32)
    assert len(values) == len(block.tokens_T)
    return values


def _correction(
    block: TrajectoryBlock, trained_T: NDArray[np.bool_], old_T: NDArray[np.float32], algorithm: AlgorithmSection
) -> NDArray[np.float32]:
    kind = algorithm.correction
    assert kind is not None
    sequence_T = np.repeat(np.arange(len(block.ids)), block.lengths_N)
    weights_S = importance_weights(
        torch.from_numpy(old_T[trained_T]),
        torch.from_numpy(block.behavior_logprobs_T[trained_T]),
        torch.from_numpy(sequence_T[trained_T].astype(np.int64)),
        len(block.ids),
        kind=kind.kind,
        cap=kind.cap,
        low=kind.low,
    )
    weights_T = np.zeros(len(trained_T), np.float32)
    weights_T[trained_T] = weights_S.numpy()
    return weights_T


def _statistics(micro: _Micro, logprobs_S: Tensor, plan: UpdatePlan) -> PolicyStatistics:
    algorithm = plan.algorithm
    return policy_statistics(
        micro.objective.tokens(logprobs_S, slice(None)),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip if algorithm.loss == "clipped" else None,
        level="sequence" if algorithm.loss == "sequence_clipped" else "token",
    )


def _gap(seen: Sequence[tuple[_Micro, Tensor, Tensor]], version: int) -> LogprobGap:
    """Engine against learner over tokens that the current weights sampled, as the first optimizer step saw them."""
    parts = []
    for micro, logprobs_S, _ in seen:
        if not micro.is_first:
            continue
        current = torch.from_numpy(micro.versions_S == version).to(logprobs_S.device)
        delta = (logprobs_S - micro.behavior_S)[current].double()
        count = delta.numel()
        parts.append(
            LogprobGap(
                count=count,
                sum_abs=float(delta.abs().sum()),
                sum_ratio=float(delta.clamp(-20, 20).exp().sum()),
                largest=float(delta.abs().max()) if count else 0.0,
            )
        )
    return LogprobGap.merge(parts)


def _num_seen(seen: Sequence[tuple[_Micro, Tensor, Tensor]]) -> float:
    return float(sum(len(entropy) for _, _, entropy in seen))


def _distance(seen: Sequence[tuple[_Micro, Tensor, Tensor]]) -> tuple[float, float]:
    """k3 to the reference, where it is in the loss: sum and count."""
    total, count = 0.0, 0.0
    for micro, logprobs_S, _ in seen:
        if micro.objective.reference_S is not None:
            total += float(kl_estimate(logprobs_S, micro.objective.reference_S, "k3").double().sum())
            count += len(logprobs_S)
    return total, count
