# SPDX-License-Identifier: Apache-2.0
"""Marks on the timeline: publishes, lent devices, deaths and recoveries, by pointer and by keyboard, and live."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from demo_runs import BEGIN_S, HOSTILE, STEP_S

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: run `make test-browser`")
expect = sync_api.expect

if TYPE_CHECKING:
    from conftest import OpenPage, Serve


def test_marks_are_reached_by_pointer_and_keys(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#/run/agent/timeline?from=136&to=144")
    tooltip = page.locator("#tooltip")
    for kind in ("publish", "death", "recovery"):
        expect(page.locator(".legend-box .keys-line", has_text="marks")).to_contain_text(kind)
    death = page.locator(".marks .death")
    expect(death).to_have_count(1)
    death.hover()
    expect(tooltip).to_contain_text("rollout[1] was killed")
    expect(tooltip).to_contain_text("at 2m 16s")
    page.mouse.move(5, 5)
    expect(tooltip).to_be_hidden()
    page.keyboard.press("m")
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    expect(page.locator(".marks .mark").first).to_be_focused()
    texts = [tooltip.inner_text()]
    for _ in range(page.locator(".marks .mark").count() - 1):
        page.keyboard.press("ArrowRight")
        texts.append(tooltip.inner_text())
    shown = "\n".join(texts)
    assert "weights of version 29" in shown
    assert "rollout[1] was killed" in shown
    assert page.locator(".marks [tabindex='0']").count() == 1
    page.keyboard.press("Home")
    before = page.locator("canvas.timeline").get_attribute("data-to")
    page.keyboard.press("Enter")
    expect(page.locator("canvas.timeline")).not_to_have_attribute("data-to", before or "")


def test_marks_that_are_near_are_one_and_say_how_many(open_page: OpenPage, address: str) -> None:
    page = open_page(f"{address}#/run/agent/timeline", is_phone=True)
    marks = page.locator(".marks .publish")
    expect(marks.first).to_be_visible()
    assert marks.count() < 60
    expect(page.locator(".marks .lent")).to_have_count(6)
    expect(page.locator(".marks .recalled").first).to_have_attribute("aria-label", re.compile("has its devices back"))
    label = marks.nth(3).get_attribute("aria-label") or ""
    assert re.search(r"versions \d+ to \d+: \d times", label), label
    marks.nth(3).tap()
    expect(page.locator("#timeline-range")).not_to_contain_text("0 s to 4m 20s")


def test_new_spans_and_marks_arrive_and_texts_stay_texts(
    open_page: OpenPage, serve: Serve, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "agent", tmp_path / "agent", ignore=shutil.ignore_patterns("rollouts"))
    run = tmp_path / "agent"
    end = 20 + 60 * STEP_S
    with serve(tmp_path) as url:
        page = open_page(f"{url}#/run/agent/timeline")
        canvas = page.locator("canvas.timeline")
        expect(canvas).to_have_attribute("data-to", re.compile(rf"{end:.0f}"))
        expect(page.locator("#connection")).to_have_text("connected")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        at = BEGIN_S + end
        spans = [["rollout", at, 3.0], ["update", at + 3.0, 7.0], ["published version 61", at + 10.0, 0.0]]
        with (run / "timeline.jsonl").open("a") as file:
            file.write(json.dumps({"worker": "controller", "spans": spans}) + "\n")
        event = {
            "event": "recovery", "part": "learner", "cause": HOSTILE[0], "remedy": "rewind", "step": 60, "seconds": 2.0,
            "time_s": at + 5.0,
        }  # fmt: skip
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 61, "time_s": at + 10.0, "step_s": 10.0}) + "\n")
        expect(canvas).to_have_attribute("data-to", re.compile(rf"{end + 10:.0f}"))
        page.locator(".marks .recovery").last.hover()
        expect(page.locator("#tooltip")).to_contain_text(HOSTILE[0])
        label = page.locator(".marks .publish").last.get_attribute("aria-label") or ""
        assert "61" in label
        (request,) = [url for url in asked if "/timeline?" in url]
        assert "after=" in request, "all was loaded again"


def test_a_hidden_page_asks_for_nothing_until_it_is_seen(
    open_page: OpenPage, serve: Serve, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "agent", tmp_path / "agent", ignore=shutil.ignore_patterns("rollouts"))
    end = 20 + 60 * STEP_S
    hide = "value => { Object.defineProperty(document, 'hidden', { value, configurable: true });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    with serve(tmp_path) as url:
        page = open_page(f"{url}#/run/agent/timeline")
        canvas = page.locator("canvas.timeline")
        expect(canvas).to_have_attribute("data-to", re.compile(rf"{end:.0f}"))
        page.evaluate(hide, True)
        span = {"worker": "controller", "spans": [["update", BEGIN_S + end, 10.0]]}
        with (tmp_path / "agent" / "timeline.jsonl").open("a") as file:
            file.write(json.dumps(span) + "\n")
        with (tmp_path / "agent" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 61, "time_s": BEGIN_S + end + 10, "step_s": 10.0}) + "\n")
        expect(page.locator(".run-head")).to_contain_text("step 61")  # the stream is still there
        page.wait_for_timeout(300)
        expect(canvas).to_have_attribute("data-to", re.compile(rf"{end:.0f}"))
        page.evaluate(hide, False)
        expect(canvas).to_have_attribute("data-to", re.compile(rf"{end + 10:.0f}"))
