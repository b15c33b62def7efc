# SPDX-License-Identifier: Apache-2.0
"""The tutorial works as written: its files are written and its commands are run, page after page, in one folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.pages import DOCS, ROOT, blocks_of, follow

TUTORIAL = DOCS / "tutorial"
PAGES = sorted(TUTORIAL.glob("[0-9]*.md"))
EXECUTED = {"bash"}
SHOWN = {"json", "text", "console"}  # output, and what a reader does once; everything else is a file


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_shows_no_code_that_nothing_runs(page: Path) -> None:
    for block in blocks_of(page):
        assert block.title or block.language in EXECUTED | SHOWN, block


def test_pages_are_in_the_index_and_lead_to_the_next() -> None:
    index = (TUTORIAL / "index.md").read_text(encoding="utf-8")
    for page, following in zip(PAGES, [*PAGES[1:], None], strict=True):
        assert f"]({page.name})" in index
        assert following is None or f"]({following.name})" in page.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(1200)
def test_the_tutorial_works_from_the_first_page_to_the_last(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    for page in PAGES:
        for done in follow(page, tmp_path, timeout_s=300):
            assert done.returncode == 0, f"{page.name}: {done.args[-1]}\n{done.stdout}\n{done.stderr}"

    runs = {each.name for each in (tmp_path / "tutorial" / "runs").iterdir() if each.name != ".cache"}
    assert runs == {"sft", "grpo", "agent-sft", "agent", "two-ranks", "on-ray", "better_half"}
