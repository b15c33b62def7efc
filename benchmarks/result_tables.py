# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/benchmarks.md from the JSON files in benchmarks/results/.

    python benchmarks/result_tables.py            writes the page
    python benchmarks/result_tables.py --check    ends with code 1 if the page is not what the files say

A table stands on the page between `<!-- results: NAME -->` and `<!-- end of results -->`, and comes from
`results/NAME.json`: columns with their formats, rows with numbers, and where they were measured, with which versions,
commit and command. `save` writes such a file from within a benchmark."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results: {name} -->", "<!-- end of results -->"
BLOCK = re.compile(
    r"^<!-- results: (?P<name>\S+) -->\n(?P<text>.*?)^<!-- end of results -->$", re.DOTALL | re.MULTILINE
)
PACKAGES = ("torch", "transformers", "numpy")  # whose versions decide about speed

Cell = int | float | str | None | tuple[int | float, ...]


class Column(BaseModel):
    """A column, and how its numbers are written: several numbers of a cell fill several places of the format."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    format: str = "{}"

    def text(self, cell: Cell) -> str:
        """A cell as it stands on the page. Text stands as it is."""
        match cell:
            case None:
                return ""
            case str():
                return cell
            case tuple():
                return self.format.format(*cell)
            case _:
                return self.format.format(cell)


class Results(BaseModel):
    """One table: what was measured, where, with what."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    machine: str
    versions: dict[str, str]
    command: tuple[str, ...]
    commit: str | None  # that ran; None: not recorded
    first_written: str | None = None  # where `commit` is not recorded: the commit of the page with these figures
    raw: str | None  # the file with every turn's figures, beside this one; None: not kept
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def table(self) -> str:
        """The Markdown of rows and columns."""
        heads = [each.name for each in self.columns]
        lines = [f"| {' | '.join(heads)} |".replace("|  |", "| |"), "|" + "---|" * len(heads)]
        for row in self.rows:
            cells = [column.text(cell) for column, cell in zip(self.columns, row, strict=True)]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def origin(self, name: str) -> str:
        """The line below the table."""
        versions = [f"{package} {version}" for package, version in self.versions.items()]
        if self.commit is not None:
            commit = f"commit {self.commit[:10]}"
        elif self.first_written is not None:
            commit = f"commit not recorded, on this page since {self.first_written[:10]}"
        else:
            commit = "commit not recorded"
        raw = "single runs not kept" if self.raw is None else f"single runs in `{self.raw}`"
        return f"*`{name}.json`: {'; '.join([self.machine, *versions, commit, raw])}.*"


def load(name: str, folder: Path = RESULTS) -> Results:
    """Reads and checks one file."""
    file = folder / f"{name}.json"
    try:
        found = Results.model_validate_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SystemExit(f"the page names the results {name}, and {file} does not exist") from error
    except ValidationError as error:
        raise SystemExit(f"{file} is not a file of results: {error}") from error
    for number, row in enumerate(found.rows):
        if len(row) != len(found.columns):
            raise SystemExit(f"{file}: row {number} has {len(row)} cells for {len(found.columns)} columns")
    return found


def save(
    name: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    command: Sequence[str],
    raw: str | None = None,
    folder: Path = RESULTS,
    machine: str | None = None,
) -> Path:
    """Writes what this process has measured, with its machine, versions and commit."""
    results = Results(
        machine=machine or this_machine(), versions=installed_versions(), commit=this_commit(), raw=raw,
        command=tuple(command), columns=tuple(columns), rows=tuple(tuple(row) for row in rows),
    )  # fmt: skip
    return write(name, results, folder)


def write(name: str, results: Results, folder: Path = RESULTS) -> Path:
    """Writes a file of results: a row on a line, so that changes can be read."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    head = results.model_dump_json(exclude={"columns", "rows"}, indent=1).rstrip("}\n")
    columns = ",\n  ".join(each.model_dump_json() for each in results.columns)
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in results.rows)
    text = f'{head},\n "columns": [\n  {columns}\n ],\n "rows": [\n  {rows}\n ]\n}}\n'
    assert Results.model_validate_json(text) == results
    file.write_text(text, encoding="utf-8")
    return file


def this_machine() -> str:
    """Processor, cores, and the GPU where torch sees one."""
    import torch

    cores = f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{torch.cuda.get_device_name()}, {cores}" if torch.cuda.is_available() else cores


def installed_versions() -> dict[str, str]:
    """Python and the packages that decide about speed."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        found[package] = importlib.metadata.version(package)
    return found


def this_commit() -> str | None:
    """The commit of this checkout, with `+` where files differ from it; None without git."""
    try:
        commit = _git("rev-parse", "HEAD").strip()
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py").strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(HERE.parent), *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout


def with_tables(page: str, tables: Mapping[str, Results] | None = None) -> str:
    """The page with every marked table written from its file."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        results = load(name) if tables is None else tables[name]
        return f"{BEGIN.format(name=name)}\n\n{results.table()}\n\n{results.origin(name)}\n\n{END}"

    return BLOCK.sub(block, page)


def names_on(page: str) -> list[str]:
    """The files that the page is written from, in its order."""
    return [match["name"] for match in BLOCK.finditer(page)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; code 1 if the page differs")
    asked = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    written = with_tables(page)
    if asked.check and written != page:
        raise SystemExit(f"{PAGE} is not what the files in {RESULTS} say: run python benchmarks/result_tables.py")
    if not asked.check:
        PAGE.write_text(written, encoding="utf-8")
    print(f"{len(names_on(page))} tables")


if __name__ == "__main__":
    main()
