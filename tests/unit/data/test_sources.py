# SPDX-License-Identifier: Apache-2.0
"""Sources of every format give the same rows however they are cut into blocks; what is wrong is named."""

import csv
import gzip
import importlib.util
import json
import pickle
import re
import sys

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.data.files import CsvFile, JsonlFile, Readers
from podium.data.sources import first_row, open_source
from podium.errors import BadRowError, DataError, MissingExtraError
from podium.recipe import SourceSection


def section(path, **values):
    return SourceSection(path=str(path), **values)


def rows_of(source):
    return [row for block in range(source.num_blocks) for row in source.read_block(block)]


def values_of(source):
    return [dict(row.values) for row in rows_of(source)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


ROWS = [{"text": f"row {number}"} for number in range(5)]


def test_jsonl_rows_come_in_order_with_their_lines(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    source = open_source(section(file), "data.train.0")
    assert values_of(source) == ROWS
    assert [row.where for row in rows_of(source)] == [f"{file}, line {number}" for number in range(1, 6)]


@given(
    lines=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=12),
    block_bytes=st.integers(1, 60),
    blank=st.booleans(),
    ends_with_newline=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_cut_into_blocks_gives_every_line_once_and_its_number(
    tmp_path_factory, lines, block_bytes, blank, ends_with_newline
):
    file = tmp_path_factory.getbasetemp() / "cut.jsonl"
    newline = "\n\n" if blank else "\n"
    text = newline.join(json.dumps({"text": line}, ensure_ascii=False) for line in lines)
    file.write_bytes((text + newline * ends_with_newline).encode())
    source = JsonlFile(str(file), "data.train.0", block_bytes)
    rows = rows_of(source)
    assert [row.values["text"] for row in rows] == lines
    step = 2 if blank else 1
    assert [row.where for row in rows] == [f"{file}, line {1 + index * step}" for index in range(len(lines))]


def test_a_line_longer_than_a_block_is_read_once(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 100}, {"text": "y"}])
    source = JsonlFile(str(file), "data.train.0", 16)
    assert source.num_blocks == 8
    assert [row.values["text"][0] for row in rows_of(source)] == ["x", "y"]


def test_several_readers_have_the_same_rows_and_each_parses_a_part_of_them(tmp_path, monkeypatch):
    file, parse, parsed = write_jsonl(tmp_path / "a.jsonl", ROWS), json.loads, []
    monkeypatch.setattr(json, "loads", lambda line: parsed.append(line) or parse(line))
    for rank in range(3):
        source = open_source(section(file), "data.train.0", readers=Readers(rank=rank, world=3))
        parsed.clear()
        rows = rows_of(source)
        assert len(parsed) in (1, 2)
        assert [dict(row.values) for row in pickle.loads(pickle.dumps(rows))] == values_of(source) == ROWS
        assert [row.where for row in rows] == [f"{file}, line {number}" for number in range(1, 6)]


@pytest.mark.parametrize("line", range(5))
def test_one_of_several_readers_finds_a_malformed_line_and_the_others_when_they_use_it(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text("".join("[1]\n" if number == line else '{"text": "fine"}\n' for number in range(5)))
    message = rf"data\.train\.0: .*a\.jsonl, line {line + 1}: a JSON list"
    found = []
    for rank in range(3):
        source = JsonlFile(str(file), "data.train.0", 1000, readers=Readers(rank=rank, world=3))
        try:
            rows = source.read_block(0)
        except DataError as error:
            found.append(str(error))
            continue
        with pytest.raises(BadRowError, match=message):
            dict(rows[line].values)
    assert len(found) == 1
    assert re.search(message, found[0])


def test_malformed_json_is_named_by_key_file_and_line_even_in_a_late_block(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join('{"text": "fine"}\n' for _ in range(40)) + '{"text": oops}\n')
    source = JsonlFile(str(file), "data.train.0", 64)
    with pytest.raises(DataError, match=r"data\.train\.0: .*a\.jsonl, line 41: .*JSON \(.*column 10\)"):
        rows_of(source)


@pytest.mark.parametrize(("line", "what"), [("[1, 2]", "list"), ("3", "int"), ("null", "NoneType")])
def test_a_line_that_is_not_an_object_is_named(tmp_path, line, what):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*JSON {what}\b"):
        values_of(open_source(section(file), "data.train.0"))


def test_bytes_that_are_not_utf_8_are_named_by_their_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: .*JSON.*'utf-8'.*0xff"):
        values_of(open_source(section(file), "data.train.0"))


def test_a_gzip_file_is_one_block_and_a_broken_one_is_named(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode())
    file.write_bytes(whole)
    source = open_source(section(file), "data.train.0")
    assert source.num_blocks == 1
    assert values_of(source) == ROWS
    assert rows_of(source)[3].where == f"{file}, line 4"
    file.write_bytes(whole[:-9])
    with pytest.raises(DataError, match=rf"data\.train\.0: {file}: .*gzip"):
        values_of(source)


def test_parquet_row_groups_are_blocks_and_nested_messages_are_lists_of_dicts(tmp_path):
    rows = [{"messages": [{"role": "user", "content": str(number)}]} for number in range(5)]
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=2)
    source = open_source(section(file), "data.train.0")
    assert source.num_blocks == 3
    assert values_of(source) == rows
    assert source.read_block(1)[1].where == f"{file}, row 4"


def test_parquet_that_is_not_parquet_is_named(tmp_path):
    file = write_jsonl(tmp_path / "a.parquet", ROWS)
    with pytest.raises(DataError, match=r"data\.train\.0: .*a\.parquet: .*Parquet.*data\.train\.0\.format"):
        open_source(section(file), "data.train.0")


def test_parquet_without_rows_is_an_error(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), file)
    with pytest.raises(DataError, match=r"a\.parquet .*no rows"):
        open_source(section(file), "data.train.0")


def test_csv_keeps_quoted_newlines_separators_and_quotes(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('prompt,completion\n"a\nb",c\n"d, ""e""",f\n', encoding="utf-8-sig")
    source = open_source(section(file), "data.train.0")
    assert values_of(source) == [{"prompt": "a\nb", "completion": "c"}, {"prompt": 'd, "e"', "completion": "f"}]
    assert [row.where for row in rows_of(source)] == [f"{file}, line 2", f"{file}, line 4"]


@given(
    fields=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1, max_size=12),
        min_size=1,
        max_size=9,
    ),
    block_bytes=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_any_cut_of_a_csv_gives_every_record_once(tmp_path_factory, fields, block_bytes):
    file = tmp_path_factory.getbasetemp() / "cut.csv"
    with open(file, "w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["prompt", "completion"])
        writer.writerows([[field, "x"] for field in fields])
    source = CsvFile(str(file), "data.train.0", block_bytes)
    assert [row.values["prompt"] for row in rows_of(source)] == fields


def test_a_csv_field_may_be_longer_than_the_csv_modules_own_limit(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("text\n" + "x" * 200_000 + "\n")
    assert len(values_of(open_source(section(file), "data.train.0"))[0]["text"]) == 200_000


def test_a_csv_record_with_too_many_fields_is_named_with_the_header(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("prompt,completion\na,b\nc,d,e\n")
    with pytest.raises(DataError, match=r"a\.csv, line 3: 3 fields.* 2 \(prompt, completion\)"):
        values_of(open_source(section(file), "data.train.0"))


def test_an_unclosed_quote_is_named(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('text\nfine\n"open\n')
    with pytest.raises(DataError, match=r"a\.csv, line 3: .*CSV"):
        values_of(open_source(section(file), "data.train.0"))


@pytest.mark.parametrize(("name", "text"), [("a.csv", "text\n"), ("a.jsonl", "\n \n")])
def test_a_file_with_only_a_header_or_blank_lines_has_no_rows(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=r"data\.train\.0: .*no rows"):
        open_source(section(tmp_path / name), "data.train.0")


def test_tsv_and_gzipped_csv_are_read_too(tmp_path):
    (tmp_path / "a.tsv").write_text("prompt\tcompletion\na\tb\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"prompt,completion\na,b\n"))
    for name in ("a.tsv", "b.csv.gz"):
        source = open_source(section(tmp_path / name), "data.train.0")
        assert values_of(source) == [{"prompt": "a", "completion": "b"}]


def test_a_folder_and_a_glob_take_their_files_in_sorted_order_and_leave_out_the_rest(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ROWS[2:])
    write_jsonl(tmp_path / "a.jsonl", ROWS[:2])
    (tmp_path / "README.md").write_text("about this data")
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / "empty.jsonl").write_text("")
    assert values_of(open_source(section(tmp_path), "data.train.0")) == ROWS
    assert values_of(open_source(section(tmp_path / "*.jsonl"), "data.train.0")) == ROWS


def test_a_remote_file_folder_and_glob_go_through_fsspec():
    memory = fsspec.filesystem("memory")
    memory.pipe("/sources/a.jsonl", b'{"text": "a"}\n')
    memory.pipe("/sources/b.jsonl", b'{"text": "b"}\noops\n')
    try:
        source = open_source(section("memory://sources/a.jsonl"), "data.train.0")
        assert values_of(source) == [{"text": "a"}]
        assert rows_of(source)[0].where == "memory://sources/a.jsonl, line 1"
        for path in ("memory://sources", "memory://sources/*.jsonl"):
            with pytest.raises(DataError, match=r"memory:///?sources/b\.jsonl, line 2"):
                rows_of(open_source(section(path), "data.train.0"))
        with pytest.raises(DataError, match=r"memory://sources/c\.jsonl.*data\.train\.0\.path"):
            open_source(section("memory://sources/c.jsonl"), "data.train.0")
    finally:
        memory.rm("/sources", recursive=True)


def test_a_url_of_an_unknown_kind_is_an_error():
    with pytest.raises(DataError, match=r"nosuch://bucket/a\.jsonl: .*file system"):
        open_source(section("nosuch://bucket/a.jsonl"), "data.train.0")


def test_a_format_that_the_recipe_names_goes_before_the_suffix(tmp_path):
    file = write_jsonl(tmp_path / "rows.txt", ROWS)
    assert values_of(open_source(section(file, format="jsonl"), "data.train.0")) == ROWS
    with pytest.raises(DataError, match=r"data\.train\.0: .*rows\.txt.*\.jsonl.*data\.train\.0\.format"):
        open_source(section(file), "data.train.0")


@pytest.mark.parametrize("name", ["no.jsonl", "no-*.jsonl", "no/such/folder"])
def test_a_missing_file_is_named_with_the_key(tmp_path, name):
    with pytest.raises(DataError, match=rf"data\.train\.1: .*/{re.escape(name)}\b.*data\.train\.1\.path"):
        open_source(section(tmp_path / name), "data.train.1")


def test_an_empty_file_and_an_empty_folder_are_errors(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match=r"a\.jsonl .*\(0 bytes\)"):
        open_source(section(tmp_path / "a.jsonl"), "data.train.0")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"data\.train\.0: .*file in .*/folder\b.*data\.train\.0\.path"):
        open_source(section(tmp_path / "folder"), "data.train.0")


def test_a_file_that_vanishes_after_the_start_is_named(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    source = open_source(section(file), "data.train.0")
    file.unlink()
    with pytest.raises(DataError, match="is gone"):
        source.read_block(0)


def test_the_fingerprint_changes_with_the_data_and_not_with_its_place(tmp_path):
    first = open_source(section(write_jsonl(tmp_path / "a.jsonl", ROWS)), "data.train.0").fingerprint()
    assert open_source(section(write_jsonl(tmp_path / "b.jsonl", ROWS)), "data.train.0").fingerprint() == first
    changed = [*ROWS[:-1], {"text": "row 9"}]
    assert open_source(section(write_jsonl(tmp_path / "a.jsonl", changed)), "data.train.0").fingerprint() != first


def test_a_saved_datasets_folder_is_read_by_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    source = open_source(section(tmp_path / "saved"), "data.train.0")
    assert values_of(source) == ROWS
    assert rows_of(source)[4].where.endswith("saved, row 5")
    assert source.fingerprint() == open_source(section(tmp_path / "saved"), "data.train.0").fingerprint()
    assert len(values_of(open_source(section(tmp_path / "saved", split="test"), "data.heldout.0"))) == 1
    with pytest.raises(DataError, match=r"data\.train\.0\.split: .*'other'.*: train, test"):
        open_source(section(tmp_path / "saved", split="other"), "data.train.0")
    row = first_row(section(tmp_path / "saved"), "data.train.0")
    assert row is not None
    assert row.values == ROWS[0]


def test_a_hub_id_without_the_datasets_package_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else real(name))
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install podium\[datasets\]"):
        open_source(section("some-owner/some-data"), "data.train.0")
