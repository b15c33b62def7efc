# SPDX-License-Identifier: Apache-2.0
"""Prompts for generation: what each kind of row becomes, and which rows are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import tiny_tokenizer
from podium.data.prompts import PromptRow, PromptRows
from podium.errors import DataError
from podium.recipe import SourceSection

TOKENIZER = tiny_tokenizer()
ASK = {"role": "user", "content": "what is 1+2?"}
ANSWER = {"role": "assistant", "content": "3"}


def read(folder: Path, *rows: Any, limit: int | None = None, **section: Any) -> list[PromptRow]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return PromptRows(SourceSection(path=str(file), **section), "--prompts").read(TOKENIZER, limit)


def rendered(prompt: PromptRow) -> str:
    return str(TOKENIZER.decode(prompt.tokens.tolist()))


def test_a_chat_that_ends_in_a_question_is_answered_from_the_generation_prompt(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"messages": [ASK]})

    assert rendered(prompt) == "<|im_start|>user\nwhat is 1+2?<|im_end|><|im_start|>assistant\n"
    assert (prompt.text, prompt.reference) == ("what is 1+2?", None)


def test_the_last_assistant_turn_is_the_reference_and_not_part_of_the_prompt(tmp_path: Path) -> None:
    requested, answered = read(tmp_path, {"messages": [ASK]}, {"messages": [ASK, ANSWER]})

    assert answered.tokens.tolist() == requested.tokens.tolist()
    assert answered.reference == "3"


def test_an_earlier_assistant_turn_stays_and_a_longer_chat_says_who_speaks(tmp_path: Path) -> None:
    again = {"role": "user", "content": "and 2+2?"}
    [prompt] = read(tmp_path, {"messages": [ASK, ANSWER, again]})

    assert "<|im_start|>assistant\n3<|im_end|>" in rendered(prompt)
    assert prompt.text == "user: what is 1+2?\nassistant: 3\nuser: and 2+2?"
    assert prompt.reference is None


def test_a_tool_turn_may_come_last(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"messages": [ASK, ANSWER, {"role": "tool", "content": "ok"}]})

    assert rendered(prompt).endswith("<|im_start|>tool\nok<|im_end|><|im_start|>assistant\n")


@pytest.mark.parametrize("row", [{"prompt": "1+1="}, {"text": "1+1="}])
def test_text_is_continued_as_it_stands(tmp_path: Path, row: dict[str, str]) -> None:
    [prompt] = read(tmp_path, row)

    assert rendered(prompt) == prompt.text == "1+1="
    assert prompt.reference is None


@pytest.mark.parametrize(
    ("row", "reference"),
    [
        ({"prompt": "1+1=", "completion": "2"}, "2"),
        ({"prompt": [ASK], "completion": [ANSWER]}, "3"),
        ({"prompt": [ASK], "completion": "three"}, "three"),
        ({"prompt": [ASK, ANSWER]}, "3"),
        ({"prompt": [ASK]}, None),
    ],
)  # fmt: skip
def test_a_completion_is_the_reference(tmp_path: Path, row: dict[str, Any], reference: str | None) -> None:
    [prompt] = read(tmp_path, row)

    assert prompt.reference == reference
    assert "three" not in rendered(prompt)


def test_an_empty_prompt_is_left_to_the_engine_to_refuse(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"prompt": ""})

    assert len(prompt.tokens) == 0


def test_rows_keep_their_numbers_when_map_drops_some_and_limit_counts_rows(tmp_path: Path) -> None:
    plugin = tmp_path / "odd.py"
    plugin.write_text("def keep(row):\n    return row if int(row['prompt']) % 2 else None\n")
    rows = [{"prompt": str(number)} for number in range(6)]

    assert [prompt.row for prompt in read(tmp_path, *rows, map=f"{plugin}:keep", limit=4)] == [1, 3]


def test_columns_name_the_prompt_and_decide_between_two(tmp_path: Path) -> None:
    [prompt] = read(tmp_path, {"question": "1+1=", "text": "no", "answer": "2"}, columns={"prompt": "question"})
    assert (prompt.text, prompt.reference) == ("1+1=", None)

    columns = {"prompt": "question", "completion": "answer"}
    [prompt] = read(tmp_path, {"question": "1+1=", "answer": "2"}, columns=columns)
    assert (prompt.text, prompt.reference) == ("1+1=", "2")


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"question": "a"}, {}, "`messages`, `prompt` or `text`.*`question`"),
        ({"prompt": "a", "text": "b"}, {}, "`prompt` and `text`"),
        ({"prompt": 3}, {}, r"`prompt`.*\{role, content\}.*\bint\b"),
        ({"messages": [ANSWER]}, {}, "`messages`.*assistant turn"),
        ({"messages": []}, {}, "`messages`.*empty"),
        ({"prompt": [ASK, ANSWER], "completion": "4"}, {}, "`prompt`.*assistant turn.*`completion`"),
        ({"prompt": "a", "completion": 4}, {}, r"`completion`.*\{role, content\}.*int 4"),
        ({"prompt": "\ud83d"}, {}, "tokenizer.*Error: "),
        ({"messages": [{"role": "robot", "content": "a"}]}, {}, r"messages\[0\]\.role"),
    ],
)  # fmt: skip
def test_a_row_that_is_wrong_is_named(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=f"line 2: .*{message}"):
        read(tmp_path, {"prompt": "good"}, row, columns=columns)


def test_a_mistyped_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'questoin'.*`columns`"):
        read(tmp_path, {"question": "a"}, columns={"prompt": "questoin"})
    with pytest.raises(DataError, match=r"'promt'.*--column"):
        read(tmp_path, {"question": "a"}, columns={"promt": "question"})


def test_a_map_that_drops_everything_is_reported(tmp_path: Path) -> None:
    plugin = tmp_path / "none.py"
    plugin.write_text("def keep(row):\n    return None\n")

    with pytest.raises(DataError, match=r"`map`.*\.jsonl"):
        read(tmp_path, {"prompt": "a"}, map=f"{plugin}:keep")
