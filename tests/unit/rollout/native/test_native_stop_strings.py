# SPDX-License-Identifier: Apache-2.0
"""Stop strings are looked for in the text of the newest tokens: across tokens, and only where a token completes one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from native_world import Learner, ask, sequence

from helpers.tiny import tiny_tokenizer
from podium.data.tokenizer import answer_text, parted_stops
from podium.rollout.native.stop_strings import completed_string
from podium.rollout.requests import Completion


def letters(tokens: Sequence[int]) -> str:
    """One character a token."""
    return "".join(chr(0x4E00 + int(token)) for token in tokens)


def halves(tokens: Sequence[int]) -> str:
    """A character takes two tokens; half of one is shown as a replacement."""
    pairs = [tokens[i : i + 2] for i in range(0, len(tokens), 2)]
    return "".join(chr(0x4E00 + int(a[0])) if len(a) == 2 else "\ufffd" for a in pairs)


@pytest.fixture(scope="module")
def free(learner: Learner) -> Completion:
    """Twelve tokens without repetition, drawn without a stop."""
    for draw in range(100):
        found = sequence(learner.engine(), ask(draw, 5, new=12))
        if len(set(found.tokens_L.tolist())) == 12:
            return found
    raise AssertionError("no answer without repetition")


def stopped(learner: Learner, free: Completion, decode: Any, **how: Any) -> Completion:
    return sequence(learner.engine(decode=decode), ask(free.id.prompt_index, 5, new=12, **how))


def test_a_string_over_three_tokens_ends_the_answer_with_the_third(learner: Learner, free: Completion) -> None:
    string = letters(free.tokens_L[4:7])
    found = stopped(learner, free, letters, stop_strings=("nowhere", string))
    assert (found.finish, found.stop, found.tokens_L.tolist()) == ("stop", string, free.tokens_L[:7].tolist())


def test_a_prompt_that_ends_with_a_string_does_not_count(learner: Learner, free: Completion) -> None:
    found = stopped(learner, free, letters, stop_strings=(letters(free.prompt[-1:]),))
    assert found.finish == "length"
    straddling = letters([free.prompt[-1], free.tokens_L[0]])
    assert stopped(learner, free, letters, stop_strings=(straddling,)).finish == "length"


def test_a_character_of_two_tokens_ends_the_answer_when_it_is_whole(learner: Learner, free: Completion) -> None:
    string = halves(free.tokens_L[:2])
    found = stopped(learner, free, halves, stop_strings=(string,))
    assert found.tokens_L.tolist() == free.tokens_L[:2].tolist()


def test_a_string_that_came_too_early_does_not_end_the_answer_later(learner: Learner, free: Completion) -> None:
    """It was complete after the third token and the answer has five at least; no later token completes it."""
    string = letters(free.tokens_L[2:3])
    assert stopped(learner, free, letters, stop_strings=(string,)).num_tokens == 3
    assert stopped(learner, free, letters, stop_strings=(string,), min_new_tokens=5).finish == "length"


SPECIAL = {1: "<|im_end|>", 2: "<|user|>"}


def with_specials(tokens: Sequence[int]) -> str:
    """As a tokenizer's text of an answer: special tokens have none."""
    return "".join("" if token in SPECIAL else chr(ord("a") + token - 10) for token in tokens)


def test_special_tokens_between_do_not_push_a_string_out_of_sight() -> None:
    """Of the end of an answer only as much is decoded as holds the longest string, and special tokens fill none."""
    sampled = np.array([10, 11, *[1] * 50, 12], np.int32)
    assert completed_string(sampled, ("abc",), with_specials) == "abc"
    assert completed_string(sampled[:-1], ("ab",), with_specials) is None  # it was there before


def test_the_name_of_a_special_token_is_no_text() -> None:
    tokenizer = tiny_tokenizer()
    decode = partial(answer_text, tokenizer)
    ended = np.array(tokenizer("12<|im_end|>", add_special_tokens=False)["input_ids"], np.int32)
    for string in ("im_end", "end|>", "|", "<|im_end|>"):
        assert completed_string(ended, (string,), decode) is None
    assert completed_string(ended[:-1], ("im_end", "2"), decode) == "2"


def test_a_stop_text_that_names_a_special_token_stands_for_the_token() -> None:
    tokenizer = tiny_tokenizer()
    assert parted_stops(tokenizer, ("<|im_end|>", "im_end", "<|im_start|>")) == (frozenset({1, 2}), ("im_end",))
    assert parted_stops(tokenizer, ()) == (frozenset(), ())
