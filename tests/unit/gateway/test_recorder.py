# SPDX-License-Identifier: Apache-2.0
"""The record of an episode: recorded tokens are continued, other histories branch, every sampled token counts once."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import CHATML, FORGETFUL, byte_tokenizer, encoded

from podium.data.kinds import Message
from podium.gateway.conversation import Conversations, rendered_form
from podium.gateway.history import answer_keys, extended_key
from podium.gateway.recorder import OpenedTurn, RecordedTurn, Recorder, RepeatedTurn, SampledAnswer
from podium.gateway.refusal import RequestRefusedError

TOKENIZER = byte_tokenizer(CHATML)
ASK: Message = {"role": "user", "content": "2+2?"}
MORE: Message = {"role": "user", "content": "and 3+3?"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]


def said(tokens: Sequence[int], *, stopped: bool = True, version: int = 1) -> SampledAnswer:
    return SampledAnswer(
        tokens_L=np.array(tokens, np.int32),
        logprobs_L=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        versions_L=np.full(len(tokens), version, np.int32),
        stopped=stopped,
    )


class Episode:
    """A recorder, and what a client and an engine do with it."""

    def __init__(self, template: str = CHATML) -> None:
        self.tokenizer = byte_tokenizer(template) if template != CHATML else TOKENIZER
        self.conversations = Conversations(self.tokenizer)
        self.recorder = Recorder(self.conversations)
        self.calls = 0

    def open(self, messages: list[Message], tools: Any = None, **how: Any) -> OpenedTurn | RepeatedTurn:
        self.calls += 1
        how.setdefault("content", b"%d" % self.calls)
        return self.recorder.open([rendered_form(each) for each in messages], tools, **how)

    def new(self, messages: list[Message], tools: Any = None, **how: Any) -> OpenedTurn:
        opened = self.open(messages, tools, **how)
        assert isinstance(opened, OpenedTurn)
        return opened

    def turn(self, messages: list[Message], text: str, tools: Any = None, *, tokens: list[int] | None = None,
             **how: Any) -> RecordedTurn:  # fmt: skip
        opened = self.new(messages, tools, **how)
        sampled = said(tokens or encoded(self.tokenizer, text + "<|im_end|>"))
        message = self.conversations.message(opened.prompt.tokens_T, sampled, tools, stop=None)
        return self.recorder.answer(opened.number, [(sampled, message)])[0]


def text_of(tokens: Any) -> str:
    return str(TOKENIZER.decode(tokens.tolist()))


def test_a_history_that_extends_continues_the_sampled_tokens_and_not_their_text() -> None:
    episode = Episode()
    a, b = encoded(TOKENIZER, "a")[0], encoded(TOKENIZER, "b")[0]
    end = encoded(TOKENIZER, "<|im_end|>")
    first = episode.turn([ASK], "", tokens=[a, b, *end])
    assert first.message["content"] == "ab"
    assert len(encoded(TOKENIZER, "ab")) == 1  # read back, it would be another token

    second = episode.turn([ASK, first.message, MORE], "6")

    assert second.parent is first
    begun = [*first.prompt.tokens_T.tolist(), a, b, *end]
    assert second.prompt.tokens_T.tolist()[: len(begun)] == begun
    assert text_of(second.prompt.tokens_T) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n"
        "<|im_start|>user\nand 3+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    (branch,) = episode.recorder.record().branches
    assert branch.tokens_T[branch.loss_mask_T].tolist() == [a, b, *end, *encoded(TOKENIZER, "6<|im_end|>")]
    assert branch.behavior_logprobs_T[branch.loss_mask_T].tolist() == [-1, -2, -3, -1, -2]
    assert branch.turn_ends == (len(begun) - 1, len(branch.tokens_T) - 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda message: {**message, "content": message["content"].strip()},
        lambda message: {**message, "content": "  4   is\nit "},
        lambda message: {key: value for key, value in message.items() if key != "reasoning_content"},
        lambda message: {**message, "content": "<think>I think</think>4 is it"},
    ],
)  # fmt: skip
def test_an_answer_that_lost_white_space_or_reasoning_is_the_same_answer(change: Any) -> None:
    episode = Episode()
    first = episode.turn([ASK], "<think>two and two</think>\n\n4 is it ")
    assert first.message["reasoning_content"] == "two and two"

    assert episode.turn([ASK, change(first.message), MORE], "6").parent is first


def test_an_answer_with_another_text_is_another_history() -> None:
    episode = Episode()
    first = episode.turn([ASK], "4")

    second = episode.turn([ASK, {**first.message, "content": "5"}, MORE], "6")

    assert second.parent is None
    assert "5<|im_end|>" in text_of(second.prompt.tokens_T)  # as prompt, which is not trained
    assert episode.recorder.record().sampled_tokens == 4


@pytest.mark.parametrize(
    ("arguments", "content"),
    [('{"b":3,"a":[1,2]}', "I add"), ('{ "a": [1, 2],\n "b": 3 }', ""), ({"b": 3, "a": [1, 2]}, None)],
)
def test_calls_with_other_ids_and_serialisation_are_the_same_calls(arguments: Any, content: str | None) -> None:
    episode = Episode()
    call = '<tool_call>{"name": "add", "arguments": {"a": [1, 2], "b": 3}}</tool_call>'
    first = episode.turn([ASK], "I add " + call, TOOLS)
    assert first.message["content"] == "I add"
    (made,) = first.message["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": [1, 2], "b": 3}'}
    assert len(made["id"]) == 9

    returned = {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "x", "content": "6"}
    second = episode.turn(
        [ASK, {"role": "assistant", "content": content, "tool_calls": [returned]}, result], "done", TOOLS
    )

    assert second.parent is first
    assert "<tool_response>6</tool_response>" in text_of(second.prompt.tokens_T)


def test_a_replaced_history_branches_behind_what_it_shares() -> None:
    episode = Episode()
    first = episode.turn([ASK], "4")
    left = episode.turn([ASK, first.message, MORE], "6")
    right = episode.turn([ASK, first.message, {"role": "user", "content": "sure?"}], "yes")
    fresh = episode.turn([{"role": "user", "content": "summary: 2+2 is 4"}], "ok")

    assert [turn.parent for turn in (left, right, fresh)] == [first, first, None]
    record = episode.recorder.record()
    assert [branch.turns for branch in record.branches] == [(0, 1), (0, 2), (3,)]
    assert [branch.fraction for branch in record.branches] == [Fraction(1, 2), Fraction(1, 2), 1]
    # "4", "6", "ok" with their ends of turn: the shared answer weighs one half in each of two branches.
    weights = [branch.weights_T[branch.loss_mask_T].tolist() for branch in record.branches]
    assert weights == [[0.5, 0.5, 1, 1], [0.5, 0.5, 1, 1, 1, 1], [1, 1, 1]]
    assert record.sampled_tokens == record.trained_tokens == 2 + 2 + 4 + 3


def test_other_tools_are_another_history() -> None:
    episode = Episode()
    first = episode.turn([ASK], "4")

    assert episode.turn([ASK, first.message, MORE], "6", TOOLS).parent is None


def test_the_same_content_is_answered_from_the_record_until_something_follows() -> None:
    episode = Episode()
    opened = episode.new([ASK], content=b"same")
    assert episode.open([ASK], content=b"same") == RepeatedTurn(number=opened.number)  # under way
    (first,) = episode.recorder.answer(opened.number, [(said([5]), {"role": "assistant", "content": "4"})])
    assert episode.open([ASK], content=b"same") == RepeatedTurn(number=opened.number)  # answered
    episode.turn([ASK, first.message, MORE], "6")

    again = episode.new([ASK], content=b"same")

    assert again.number != opened.number
    assert episode.recorder.record().repeated_requests == 2


def test_an_agent_that_waits_for_another_answer_to_the_same_request_is_refused() -> None:
    episode = Episode()
    opened = episode.new([ASK], content=b"same")
    episode.recorder.answer(opened.number, [(said([5]), {"role": "assistant", "content": "4"})])
    for _ in range(32):
        assert episode.open([ASK], content=b"same") == RepeatedTurn(number=opened.number)
    with pytest.raises(RequestRefusedError, match=r"this request was made 33 times.*`seed`"):
        episode.open([ASK], content=b"same")
    assert episode.recorder.record().repeated_requests == 32


def test_an_idempotency_key_stands_for_one_request() -> None:
    episode = Episode()
    first = episode.turn([ASK], "4", content=b"a", idempotency_key="k")
    episode.turn([ASK, first.message, MORE], "6")

    assert episode.open([ASK], content=b"a", idempotency_key="k") == RepeatedTurn(number=0)
    with pytest.raises(RequestRefusedError, match="another request"):
        episode.open([MORE], content=b"b", idempotency_key="k")


def test_an_abandoned_request_leaves_only_its_count() -> None:
    episode = Episode()
    opened = episode.new([ASK], content=b"a", idempotency_key="k")
    episode.recorder.abandon(opened.number, sampled_tokens=7)

    assert isinstance(episode.open([ASK], content=b"a", idempotency_key="k"), OpenedTurn)
    record = episode.recorder.record()
    assert (record.branches, record.discarded_tokens, record.sampled_tokens) == ((), 7, 0)


def test_several_answers_to_one_request_are_branches() -> None:
    episode = Episode()
    opened = episode.new([ASK])
    answers = [
        (said([5]), {"role": "assistant", "content": "4"}),
        (said([6, 7]), {"role": "assistant", "content": "5"}),
    ]
    turns = episode.recorder.answer(opened.number, answers)

    followed = episode.turn([ASK, turns[1].message, MORE], "6")

    assert followed.parent is turns[1]
    assert [branch.turns for branch in episode.recorder.record().branches] == [(0,), (1, 2)]


def test_of_answers_that_say_the_same_the_literal_one_is_continued() -> None:
    episode = Episode()
    first = episode.turn([ASK], "4  ok")
    episode.turn([ASK], "4 ok")

    assert episode.turn([ASK, {"role": "assistant", "content": "4  ok"}, MORE], "6").parent is first


def test_a_template_that_rewrites_earlier_turns_begins_a_new_root() -> None:
    episode = Episode(FORGETFUL + "{# </think> #}")
    first = episode.turn([ASK], "<think>hm</think>4")

    assert episode.turn([ASK, first.message, MORE], "6").parent is None
    assert episode.recorder.record().rerendered_requests == 1


def test_a_truncated_answer_is_continued_with_an_end_of_turn_that_is_not_trained() -> None:
    episode = Episode()
    opened = episode.new([ASK])
    cut = said(encoded(TOKENIZER, "lon"), stopped=False)
    (first,) = episode.recorder.answer(opened.number, [(cut, {"role": "assistant", "content": "lon"})])

    episode.turn([ASK, first.message, MORE], "6")

    (branch,) = episode.recorder.record().branches
    end = encoded(TOKENIZER, "<|im_end|>")[0]
    after = int(branch.turn_ends[0]) + 1
    assert (branch.tokens_T[after], branch.loss_mask_T[after]) == (end, False)


actions = st.lists(st.tuples(st.sampled_from(["continue", "branch", "retry", "abandon", "edit"]), st.integers(0, 99),
                             st.text("ab <>\n", min_size=0, max_size=5)), max_size=12)  # fmt: skip


@given(actions)
def test_trained_tokens_are_the_sampled_tokens_in_every_tree(steps: list[tuple[str, int, str]]) -> None:
    episode, sampled, discarded = Episode(), 0, 0
    histories: list[tuple[list[Message], bytes]] = []
    ends: list[list[Message]] = [[]]
    for number, (kind, choice, text) in enumerate(steps):
        before = ends[choice % len(ends)] if kind != "branch" else ends[choice % len(ends)][: 2 * (choice % 3)]
        messages = [*before, {"role": "user", "content": f"question {number}"}]
        if kind == "edit" and len(before) > 1:
            messages[-2] = {"role": "assistant", "content": f"edited {number}"}
        if kind == "retry" and histories:
            again = episode.open(*histories[choice % len(histories)][:1], content=histories[choice % len(histories)][1])
            if isinstance(again, OpenedTurn):  # something has followed: sampled anew
                episode.recorder.abandon(again.number, sampled_tokens=3)
                discarded += 3
            continue
        content = b"request %d" % number
        if kind == "abandon":
            opened = episode.new(messages, content=content)
            episode.recorder.abandon(opened.number, sampled_tokens=len(text))
            discarded += len(text)
            continue
        turn = episode.turn(messages, text, content=content)
        sampled += len(turn.answer.tokens_L)
        histories.append((messages, content))
        ends.append([*messages, turn.message])

    record = episode.recorder.record()
    assert (record.sampled_tokens, record.trained_tokens, record.discarded_tokens) == (sampled, sampled, discarded)
    assert sum(float(branch.weights_T.sum()) for branch in record.branches) == pytest.approx(sampled)
    roots = {branch.turns[0] for branch in record.branches}
    assert sum(branch.fraction for branch in record.branches) == len(roots)
    for branch in record.branches:
        assert (branch.weights_T > 0).tolist() == branch.loss_mask_T.tolist() == (branch.versions_T >= 0).tolist()


@given(st.text(max_size=20), st.text(" \n\t", max_size=3))
def test_white_space_around_an_answer_never_matters(text: str, space: str) -> None:
    answer: Message = {"role": "assistant", "content": text}
    assert extended_key(b"", {**answer, "content": space + text + space}) in answer_keys(b"", answer)
