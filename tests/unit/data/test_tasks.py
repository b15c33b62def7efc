# SPDX-License-Identifier: Apache-2.0
"""Tasks: what rows of each convention become, how they are encoded, and that a restored cursor draws the same ones."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import TOOLS, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.tiny import tiny_tokenizer
from podium.data.prompts import PromptTokenizer
from podium.data.rows import Row
from podium.data.tasks import Task, TaskCursor, TaskReader, check_task_source, read_tasks
from podium.errors import DataError
from podium.recipe import SourceSection

ASK = {"role": "user", "content": "what is 1+2?"}
ANSWER = {"role": "assistant", "content": "3"}


def write(file: Path, *rows: Any) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def read(folder: Path, *rows: Any, **section: Any) -> list[Task]:
    path = write(folder / "train.jsonl", *rows)
    return read_tasks([SourceSection(path=path, **section)], "data.train", None)


def cursor(*sections: SourceSection, shuffle: bool = True, state: dict[str, Any] | None = None) -> TaskCursor:
    return TaskCursor(sections, "data.train", seed=5, shuffle=shuffle, shuffle_rows=64, state=state)


def sampled(tasks: TaskCursor, count: int) -> list[tuple[int, int, str | None]]:
    return [(one.prompt_index, one.epoch, one.task.text) for one in tasks.take(count)]


@pytest.mark.parametrize(
    ("row", "messages", "text", "reference"),
    [
        ({"prompt": "1+2=", "completion": "3"}, None, "1+2=", "3"),
        ({"prompt": "1+2="}, None, "1+2=", None),
        ({"text": "1+2=", "answer": "3"}, None, "1+2=", "3"),
        ({"text": "1+2=", "completion": "3"}, None, "1+2=", "3"),
        ({"messages": [ASK], "ground_truth": "3"}, (ASK,), None, "3"),
        ({"messages": [ASK, ANSWER]}, (ASK,), None, "3"),
        ({"messages": [ASK, ANSWER], "answer": "three"}, (ASK,), None, "three"),
        ({"messages": [ASK], "completion": [ANSWER]}, (ASK,), None, "3"),
        ({"prompt": [ASK], "completion": [ANSWER]}, (ASK,), None, "3"),
        ({"prompt": [ASK], "solution": "1+2 is 3", "answer": "3"}, (ASK,), None, "3"),
        ({"prompt": [ASK], "target": 3}, (ASK,), None, "3"),
        ({"prompt": [ASK], "answer": None, "target": 2.5}, (ASK,), None, "2.5"),
        ({"prompt": [ASK], "answer": ["3", "three"]}, (ASK,), None, '["3", "three"]'),
        ({"prompt": [ASK], "answer": True}, (ASK,), None, "true"),
        ({"prompt": [ASK], "answer": ""}, (ASK,), None, ""),
        ({"prompt": [ASK], "reference": "3", "answer": "4"}, (ASK,), None, "3"),
    ],
)  # fmt: skip
def test_each_kind_of_row_is_a_task(
    tmp_path: Path, row: dict[str, Any], messages: Any, text: str | None, reference: str | None
) -> None:
    [task] = read(tmp_path, row)

    assert (task.messages, task.text, task.reference) == (messages, text, reference)
    assert (task.source, task.where) == ("train", f"{tmp_path}/train.jsonl, line 1")
    assert task.row == row


def test_rows_of_verl_are_read_as_they_are(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [ASK],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 7},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "gsm8k.parquet")

    [task] = read_tasks([SourceSection(path=str(tmp_path / "gsm8k.parquet"))], "data.train", None)

    assert (task.source, task.messages, task.reference) == ("openai/gsm8k", (ASK,), "3")
    assert task.row == row
    assert task.where.endswith("gsm8k.parquet, row 1")


def test_columns_name_prompt_and_reference_and_the_row_has_the_new_names(tmp_path: Path) -> None:
    row = {"question": "1+2=", "final": "3", "answer": "by counting"}
    [task] = read(tmp_path, row, columns={"prompt": "question", "reference": "final"})

    assert (task.text, task.reference) == ("1+2=", "3")
    assert task.row == {"prompt": "1+2=", "reference": "3", "answer": "by counting"}


def test_map_shapes_rows_and_drops_some(tmp_path: Path) -> None:
    plugin = tmp_path / "shape.py"
    plugin.write_text(
        "def shape(row):\n"
        "    return {'prompt': row['a'] + '+' + row['b'] + '=', 'answer': int(row['a']) + int(row['b'])}"
        " if row['a'] != '0' else None\n"
    )

    [task] = read(tmp_path, {"a": "0", "b": "1"}, {"a": "1", "b": "2"}, map=f"{plugin}:shape")

    assert (task.text, task.reference, task.row["answer"]) == ("1+2=", "3", 3)
    assert task.where.endswith("line 2")


def test_a_source_is_named_after_its_file_and_two_of_one_name_with_their_folders(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "math/train.jsonl", {"prompt": "a"}),
        write(tmp_path / "code/train.jsonl", {"prompt": "b"}),
        write(tmp_path / "chat-v1.5/one.jsonl", {"prompt": "c"}),
    ]
    sections = [SourceSection(path=path) for path in [*paths[:2], str(tmp_path / "chat-v1.5")]]
    sections.append(SourceSection(path=str(tmp_path / "chat-v1.5/*.jsonl")))

    names = [task.source for task in read_tasks(sections, "data.train", None)]

    assert names[:2] == ["math/train", "code/train"]
    assert names[2:] == [f"{tmp_path.name}/chat-v1.5"] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, "`messages`, `prompt` or `text`.*`question`"),
        ({"prompt": "a", "text": "b"}, "`prompt` and `text`"),
        ({"prompt": 3}, r"`prompt`.*\{role, content\}.*\bint\b"),
        ({"messages": [ANSWER]}, "`messages`.*assistant turn"),
        ({"messages": [ASK], "tools": "{"}, "`tools`.*JSON.*column 2"),
        ({"prompt": "a", "completion": 4}, r"`completion`.*\{role, content\}.*int 4"),
    ],
)  # fmt: skip
def test_a_row_that_is_wrong_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"line 2: .*{message}"):
        read(tmp_path, {"prompt": "good"}, row)


def test_a_reference_that_is_neither_text_nor_json_is_named() -> None:
    reader = TaskReader([SourceSection(path="a.jsonl")], "data.train")

    with pytest.raises(DataError, match=r"a, row 3: `answer`.*reference.*JSON.*`map`"):
        reader.read(0, Row({"prompt": "a", "answer": np.zeros(2)}, "a, row 3"))


def test_reading_held_out_tasks_stops_at_the_limit_over_all_sources(tmp_path: Path) -> None:
    sections = [
        SourceSection(path=write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{n}"} for n in range(3))))
        for name in "ab"
    ]

    assert [task.text for task in read_tasks(sections, "data.heldout", 4)] == ["a0", "a1", "a2", "b0"]
    assert len(read_tasks(sections, "data.heldout", None)) == 6


def test_an_empty_source_and_a_map_that_drops_everything_are_reported(tmp_path: Path) -> None:
    plugin = tmp_path / "none.py"
    plugin.write_text("def keep(row):\n    return None\n")
    section = SourceSection(path=write(tmp_path / "a.jsonl", {"prompt": "a"}), map=f"{plugin}:keep")
    (tmp_path / "empty.jsonl").touch()

    with pytest.raises(DataError, match=r"data\.heldout: .*`map`"):
        read_tasks([section], "data.heldout", 1)
    with pytest.raises(DataError, match=r"data\.train: .*`map`"):
        cursor(section).take(1)
    with pytest.raises(DataError, match=r"data\.train\.0: .*empty\.jsonl .*0 bytes"):
        cursor(SourceSection(path=str(tmp_path / "empty.jsonl")))


def test_the_check_before_a_run_looks_at_the_first_row_only(tmp_path: Path) -> None:
    good = SourceSection(path=write(tmp_path / "good.jsonl", {"prompt": "a"}, {"question": "b"}))
    bad = SourceSection(path=write(tmp_path / "bad.jsonl", {"question": "b"}))

    check_task_source(good, "data.train.0")
    with pytest.raises(DataError, match=r"data\.train\.1: .*bad\.jsonl, line 1: .*`messages`, `prompt` or `text`"):
        check_task_source(bad, "data.train.1")


def test_a_task_pickles_to_about_the_size_of_its_row(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "why? " * 400}], "answer": "because", "extra_info": {"index": 1}}
    [task] = read(tmp_path, row)

    packed = pickle.dumps(task)
    again = pickle.loads(packed)

    assert len(packed) < len(json.dumps(row)) + 600  # the prompt is in there once
    assert (again.messages, again.reference, again.row, again.where) == (task.messages, "because", row, task.where)


def test_a_chat_is_encoded_with_the_generation_prompt_and_shown_for_people(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    [alone, longer] = read(tmp_path, {"messages": [ASK, ANSWER]}, {"prompt": [ASK, ANSWER, ASK]})
    encoder = PromptTokenizer(tokenizer)

    tokens = alone.encode(encoder)

    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens.tolist()) == "<|im_start|>user\nwhat is 1+2?<|im_end|><|im_start|>assistant\n"
    assert alone.prompt_text == "what is 1+2?"
    assert longer.prompt_text == "user: what is 1+2?\nassistant: 3\nuser: what is 1+2?"


def test_a_text_is_encoded_with_its_beginning_and_without_an_end(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(bos=True)
    [task] = read(tmp_path, {"prompt": "1+2="})
    encoder = PromptTokenizer(tokenizer)

    assert tokenizer.decode(task.encode(encoder).tolist()) == "<s>1+2="
    assert task.prompt_text == "1+2="


def test_tools_of_the_row_reach_the_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(TOOLS)
    [task] = read(tmp_path, {"prompt": [ASK], "tools": [{"name": "add", "parameters": {}}]})

    assert task.tools == [{"name": "add", "parameters": {}}]
    assert tokenizer.decode(task.encode(PromptTokenizer(tokenizer)).tolist()).startswith("[add]<|im_start|>user")


def test_prompts_that_cannot_be_encoded_are_named(tmp_path: Path) -> None:
    broken, empty, chat = read(tmp_path, {"prompt": "\ud83d"}, {"prompt": ""}, {"messages": [ASK]})
    encoder = PromptTokenizer(byte_tokenizer(None))

    with pytest.raises(DataError, match=r"line 1: .*tokenizer.*Error: "):
        broken.encode(encoder)
    with pytest.raises(DataError, match=r"line 2: .*empty.*`map`"):
        empty.encode(encoder)
    with pytest.raises(DataError, match=r"line 3: .*model\.chat_template"):
        chat.encode(encoder)


def test_prompts_are_numbered_from_0_and_epochs_repeat_for_ever(tmp_path: Path) -> None:
    section = SourceSection(path=write(tmp_path / "a.jsonl", *({"prompt": text} for text in "ab")))

    tasks = cursor(section, shuffle=False)

    assert sampled(tasks, 3) == [(0, 0, "a"), (1, 0, "b"), (2, 1, "a")]
    assert sampled(tasks, 2) == [(3, 1, "b"), (4, 2, "a")]


def test_rows_that_map_drops_take_no_number(tmp_path: Path) -> None:
    plugin = tmp_path / "odd.py"
    plugin.write_text("def keep(row):\n    return row if int(row['prompt']) % 2 else None\n")
    rows = [{"prompt": str(number)} for number in range(6)]
    section = SourceSection(path=write(tmp_path / "a.jsonl", *rows), map=f"{plugin}:keep")

    assert sampled(cursor(section, shuffle=False), 4) == [(0, 0, "1"), (1, 0, "3"), (2, 0, "5"), (3, 1, "1")]


def test_weights_share_the_prompts_between_sources(tmp_path: Path) -> None:
    sections = [
        SourceSection(path=write(tmp_path / "a.jsonl", {"prompt": "a"}), weight=3.0),
        SourceSection(path=write(tmp_path / "b.jsonl", {"prompt": "b"}), weight=1.0),
    ]

    counts = Counter(one.task.source for one in cursor(*sections).take(1000))

    assert 700 < counts["a"] < 800
    assert counts["a"] + counts["b"] == 1000


@settings(max_examples=30)
@given(before=st.integers(0, 40), batch=st.integers(1, 7))
def test_a_restored_cursor_gives_the_very_same_tasks(
    tmp_path_factory: pytest.TempPathFactory, before: int, batch: int
) -> None:
    folder = tmp_path_factory.mktemp("tasks")
    plugin = folder / "some.py"
    plugin.write_text("def keep(row):\n    return None if row['prompt'].endswith('3') else row\n")
    sections = [
        SourceSection(path=write(folder / "a.jsonl", *({"prompt": f"a{n}"} for n in range(7))), weight=2.0),
        SourceSection(
            path=write(folder / "b.jsonl", *({"prompt": f"b{n}"} for n in range(5))), map=f"{plugin}:keep"
        ),
    ]  # fmt: skip
    first = cursor(*sections)
    begun = sampled(first, before)
    state = json.loads(json.dumps(first.state()))

    went_on = [sampled(first, batch) for _ in range(5)]
    resumed = cursor(*sections, state=state)

    assert [sampled(resumed, batch) for _ in range(5)] == went_on
    assert resumed.state() == first.state()
    numbers = [draw for part in (begun, *went_on) for draw, _, _ in part]
    assert numbers == list(range(before + 5 * batch))


@pytest.mark.parametrize(
    "state",
    [{}, {"next_index": 1}, {"next_index": "x", "stream_draw": 1, "sources": [[0, 0, 0]]},
     {"next_index": 1, "stream_draw": 1, "sources": [[0, 0]]}, {"next_index": 1, "stream_draw": 1, "sources": 3}],
)  # fmt: skip
def test_a_position_that_is_none_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    section = SourceSection(path=write(tmp_path / "a.jsonl", {"prompt": "a"}))

    with pytest.raises(DataError, match=r"tasks.*\((Key|Type|Value)Error: "):
        cursor(section, state=state)


def test_a_position_of_other_sources_is_refused(tmp_path: Path) -> None:
    section = SourceSection(path=write(tmp_path / "a.jsonl", {"prompt": "a"}))
    state = cursor(section).state()

    with pytest.raises(DataError, match=r" 1 sources.* 2\b"):
        cursor(section, section, state=state)
