# SPDX-License-Identifier: Apache-2.0
"""Choices of experts: joined, continued and cut with the tokens that they belong to."""

from __future__ import annotations

import numpy as np
import pytest

from podium.data.documents import Document, pack
from podium.data.routed_experts import RouterShape, aligned, continued, num_recorded, unrecorded
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds

NONE = 255


def experts(*of_tokens: int) -> np.ndarray:
    """One layer, one expert a token."""
    return np.array(of_tokens, np.uint8).reshape(-1, 1, 1)


def test_the_dtype_has_a_value_that_is_no_expert() -> None:
    for num_experts, dtype in ((128, np.uint8), (254, np.uint8), (255, np.int16), (256, np.int16), (512, np.int16)):
        shape = RouterShape(num_layers=48, num_experts=num_experts, per_token=8)
        assert shape.dtype is dtype
        assert np.iinfo(shape.dtype).max >= num_experts
    assert RouterShape(num_layers=48, num_experts=128, per_token=8).bytes_per_token == 384


def test_what_is_not_recorded_is_marked() -> None:
    joined = aligned([(experts(1, 2), 3), (None, 2), (experts(7, 8, 9), 2)])
    assert joined is not None
    assert joined.ravel().tolist() == [1, 2, NONE, NONE, NONE, 7, 8]
    assert aligned([(None, 3), (None, 1)]) is None
    assert num_recorded(joined[:3]) == 2
    assert num_recorded(experts(1, 2)) == 2
    assert num_recorded(unrecorded(4, joined)) == 0
    assert num_recorded(experts()) == 0


def test_the_first_choice_of_a_position_stays() -> None:
    first, second = experts(1, 2), experts(5, 6, 7)
    assert continued(first, second) is not None
    assert np.array_equal(continued(first, second), experts(1, 2, 7))  # type: ignore[arg-type]
    assert continued(second, first) is second
    assert continued(None, first) is first
    assert continued(first, None) is first


def block(*rows: tuple[int, np.ndarray | None]) -> TrajectoryBlock:
    total = sum(length for length, _ in rows)
    return TrajectoryBlock(
        ids=TrajectoryIds.of(TrajectoryId(number, 0) for number in range(len(rows))),
        offsets=np.cumsum([0, *(length for length, _ in rows)]).astype(np.int64),
        tokens_T=np.arange(total, dtype=np.int32),
        loss_mask_T=np.ones(total, np.bool_),
        behavior_logprobs_T=np.zeros(total, np.float32),
        versions_T=np.zeros(total, np.int32),
        experts_TLK=aligned([(each, length) for length, each in rows]),
    )


def test_blocks_are_cut_and_joined_with_their_experts() -> None:
    whole = block((3, experts(1, 2)), (2, experts(4)))
    assert whole.take(np.array([1, 0])).experts_TLK.ravel().tolist() == [4, NONE, 1, 2, NONE]  # type: ignore[union-attr]
    joined = TrajectoryBlock.concatenate([whole, block((2, None)), block()])
    assert joined.experts_TLK is not None
    assert joined.experts_TLK.ravel().tolist() == [1, 2, NONE, 4, NONE, NONE, NONE]
    assert joined.nbytes == TrajectoryBlock.concatenate([block((3, None), (2, None)), block((2, None))]).nbytes + 7
    assert not joined.experts_TLK.flags.writeable


def test_blocks_without_experts_have_none() -> None:
    plain = block((3, None), (2, None))
    assert plain.experts_TLK is None
    assert plain.take(np.array([1])).experts_TLK is None
    assert TrajectoryBlock.concatenate([plain, plain.take(np.array([0]))]).experts_TLK is None


@pytest.mark.parametrize("of_second", [None, experts(6, 7)])
def test_documents_are_packed_with_the_experts_of_their_inputs(of_second: np.ndarray | None) -> None:
    """The last token of a document is only a target."""
    documents = [
        Document(tokens=np.arange(3, dtype=np.int32), trained=np.array([False, True, True]), experts=experts(1, 2, 3)),
        Document(tokens=np.arange(3, dtype=np.int32), trained=np.array([False, True, True]), experts=of_second),
    ]
    packed = pack(documents).experts_TLK
    assert packed is not None
    assert packed.ravel().tolist() == [1, 2, *([NONE, NONE] if of_second is None else [6, 7])]
    assert pack([]).experts_TLK is None
    assert pack([Document(tokens=np.arange(3, dtype=np.int32), trained=np.ones(3, np.bool_))]).experts_TLK is None
