# SPDX-License-Identifier: Apache-2.0
"""The site of the documentation builds without a warning, loads nothing from the network, and its hooks do what they
say."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from helpers.pages import DOCS, ROOT

# `--quiet` hides warnings from mkdocs itself, which then does not count them: no test may use it.
# A page may link to other sites, but must not load anything from them.
LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]+src=\"?(https?:)?//|<link[^>]+rel=\"?stylesheet\"?[^>]+href=\"?https?://"
)


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lists_and_tables_get_the_blank_lines_that_python_markdown_wants(hooks: ModuleType) -> None:
    page = "Text:\n- one\n  more\n- two\n\nText\n| a |\n|---|\n| 1 |\n"
    wanted = "Text:\n\n- one\n  more\n- two\n\nText\n\n| a |\n|---|\n| 1 |\n"
    assert hooks.for_python_markdown(page) == wanted
    assert hooks.for_python_markdown(wanted) == wanted


def test_code_of_a_list_item_is_indented_by_four(hooks: ModuleType) -> None:
    page = "- one:\n  ```python\n  a = 1\n  ```\n- two\n"
    assert hooks.for_python_markdown(page) == "- one:\n\n    ```python\n    a = 1\n    ```\n\n- two\n"


def test_pipes_in_the_code_of_a_table_are_not_escaped(hooks: ModuleType) -> None:
    assert hooks.for_python_markdown("| `a\\|b` | c\\|d |") == "| `a|b` | c\\|d |"


def test_code_is_left_as_it_is(hooks: ModuleType) -> None:
    page = "Text\n```yaml\nreward:\n- a\n```\n"
    assert hooks.for_python_markdown(page, str.upper) == "TEXT\n```yaml\nreward:\n- a\n```\n"


def test_links_out_of_the_docs_lead_to_pages_of_the_repository(hooks: ModuleType) -> None:
    assert hooks.repository_path("../examples/calculator", "environments.md", DOCS) == "examples/calculator"
    assert hooks.repository_path("../../README.md#a", "tutorial/index.md", DOCS) == "README.md"
    assert hooks.repository_path("../examples/missing.yaml", "data.md", DOCS) is None
    assert hooks.repository_path("../data.md", "tutorial/index.md", DOCS) is None
    assert "def calculate" in hooks.shown(ROOT / "examples" / "calculator", "examples/calculator")


def test_every_page_and_decision_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load("nav:" + text.partition("\nnav:")[2])
    named = set(re.findall(r"[\w/-]+\.md", json.dumps(nav)))
    assert named == {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")}


def test_the_start_page_links_to_every_page_but_decisions() -> None:
    linked = set(re.findall(r"\]\(([\w/]+\.md)", (DOCS / "index.md").read_text(encoding="utf-8")))
    pages = {file.name for file in DOCS.glob("*.md")} - {"index.md", "recipe.md"}
    assert pages | {"tutorial/index.md"} == linked - {"recipe.md"}


@pytest.mark.slow
def test_the_site_builds_and_can_be_searched_without_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any("podium.train" in entry["text"] or "train" in entry["title"] for entry in found["docs"])
    for page in tmp_path.rglob("*.html"):
        assert not LOADED.search(page.read_text(encoding="utf-8")), page
    api = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("podium.train", "podium.controller.run.OnPolicyRun", "podium.spmd.run.SpmdRun"):
        assert f'id="{name}"' in api


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "is_fine"),
    [
        ("[here](#a-heading)\n\n## A heading", True),
        ("[nowhere](missing.md)", False),
        ("[nowhere](#missing)", False),
        ("[outside](../missing/file.py)", False),
        ("::: podium.errors.MissingError", False),
        ("[unknown][podium.missing]", False),
    ],
)
def test_a_broken_link_or_an_unknown_reference_fails_the_build(tmp_path: Path, text: str, is_fine: bool) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n{text}\n", encoding="utf-8")
    settings = {"INHERIT": str(ROOT / "mkdocs.yml"), "nav": ["index.md"], "hooks": [str(DOCS / "site_hooks.py")]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")

    command = [sys.executable, "-m", "mkdocs", "build"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert (done.returncode == 0) == is_fine, done.stdout + done.stderr
