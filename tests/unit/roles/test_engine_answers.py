# SPDX-License-Identifier: Apache-2.0
"""Answers of an engine as one block: prompt and answer end to end, and what the controller is told of each."""

from __future__ import annotations

import numpy as np

from helpers.made_batches import make_answer
from podium.data.trajectories import TrajectoryId
from podium.roles.blocks import block_of, empty_block
from podium.roles.carriers import FINISHES


def test_rows_are_prompt_and_answer_in_ascending_order_of_id() -> None:
    block, _ = block_of(
        [
            make_answer(7, 1, prompt=[1, 2, 3], tokens=[4, 5], logprobs=[-0.25, -0.5], version=6),
            make_answer(7, 0, prompt=[1, 2, 3], tokens=[9], logprobs=[-2.0], version=5),
        ]
    )

    assert list(block.ids) == [TrajectoryId(7, 0), TrajectoryId(7, 1)]
    assert block.offsets.tolist() == [0, 4, 9]
    assert block.tokens_T.tolist() == [1, 2, 3, 9, 1, 2, 3, 4, 5]
    assert block.loss_mask_T.tolist() == [False] * 3 + [True] + [False] * 3 + [True] * 2
    assert block.behavior_logprobs_T.tolist() == [0, 0, 0, -2.0, 0, 0, 0, -0.25, -0.5]
    assert block.versions_T.tolist() == [-1, -1, -1, 5, -1, -1, -1, 6, 6]
    kinds = (block.tokens_T, block.loss_mask_T, block.behavior_logprobs_T, block.versions_T)
    assert [part.dtype for part in kinds] == [np.int32, np.bool_, np.float32, np.int32]


def test_the_note_is_in_the_order_of_the_rows() -> None:
    _, note = block_of(
        [
            make_answer(2, 0, tokens=[4, 5], version=6, finish="length"),
            make_answer(1, 0, tokens=[], finish="error", error="the prompt is empty"),
            make_answer(3, 0, tokens=[4], version=7),
        ]
    )

    assert [FINISHES[at] for at in note.finish_N] == ["unanswered", "length", "stop"]
    assert note.sampled_N.tolist() == note.trained_N.tolist() == [0, 2, 1]
    assert note.version_N.tolist() == [-1, 6, 7]
    assert note.turns_N.tolist() == [1, 1, 1]
    assert np.isnan(note.environment_N).all()
    assert note.errors == {0: "the prompt is empty"}
    assert len(note.turn_rewards.row_K) == 0


def test_an_answer_over_two_versions_is_as_old_as_its_oldest_token() -> None:
    answer = make_answer(0, tokens=[4, 5, 6])
    answer.versions_L[:] = [8, 9, 9]

    _, note = block_of([answer])

    assert note.version_N.tolist() == [8]


def test_an_answer_without_a_token_is_its_prompt() -> None:
    block, _ = block_of([make_answer(0, prompt=[1, 2], tokens=[])])

    assert block.tokens_T.tolist() == [1, 2]
    assert not block.loss_mask_T.any()


def test_no_answer_is_a_block_without_rows() -> None:
    block, note = block_of([])

    assert block.lengths_N.tolist() == empty_block().lengths_N.tolist() == []
    assert len(note.finish_N) == 0


def test_versions_are_whole_numbers_also_of_no_answer() -> None:
    _, note = block_of([])

    assert note.version_N.dtype == np.int64
