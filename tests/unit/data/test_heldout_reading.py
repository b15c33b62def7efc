# SPDX-License-Identifier: Apache-2.0
"""Held-out documents and prompts, in file order, up to a limit."""

import json

import pytest
from chat_tokenizers import CHATML, byte_tokenizer, text_of

from podium.data.examples import ExampleMaker
from podium.data.reading import OrderedRows
from podium.errors import DataError
from podium.recipe import SourceSection


@pytest.fixture
def maker():
    return ExampleMaker(byte_tokenizer(CHATML), "documents", "assistant", 100, "drop")


def sections(tmp_path, *files):
    for name, rows in files:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [SourceSection(path=str(tmp_path / name)) for name, _ in files]


def pairs(*answers):
    return [{"prompt": "q", "completion": answer} for answer in answers]


def test_documents_come_in_file_order_over_all_sources_and_stop_at_the_limit(tmp_path, maker):
    found = sections(tmp_path, ("b.jsonl", pairs("1", "2")), ("a.jsonl", pairs("3", "x" * 200, "4")))
    tokenizer = byte_tokenizer()
    texts = [
        text_of(tokenizer, example.documents[0]) for example in OrderedRows(found, "data.heldout").examples(maker, None)
    ]
    assert texts == ["q1</s>", "q2</s>", "q3</s>", "q4</s>"]
    assert len(OrderedRows(found, "data.heldout").examples(maker, 3)) == 3


def test_prompts_come_with_their_references(tmp_path, maker):
    found = sections(tmp_path, ("a.jsonl", [{"text": "no prompt"}, *pairs("1", "2", "3")]))
    assert [prompt.reference for prompt in OrderedRows(found, "data.heldout").prompts(maker, 2)] == ["1", "2"]


def test_held_out_data_without_a_trained_token_or_prompt_is_an_error(tmp_path, maker):
    only_text = sections(tmp_path, ("a.jsonl", [{"text": ""}]))
    with pytest.raises(DataError, match=r"data\.heldout: .*a\.jsonl.*data\.trained"):
        OrderedRows(only_text, "data.heldout").examples(maker, None)
    with pytest.raises(DataError, match=r"data\.heldout: .*a\.jsonl.*evaluation\.generation"):
        OrderedRows(only_text, "data.heldout").prompts(maker, None)
