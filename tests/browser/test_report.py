# SPDX-License-Identifier: Apache-2.0
"""A report opens from a file: the same page with its data inside, and no request leaves it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from demo_runs import HOSTILE

from podium.ui.report import write_report

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: run `make test-browser`")
expect = sync_api.expect
expect.set_options(timeout=15_000)
if TYPE_CHECKING:
    from conftest import OpenPage


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("report") / "agent.html"
    write_report(runs / "agent", file)
    return file.as_uri()


def test_a_report_shows_curves_and_timeline_from_a_file(open_page: OpenPage, report: str) -> None:
    page = open_page(report)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.get_by_role("link", name="agent", exact=True).click()
    expect(page.get_by_role("heading", name="agent")).to_be_visible()
    page.get_by_role("link", name="Curves").click()
    expect(page.locator('[data-chart="reward/mean"] .legend')).to_contain_text("reward/mean 0.")
    expect(page.locator('[data-chart="reward/mean"] canvas')).to_be_visible()
    page.get_by_role("link", name="Timeline").click()
    expect(page.locator(".account", has_text="train")).to_contain_text("idle")
    page.keyboard.press("+")
    expect(page.locator("canvas.timeline")).not_to_have_attribute("data-from", "0")
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_html_in_an_answer_stays_text_in_a_report(open_page: OpenPage, report: str) -> None:
    page = open_page(report)
    page.get_by_role("link", name="agent", exact=True).click()
    page.get_by_role("link", name="Rollouts").click()
    page.get_by_role("searchbox").fill(HOSTILE[1])
    expect(page.locator("tbody tr").first).to_contain_text(HOSTILE[1])
    page.locator("tbody tr").first.click()
    for text in HOSTILE:
        expect(page.locator("main")).to_contain_text(text)
    page.locator(".token").last.hover()
    expect(page.locator("#tooltip")).to_contain_text("version ")


def test_what_a_report_does_not_have_is_said(open_page: OpenPage, report: str) -> None:
    page = open_page(f"{report}#/run/another")
    expect(page.locator("main")).to_contain_text("not part of the report")
