# SPDX-License-Identifier: Apache-2.0
"""Python on the pages runs as it stands: every name in a block is defined or imported there. Where it is not, the page
says before the block which file of the repository has it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.on_policy import rl_recipe
from helpers.pages import DOCS, ROOT
from helpers.workspace import Workspace

_BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"(?:examples|src|tests)/[\w/]+\.py")
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PROGRAMS = DOCS / "custom_programs.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonBlock:
    """A block of Python, and the files of the repository that its page has named before it."""

    text: str
    named_files: tuple[str, ...]


def python_blocks(page: Path) -> list[PythonBlock]:
    """In the order of the page."""
    text = page.read_text(encoding="utf-8")
    return [
        PythonBlock(text=textwrap.dedent(match[2]), named_files=tuple(_FILE.findall(text[: match.start()])))
        for match in _BLOCK.finditer(text)
    ]


def undefined_names(text: str) -> list[str]:
    """By ruff. A block that is a part of a function is put into one."""
    body = text
    try:
        ast.parse(text)
    except SyntaxError:
        body = "async def block():\n" + textwrap.indent(text, "    ")
        ast.parse(body)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=json", "-"]
    done = subprocess.run(command, input=body, capture_output=True, text=True, timeout=60)
    return [re.findall(r"`(\w+)`", problem["message"])[0] for problem in json.loads(done.stdout)]


def names_in(file: Path) -> set[str]:
    """Names that a file defines, imports or assigns anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.alias():
                names.add(node.asname or node.name)
            case ast.Name(ctx=ast.Store()) | ast.arg():
                names.add(node.id if isinstance(node, ast.Name) else node.arg)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_is_in_the_block_or_in_a_file_that_the_page_names(page: Path) -> None:
    for block in python_blocks(page):
        missing = set(undefined_names(block.text))
        for file in block.named_files if missing else ():
            missing -= names_in(ROOT / file)
        assert not missing, block.text


def test_blocks_are_found() -> None:
    blocks = [block for page in PAGES for block in python_blocks(page)]
    assert len(blocks) > 40
    assert undefined_names("x = y\n") == ["y"]


def test_programs_are_whole_and_as_in_the_examples() -> None:
    on_policy, fixed, estimator = python_blocks(PROGRAMS)
    assert not any(undefined_names(block.text) for block in (on_policy, fixed, estimator))
    for block, file in ((on_policy, "best_half.py"), (fixed, "focal.py")):
        assert (ROOT / "examples/methods" / file).read_text(encoding="utf-8").endswith("\n\n" + block.text)


def test_the_program_with_the_recipes_estimator_trains(workspace: Workspace) -> None:
    (workspace.path / "mine.py").write_text(python_blocks(PROGRAMS)[2].text)
    (workspace.path / "rewards.py").write_text("def digits(answer): return sum(map(ord, answer)) % 3\n")
    changes = {"program": "mine.py:train", "signal": "on_policy", "reward": [{"function": "rewards.py:digits"}]}

    outcome = workspace.podium("train", rl_recipe(workspace, steps=2, **changes))

    assert outcome.code == 0, outcome.err
    assert workspace.metric("sums", "loss").keys() == {1, 2}
