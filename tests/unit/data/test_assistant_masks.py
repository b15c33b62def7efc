# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a chat are trained, by spans read off the templates by hand."""

import pytest
from chat_tokenizers import (
    CHATML,
    CHATML_MARKED,
    FORGETFUL,
    GEMMA,
    LLAMA3,
    PLAIN,
    TOOLS,
    byte_tokenizer,
    text_of,
    trained_spans,
)

from podium.data.chat import DocumentMaker, Dropped, Made
from podium.data.rows import Row
from podium.errors import DataError

SYSTEM = {"role": "system", "content": "Be brief."}
TWO_TURNS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]


def made(tokenizer, messages, trained="assistant", **columns):
    maker = DocumentMaker(tokenizer, trained, 1000, "error")
    result = maker.make(Row({"messages": messages, **columns}, "chats.jsonl, line 7"))
    assert isinstance(result, Made)
    return result.document


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_chatml_trains_each_answer_with_its_end_of_turn_and_not_the_newline_after_it(template):
    tokenizer = byte_tokenizer(template)
    document = made(tokenizer, [SYSTEM, *TWO_TURNS])
    assert trained_spans(tokenizer, document) == ["4<|im_end|>", "6<|im_end|>"]
    assert text_of(tokenizer, document) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n6<|im_end|>"
    )


def test_markers_and_prefixes_give_the_same_document():
    plain, marked = byte_tokenizer(CHATML), byte_tokenizer(CHATML_MARKED)
    first, second = made(plain, [SYSTEM, *TWO_TURNS]), made(marked, [SYSTEM, *TWO_TURNS])
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.trained.tolist() == second.trained.tolist()


def test_llama_3_trains_the_answers_with_eot_and_the_template_writes_the_only_bos():
    tokenizer = byte_tokenizer(LLAMA3, bos=True)
    document = made(tokenizer, TWO_TURNS)
    assert trained_spans(tokenizer, document) == ["4<|eot_id|>", "6<|eot_id|>"]
    assert document.tokens.tolist().count(tokenizer.bos_token_id) == 1


def test_gemma_calls_the_assistant_model_and_its_newline_after_the_turn_is_not_trained():
    tokenizer = byte_tokenizer(GEMMA, bos=True)
    assert trained_spans(tokenizer, made(tokenizer, TWO_TURNS)) == ["4<end_of_turn>", "6<end_of_turn>"]


def test_a_template_that_refuses_a_system_turn_is_quoted_with_the_row():
    with pytest.raises(DataError, match=r"chats\.jsonl, line 7: .*System role not supported"):
        made(byte_tokenizer(GEMMA), [SYSTEM, *TWO_TURNS])


def test_without_an_end_of_turn_token_the_whole_turn_is_trained():
    tokenizer = byte_tokenizer(PLAIN)
    assert trained_spans(tokenizer, made(tokenizer, TWO_TURNS)) == ["4\n", "6\n"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_last_turn_trains_only_the_last_answer(template):
    tokenizer = byte_tokenizer(template)
    assert trained_spans(tokenizer, made(tokenizer, TWO_TURNS, "last_turn")) == ["6<|im_end|>"]


def test_everything_trains_all_tokens_but_the_first():
    tokenizer = byte_tokenizer(CHATML)
    document = made(tokenizer, TWO_TURNS, "everything")
    assert document.trained.tolist() == [False] + [True] * (len(document.tokens) - 1)
    assert text_of(tokenizer, document).endswith("6<|im_end|>\n")


def test_a_user_turn_after_the_last_answer_is_cut_off():
    tokenizer = byte_tokenizer(CHATML)
    document = made(tokenizer, [*TWO_TURNS, {"role": "user", "content": "thanks"}])
    assert text_of(tokenizer, document).endswith("6<|im_end|>")


def test_tool_turns_are_context_and_the_rows_own_tools_reach_the_template():
    tokenizer = byte_tokenizer(TOOLS)
    chat = [TWO_TURNS[0], {"role": "assistant", "content": "calc"}, {"role": "tool", "content": "4"}, TWO_TURNS[1]]
    document = made(tokenizer, chat, tools=[{"name": "calculator"}])
    assert trained_spans(tokenizer, document) == ["calc<|im_end|>", "4<|im_end|>"]
    assert text_of(tokenizer, document).startswith("[calculator]")
    as_text = made(tokenizer, chat, tools='[{"name": "calculator"}]')
    assert as_text.tokens.tolist() == document.tokens.tolist()


def test_a_template_that_forgets_earlier_thoughts_cannot_mark_turns_and_the_error_says_what_to_do():
    chat = [TWO_TURNS[0], {"role": "assistant", "content": "<think>hm</think>4"}, *TWO_TURNS[2:]]
    with pytest.raises(DataError, match=r"line 7: .* 2 messages .*\{% generation %\}.*last_turn"):
        made(byte_tokenizer(FORGETFUL), chat)
    tokenizer = byte_tokenizer(FORGETFUL)
    assert trained_spans(tokenizer, made(tokenizer, chat, "last_turn")) == ["6<|im_end|>"]


def test_an_answer_whose_first_character_melts_into_the_template_is_refused_not_guessed():
    chat = [TWO_TURNS[0], {"role": "assistant", "content": "\n4"}]
    with pytest.raises(DataError, match=r"line 7: messages\[1\].*`map`.*last_turn"):
        made(byte_tokenizer(CHATML), chat)


def test_a_chat_that_begins_with_the_assistant_is_refused_by_the_prefix_method_and_fine_with_markers():
    chat = [{"role": "assistant", "content": "Hello"}]
    with pytest.raises(DataError, match=r"line 7: messages\[0\].*last_turn"):
        made(byte_tokenizer(CHATML), chat)
    marked = byte_tokenizer(CHATML_MARKED)
    assert trained_spans(marked, made(marked, chat)) == ["Hello<|im_end|>"]


def test_a_tokenizer_without_chat_template_is_an_error_that_names_the_key():
    with pytest.raises(DataError, match=r"line 7: .*model\.chat_template.*`prompt`/`completion`"):
        made(byte_tokenizer(None), TWO_TURNS)


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_a_prompt_of_messages_is_not_trained_even_where_the_assistant_speaks_in_it(template):
    tokenizer = byte_tokenizer(template)
    row = Row({"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}, "row 1")
    result = DocumentMaker(tokenizer, "assistant", 1000, "error").make(row)
    assert isinstance(result, Made)
    assert trained_spans(tokenizer, result.document) == ["6<|im_end|>"]


def test_a_chat_without_answer_has_nothing_trained():
    row = Row({"messages": TWO_TURNS[:1]}, "row 1")
    assert DocumentMaker(byte_tokenizer(CHATML), "assistant", 1000, "error").make(row) is Dropped.NO_ANSWER
