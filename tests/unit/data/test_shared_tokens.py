# SPDX-License-Identifier: Apache-2.0
"""A teacher that numbers its words differently is refused, also where it has as many."""

from __future__ import annotations

import pytest

from podium.data.tokenizer import require_same_tokens
from podium.errors import ModelError


class Vocabulary:
    def __init__(self, *words: str) -> None:
        self._words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self._words)}


def test_two_words_that_changed_places_are_found() -> None:
    with pytest.raises(ModelError, match=r"teacher: .* 2 of .*'b'"):
        require_same_tokens(Vocabulary("a", "b", "c"), Vocabulary("a", "c", "b"), "teacher")


def test_a_teacher_may_know_more_words() -> None:
    require_same_tokens(Vocabulary("a", "b"), Vocabulary("a", "b", "c"), "teacher")


def test_a_word_that_the_teacher_lacks_is_found() -> None:
    with pytest.raises(ModelError, match="'c' for one"):
        require_same_tokens(Vocabulary("a", "b", "c"), Vocabulary("a", "b", "d"), "teacher")
