# SPDX-License-Identifier: Apache-2.0
"""Rows of every kind, the longest length, prompts, and rows that are wrong."""

import pytest
from chat_tokenizers import CHATML, byte_tokenizer, text_of, trained_spans

from podium.data.chat import DocumentMaker, Dropped, Made
from podium.data.examples import ExampleMaker, SourcesMaker
from podium.data.results import MadeExample
from podium.data.rows import Row
from podium.errors import DataError
from podium.recipe import SourceSection

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def maker(tokenizer=None, trained="assistant", max_length=1000, overlong="truncate"):
    return DocumentMaker(tokenizer or byte_tokenizer(CHATML), trained, max_length, overlong)


def row(**values):
    return Row(values, "rows.jsonl, line 3")


def test_raw_text_is_trained_on_everything_but_the_first_token_and_ends_with_eos():
    tokenizer = byte_tokenizer(bos=True)
    made = maker(tokenizer).make(row(text="abc"))
    assert isinstance(made, Made)
    assert text_of(tokenizer, made.document) == "<s>abc</s>"
    assert made.document.trained.tolist() == [False, True, True, True, True]


def test_text_that_already_ends_with_eos_gets_no_second_one():
    tokenizer = byte_tokenizer()
    made = maker(tokenizer).make(row(text="abc</s>"))
    assert isinstance(made, Made)
    assert text_of(tokenizer, made.document) == "abc</s>"


def test_without_an_eos_token_none_is_added():
    tokenizer = byte_tokenizer(eos=None)
    made = maker(tokenizer).make(row(text="abc"))
    assert isinstance(made, Made)
    assert text_of(tokenizer, made.document) == "abc"


def test_prompt_and_completion_train_the_completion_and_eos():
    tokenizer = byte_tokenizer(bos=True)
    made = maker(tokenizer).make(row(prompt="2+2=", completion="4"))
    assert isinstance(made, Made)
    assert text_of(tokenizer, made.document) == "<s>2+2=4</s>"
    assert trained_spans(tokenizer, made.document) == ["4</s>"]


def test_a_token_never_spans_the_border_of_prompt_and_completion():
    tokenizer = byte_tokenizer()
    newline = tokenizer("\n")["input_ids"]
    made = maker(tokenizer).make(row(prompt="a\n", completion="\nb"))
    assert isinstance(made, Made)
    # Joined, the two newlines are one token; generation starts from the prompt's own tokens, so they stay apart.
    assert made.document.tokens.tolist()[1:3] == newline * 2
    assert made.document.trained.tolist() == [False, False, True, True, True]


def test_everything_trains_the_prompt_too():
    made = maker(byte_tokenizer(), "everything").make(row(prompt="ab", completion="c"))
    assert isinstance(made, Made)
    assert made.document.trained.tolist() == [False, True, True, True]


def test_a_document_of_exactly_the_longest_length_is_whole():
    made = maker(max_length=4).make(row(text="abcd"))  # 5 tokens with eos: 4 inputs
    assert isinstance(made, Made)
    assert not made.truncated
    assert made.document.num_inputs == 4


def test_a_longer_document_is_truncated_dropped_or_refused_as_configured():
    made = maker(max_length=3).make(row(text="abcd"))
    assert isinstance(made, Made)
    assert made.truncated
    assert made.document.num_inputs == 3
    assert maker(max_length=3, overlong="drop").make(row(text="abcd")) is Dropped.OVERLONG
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: 4 tokens.* 3\b.*data\.max_length.*data\.overlong"):
        maker(max_length=3, overlong="error").make(row(text="abcd"))


def test_truncation_that_leaves_no_trained_token_drops_the_document():
    made = maker(byte_tokenizer(), max_length=4).make(row(prompt="abcdefgh", completion="i"))
    assert made is Dropped.UNTRAINED


def test_what_follows_the_last_trained_token_does_not_make_a_chat_overlong():
    chat = [*CHAT, {"role": "user", "content": "x" * 500}]
    made = maker(max_length=100, overlong="error").make(row(messages=chat))
    assert isinstance(made, Made)
    assert not made.truncated


def test_an_empty_text_has_nothing_to_predict():
    assert maker().make(row(text="")) is Dropped.UNTRAINED


def test_columns_rename_and_a_kind_that_they_name_goes_before_one_that_is_merely_there():
    tokenizer = byte_tokenizer()
    made = maker(tokenizer).make(row(question="a", completion="b", text="noise"), {"prompt": "question"})
    assert isinstance(made, Made)
    assert text_of(tokenizer, made.document) == "ab</s>"


def test_a_column_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(DataError, match=r"line 3: .*'question'.*`q`, `completion`"):
        maker().make(row(q="a", completion="b"), {"prompt": "question"})


def test_the_map_shapes_a_row_or_drops_it():
    def shape(values):
        return {"text": values["body"].upper()} if values["body"] else None

    tokenizer = byte_tokenizer()
    made = maker(tokenizer).make(row(body="abc"), {}, shape)
    assert isinstance(made, Made)
    assert text_of(tokenizer, made.document) == "ABC</s>"
    assert maker().make(row(body=""), {}, shape) is Dropped.BY_MAP


def test_a_map_that_raises_is_an_error_with_the_row_and_the_exception():
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: .*`map`.*KeyError: 'body'"):
        maker().make(row(text="a"), {}, lambda values: {"text": values["body"]})


def test_a_map_that_returns_something_else_is_an_error():
    with pytest.raises(DataError, match=r"line 3: .*`map`.*\blist\b"):
        maker().make(row(text="a"), {}, lambda values: [values])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"body": "a"}, "`messages`, `prompt`.*`completion`.*`text`.*`body`"),
        ({}, "`messages`, `prompt`.*`completion`.*`text`.*nothing"),
        ({"prompt": "a"}, "`text`.*`prompt`.*`completion`"),
        ({"text": None}, r"`text` \(null\)"),
        ({"messages": CHAT, "text": "a"}, "messages and text.*`map`.*`columns`"),
        ({"text": 3}, "`text`.*int 3"),
        ({"prompt": "a", "completion": 3}, "`prompt` and `completion`.*str 'a' and int 3"),
        ({"messages": "hello"}, r"`messages`.*\{role, content\}.*str 'hello'.*CSV"),
        ({"messages": []}, "`messages`.*empty"),
        ({"messages": ["hello"]}, r"messages\[0\].*\{role, content\}.*str 'hello'"),
        ({"messages": [{"from": "human", "value": "hi"}]}, r"messages\[0\] .*`role`.*`from`, `value`.*map"),
        (
            {"messages": [{"role": "human", "content": "hi"}]},
            r"messages\[0\]\.role .*str 'human'.*system, developer, user",
        ),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] \(user\).*`content`"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]\.content .*int 3"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\]\.content .*\blist\b"),
        ({"messages": CHAT, "tools": "{"}, "`tools`.*JSON.*column 2"),
        ({"messages": CHAT, "tools": ["calculator"]}, r"`tools`.*list \['calculator'\]"),
        ({"conversations": CHAT}, r"columns: \{messages: conversations\}"),
    ],
)
def test_a_row_that_is_wrong_is_named_with_what_is_wrong(values, message):
    with pytest.raises(DataError, match=rf"^rows\.jsonl, line 3: .*{message}"):
        maker().make(row(**values))


def test_an_assistant_turn_that_only_calls_tools_needs_no_content_and_nulls_of_columnar_files_are_dropped():
    template = (
        "{% for m in messages %}{{ m.role }}{% if 'name' in m %}!{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.name }}{% endfor %}</s>{% endfor %}"
    )
    chat = [
        {"role": "user", "content": "2+2?", "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "calculator"}]},
    ]
    tokenizer = byte_tokenizer(template)
    made = maker(tokenizer, "everything").make(row(messages=chat))
    assert isinstance(made, Made)
    assert text_of(tokenizer, made.document) == "user2+2?</s>assistantcalculator</s>"


def test_the_prompt_of_a_chat_is_everything_before_the_last_answer_with_the_cue_to_answer():
    tokenizer = byte_tokenizer(CHATML)
    prompt = maker(tokenizer).prompt_of(row(messages=CHAT, level=2))
    assert prompt is not None
    assert tokenizer.decode(prompt.tokens.tolist()) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.reference == "4"
    assert prompt.values["level"] == 2


def test_the_prompt_is_exactly_how_the_training_document_begins():
    for values in ({"messages": CHAT}, {"prompt": "2+2=", "completion": "4"}):
        prompt, made = maker().prompt_of(row(**values)), maker().make(row(**values))
        assert prompt is not None
        assert isinstance(made, Made)
        length = len(prompt.tokens)
        assert made.document.tokens[:length].tolist() == prompt.tokens.tolist()
        assert made.document.trained.tolist() == [False] * length + [True] * (len(made.document.tokens) - length)


def test_a_repeated_row_is_not_tokenized_again_unless_a_map_has_to_see_it(tmp_path):
    plugin = tmp_path / "count.py"
    plugin.write_text("calls = []\ndef count(row):\n    calls.append(1)\n    return {'text': 'x' * len(calls)}\n")
    sections = [SourceSection(path="a.jsonl"), SourceSection(path="b.jsonl", map=f"{plugin}:count")]
    examples = ExampleMaker(byte_tokenizer(CHATML), "documents", "assistant", 1000, "truncate")
    both = SourcesMaker(examples, sections, "data.train")
    assert both.make(0, row(text="abc")) is both.make(0, row(text="abc"))
    first, second = both.make(1, row(text="abc")), both.make(1, row(text="abc"))
    assert isinstance(first, MadeExample)
    assert isinstance(second, MadeExample)
    assert second.example.num_inputs == first.example.num_inputs + 1


def test_made_documents_cannot_be_written_to():
    made = maker().make(row(text="abc"))
    assert isinstance(made, Made)
    assert not made.document.tokens.flags.writeable
    assert not made.document.trained.flags.writeable


def test_raw_text_and_chats_without_answer_have_no_prompt():
    assert maker().prompt_of(row(text="abc")) is None
    assert maker().prompt_of(row(messages=CHAT[:1])) is None
