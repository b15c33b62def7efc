# SPDX-License-Identifier: Apache-2.0
"""What an update is computed from, by hand: rewards on tokens, and rows packed into micro-batches."""

# T tokens of all rows · S trained ones

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.recipe import AlgorithmSection
from podium.roles.carriers import TurnRewards
from podium.roles.token_rows import packed_rows, token_rewards

PLAIN = AlgorithmSection()


def _block(trained: list[str], logprob: float = 0.0) -> TrajectoryBlock:
    """One row for each text of x (trained) and . (not); tokens count on from row to row."""
    mask_T = np.array([letter == "x" for row in trained for letter in row], np.bool_)
    return TrajectoryBlock(
        ids=TrajectoryIds.of([TrajectoryId(row, 0) for row in range(len(trained))]),
        offsets=np.cumsum([0, *map(len, trained)]).astype(np.int64),
        tokens_T=np.arange(len(mask_T), dtype=np.int32), loss_mask_T=mask_T,
        behavior_logprobs_T=np.where(mask_T, logprob, 0).astype(np.float32),
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
    )  # fmt: skip


def _rewards(block: TrajectoryBlock, rewards: list[float], **changes: Any) -> list[float]:
    values: dict[str, Any] = {
        "turn_rewards": TurnRewards.none(), "reference_T": None, "algorithm": PLAIN, "kl_coefficient": 0.0
    }  # fmt: skip
    found = token_rewards(block, block.loss_mask_T, np.array(rewards), **(values | changes))
    assert found.dtype == np.float32
    return [float(value) for value in found]


def _turns(*given: tuple[int, int, float]) -> TurnRewards:
    rows, tokens, values = zip(*given, strict=True)
    return TurnRewards(row_K=np.array(rows), token_K=np.array(tokens), reward_K=np.array(values, np.float64))


# --- rewards on tokens ---


def test_a_reward_is_on_the_last_trained_token_of_its_row() -> None:
    assert _rewards(_block([".xx", ".x.", "..xx.."]), [1, 2, 4]) == [0, 0, 1, 0, 2, 0, 0, 0, 0, 4, 0, 0]


def test_a_row_without_a_trained_token_has_no_reward_and_takes_none_from_others() -> None:
    assert _rewards(_block([".x", "..", ".x"]), [1, 2, 4]) == [0, 1, 0, 0, 0, 4]


@pytest.mark.parametrize("rows", [["", ".x", ""], ["", "", ".x"], [".x", "", ""]])
def test_rows_without_tokens_are_in_nobodys_way(rows: list[str]) -> None:
    assert _rewards(_block(rows), [5 if row else 7 for row in rows]) == [0, 5]


def test_rewards_of_turns_are_where_they_were_given() -> None:
    found = _rewards(_block([".x.x", ".xx"]), [1, 2], turn_rewards=_turns((0, 1, 0.5), (1, 2, 0.25), (0, 3, 8)))

    assert found == [0, 0.5, 0, 9, 0, 0, 2.25]


def test_two_rewards_on_one_token_add_up() -> None:
    assert _rewards(_block([".x"]), [1], turn_rewards=_turns((0, 1, 0.5), (0, 1, 0.25))) == [0, 1.75]


def test_kl_in_the_reward_is_taken_off_every_trained_token() -> None:
    block = _block([".xx", "..x"], logprob=-1.0)
    reference_T = np.full(6, -1.5, np.float32)  # half a nat below, also where nothing was drawn
    algorithm = AlgorithmSection.model_validate({"kl": {"coefficient": 0.1, "where": "reward"}})

    found = _rewards(block, [1, 0], reference_T=reference_T, algorithm=algorithm, kl_coefficient=0.2)

    # k1 is 0.5; the coefficient is that of the step.
    assert found == pytest.approx([0, -0.1, 0.9, 0, 0, -0.1])


@pytest.mark.parametrize(("estimator", "penalty"), [("k1", 0.5), ("k2", 0.125), ("k3", np.exp(-0.5) - 0.5)])
def test_the_recipe_names_the_estimator_of_the_kl(estimator: str, penalty: float) -> None:
    algorithm = AlgorithmSection.model_validate({"kl": {"coefficient": 1, "where": "reward", "estimator": estimator}})

    found = _rewards(
        _block([".x"], logprob=-1.0), [0], reference_T=np.full(2, -1.5, np.float32), algorithm=algorithm,
        kl_coefficient=1.0,
    )  # fmt: skip

    assert found == pytest.approx([0, -penalty])


def test_kl_in_the_loss_leaves_rewards_alone() -> None:
    algorithm = AlgorithmSection.model_validate({"kl": {"coefficient": 0.1}})

    found = _rewards(
        _block([".x"]), [3], reference_T=np.full(2, -9.0, np.float32), algorithm=algorithm, kl_coefficient=1.0
    )

    assert found == [0, 3]


def test_of_no_row_there_is_no_reward() -> None:
    assert _rewards(_block([]), []) == []


ROWS = st.lists(st.text(alphabet="x.", max_size=6), max_size=6)


@given(ROWS)
def test_no_reward_is_lost_where_something_is_trained(rows: list[str]) -> None:
    rewards = [float(1 << number) for number in range(len(rows))]

    found = np.array(_rewards(_block(rows), rewards))

    offsets = np.cumsum([0, *map(len, rows)])
    for row, reward, begin, end in zip(rows, rewards, offsets, offsets[1:], strict=False):
        assert found[begin:end].sum() == (reward if "x" in row else 0)


# --- packing ---


def test_packed_rows_by_hand() -> None:
    # Tokens 0-3, 4-5, 6-10, 11-12.
    block = _block([".xx.", "..", "..x.x", ".x"])

    packed, places_S, sequence_S, num_sequences = packed_rows(block, block.loss_mask_T, np.array([0, 1, 2, 3]))

    # Row 1 has nothing to learn; what follows a row's last trained token is cut; the shortest comes first.
    assert num_sequences == 3
    assert places_S.tolist() == [12, 1, 2, 8, 10]
    assert sequence_S.tolist() == [0, 1, 1, 2, 2]
    assert packed.tokens_T.tolist() == [11, 0, 1, 6, 7, 8, 9]
    assert packed.targets_T.tolist() == [12, 1, 2, 7, 8, 9, 10]
    assert packed.weights_T.tolist() == [1, 1, 1, 0, 1, 0, 1]
    assert packed.positions_T.tolist() == [0, 0, 1, 0, 1, 2, 3]
    assert packed.offsets.tolist() == [0, 1, 3, 7]


def test_only_the_rows_that_are_requested_are_packed() -> None:
    block = _block([".x", ".xx", ".x"])

    packed, places_S, _, num_sequences = packed_rows(block, block.loss_mask_T, np.array([2]))

    assert (places_S.tolist(), num_sequences, packed.tokens_T.tolist()) == ([6], 1, [5])


@pytest.mark.parametrize("rows", [[], [0, 1]])
def test_a_rank_without_work_has_one_token_of_no_weight(rows: list[int]) -> None:
    block = _block(["..", "."])

    packed, places_S, sequence_S, num_sequences = packed_rows(block, block.loss_mask_T, np.array(rows, np.int64))

    assert (len(places_S), len(sequence_S), num_sequences) == (0, 0, 0)
    assert (packed.num_tokens, packed.num_trained) == (1, 0)


@given(ROWS, st.randoms(use_true_random=False))
def test_every_trained_token_is_a_target_once_in_its_own_place(rows: list[str], random: Any) -> None:
    rows = [f".{row}" for row in rows]  # nothing predicts a row's first token
    block, chosen = _block(rows), [row for row in range(len(rows)) if random.random() < 0.7]

    packed, places_S, sequence_S, _ = packed_rows(block, block.loss_mask_T, np.array(chosen, np.int64))

    wanted = [
        place
        for row in chosen
        for place in range(block.offsets[row], block.offsets[row + 1])
        if block.loss_mask_T[place]
    ]
    assert sorted(places_S.tolist()) == wanted
    # Tokens are their own places here, so that targets show whether columns are laid beside the right tokens.
    assert packed.targets_T[packed.weights_T > 0].tolist() == places_S.tolist()
    assert (np.diff(sequence_S) >= 0).all()
