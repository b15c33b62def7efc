# SPDX-License-Identifier: Apache-2.0
"""Records of sessions as sequences to train on: every sampled token once, in an order that does not depend on time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_recorder import ASK, MORE, Episode, said, text_of

from podium.data.kinds import Message
from podium.errors import InvariantError
from podium.gateway.branches import SessionRecord
from podium.gateway.episodes import SessionSequences, sequences_of


def parts(sequences: SessionSequences) -> list[tuple[str, str]]:
    """Of each sequence: its text, and what is trained of it."""
    edges = [0, *sequences.starts, len(sequences.tokens_T)]
    found = []
    for begin, end in pairwise(edges):
        tokens, sampled = sequences.tokens_T[begin:end], sequences.sampled_T[begin:end]
        found.append((text_of(tokens), text_of(tokens[sampled])))
    return found


def overlapping(order: Sequence[int]) -> SessionRecord:
    """A turn, and three requests at once behind it that are answered in this order."""
    episode = Episode()
    first = episode.turn([ASK], "4")
    words = ("left", "middle", "right")
    opened = [episode.new([ASK, first.message, {"role": "user", "content": word}]) for word in words]
    for at in order:
        answer = said(episode.tokenizer(f"{words[at]}!<|im_end|>", add_special_tokens=False)["input_ids"])
        message = episode.conversations.message(opened[at].prompt.tokens_T, answer, None, stop=None)
        episode.recorder.answer(opened[at].number, [(answer, message)])
    return episode.recorder.record()


def test_the_order_of_answers_at_the_same_time_has_no_influence() -> None:
    found = [sequences_of(overlapping(order)) for order in permutations(range(3))]

    assert len({each.tokens_T.tobytes() + each.sampled_T.tobytes() for each in found}) == 1
    trained = [text for _, text in parts(found[0])]
    assert sum(text.startswith("4<|im_end|>") for text in trained) == 1, "the shared turn is trained once"
    assert trained[0].startswith("4<|im_end|>")
    assert {text.removeprefix("4<|im_end|>") for text in trained} == {
        f"{each}!<|im_end|>" for each in ("left", "middle", "right")
    }


def test_the_sequence_with_the_last_answer_is_the_last() -> None:
    for texts in (("zzz", "aaa"), ("aaa", "zzz")):
        episode = Episode()
        for text in texts:
            question: Message = {"role": "user", "content": text}
            episode.turn([question], text)
        assert [trained for _, trained in parts(sequences_of(episode.recorder.record()))] == [
            f"{text}<|im_end|>" for text in texts
        ]


def test_log_probs_and_versions_are_those_of_the_sampled_tokens() -> None:
    episode = Episode()
    first = episode.turn([ASK], "4")
    episode.turn([ASK, first.message, MORE], "6")
    episode.turn([ASK, first.message, ASK], "8")

    found = sequences_of(episode.recorder.record())

    assert found.behavior_logprobs_T[found.sampled_T].tolist() == [-1, -2] * 3
    assert (found.behavior_logprobs_T[~found.sampled_T] == 0).all()
    assert (found.versions_T[found.sampled_T] == 1).all()
    assert (found.versions_T[~found.sampled_T] == -1).all()
    assert found.sampled_T[list(found.turn_ends)].all()
    assert len(found.turn_ends) == 3
    assert text_of(found.tokens_T[: found.num_prompt_tokens]).endswith("assistant\n")


def test_a_session_without_an_answer_has_no_tokens() -> None:
    found = sequences_of(Episode().recorder.record())
    assert (len(found.tokens_T), found.starts, found.turn_ends) == (0, (), ())


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12))
def test_in_any_tree_every_sampled_token_is_trained_once(parents: list[int]) -> None:
    """Each turn continues one before it, or begins a new root."""
    episode = Episode()
    histories: list[list[Message]] = []
    for number, choice in enumerate(parents):
        before = [] if choice % (len(histories) + 1) == len(histories) else histories[choice % (len(histories) + 1)]
        asked: list[Message] = [*before, {"role": "user", "content": f"question {number}"}]
        turn = episode.turn(asked, f"answer {number}")
        histories.append([*asked, turn.message])

    found = sequences_of(episode.recorder.record())

    trained = "".join(text for _, text in parts(found)).split("<|im_end|>")[:-1]
    assert sorted(trained) == sorted(f"answer {number}" for number in range(len(parents)))
    assert not found.sampled_T[[0, *found.starts]].any()


def test_a_record_with_other_counts_is_refused() -> None:
    record = overlapping((0, 1, 2))
    wrong = SessionRecord(
        branches=record.branches[1:], sampled_tokens=record.sampled_tokens, discarded_tokens=0, turns=record.turns,
        last_turns_from=0, requests=4, repeated_requests=0, rerendered_requests=0,
    )  # fmt: skip
    with pytest.raises(InvariantError, match="tokens are trained and"):
        sequences_of(wrong)
