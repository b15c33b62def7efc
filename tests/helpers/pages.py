# SPDX-License-Identifier: Apache-2.0
"""Blocks of code on pages of the documentation: files to write, commands to run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. One with a title is a file of that name."""

    language: str
    title: str | None
    text: str


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page that name a language, in order."""
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(language=each[1], title=each[2], text=each[3]) for each in found]


def files_of(page: Path) -> dict[str, str]:
    """Title -> text of the blocks that are files."""
    return {block.title: block.text for block in blocks_of(page) if block.title}


def write_files(page: Path, folder: Path) -> list[Path]:
    """Writes the files of a page below a folder."""
    return [_write(folder / title, text) for title, text in files_of(page).items()]


def follow(page: Path, folder: Path, *, timeout_s: float) -> Iterator[subprocess.CompletedProcess[str]]:
    """Does what a page says, in its order: writes its files below a folder and runs its commands there. Yields what
    each block of commands gave."""
    for block in blocks_of(page):
        if block.title:
            _write(folder / block.title, block.text)
        elif block.language == "bash":
            yield _run(block.text, folder, timeout_s)


def _write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def _run(commands: str, folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a block in bash as a reader would, with this environment's podium and python on the path."""
    bash = shutil.which("bash")
    assert bash is not None
    binaries = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": binaries + os.pathsep + os.environ["PATH"]}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [bash, "-e", "-c", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
