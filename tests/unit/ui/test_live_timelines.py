# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run that goes on: pages get what is new, and together with what they have it is the whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podium.observe.timeline import timeline_file
from podium.runs.events import append_recovery
from podium.ui import timelines
from podium.ui.apart import Apart
from podium.ui.timelines import RunTimeline

BEGIN_S = 1000.0
TRAIN, ROLLOUT = "train[0]@a/0#0", "rollout[0]@a/1#0"


def append_step(run: Path, step: int) -> None:
    """A step of 2 s: generation, an update, and a publish."""
    at = BEGIN_S + 2 * step
    spans = {
        "controller": [["rollout", at, 1.2], ["update", at + 1.2, 0.7], ["publish", at + 1.9, 0.1],
                       [f"published version {step}", at + 2.0, 0.0]],
        TRAIN: [["policy.update", at + 1.2, 0.7]],
        ROLLOUT: [["generator.stream", at, 1.2]],
    }  # fmt: skip
    with timeline_file(run).open("a") as file:
        for worker, mine in spans.items():
            file.write(json.dumps({"worker": worker, "spans": mine}) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    with timeline_file(folder).open("w") as file:
        file.write(json.dumps({"worker": "controller", "spans": [["launch", BEGIN_S, 0.0]]}) + "\n")
    for step in range(4):
        append_step(folder, step)
    return folder


@pytest.fixture
def timeline(run: Path) -> Iterator[RunTimeline]:
    apart = Apart()
    yield RunTimeline(run, apart)
    apart.close()


def merged(view: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """As the page does it: what it has until `since_s`, and what is new from then on."""
    since = new["since_s"]
    lanes = {worker["name"]: [] for worker in view["workers"]}
    for answer, first, last in ((view, -1e9, since), (new, since, 1e12)):
        for worker in answer["workers"]:
            for span in worker["spans"]:
                begin, end = max(span["begin_s"], first), min(span["end_s"], last)
                if end > begin:
                    lanes[worker["name"]].append({**span, "begin_s": begin, "end_s": end})
    marks = [mark for mark in view["marks"] if mark["time_s"] < since] + new["marks"]
    return {"workers": lanes, "marks": marks, "end_s": new["end_s"]}


def shares(spans: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for span in spans:
        found[span["name"]] = found.get(span["name"], 0.0) + span["end_s"] - span["begin_s"]
    return {name: round(seconds, 4) for name, seconds in found.items()}


@pytest.mark.parametrize("points", [1000, 25], ids=["fine", "coarse"])
def test_what_is_new_completes_what_a_page_has(timeline: RunTimeline, run: Path, points: int) -> None:
    view = timeline.view(None, None, points)
    begin, point = view["begin_s"], view["point_s"]
    for step in range(4, 12):
        append_step(run, step)
        new = timeline.view(begin, None, points, after=view["version"], point_s=point)
        assert new["version"] != view["version"]
        assert new["since_s"] >= BEGIN_S + 2 * step - 0.1 - 16 * point, "more was sent than has changed"
        together = merged(view, new)
        view = {
            "workers": [{"name": name, "spans": spans} for name, spans in together["workers"].items()],
            "marks": together["marks"], "version": new["version"],
        }  # fmt: skip
    whole = RunTimeline(run, Apart()).view(None, None, 5000)
    for worker in whole["workers"]:
        assert shares(together["workers"][worker["name"]]) == shares(worker["spans"])
    assert together["end_s"] == whole["end_s"] == BEGIN_S + 24
    assert sum(mark.get("count", 1) for mark in together["marks"]) == 12


def test_nothing_new_is_an_answer_without_spans(timeline: RunTimeline) -> None:
    view = timeline.view(None, None, 1000)
    again = timeline.view(view["begin_s"], None, 1000, after=view["version"], point_s=view["point_s"])

    assert (again["version"], again["since_s"]) == (view["version"], view["end_s"])
    assert again["workers"] == []
    assert [mark["time_s"] for mark in again["marks"]] == [view["end_s"]]  # a page forgets those from `since_s` on


@pytest.mark.parametrize("version", ["", "another-3", "nonsense", "-", "x-²"])
def test_a_version_that_is_not_known_gets_the_whole(timeline: RunTimeline, version: str) -> None:
    view = timeline.view(None, None, 1000, after=version)

    assert "since_s" not in view
    assert {worker["name"] for worker in view["workers"]} == {"controller", TRAIN, ROLLOUT}


def test_a_new_worker_gives_every_page_the_whole(timeline: RunTimeline, run: Path) -> None:
    view = timeline.view(None, None, 1000)
    with timeline_file(run).open("a") as file:
        file.write(json.dumps({"worker": "rollout[1]@a/2#0", "spans": [["generator.stream", BEGIN_S + 7, 1.0]]}) + "\n")
    timeline._beginning.next_s = 0.0  # however long the first read took
    new = timeline.view(view["begin_s"], None, 1000, after=view["version"], point_s=view["point_s"])

    assert "since_s" not in new
    assert len(new["workers"]) == 4


def test_a_file_of_another_run_replaces_everything(timeline: RunTimeline, run: Path) -> None:
    timeline.view(None, None, 1000)
    timeline_file(run).write_text(json.dumps({"worker": "rank 0", "spans": [["compute", 5.0, 1.0]]}) + "\n")
    view = timeline.view(None, None, 1000)

    assert [worker["name"] for worker in view["workers"]] == ["rank 0"]
    assert view["marks"] == []
    assert (view["begin_s"], view["end_s"]) == (5.0, 6.0)


def test_only_what_is_new_is_read(timeline: RunTimeline, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline.view(None, None, 1000)
    monkeypatch.setattr(timelines, "caused_segments", lambda spans: pytest.fail("all was accounted again"))
    append_step(run, 4)

    assert timeline.view(None, None, 1000)["end_s"] == BEGIN_S + 10
    assert timeline.accounting()["workers"][0]["total_s"] == pytest.approx(10.0)


class TestMarks:
    def test_publishes_deaths_and_recoveries(self, timeline: RunTimeline, run: Path) -> None:
        append_recovery(run, part="generator", cause="rollout[0] was killed", remedy="respawn", step=3, seconds=2.5)
        found = timeline.view(None, 1e12, 1000)["marks"]
        death, recovery = (mark for mark in found if mark["kind"] in ("death", "recovery"))

        assert recovery["time_s"] - death["time_s"] == 2.5
        assert death["text"] == recovery["text"] == "generator: rollout[0] was killed (respawn, 2.5 s)"

    def test_near_publishes_are_one_mark_that_says_which(self, timeline: RunTimeline) -> None:
        fine = [mark for mark in timeline.view(None, None, 1000)["marks"] if mark["kind"] == "publish"]
        coarse = [mark for mark in timeline.view(None, None, 10)["marks"] if mark["kind"] == "publish"]

        assert [(mark["time_s"], mark["text"]) for mark in fine] == [
            (BEGIN_S + 2 * step + 2, f"weights of version {step}") for step in range(4)
        ]
        assert [mark["text"] for mark in coarse] == ["weights of versions 0 to 3: 4 times"]
        assert (coarse[0]["count"], coarse[0]["end_s"]) == (4, BEGIN_S + 8)

    def test_lent_devices(self, timeline: RunTimeline, run: Path) -> None:
        with timeline_file(run).open("a") as file:
            spans = [["devices lent", BEGIN_S + 1.0, 0.0], ["devices recalled", BEGIN_S + 1.1, 0.0]]
            file.write(json.dumps({"worker": "controller", "spans": spans}) + "\n")
        found = [mark for mark in timeline.view(None, None, 1000)["marks"] if mark["kind"] in ("lent", "recalled")]

        assert [(mark["kind"], mark["time_s"]) for mark in found] == [
            ("lent", BEGIN_S + 1.0), ("recalled", BEGIN_S + 1.1),
        ]  # fmt: skip
        assert found[0]["text"] == "the learner's devices generate"
