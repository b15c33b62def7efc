# SPDX-License-Identifier: Apache-2.0
"""Log-probs of simulated models: a number for each episode that follows from their weights, which are a digest. Two
models agree only if they have learned the same. Torch-free."""

# N episodes · T tokens of all of them

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from podium.algorithms.kl import KlEstimator
from podium.cluster import Computed, RowRefs, WorkerContext
from podium.controller.simulation.costs import RunCosts
from podium.data.trajectories import TokenColumn, TrajectoryBlock, TrajectoryIds, ValueColumns
from podium.roles.blocks import empty_block
from podium.roles.carriers import DistanceNote, Floats
from podium.rollout.engine import MemoryChange

BASE = ""
"""The weights that a policy begins with, and a reference without a checkpoint of its own."""
NO_CHANGE = MemoryChange(measured_bytes=0, accounted_bytes=0)

# Log-probs of a scorer are at most so far from those of the policy, which are 0.
_FARTHEST = 0.2


def numbers(weights: str, ids: TrajectoryIds) -> Floats:
    """A number from -1 to 1 for each episode, whichever attempt it is."""
    seen = [f"{weights} {prompt} {sample}".encode() for prompt, sample, _, _ in ids.array_N4.tolist()]
    parts = [int.from_bytes(hashlib.sha256(each).digest()[:6]) / (1 << 48) for each in seen]
    return 2.0 * np.array(parts, np.float64) - 1.0


def digest_of(rows: RowRefs[TokenColumn] | RowRefs[ValueColumns] | None) -> str | None:
    """A digest of the values of all tokens; None if there are none."""
    if rows is None or not len(rows):
        return None
    column, seen = rows.read(), hashlib.sha256()
    for field in fields(column):
        if field.name.endswith("_T"):
            seen.update(np.ascontiguousarray(getattr(column, field.name)).tobytes())
    return seen.hexdigest()


def kl_distance(block: TrajectoryBlock, scored: TokenColumn, estimator: KlEstimator) -> NDArray[np.float64]:
    """`algorithms.kl.kl_estimate` in NumPy: of the sampling policy from the scoring model, at each token."""
    difference_T: NDArray[np.float64] = block.behavior_logprobs_T.astype(np.float64) - scored.values_T
    quadratic_T: NDArray[np.float64] = difference_T**2 / 2
    unbiased_T: NDArray[np.float64] = np.expm1(-difference_T) + difference_T
    match estimator:
        case "k1":
            return difference_T
        case "k2":
            return quadratic_T
        case "k3" | "k3_straight":
            return unbiased_T
        case other:
            assert_never(other)


def distance(block: TrajectoryBlock, scored: TokenColumn) -> DistanceNote:
    """`roles.distances.distance` in NumPy."""
    sampled_T = block.versions_T >= 0
    sampled_T[block.first_T] = False

    def sums(values_T: NDArray[np.float64]) -> Floats:
        total = np.concatenate([[0.0], np.cumsum(np.where(sampled_T, values_T, 0.0))])
        sums_N: Floats = total[block.offsets[1:]] - total[block.offsets[:-1]]
        return sums_N

    return DistanceNote(
        k1_N=sums(kl_distance(block, scored, "k1")),
        k2_N=sums(kl_distance(block, scored, "k2")),
        k3_N=sums(kl_distance(block, scored, "k3")),
        tokens_N=sums(np.ones(len(sampled_T))).astype(np.int64),
    )


async def scored(
    rows: RowRefs[TrajectoryBlock], weights: str, costs: RunCosts, context: WorkerContext
) -> Computed[TokenColumn]:
    """Log-probs of sampled tokens by a model with these weights."""
    block = rows.read() if len(rows) else empty_block()
    await costs.work(context.worker, costs.model.score_token_s * len(block.tokens_T))
    values_T = np.repeat(_FARTHEST * numbers(weights, block.ids), block.lengths_N).astype(np.float32)
    column = TokenColumn.like(block, values_T)
    return Computed(rows=column, note=distance(block, column))
