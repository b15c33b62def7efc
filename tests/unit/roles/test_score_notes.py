# SPDX-License-Identifier: Apache-2.0
"""Scores of models in the run, taken apart by groups and joined again."""

from __future__ import annotations

import numpy as np

from podium.roles.carriers import ScoreNote

FIRST = ScoreNote(
    values_N=np.array([1.0, np.nan, 3.0]), errors={1: "cut off"}, extras={"swapped": np.array([0.0, np.nan, 1.0])}
)
SECOND = ScoreNote(values_N=np.array([np.nan, 5.0]), errors={0: "too long"})


def test_rows_keep_their_errors_and_numbers_in_another_order() -> None:
    found = FIRST.take(np.array([2, 1]))

    np.testing.assert_equal(found.values_N, [3.0, np.nan])
    assert found.errors == {1: "cut off"}
    np.testing.assert_equal(found.extras["swapped"], [1.0, np.nan])


def test_batches_are_joined_one_after_the_other() -> None:
    found = ScoreNote.join([FIRST, SECOND])

    np.testing.assert_equal(found.values_N, [1.0, np.nan, 3.0, np.nan, 5.0])
    assert found.errors == {1: "cut off", 3: "too long"}
    np.testing.assert_equal(found.extras["swapped"], [0.0, np.nan, 1.0, np.nan, np.nan])


def test_no_batch_is_a_note_without_rows() -> None:
    assert len(ScoreNote.join([])) == 0
