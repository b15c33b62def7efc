# SPDX-License-Identifier: Apache-2.0
"""Run folders that are damaged, foreign or changing: one of them never takes the page from the others."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.run_folders import append_steps
from podium.runs.folder import RunFolder, is_held
from podium.ui import site as site_module
from podium.ui import timelines
from podium.ui.apart import Apart
from podium.ui.metric_columns import MetricColumns
from podium.ui.report import write_report
from podium.ui.site import Site
from podium.ui.streams import run_events

Serve = Callable[..., Any]


def test_a_name_that_is_no_utf8_is_an_id_that_can_be_asked_for(browser: Any, runs: Path) -> None:
    os.rename(os.fsencode(runs / "two"), os.fsencode(runs) + b"/caf\xe9")

    assert {row["id"] for row in browser.get("/api/runs")["runs"]} == {"one", "caf\\xe9"}
    assert browser.get(f"/api/runs/{quote('caf' + chr(92) + 'xe9')}")["step"] == 6


def test_half_an_emoji_is_a_question_mark(browser: Any, runs: Path) -> None:
    with (runs / "one" / "samples.jsonl").open("a") as file:
        file.write('{"step": 1, "prompt": "half", "answer": "\\ud83d!"}\n')

    prompts = {each["prompt"]: each["answers"] for each in browser.get("/api/runs/one/heldout")["prompts"]}
    assert prompts["half"][0]["answer"] == "?!"


_DEEP = "[" * 100_000
_LONG = '{"step": 1, "time_s": 1, "loss": 1' + 400 * "0" + "}"


@pytest.mark.parametrize(
    "line",
    [
        '{"step": Infinity, "time_s": 1}', '{"step": 1e30, "time_s": 1}', _LONG,
        '{"step": 11, "time_s": 1, "a": [1, 2], "b": [3, 4]}', _DEEP, '{"step": 11, "time_s": NaN, "loss": NaN}',
    ],
    ids=["infinite", "large", "long", "lists", "deep", "nan"],
)  # fmt: skip
def test_lines_of_metrics_that_no_run_wrote(browser: Any, runs: Path, line: str) -> None:
    with (runs / "one" / "metrics.jsonl").open("a") as file:
        file.write(line + "\n" + '{"step": 12, "time_s": 5.0, "loss": 0.5}\n')

    assert {row["id"] for row in browser.get("/api/runs")["runs"]} == {"one", "two"}
    assert browser.get("/api/runs/one")["step"] == 10
    series = browser.get("/api/runs/one/metrics")["series"]
    assert series["loss"]["step"][-1] == 12
    assert series["loss"]["value"][-1] == 0.5
    assert all(len(each["step"]) == len(each["value"]) for each in series.values())


def test_a_line_without_end_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with file.open("wb") as zeros:
        zeros.truncate(64 << 20)
        zeros.seek(0, os.SEEK_END)
        zeros.write(b'\n{"step": 1, "time_s": 0, "loss": 2.0}\n')
    columns = MetricColumns(file)

    tracemalloc.start()
    assert columns.refresh() == 1
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 96 << 20
    assert columns.names == ["loss"]


@pytest.mark.parametrize(
    "line",
    [
        '["compute", NaN, 1]', '["compute", 1.75e9, -50]',
        '["compute", 1.75e9, Infinity]', '["compute", 1e308, 1e308]', '["compute", 1, 1, 5]',
        '["steps", 1.75e9, 1.0, {"steps": Infinity}]', _DEEP,
    ],
    ids=["nan", "backward", "infinite", "large", "values", "value", "deep"],
)  # fmt: skip
def test_lines_of_timelines_that_no_run_wrote(browser: Any, runs: Path, line: str) -> None:
    known = browser.get("/api/runs/two/accounting")["workers"]
    with (runs / "two" / "timeline.jsonl").open("a") as file:
        file.write('{"worker": "controller", "spans": [' + line + "]}\n")
    with (runs / "two" / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "membership", "change": "\xff", "time_s": "now"}\n')

    assert browser.get("/api/runs/two/timeline")["workers"]
    found = browser.get("/api/runs/two/accounting")["workers"]
    assert [each["total_s"] for each in found] == [each["total_s"] for each in known]
    assert not any("cannot read" in text for text in browser.get("/api/runs/two")["texts"])


def test_a_state_that_nests_too_deeply_is_damage(browser: Any, runs: Path) -> None:
    (runs / "two" / "run.json").write_text(_DEEP)
    (runs / "three").mkdir()
    (runs / "three" / "pipeline.json").write_text(_DEEP)

    rows = {row["id"]: row["status"] for row in browser.get("/api/runs")["runs"]}
    assert rows == {"one": "finished", "two": "damaged", "three": "damaged"}
    assert "cannot be read" in browser.error("/api/runs/two", 422)


def test_a_folder_of_another_user_is_left_out(browser: Any, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs / "lost+found").mkdir()
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert {row["id"] for row in browser.get("/api/runs")["runs"]} == {"one", "two"}


def test_lines_of_show_that_another_request_has_given_up(runs: Path) -> None:
    site = Site(runs)
    try:
        entry = site.catalogue.find("one")
        site._waiting[entry.path, 1.0] = waiting = Future()
        waiting.cancel()
        assert site._show_lines(entry, 1.0, 5.0) is None
    finally:
        site.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"group": [0], "rewards": [5], "prompt_tokens": ["x"], "tokens": [[1]], "trained": ["maybe"]},
        {"group": [2**63], "messages": ["[]"]},
        {"group": [0], "messages": [_DEEP]},
        {"group": [0], "reward": [datetime(2030, 1, 1)]},
        {"something": ["else"]},
    ],
    ids=["types", "unsigned", "deep", "dates", "columns"],
)
def test_a_foreign_file_of_rollouts_costs_only_itself(
    browser: Any, runs: Path, tmp_path: Path, values: dict[str, list[Any]]
) -> None:
    types = {name: pa.uint64() if 2**63 in column else None for name, column in values.items()}
    table = pa.table({name: pa.array(column, types[name]) for name, column in values.items()})
    pq.write_table(table, runs / "one" / "rollouts" / "step-00000009.parquet")

    found = browser.get("/api/runs/one/rollouts")
    assert found["total"] >= 9
    assert {row["step"] for row in found["rows"]} >= {1, 2, 3}
    for path in ("rollouts?step=9", "rollouts/9/0"):
        assert browser.ask(f"/api/runs/one/{path}").status in (200, 404, 422)
    summary = write_report(runs / "one", tmp_path / "report.html")
    assert "Left out" in summary.file.read_text(encoding="utf-8")


def test_an_index_that_is_removed_or_damaged_is_made_again(runs: Path, serve: Serve, tmp_path: Path) -> None:
    cache = tmp_path / "index"
    browser = serve(runs, cache=cache)
    total = browser.get("/api/runs/one/rollouts")["total"]
    shutil.rmtree(cache)
    assert _settled(browser) == total

    browser.server.site.close()
    (file,) = cache.glob("*.sqlite")
    content = bytearray(file.read_bytes())
    content[4096:] = b"x" * (len(content) - 4096)
    browser = serve(runs, cache=cache)
    file.write_bytes(content)
    assert _settled(browser) == total


def _settled(browser: Any) -> int:
    """The number of rollouts, when the index has all of them."""
    for _ in range(10):
        found = browser.get("/api/runs/one/rollouts")
        if found["index"]["done"] == found["index"]["of"] > 0:
            break
    return int(found["total"])


def test_two_who_ask_do_not_take_each_other_for_the_run(runs: Path) -> None:
    with RunFolder.open(runs / "two").held():
        assert is_held(runs / "two")
    with (runs / "two" / "run.lock").open("r") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)  # as another page does at this moment
        assert not is_held(runs / "two")


def test_one_request_has_a_bounded_answer(browser: Any, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "_MOST_VALUES", 12)
    monkeypatch.setattr(timelines, "_MOST_SPANS", 30)

    series = browser.get("/api/runs/one/metrics?points=1000000000")["series"]
    assert {name: len(each["step"]) for name, each in series.items()} == {"loss": 4, "reward/mean": 4, "step_s": 4}
    assert len(browser.get("/api/runs/one/metrics?names=loss,loss,loss")["series"]["loss"]["step"]) == 10
    fine = browser.get("/api/runs/one/timeline?points=1000000000")["workers"]
    assert len(fine) == 3
    assert all(any("merged" in span for span in worker["spans"]) for worker in fine[:1])


def test_lines_that_another_request_read_first_arrive_once(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(runs)
    stop = threading.Event()
    events = run_events(site, "two", stop, look_s=0.001)
    since = MetricColumns.since

    def busy(columns: MetricColumns, line: int) -> Any:
        if columns.refresh() == 7:
            append_steps(RunFolder.open(runs / "two"), [8])
            columns.refresh()
        return since(columns, line)

    try:
        while "status" not in next(events):
            pass
        monkeypatch.setattr(MetricColumns, "since", busy)
        append_steps(RunFolder.open(runs / "two"), [7])
        steps = [next(events) for _ in range(2)]
        append_steps(RunFolder.open(runs / "two"), [9])
        steps.append(next(events))
        assert [json.loads(each.partition("data: ")[2])["step"] for each in steps] == [7, 8, 9]
    finally:
        stop.set()
        site.close()


def test_a_report_has_all_of_a_large_timeline(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "_NEWEST_BYTES", 1500)
    monkeypatch.setattr(Apart, "call", lambda self, function, *args, most_s: function(*args))
    monkeypatch.setattr(Apart, "each", lambda self, function, *args, most_s: function(*args))
    summary = write_report(runs / "one", tmp_path / "report.html")
    accounting = _embedded(summary.file)["/api/runs/one/accounting"]
    assert (accounting["is_whole"], accounting["workers"][0]["total_s"]) == (True, pytest.approx(22.0))

    monkeypatch.setattr(Apart, "call", lambda self, function, *args, most_s: None)  # it took too long
    summary = write_report(runs / "one", tmp_path / "report.html")
    assert any("of the newest part" in line for line in summary.left_out)
    assert _embedded(summary.file)["/api/runs/one/timeline"]["is_whole"]  # nobody reads the rest meanwhile


def _embedded(report: Path) -> dict[str, Any]:
    text = report.read_text(encoding="utf-8").partition('id="podium-data">')[2].partition("</script>")[0]
    found: dict[str, Any] = json.loads(text)
    return found
