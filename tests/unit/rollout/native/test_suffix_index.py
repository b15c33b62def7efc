# SPDX-License-Identifier: Apache-2.0
"""Proposals against a search of everything, histories within their bound, and how many proposals pay."""

from __future__ import annotations

import random

import numpy as np
import pytest

from podium.data.trajectories import TrajectoryId
from podium.rollout.native.answer_history import AnswerHistory, prompt_key
from podium.rollout.native.rows import Sequence
from podium.rollout.native.speculation import CPU_STEP, Speculation, StepCost, proposals_per_lane, rounds
from podium.rollout.native.suffix_index import GRAM, SuffixIndex
from podium.rollout.requests import Request, Sampling


def longest_matches(texts: list[list[int]], text: int) -> tuple[int, list[tuple[int, int]]]:
    """Length of the longest end of a text that occurs elsewhere with something behind it, and all such places."""
    own, best, places = texts[text], GRAM - 1, list[tuple[int, int]]()
    for number, other in enumerate(texts):
        for at in range(len(other) - 1):
            length = 0
            while length <= min(at, len(own) - 1) and own[-1 - length] == other[at - length]:
                length += 1
            if length > best:
                best, places = length, []
            if length == best and length >= GRAM:
                places.append((number, at))
    return best, places


@pytest.mark.parametrize("seed", range(30))
def test_a_proposal_follows_a_longest_earlier_occurrence(seed: int) -> None:
    draw = random.Random(seed)
    vocabulary = draw.choice([2, 3, 4])
    index, texts = SuffixIndex(candidates=10_000, longest=10_000), list[list[int]]()
    found = 0
    for _ in range(120):
        if not texts or draw.random() < 0.1:
            texts.append([])
            assert index.add(()) == len(texts) - 1
        text = draw.randrange(len(texts))
        more = [draw.randrange(vocabulary) for _ in range(draw.randrange(5))]
        index.extend(text, more)
        texts[text].extend(more)
        most = draw.randrange(1, 6)
        proposal = index.propose(text, most)
        _, places = longest_matches(texts, text)
        if not places:
            assert proposal == []
            continue
        found += 1
        wanted = []
        for number, at in places:
            source = [*texts[number]]
            if number == text:  # what is proposed goes on being read
                period = len(source) - at - 1
                while len(source) < at + 1 + most:
                    source.append(source[-period])
            wanted.append(source[at + 1 : at + 1 + most])
        assert proposal in wanted
        assert index.num_tokens == sum(map(len, texts))
    assert found > 20


def test_among_equally_long_occurrences_the_newest_is_taken() -> None:
    index = SuffixIndex()
    index.add([1, 2, 3, 4])
    index.add([1, 2, 3, 5])
    own = index.add([1, 2, 3])
    assert index.propose(own, 4) == [5]
    index.add([9, 1, 2, 3, 6])
    index.extend(own, [])
    assert index.propose(own, 4) == [6]
    longer = index.add([4, 9, 1, 2, 3])
    assert index.propose(longer, 4) == [6]


def test_a_loop_is_proposed_on() -> None:
    index = SuffixIndex()
    own = index.add([7, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert index.propose(own, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_two_equal_tokens_are_not_enough() -> None:
    index = SuffixIndex()
    index.add([5, 2, 3, 4])
    assert index.propose(index.add([1, 2, 3]), 4) == []
    assert index.propose(index.add([5, 2]), 4) == []


def test_tokens_of_the_largest_vocabularies_are_kept_apart() -> None:
    index, large = SuffixIndex(), 2**21 - 1
    index.add([large, 0, large, 1])
    index.add([0, large, large, 2])
    assert index.propose(index.add([large, 0, large]), 2) == [1]


def answer_of(number: int, length: int = 10) -> np.ndarray:
    return np.full(length, number, np.int32)


def test_a_history_keeps_the_newest_answers_of_each_prompt_once() -> None:
    history = AnswerHistory(10_000)
    for number in (*range(40), 10):
        history.add(b"prompt", answer_of(number))
    kept = [int(answer[0]) for answer in history.answers(b"prompt")]
    assert kept == [*range(8, 10), *range(11, 40), 10]
    assert history.num_tokens == 320
    assert history.answers(b"another") == []


def test_a_history_forgets_the_prompts_that_were_answered_longest_ago() -> None:
    history = AnswerHistory(35)
    for prompt in (b"a", b"b", b"c", b"a"):
        history.add(prompt, answer_of(1 if prompt != b"a" or history.num_tokens == 0 else 2))
    # 40 tokens are too many: b was answered longest ago.
    assert [len(history.answers(prompt)) for prompt in (b"a", b"b", b"c")] == [2, 0, 1]
    assert history.num_tokens == 30
    history.add(b"d", answer_of(3, 36))  # larger than all of it
    assert history.answers(b"d") == []


def test_a_prompt_is_known_by_its_tokens_of_any_integer_type() -> None:
    assert prompt_key(np.array([1, 2, 3], np.int64)) == prompt_key(np.array([1, 2, 3], np.int32))
    assert prompt_key(np.array([1, 2, 3], np.int32)) != prompt_key(np.array([1, 2], np.int32))


EXACT = StepCost(fixed_rows=30.0, row_multiple=1, lane_rows=0.0)


def test_proposals_pay_for_few_lanes_only() -> None:
    # One lane, all right: 31 rows of time for one token, 31 + k for 1 + k.
    assert proposals_per_lane(1, acceptance=1.0, most=8, most_rows=64, cost=EXACT) == 8
    # 100 lanes: 130 for 100 tokens; one proposal each: 230 for 200. That pays at 15/13 tokens a row, not at 0.7 right.
    assert proposals_per_lane(100, acceptance=1.0, most=1, most_rows=400, cost=EXACT) == 1
    assert proposals_per_lane(100, acceptance=0.7, most=8, most_rows=900, cost=EXACT) == 0
    assert proposals_per_lane(100, acceptance=1.0, most=8, most_rows=199, cost=EXACT) == 0
    assert proposals_per_lane(0, acceptance=1.0, most=8, most_rows=64, cost=EXACT) == 0
    counts = [proposals_per_lane(n, acceptance=0.8, most=8, most_rows=64, cost=CPU_STEP) for n in range(1, 65)]
    assert counts[0] == 8
    assert counts[-1] == 0
    assert not any(counts[counts.index(0) :])


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("lanes", [1, 3, 8, 40])
def test_the_number_of_proposals_is_the_best_of_all(acceptance: float, lanes: int) -> None:
    def rate(count: int) -> float:
        tokens = sum(acceptance**each for each in range(count + 1))
        return tokens / EXACT.of(lanes * (1 + count), lanes)

    found = proposals_per_lane(lanes, acceptance=acceptance, most=8, most_rows=999, cost=EXACT, least_gain=1.0)
    assert rate(found) == max(rate(count) for count in range(9))


def test_samples_count_in_rounds_up_to_the_first_wrong_proposal() -> None:
    # Two rows without proposals, one with 5 6 7 of which 7 is wrong, one with 8 that is wrong, one with 9.
    proposed = np.array([-1, -1, -1, 5, 6, 7, -1, 8, -1, 9], np.int64)
    sampled = np.array([3, 4, 5, 6, 0, 7, 7, 8, 9, 1], np.int32)
    assert [each.tolist() for each in rounds(proposed, sampled)] == [[0, 1, 2, 6, 8], [3, 9], [4]]
    assert [each.tolist() for each in rounds(proposed[:0], sampled[:0])] == [[]]


def sequence_of(number: int, prompt: list[int], sample: int = 0) -> Sequence:
    request = Request(
        id=TrajectoryId(number, sample), prompt=np.array(prompt, np.int32), sampling=Sampling(max_new_tokens=50)
    )
    return Sequence.of(request, arrival=0)


def speculation(history_tokens: int = 1000) -> Speculation:
    made = Speculation(most=8, history_tokens=history_tokens, most_rows=64, cost=EXACT)
    assert made.begin_step(1) == 8
    return made


def test_an_answer_is_proposed_from_its_first_token_on_and_only_to_its_own_prompt() -> None:
    ours = speculation()
    first = sequence_of(0, [1, 2, 3])
    ours.begin(first)
    ours.end(first.id, np.array([10, 11, 12, 13, 14], np.int32))
    again, other = sequence_of(1, [1, 2, 3]), sequence_of(2, [4, 1, 2, 3])
    ours.begin(again)
    ours.begin(other)
    assert ours.propose(again, again.tokens, 50) == [10, 11, 12, 13]  # at first no more than four
    assert ours.propose(again, again.tokens, 2) == [10, 11]
    assert ours.propose(other, other.tokens, 50) == []


def test_running_and_ended_samples_of_a_group_propose_to_each_other() -> None:
    ours = speculation()
    one, two, three = (sequence_of(0, [1, 2, 3], sample) for sample in range(3))
    for each in (one, two, three):
        ours.begin(each)
    assert ours.propose(one, np.array([1, 2, 3, 20, 21, 22], np.int32), 8) == []
    assert ours.propose(two, np.array([1, 2, 3, 20, 21], np.int32), 8) == [22]
    ours.end(one.id, np.array([20, 21, 22, 23, 24], np.int32))
    assert ours.propose(two, np.array([1, 2, 3, 20, 21], np.int32), 8) == [22, 23, 24]
    ours.end(three.id, np.array([20, 21, 30], np.int32))  # never asked for any
    assert ours.propose(two, np.array([1, 2, 3, 20, 21], np.int32), 8) == [30]


def test_wrong_proposals_lower_their_number_and_right_ones_raise_it() -> None:
    ours = speculation()
    first = sequence_of(0, [1, 2, 3])
    ours.begin(first)
    ours.end(first.id, np.arange(100, 140, dtype=np.int32))
    again = sequence_of(1, [1, 2, 3])
    ours.begin(again)
    assert len(ours.propose(again, again.tokens, 50)) == 4
    ours.note(again.id, proposed=4, accepted=1)
    assert len(ours.propose(again, again.tokens, 50)) == 2
    ours.note(again.id, proposed=2, accepted=2)
    ours.note(again.id, proposed=4, accepted=4)
    assert len(ours.propose(again, again.tokens, 50)) == 8
    assert (ours.num_proposed, ours.num_accepted) == (10, 7)
    assert ours.acceptance == (8 + 7) / (10 + 8)  # seven right, one wrong


def test_where_few_are_accepted_it_pauses_and_tries_again() -> None:
    ours = speculation()
    first = sequence_of(0, [1, 2, 3])
    ours.begin(first)
    for _ in range(300):
        ours.note(first.id, proposed=8, accepted=0)
    steps = 0
    while not ours.begin_step(20):
        steps += 1
    assert 10 < steps < 100
    assert ours.acceptance == 0.8
