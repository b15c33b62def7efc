# SPDX-License-Identifier: Apache-2.0
"""Pairs, labels and scores: what rows of each shape say, and rows that make no sense, each reported with its place."""

import json
import re

import pytest
from chat_tokenizers import CHATML, byte_tokenizer, text_of, trained_spans

from podium.data.chat import Dropped
from podium.data.checking import check_source
from podium.data.comparisons import check_judged, judged
from podium.data.examples import ExampleMaker
from podium.data.reading import OrderedRows
from podium.data.results import MadeExample
from podium.data.rows import Row
from podium.data.scored import ConversationEncoder
from podium.errors import DataError
from podium.recipe import SourceSection

WHERE = "rows.jsonl, line 3"
QUESTION = [{"role": "user", "content": "2+2?"}]


def said(text):
    return [{"role": "assistant", "content": text}]


def row(**values):
    return Row(values, WHERE)


def make(shape, tokenizer=None, max_length=1000, overlong="truncate", **values):
    tokenizer = tokenizer or byte_tokenizer(CHATML)
    return ExampleMaker(tokenizer, shape, "assistant", max_length, overlong).make(row(**values))


def texts(shape, tokenizer=None, **values):
    """Of each document of the row's example: all of it, and what is trained."""
    tokenizer = tokenizer or byte_tokenizer(CHATML)
    made = make(shape, tokenizer, **values)
    assert isinstance(made, MadeExample)
    return [(text_of(tokenizer, each), trained_spans(tokenizer, each)) for each in made.example.documents]


def complaint(shape, **values):
    """What is said about the row, without and with a tokenizer: the same, and it begins with the row's place."""
    with pytest.raises(DataError) as quick:
        check_judged(values, {}, shape, row(**values))
    with pytest.raises(DataError) as full:
        make(shape, **values)
    assert str(quick.value) == str(full.value)
    assert str(quick.value).startswith(f"{WHERE}: ")
    return str(quick.value)


# --- what good rows say -------------------------------------------------------------------------------------------


def test_a_pair_of_texts_has_the_chosen_document_first_and_trains_the_completions_only():
    found = texts("pairs", prompt="2+2=", chosen="4", rejected="five")
    assert found == [("2+2=4</s>", ["4</s>"]), ("2+2=five</s>", ["five</s>"])]


def test_a_pair_of_messages_shares_its_prompt():
    chosen, rejected = texts("pairs", prompt=QUESTION, chosen=said("4"), rejected=said("5"))
    before = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert chosen[0].startswith(before + "4")
    assert rejected[0].startswith(before + "5")
    assert [chosen[1], rejected[1]] == [["4<|im_end|>"], ["5<|im_end|>"]]


def test_whole_conversations_part_at_their_last_turn_and_earlier_turns_are_not_trained():
    talk = [*QUESTION, *said("4"), {"role": "user", "content": "and 3+3?"}]
    given = texts("pairs", prompt=talk, chosen=said("6"), rejected=said("7"))
    implied = texts("pairs", chosen=talk + said("6"), rejected=talk + said("7"))
    assert implied == given
    assert implied[0][1] == ["6<|im_end|>"]


def test_a_completion_of_several_turns_trains_all_its_assistant_turns():
    more = [*said("hm"), {"role": "user", "content": "so?"}, *said("4")]
    chosen, rejected = texts("pairs", prompt=QUESTION, chosen=more, rejected=said("5"))
    assert chosen[1] == ["hm<|im_end|>", "4<|im_end|>"]
    assert rejected[1] == ["5<|im_end|>"]


def test_pairs_have_no_value_of_their_own():
    assert judged({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 3}, "pairs", row()).value == 0.0


@pytest.mark.parametrize(("margin", "value"), [(1.5, 1.5), (2, 2.0), ("0.25", 0.25), (None, 0.0), (-1, -1.0)])
def test_a_ranked_pair_has_its_margin_or_none(margin, value):
    values = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
    assert judged(values, "ranked", row()).value == value
    del values["margin"]
    assert judged(values, "ranked", row()).value == 0.0


@pytest.mark.parametrize(
    ("label", "value"),
    [(True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0), (1.0, 1.0), ("true", 1.0), (" False ", 0.0), ("TRUE", 1.0)],
)
def test_a_label_is_true_or_false_as_files_write_it(label, value):
    made = make("labels", prompt="2+2=", completion="4", label=label)
    assert isinstance(made, MadeExample)
    assert made.example.value == value
    assert len(made.example.documents) == 1


def test_a_score_goes_with_any_kind_of_row_and_may_be_text_of_a_number():
    for values in ({"prompt": "2+2=", "completion": "4"}, {"messages": QUESTION + said("4")}, {"text": "2+2=4"}):
        made = make("scores", score="-0.5", **values)
        assert isinstance(made, MadeExample)
        assert made.example.value == -0.5


def test_what_a_reward_model_reads_is_the_conversation_as_graders_render_it_looked_at_where_it_ends():
    tokenizer = byte_tokenizer(CHATML)
    made = make("scores", tokenizer, prompt=QUESTION, completion=said("4"), score=1)
    assert isinstance(made, MadeExample)
    (document,) = made.example.documents
    assert document.tokens[:-1].tolist() == ConversationEncoder(tokenizer).chat(QUESTION + said("4"))
    assert document.trained.tolist() == [False] * document.num_inputs + [True]


def test_a_scored_text_that_is_too_long_loses_its_beginning():
    tokenizer = byte_tokenizer(CHATML)
    made = make("scores", tokenizer, max_length=4, text="abcdefgh", score=0)
    assert isinstance(made, MadeExample)
    assert made.truncated
    assert tokenizer.decode(made.example.documents[0].tokens[:-1]) == "efgh"
    assert make("scores", tokenizer, max_length=4, overlong="drop", text="abcdefgh", score=0) is Dropped.OVERLONG
    with pytest.raises(DataError, match=r"rows.jsonl, line 3: 8 tokens.* 4\b"):
        make("scores", tokenizer, max_length=4, overlong="error", text="abcdefgh", score=0)


def test_a_scored_text_of_nothing_is_dropped():
    assert make("scores", text="", score=0) is Dropped.UNTRAINED


def test_nulls_of_columnar_files_are_as_good_as_columns_that_are_not_there():
    """Parquet gives every row every column, and every message every field."""
    talk = [{"role": "user", "content": "2+2?", "tool_calls": None, "name": None}]
    answer = [{"role": "assistant", "content": "4", "tool_calls": None}]
    plain = texts("pairs", prompt=QUESTION, chosen=said("4"), rejected=said("5"))
    assert texts("pairs", prompt=talk, chosen=answer, rejected=said("5"), tools=None, margin=None) == plain
    assert texts("pairs", prompt=None, chosen=talk + answer, rejected=QUESTION + said("5")) == plain
    labelled = make("labels", prompt=talk, completion=answer, label=True, tools=None, text=None)
    assert isinstance(labelled, MadeExample)
    scored = make("scores", messages=talk + answer, prompt=None, completion=None, text=None, tools=None, score=2.0)
    assert isinstance(scored, MadeExample)


def test_pairs_of_parquet_and_labels_of_csv_are_read_as_they_are_written(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row_of = {"prompt": QUESTION, "chosen": said("4"), "rejected": said("5"), "tools": None}
    rows = [{**row_of, "margin": 0.5}, {**row_of, "margin": None, "chosen": [{**said("4")[0], "name": "me"}]}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    (tmp_path / "l.csv").write_text("prompt,completion,label\n2+2=,4,true\n2+2=,5,False\n")
    tokenizer = byte_tokenizer(CHATML)

    def values(name, shape):
        maker = ExampleMaker(tokenizer, shape, "assistant", 100, "truncate")
        return [
            each.value for each in OrderedRows([SourceSection(path=str(tmp_path / name))], "d").examples(maker, None)
        ]

    assert values("p.parquet", "ranked") == [0.5, 0.0]
    assert values("l.csv", "labels") == [1.0, 0.0]


# --- rows that make no sense --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["pairs", "ranked"])
def test_a_pair_of_equals_has_nothing_to_prefer(shape):
    for pair in (
        {"prompt": "2+2=", "chosen": "4", "rejected": "4"},
        {"prompt": QUESTION, "chosen": said("4"), "rejected": said("4")},
        {"chosen": QUESTION + said("4"), "rejected": QUESTION + said("4")},
    ):
        assert re.search("`chosen` and `rejected`.*prefer", complaint(shape, **pair))


def test_a_pair_whose_sides_differ_only_in_nulls_is_a_pair_of_equals():
    answer = [{"role": "assistant", "content": "4", "tool_calls": None}]
    assert "prefer" in complaint("pairs", prompt=QUESTION, chosen=answer, rejected=said("4"))
    assert "prefer" in complaint("pairs", chosen=QUESTION + answer, rejected=QUESTION + said("4"))


@pytest.mark.parametrize("shape", ["pairs", "ranked"])
def test_a_pair_about_two_prompts_is_reported_with_the_first_difference(shape):
    other = [{"role": "user", "content": "2+3?"}]
    message = complaint(shape, chosen=QUESTION + said("4"), rejected=other + said("5"))
    assert re.search("`chosen` and `rejected`.*message 0", message)
    longer = QUESTION + said("4") + other
    message = complaint(shape, chosen=longer + said("5"), rejected=QUESTION + said("5"))
    assert "message 1" in message


@pytest.mark.parametrize(
    ("chosen", "rejected", "named"),
    [
        (QUESTION + said("4"), QUESTION + QUESTION, "rejected"),
        (said("4"), said("5"), "chosen"),
        (QUESTION, said("5"), "chosen"),
    ],
)
def test_a_conversation_without_prompt_column_must_end_with_an_answer(chosen, rejected, named):
    assert re.search(f"`{named}`.*assistant turn", complaint("pairs", chosen=chosen, rejected=rejected))


def test_two_texts_without_a_prompt_cannot_be_split():
    assert "`prompt` column" in complaint("pairs", chosen="2+2=4", rejected="2+2=5")


@pytest.mark.parametrize("empty", ["", "  \n", [], [{"role": "assistant", "content": ""}]])
def test_an_empty_completion_is_named(empty):
    is_text = isinstance(empty, str)
    prompt, answer = ("2+2=", "4") if is_text else (QUESTION, said("4"))
    assert re.search("`chosen`.*empty", complaint("pairs", prompt=prompt, chosen=empty, rejected=answer))
    assert re.search("`rejected`.*empty", complaint("ranked", prompt=prompt, chosen=answer, rejected=empty))
    assert re.search("`completion`.*empty", complaint("labels", prompt=prompt, completion=empty, label=True))


def test_a_call_of_a_tool_is_not_an_empty_completion():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    values = {"prompt": QUESTION, "chosen": [{"role": "assistant", "tool_calls": [call]}], "rejected": said("5")}
    assert len(judged(values, "pairs", row()).texts) == 2


@pytest.mark.parametrize("gone", ["chosen", "rejected"])
def test_a_pair_without_a_side_says_which_columns_there_are(gone):
    values = {"prompt": "2+2=", "chosen": "4", "rejected": "5", "answer": "4"}
    for changed in ({**values, gone: None}, {name: value for name, value in values.items() if name != gone}):
        message = complaint("pairs", **changed)
        assert f"no `{gone}`" in message
        assert "answer" in message
        assert "`columns`" in message


@pytest.mark.parametrize("gone", ["prompt", "completion"])
def test_a_labelled_row_without_its_text_is_named(gone):
    values = {"prompt": "2+2=", "completion": "4", "label": True}
    del values[gone]
    assert f"no `{gone}`" in complaint("labels", **values)


def test_a_scored_row_without_text_is_named():
    assert re.search("`messages`, `prompt`.*`completion`.*`text`", complaint("scores", score=1))


def test_text_beside_messages_is_neither():
    message = complaint("pairs", prompt="2+2=", chosen=said("4"), rejected=said("5"))
    assert "`prompt` and `chosen`" in message
    assert "`prompt` and `rejected`" in complaint("pairs", prompt="2+2=", chosen="4", rejected=said("5"))


@pytest.mark.parametrize("label", ["good", 2, -1, 0.5, "", [], float("nan")])
def test_a_label_that_is_neither_is_shown(label):
    message = complaint("labels", prompt="2+2=", completion="4", label=label)
    assert re.search(f"`label`.*true.*false.*{re.escape(repr(label))}", message)


def test_a_row_without_label_is_reported():
    assert "no `label`" in complaint("labels", prompt="2+2=", completion="4")


BAD_NUMBERS = ["high", True, float("nan"), float("inf"), [1.0], {}, ""]


@pytest.mark.parametrize("score", BAD_NUMBERS)
def test_a_score_that_is_no_finite_number_is_shown(score):
    message = complaint("scores", text="2+2=4", score=score)
    assert re.search(f"`score`.*finite.*{re.escape(repr(score))}", message)


@pytest.mark.parametrize("margin", BAD_NUMBERS)
def test_a_margin_that_is_no_finite_number_is_shown(margin):
    message = complaint("ranked", prompt="2+2=", chosen="4", rejected="5", margin=margin)
    assert re.search(f"`margin`.*finite.*{re.escape(repr(margin))}", message)


def test_the_quick_look_at_a_source_knows_its_shape(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "2+2=", "chosen": "4", "rejected": "4"}) + "\n")
    section = SourceSection(path=str(file))
    with pytest.raises(DataError, match=r"data.train.0: .*rows.jsonl, line 1: `chosen` and `rejected`.*prefer"):
        check_source(section, "data.train.0", "pairs")
    with pytest.raises(DataError, match=r"`label`.*no `completion`"):
        check_source(section, "data.train.0", "labels")
    renamed = SourceSection(path=str(file), columns={"completion": "chosen", "label": "prompt"})
    with pytest.raises(DataError, match="no `prompt`"):
        check_source(renamed, "data.train.0", "labels")


def test_a_row_without_score_is_reported():
    assert re.search(r"no `score`.*: text\b", complaint("scores", text="2+2=4"))


def test_whole_conversations_beside_their_prompt_are_read_once():
    requested = [{"role": "user", "content": "2+2?"}]
    found = judged(
        {"prompt": "2+2?", "chosen": [*requested, *said("4")], "rejected": [*requested, *said("5")]},
        "pairs",
        Row({}, "rows.jsonl, line 3"),
    )
    assert [text["prompt"] for text in found.texts] == [requested, requested]
    assert [text["completion"] for text in found.texts] == [said("4"), said("5")]


def test_a_prompt_that_is_not_that_of_the_conversations_beside_it_is_reported():
    requested = [{"role": "user", "content": "2+2?"}]
    message = complaint("pairs", prompt="3+3?", chosen=[*requested, *said("4")], rejected=[*requested, *said("5")])
    assert re.search("line 3: `chosen` and `rejected`.*`prompt`.*`map`", message)


def test_a_completion_that_begins_with_a_question_is_reported():
    requested = [{"role": "user", "content": "2+2?"}]
    message = complaint("labels", prompt=requested, completion=[*requested, *said("4")], label=True)
    assert re.search(r"`completion`.*\buser\b.*`prompt`", message)
