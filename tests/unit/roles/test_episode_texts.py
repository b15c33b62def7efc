# SPDX-License-Identifier: Apache-2.0
"""Trajectories as text: the last thing the policy said, and who said what in episodes of several turns."""

from __future__ import annotations

import numpy as np

from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.roles.texts import EpisodeText, TextReader

END = 99


class Letters:
    """Token 1 is `a`, 2 is `b`, ...; END is special."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return "".join(chr(ord("a") + token - 1) for token in tokens if token != END)


def _read(*rows: str) -> list[EpisodeText]:
    """Each row as letters: capitals were drawn by the policy, `.` is an end that it drew."""
    tokens = [[END if letter == "." else ord(letter.lower()) - ord("a") + 1 for letter in row] for row in rows]
    sampled = [[letter.isupper() or letter == "." for letter in row] for row in rows]
    flat = np.array([token for row in tokens for token in row], np.int32)
    sampled_T = np.array([each for row in sampled for each in row], np.bool_)
    block = TrajectoryBlock(
        ids=TrajectoryIds.of([TrajectoryId(row, 0) for row in range(len(rows))]),
        offsets=np.cumsum([0, *map(len, rows)]).astype(np.int64), tokens_T=flat, loss_mask_T=sampled_T,
        behavior_logprobs_T=np.zeros(len(flat), np.float32), versions_T=np.where(sampled_T, 3, -1).astype(np.int32),
    )  # fmt: skip
    return list(TextReader(Letters()).read(block))


def test_an_answer_is_what_the_policy_drew_without_its_end() -> None:
    (text,) = _read("abCDE.")

    assert text.answer == "cde"
    assert text.turns == ((True, "cde"),)
    assert text.num_sampled == 4
    assert text.tokens.tolist() == [3, 4, 5, END]


def test_turns_alternate_from_the_policys_first_word_on() -> None:
    (text,) = _read("abCD.xyE.z")

    assert text.turns == ((True, "cd"), (False, "xy"), (True, "e"), (False, "z"))
    assert text.answer == "e"
    assert text.num_sampled == 5
    assert text.tokens.tolist() == [3, 4, END, 5, END]


def test_each_row_is_read_for_itself() -> None:
    texts = _read("aB", "cdE.fG", "h")

    assert [text.answer for text in texts] == ["b", "g", ""]
    assert [len(text.turns) for text in texts] == [1, 3, 0]


def test_a_row_in_which_nothing_was_sampled_has_no_turns() -> None:
    prompt, empty = _read("abc", "")

    assert (prompt.answer, prompt.turns, prompt.num_sampled, len(prompt.tokens)) == ("", (), 0, 0)
    assert (empty.answer, empty.turns) == ("", ())


def test_what_counts_is_who_drew_a_token_not_whether_it_is_trained() -> None:
    block = TrajectoryBlock(
        ids=TrajectoryIds.of([TrajectoryId(0, 0)]), offsets=np.array([0, 3]), tokens_T=np.array([1, 2, 3], np.int32),
        loss_mask_T=np.zeros(3, np.bool_), behavior_logprobs_T=np.zeros(3, np.float32),
        versions_T=np.array([-1, 0, 0], np.int32),
    )  # fmt: skip

    assert next(TextReader(Letters()).read(block)).answer == "bc"
