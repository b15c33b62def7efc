# SPDX-License-Identifier: Apache-2.0
"""What the update learned from each token of some episodes, as the learner computes it: advantages, and the columns
that they follow from. Torch-free at import."""

# N episodes · T tokens of all of them · K teachers

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.data.trajectories import TrajectoryBlock, TrajectoryIds
from podium.recipe import AlgorithmSection
from podium.roles.stages import Advantages, TeacherAdvantages, TokenAdvantages, TrainBatch

Column = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSignal:
    """Values of the tokens of some episodes, by name of their column in the file. NaN: the token has none."""

    ids: TrajectoryIds
    lengths_N: NDArray[np.int64]
    columns: Mapping[str, Column]


def trained_tokens(block: TrajectoryBlock) -> NDArray[np.bool_]:
    """Mask of the tokens that count in the loss: nothing predicts a sequence's first token."""
    trained_T = block.loss_mask_T.copy()
    trained_T[block.first_T] = False
    return trained_T


def token_signal(batch: TrainBatch, ids: TrajectoryIds, algorithm: AlgorithmSection) -> TokenSignal:
    """The signal of these episodes of a batch. Reads the object store. Advantages that only the learner knows (those of
    teachers, where it computes the old log-probs anew) are left out."""
    rows = batch.rollouts.rows
    advantages, columns = batch.advantages, dict[str, Column]()
    is_whole = isinstance(advantages, Advantages) and (advantages.whiten or advantages.values_N is None)
    block = rows.read() if is_whole else rows.select(ids).read()  # whitening takes all tokens of the step
    trained_T = trained_tokens(block)
    if batch.reference is not None:
        columns["reference_log_probs"] = batch.reference.logprobs.select(block.ids).read().values_T
    match advantages:
        case TokenAdvantages(columns=refs, whitening=(shift, scale)):
            found = refs.select(ids).read()
            columns["advantages"] = np.asarray((found.advantages_T - shift) * scale, np.float32)
            columns |= {"values": found.values_T, "returns": found.returns_T}
        case TeacherAdvantages(logprobs=logprobs, weights=weights):
            shares = np.array(weights, np.float32)[:, None]
            teachers_KT = np.stack([each.select(ids).read().values_T for each in logprobs])
            columns["teacher_log_probs"] = (shares * teachers_KT).sum(axis=0)
            if not _is_rescored(algorithm):
                columns["advantages"] = (shares * (teachers_KT - block.behavior_logprobs_T)).sum(axis=0)
        case Advantages():
            columns["advantages"] = _of_episodes(batch, advantages, block, trained_T, columns, algorithm)
    trained = {name: np.where(trained_T, values_T, np.nan).astype(np.float32) for name, values_T in columns.items()}
    return _chosen(block, trained, ids)


def _is_rescored(algorithm: AlgorithmSection) -> bool:
    """Whether the learner computes the old log-probs itself."""
    return algorithm.proximal == "always" or (algorithm.proximal == "auto" and algorithm.correction is not None)


def _of_episodes(
    batch: TrainBatch, advantages: Advantages, block: TrajectoryBlock, trained_T: NDArray[np.bool_],
    columns: Mapping[str, Column], algorithm: AlgorithmSection,
) -> Column:  # fmt: skip
    """As PolicyUpdate computes them: one for the whole episode, or returns of its rewards; whitened over the step."""
    values_T: NDArray[Any]
    if advantages.values_N is not None:
        values_N = advantages.values_N[batch.rollouts.rows.ids.positions_of(block.ids)]
        values_T = np.repeat(values_N, block.lengths_N).astype(np.float32)
        if not advantages.whiten:
            return values_T
    import torch

    from podium.algorithms.returns import moments_of, rewards_to_go
    from podium.roles.token_rows import spread_over_turns, token_rewards

    mask_T = torch.from_numpy(trained_T)
    if advantages.turns is not None:
        turns = advantages.turns.take(batch.rollouts.rows.ids.positions_of(block.ids))
        values_T = spread_over_turns(turns, block)
    elif advantages.values_N is None:
        rewards_T = token_rewards(
            block, trained_T, batch.graded.last_token_rewards_N, batch.graded.token_turn_rewards,
            columns.get("reference_log_probs"), algorithm, batch.kl_coefficient,
        )  # fmt: skip
        offsets = torch.from_numpy(block.offsets.copy())
        values_T = rewards_to_go(torch.from_numpy(rewards_T), mask_T, offsets, gamma=algorithm.gamma).numpy()
    if advantages.whiten:
        given_T = torch.from_numpy(values_T.copy())
        values_T = moments_of(given_T, mask_T).whitening().apply(given_T, mask_T).numpy()
    return np.asarray(values_T, np.float32)


def _chosen(block: TrajectoryBlock, columns: Mapping[str, Column], ids: TrajectoryIds) -> TokenSignal:
    rows = block.ids.positions_of(ids)
    bounds = block.offsets.tolist()
    places = [np.arange(bounds[row], bounds[row + 1]) for row in rows.tolist()]
    places_T = np.concatenate(places) if places else np.empty(0, np.int64)
    return TokenSignal(
        ids=ids,
        lengths_N=block.lengths_N[rows],
        columns={name: values_T[places_T] for name, values_T in columns.items()},
    )
