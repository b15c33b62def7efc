# SPDX-License-Identifier: Apache-2.0
"""`podium check` finds what is wrong with a source from its first row alone."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podium.data.checking import check_source
from podium.errors import DataError
from podium.recipe import SourceSection


def section(path, **values):
    return SourceSection(path=str(path), **values)


def test_a_good_source_of_each_format_passes(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "a"}\n')
    (tmp_path / "a.csv").write_text("text\na\n")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        check_source(section(tmp_path / name), "data.train.0")


def test_only_the_beginning_is_read(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\nnot json at all\n')
    check_source(section(file), "data.train.0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 bytes"),
        ("\n \n", "no rows"),
        ("{oops}\n", "line 1: .*JSON"),
        ('\n{"body": "a"}\n', "line 2: .*`messages`.*`body`"),
        ('{"messages": []}\n', "line 1: `messages`.*empty"),
    ],
)
def test_what_is_wrong_is_named_with_the_key(tmp_path, text, message):
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=rf"(?s)^data\.train\.0: .*{message}"):
        check_source(section(file), "data.train.0")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"data\.train\.0: .*/a\.jsonl.*data\.train\.0\.path"):
        check_source(section(tmp_path / "a.jsonl"), "data.train.0")


def test_columns_are_followed_and_a_map_is_trusted(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"q": "2+2", "a": "4"}) + "\n")
    check_source(section(file, columns={"prompt": "q", "completion": "a"}), "data.train.0")
    check_source(section(file, map="anything.py:function"), "data.train.0")
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: .*'question'.*`columns`"):
        check_source(section(file, columns={"prompt": "question"}), "data.train.0")


def test_checking_and_the_whole_data_room_import_neither_torch_nor_transformers():
    code = (
        "import sys, podium.data.checking, podium.data.loader, podium.data.reading, podium.data.splitting\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'ray') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
