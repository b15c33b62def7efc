# SPDX-License-Identifier: Apache-2.0
"""Turns an engine's answers into trajectories: prompt and answer in one row, with the source of each token.
Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podium.data.prefixes import RowPrefixes
from podium.data.routed_experts import aligned, num_recorded
from podium.data.trajectories import TrajectoryBlock, TrajectoryIds
from podium.roles.carriers import FINISHES, UNANSWERED, EpisodeNote
from podium.rollout.requests import Completion, PartialAnswer


def empty_block() -> TrajectoryBlock:
    """A block without trajectories: a rank without work still joins in every collective."""
    return TrajectoryBlock(
        ids=TrajectoryIds.of(()),
        offsets=np.zeros(1, np.int64),
        tokens_T=np.empty(0, np.int32),
        loss_mask_T=np.empty(0, np.bool_),
        behavior_logprobs_T=np.empty(0, np.float32),
        versions_T=np.empty(0, np.int32),
    )


def block_of(answers: Sequence[Completion]) -> tuple[TrajectoryBlock, EpisodeNote]:
    """Rows in ascending order of id, and their note for the controller."""
    answers = sorted(answers, key=lambda each: each.id)
    prompts = np.array([len(each.prompt) for each in answers], np.int64)
    sampled = np.array([each.num_tokens for each in answers], np.int64)
    lengths = np.stack([prompts, sampled], axis=1).reshape(-1)
    is_drawn_T = np.repeat(np.tile([False, True], len(answers)), lengths)
    block = TrajectoryBlock(
        ids=TrajectoryIds.of([each.id for each in answers]),
        offsets=np.concatenate([[0], np.cumsum(prompts + sampled)]).astype(np.int64),
        tokens_T=_joined([part for each in answers for part in (each.prompt, each.tokens_L)], np.int32),
        loss_mask_T=is_drawn_T,
        behavior_logprobs_T=_laid(is_drawn_T, [each.logprobs_L for each in answers], 0.0, np.float32),
        versions_T=_laid(is_drawn_T, [each.versions_L for each in answers], -1, np.int32),
        experts_TLK=aligned([(each.experts, len(each.prompt) + each.num_tokens) for each in answers]),
    )
    note = EpisodeNote(
        finish_N=np.array([_finish_of(each) for each in answers], np.int8),
        sampled_N=sampled,
        trained_N=sampled,
        turns_N=np.ones(len(answers), np.int64),
        version_N=np.array([int(each.versions_L.min()) if each.num_tokens else -1 for each in answers], np.int64),
        newest_version_N=np.array(
            [int(each.versions_L.max()) if each.num_tokens else -1 for each in answers], np.int64
        ),
        environment_N=np.full(len(answers), np.nan),
        errors={row: each.error for row, each in enumerate(answers) if each.error is not None},
        prefixes=RowPrefixes.of(block),
    )
    return block, note


def _finish_of(answer: Completion) -> int:
    return UNANSWERED if answer.finish == "error" else FINISHES.index(answer.finish)


def sampled_so_far(block: TrajectoryBlock) -> dict[tuple[int, int], PartialAnswer]:
    """What was sampled of episodes of one turn, by prompt index and sample."""
    begun = {}
    for row, id in enumerate(block.ids):
        tokens = slice(int(block.offsets[row]), int(block.offsets[row + 1]))
        is_sampled = block.versions_T[tokens] >= 0
        experts = None if block.experts_TLK is None else block.experts_TLK[tokens]
        begun[id.prompt_index, id.sample] = PartialAnswer(
            tokens_L=block.tokens_T[tokens][is_sampled],
            logprobs_L=block.behavior_logprobs_T[tokens][is_sampled],
            versions_L=block.versions_T[tokens][is_sampled],
            experts=None if experts is None else experts[: num_recorded(experts)],
        )
    return begun


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)


def _laid(where_T: np.ndarray, parts: Sequence[np.ndarray], rest: float, dtype: type) -> np.ndarray:
    values: np.ndarray = np.full(len(where_T), rest, dtype)
    values[where_T] = _joined(parts, dtype)
    return values
