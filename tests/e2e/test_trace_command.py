# SPDX-License-Identifier: Apache-2.0
"""`podium trace`: the spans of runs of both kinds, in the format that trace viewers read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.on_policy import rl_recipe
from helpers.workspace import Workspace
from podium.observe.timeline import timeline_file
from podium.runs.events import append_membership, append_recovery


def read_trace(file: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def threads(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The spans of each thread, by its name."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return {
        name: [event for event in events if event["ph"] == "X" and event["tid"] == number]
        for number, name in names.items()
    }


def require_nesting(spans: list[Mapping[str, Any]]) -> None:
    """Viewers need it: of two spans of a thread one has the other inside, or they do not overlap."""
    ends: list[int] = []
    for before, span in pairwise([{"ts": 0}, *spans]):
        assert before["ts"] <= span["ts"]
        assert (type(span["ts"]), type(span["dur"])) == (int, int)
        while ends and ends[-1] <= span["ts"]:
            ends.pop()
        end = span["ts"] + span["dur"]
        assert not ends or end <= ends[-1]
        ends.append(end)


@pytest.mark.slow
def test_a_run_on_policy_has_the_controller_and_its_workers(workspace: Workspace) -> None:
    assert workspace.podium("train", rl_recipe(workspace, steps=3)).code == 0
    outcome = workspace.podium("trace", "runs/sums", "-o", "trace.json")

    assert outcome.code == 0, outcome
    assert "trace.json" in outcome.out
    events = read_trace(workspace.path / "trace.json")
    by_thread = threads(events)
    controller = [span["name"] for span in by_thread["controller"]]
    assert controller.count("rollout") == controller.count("update") == 3
    published = [event["args"]["version"] for event in events if event.get("cat") == "publish"]
    assert published == [0, 1, 2]
    workers = {name: [span["name"] for span in spans] for name, spans in by_thread.items() if "@" in name}
    assert sum(names.count("policy.update") for names in workers.values()) == 3
    assert sum(names.count("generator.stream") for names in workers.values()) == 3
    assert any("grader" in name for names in workers.values() for name in names)
    for spans in by_thread.values():
        require_nesting(list(spans))
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    # Workers do what the controller asks for, by the same clock.
    updates = [span for span in by_thread["controller"] if span["name"] == "update"]
    for span in (span for spans in by_thread.values() for span in spans if span["name"] == "policy.update"):
        assert any(
            each["ts"] - 5e3 <= span["ts"] and span["ts"] + span["dur"] <= each["ts"] + each["dur"] + 5e3
            for each in updates
        )
    assert [event["args"]["reward/mean"] for event in events if event["name"] == "reward/mean"]


@pytest.mark.slow
def test_a_run_of_ranks_and_its_continuation_are_one_trace(workspace: Workspace) -> None:
    recipe = workspace.recipe(steps=4, checkpoint={"every": 2})
    assert workspace.podium("train", recipe).code == 0
    assert workspace.podium("resume", "runs/sums", "--set", "steps=6").code == 0
    outcome = workspace.podium("trace", "runs/sums", "--out", "out.json.gz")

    assert outcome.code == 0, outcome
    by_thread = threads(read_trace(workspace.path / "out.json.gz"))
    assert by_thread.keys() == {"rank 0", "events"}  # a rank does one thing at a time
    names = [span["name"] for span in by_thread["rank 0"]]
    assert names.count("compute") == 6
    assert names.count("start-up") == 4  # of each command: the engine's, and what the program does before its steps
    assert "checkpoint" in names


def test_deaths_and_generators_that_join_are_in_the_trace(workspace: Workspace) -> None:
    assert workspace.podium("train", workspace.recipe()).code == 0
    run = workspace.path / "runs" / "sums"
    append_recovery(run, part="generator", cause="killed", remedy="respawn", step=2, seconds=1.5)
    append_membership(run, change="joined", generator="generate[1]", cause="a node", step=3, generators=2)
    assert workspace.podium("trace", "runs/sums", "-o", "t.json").code == 0

    events = read_trace(workspace.path / "t.json")
    recovery = next(event for event in events if event["name"] == "recovery: generator")
    assert recovery["dur"] == 1.5e6
    assert recovery["args"] == {"cause": "killed", "remedy": "respawn", "step": 2}
    assert any(event["name"] == "generate[1] joined" and event["ph"] == "i" for event in events)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("runs/sums", "-o", "nowhere/t.json"), "nowhere/t.json cannot be written"),
        (("runs/none", "-o", "t.json"), "runs/none"),
    ],
)
def test_what_cannot_be_read_or_written_is_said(workspace: Workspace, arguments: tuple[str, ...], words: str) -> None:
    assert workspace.podium("train", workspace.recipe()).code == 0
    outcome = workspace.podium("trace", *arguments)
    assert outcome.code != 0
    assert words in outcome.err
    timeline_file(workspace.path / "runs" / "sums").unlink()
    assert "no timeline" in workspace.podium("trace", "runs/sums").err
    assert not (workspace.path / "trace.json").exists()
