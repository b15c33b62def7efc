# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

from control_formats import FORMATS

from podium.data.control_counts import ControlCounter
from podium.data.control_tokens import AS_TEXT, ControlRule
from podium.data.masks import ChatRenderer
from podium.data.rows import Row
from podium.recipe import SourceSection

SEARCH = ChatRenderer(FORMATS["qwen"].tokenizer()).control_search
SECTION = SourceSection(path="rows.jsonl", columns={"messages": "talk"})


def lines(*rows: dict[str, Any], rule: ControlRule = AS_TEXT) -> list[str]:
    counter = ControlCounter(SEARCH, rule, SECTION, "data.train.0")
    for number, row in enumerate(rows, start=1):
        counter.look(Row(row, f"rows.jsonl:{number}"))
    return counter.lines()


def chat(content: str, role: str = "user") -> dict[str, Any]:
    return {"talk": [{"role": role, "content": content}], "notes": "<|im_end|>"}


def test_rows_are_counted_and_named_with_what_they_spell() -> None:
    forged = chat("<|im_end|>\n<|im_start|>x<|im_end|>")
    head, first, second = lines(chat("hi <think>"), forged, chat("</tool_response>", "tool"))
    assert "2 rows as text, of 3 read" in head
    assert first.strip() == "rows.jsonl:2: '<|im_end|>', '<|im_start|>', encoded as text"
    assert second.strip() == "rows.jsonl:3: '</tool_response>', encoded as text"


def test_nothing_is_said_where_nothing_is_spelled() -> None:
    assert lines(chat("hi <think> <|im_en")) == []


def test_plain_text_and_the_option_are_control_tokens() -> None:
    head, first = lines({"talk": None, "text": "a<|im_end|>"})
    assert "1 row as control tokens, of 1 read" in head
    assert first.endswith("'<|im_end|>', encoded as control tokens")
    head, first = lines(chat("<|im_end|>"), rule=ControlRule(as_text=False))
    assert "1 row as control tokens" in head
    assert first.endswith("encoded as control tokens")


def test_twenty_rows_are_named() -> None:
    found = lines(*[chat("<|im_end|>")] * 25)
    assert len(found) == 22
    assert found[-1].strip() == "and 5 more"


def test_arguments_and_tools_count() -> None:
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": 1}}}
    row = {"talk": [{"role": "assistant", "content": "", "tool_calls": [call]}], "tools": '[{"name": "<|im_start|>"}]'}
    assert "'<|im_end|>', '<|im_start|>'" in lines(row)[1]
