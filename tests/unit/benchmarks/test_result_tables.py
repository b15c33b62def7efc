# SPDX-License-Identifier: Apache-2.0
"""docs/benchmarks.md and the files of results beside the benchmarks say the same."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import result_tables
from result_tables import Column, Results

# What is no measurement: parameters and options.
BY_HAND = {"| what | parameters |", "| old tokens | recipe |", "| option | default | meaning |"}


@pytest.fixture(scope="module")
def page() -> str:
    return result_tables.PAGE.read_text(encoding="utf-8")


def results(**changed: object) -> Results:
    values = {
        "machine": "x86_64, 2 cores",
        "versions": {"torch": "2.13.0"},
        "command": ("python benchmarks/example.py",),
        "commit": "0123456789abcdef",
        "raw": None,
        "columns": (
            Column(name=""),
            Column(name="tokens/s (range)", format="{:,.0f} ({:,.0f}-{:,.0f})"),
            Column(name="ratio", format="{:.2f}×"),
        ),
        "rows": (("TRL", (1497.4, 1476, 1521), None), ("Podium", (3153, 3129, 3156), 2.105), ("none", "off", 2)),
    }
    return Results.model_validate(values | changed)


def test_numbers_are_written_by_the_format_of_their_column_and_text_as_it_is() -> None:
    assert results().table().split("\n") == [
        "| | tokens/s (range) | ratio |",
        "|---|---|---|",
        "| TRL | 1,497 (1,476-1,521) |  |",
        "| Podium | 3,153 (3,129-3,156) | 2.10× |",
        "| none | off | 2.00× |",
    ]


@pytest.mark.parametrize(
    ("changed", "end"),
    [
        ({}, "commit 0123456789; single runs not kept.*"),
        ({"commit": None, "first_written": "f" * 40}, f"commit not recorded, on this page since {'f' * 10}; single"),
        ({"raw": "example.turns.json"}, "commit 0123456789; single runs in `example.turns.json`.*"),
    ],
)
def test_the_line_below_says_where_it_was_measured(changed: dict[str, object], end: str) -> None:
    line = results(**changed).origin("example")
    assert line.startswith("*`example.json`: x86_64, 2 cores; torch 2.13.0; ")
    assert end in line


def test_only_what_is_between_the_marks_is_written_anew() -> None:
    end = "<!-- end of results -->\n"
    page = f"Before.\n<!-- results: a -->\nold\n{end}Between 12.\n\n<!-- results: b -->\n{end}"
    written = result_tables.with_tables(page, {"a": results(), "b": results(rows=())})
    before, a, b = re.split(r"<!-- results: .* -->\n\n", written)
    assert before == "Before.\n"
    assert a.startswith("| | tokens/s (range) |")
    assert a.endswith("<!-- end of results -->\nBetween 12.\n\n")
    assert "old" not in written
    assert b.startswith("| | tokens/s (range) | ratio |\n|---|---|---|\n\n*`b.json`")
    assert result_tables.with_tables(written, {"a": results(), "b": results(rows=())}) == written


def test_a_file_that_is_written_reads_as_the_same_results_with_a_row_on_a_line(tmp_path: Path) -> None:
    file = result_tables.write("example", results(), tmp_path)
    assert result_tables.load("example", tmp_path) == results()
    assert '  ["Podium", [3153, 3129, 3156], 2.105],\n' in file.read_text(encoding="utf-8")


def test_a_benchmark_saves_machine_versions_and_commit_itself(tmp_path: Path) -> None:
    result_tables.save("mine", [Column(name="s")], [[1.5]], command=["python", "benchmarks/mine.py"], folder=tmp_path)
    saved = result_tables.load("mine", tmp_path)
    head = subprocess.run(["git", "-C", str(result_tables.HERE), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert saved.commit is not None
    assert saved.commit.rstrip("+") == head.stdout.strip()
    assert set(saved.versions) == {"Python", "torch", "transformers", "numpy"}
    assert saved.rows == ((1.5,),)


def test_a_row_with_too_few_cells_and_an_unknown_key_are_errors(tmp_path: Path) -> None:
    result_tables.write("short", results(rows=(("TRL", 3),)), tmp_path)
    with pytest.raises(SystemExit, match="row 0 has 2 cells for 3 columns"):
        result_tables.load("short", tmp_path)
    values = json.loads(results().model_dump_json()) | {"comit": "a"}
    (tmp_path / "typo.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(SystemExit, match="comit"):
        result_tables.load("typo", tmp_path)


def test_the_page_is_what_the_files_say(page: str) -> None:
    assert result_tables.with_tables(page) == page, "run `make docs-benchmarks`"


def test_every_file_is_on_the_page_once(page: str) -> None:
    files = {file.stem for file in result_tables.RESULTS.glob("*.json")}
    names = result_tables.names_on(page)
    raw = {each.removesuffix(".json") for name in names if (each := result_tables.load(name).raw) is not None}
    assert len(names) == len(set(names))
    assert set(names) == files - raw
    assert raw <= files


def test_no_measured_table_is_written_by_hand(page: str) -> None:
    rest = result_tables.BLOCK.sub("", page)
    heads = set(re.findall(r"(?m)^(\|.*\|)\n\|-", rest))
    assert heads == BY_HAND


def test_every_command_names_a_script_that_exists(page: str) -> None:
    for name in result_tables.names_on(page):
        commands = result_tables.load(name).command
        assert commands, name
        for command in commands:
            scripts = re.findall(r"\b(?:benchmarks|tests|examples)/\S+\.(?:py|yaml)", command)
            assert scripts, f"{name}: {command}"
            assert all((result_tables.HERE.parent / each).is_file() for each in scripts), command
