# SPDX-License-Identifier: Apache-2.0
"""What `podium ui` answers about runs, from files whose content the test knows."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.run_folders import BEGIN_S, GENERATOR, LEARNER, append_steps, episode, make_run_folder, write_rollouts
from helpers.simulated_runs import simulated, simulated_recipe
from podium.errors import RunFolderError
from podium.runs.example_files import KeptDocument, KeptExample, write_examples
from podium.runs.folder import RunFolder
from podium.ui import timelines
from podium.ui.answers import Query
from podium.ui.apart import Apart
from podium.ui.server import PageServer
from podium.ui.site import Site
from podium.ui.timelines import RunTimeline

Serve = Callable[..., Any]


def test_the_list_has_every_run_with_its_last_figures(browser: Any) -> None:
    rows = {row["id"]: row for row in browser.get("/api/runs")["runs"]}

    assert set(rows) == {"one", "two"}
    one = rows["one"]
    assert (one["program"], one["status"], one["step"], one["steps"]) == ("sft", "finished", 10, 10)
    assert one["metrics"] == {"loss": 1.0, "reward/mean": 1.0, "step_s": 2.0}
    assert one["duration_s"] == 18.0
    assert (one["parent"], one["broken"]) == (None, None)


def test_a_row_follows_its_files(browser: Any, runs: Path) -> None:
    run = RunFolder.open(runs / "two")
    assert browser.get("/api/runs/two")["step"] == 6
    run.update(status="running")
    append_steps(run, [7])

    row = browser.get("/api/runs/two")
    assert (row["status"], row["step"]) == ("dead", 7)  # nobody holds the folder
    with run.held():
        assert browser.get("/api/runs/two")["status"] == "running"


def test_rows_of_fixed_data_are_there_token_by_token(browser: Any, runs: Path) -> None:
    assert browser.get("/api/runs/one/examples") == {"examples": []}
    assert browser.get("/api/runs/one")["has_examples"] is False
    document = KeptDocument(tokens=(5, 6), texts=("<b>", " two"), loss_mask=(False, True), length=9)
    write_examples(runs / "one" / "examples.jsonl", [KeptExample(source="sums", value=0.5, documents=(document,))])

    (example,) = browser.get("/api/runs/one/examples")["examples"]
    assert browser.get("/api/runs/one")["has_examples"] is True
    assert (example["source"], example["value"]) == ("sums", 0.5)
    assert example["documents"] == [
        {"tokens": [5, 6], "texts": ["<b>", " two"], "loss_mask": [False, True], "length": 9}
    ]


def test_the_facts_of_a_run(browser: Any) -> None:
    facts = browser.get("/api/runs/one")

    assert facts["recipe"]["optimizer.lr"] == 1e-3
    assert facts["recipe"]["data.train.0.path"] == "data/train.jsonl"
    assert facts["metric_names"] == ["loss", "reward/mean", "step_s"]
    assert (facts["has_rollouts"], facts["has_timeline"], facts["has_heldout"]) == (True, True, True)
    assert [event["kind"] for event in facts["events"]] == ["recovery", "joined"]
    assert "rollout[0] died." in facts["events"][0]["text"]
    assert facts["alarms"] == [{"step": 5, "text": "steps 3 to 5: every episode has the same total reward"}]
    texts = facts["texts"] or browser.get("/api/runs/one/texts")["texts"]  # on a busy machine they come later
    assert texts[0].endswith("/one")


def test_checkpoints_have_sizes(browser: Any, runs: Path) -> None:
    folder = runs / "one" / "checkpoints" / "step-00000003"
    folder.mkdir()
    (folder / "weights").write_bytes(b"x" * 1234)

    assert browser.get("/api/runs/one")["checkpoints"] == [
        {"step": 3, "size_bytes": 1234, "path_name": "step-00000003"}
    ]


def test_curves_have_every_step_or_buckets(browser: Any) -> None:
    whole = browser.get("/api/runs/one/metrics?names=loss,nothing")["series"]
    assert list(whole) == ["loss"]
    assert whole["loss"]["step"] == list(range(1, 11))
    assert whole["loss"]["value"] == whole["loss"]["low"] == whole["loss"]["high"] == [10 / n for n in range(1, 11)]
    assert whole["loss"]["time_s"][0] == BEGIN_S + 2.0

    few = browser.get("/api/runs/one/metrics?names=reward/mean&points=2")["series"]["reward/mean"]
    assert few["step"] == [3, 8]
    assert few["value"] == pytest.approx([0.3, 0.8])
    assert (few["low"], few["high"]) == ([0.1, 0.6], [0.5, 1.0])

    some = browser.get("/api/runs/one/metrics?names=loss&from=4&to=6")["series"]["loss"]
    assert some["step"] == [4, 5, 6]


def test_all_metrics_are_the_default(browser: Any) -> None:
    assert set(browser.get("/api/runs/one/metrics")["series"]) == {"loss", "reward/mean", "step_s"}


def test_a_value_that_is_not_finite_is_a_gap_with_a_name(browser: Any, runs: Path) -> None:
    append_steps(RunFolder.open(runs / "two"), [7], loss="NaN")

    curve = browser.get("/api/runs/two/metrics?names=loss")["series"]["loss"]
    assert curve["value"][-1] is None
    assert curve["not_finite"] == [7]
    assert browser.get("/api/runs/two")["metrics"]["loss"] == "NaN"


def test_a_run_records_what_the_page_shows_of_the_machine(tmp_path: Path) -> None:
    """A whole run, with simulated workers and the real log: nothing is put into its folder by hand."""
    run = simulated(simulated_recipe(tmp_path)).result.folder
    site = Site(run.parent)
    try:
        (entry,) = site.catalogue.entries()
        curves = site.answer(f"/api/runs/{entry.id}/system", Query({}))["series"]
    finally:
        site.close()

    assert curves.keys() >= {"machine/memory_gib", "machine/process_memory_gib"}
    assert 0.01 < curves["machine/process_memory_gib"]["value"][0] < curves["machine/memory_gib"]["value"][0]
    assert curves["machine/memory_gib"]["step"][0] == 1
    assert not any("machine/" in line for line in (run / "metrics.jsonl").read_text().splitlines())


def test_the_machine_has_its_own_curves(browser: Any, runs: Path) -> None:
    append_steps(RunFolder.open(runs / "two"), [7], **{"machine/memory_gib": 3.0, "memory": 1.0, "mean_gip": 2.0})

    assert set(browser.get("/api/runs/two/system")["series"]) == {"machine/memory_gib", "memory"}


def test_the_timeline_has_every_second_of_every_worker(browser: Any) -> None:
    found = browser.get("/api/runs/one/timeline")

    assert (found["begin_s"], found["end_s"]) == (BEGIN_S, BEGIN_S + 22.0)
    assert [(each["name"], each["kind"]) for each in found["workers"]] == [
        ("controller", "controller"), (GENERATOR, "rollout"), (LEARNER, "train"),
    ]  # fmt: skip
    for worker in found["workers"]:
        spans = worker["spans"]
        assert spans[0]["begin_s"] == BEGIN_S
        assert all(a["end_s"] == pytest.approx(b["begin_s"], abs=1e-5) for a, b in pairwise(spans))
    learner = found["workers"][2]["spans"]
    assert [(each["name"], each["idle"]) for each in learner[:5]] == [
        ("waiting for start-up", True), ("waiting for the other role", True), ("waiting for grading", True),
        ("update", False), ("update", False),
    ]  # fmt: skip
    assert [each.get("span") for each in learner[2:5]] == [None, "policy.update > forward", "policy.update"]
    assert [mark["kind"] for mark in found["marks"]] == []  # they happened when the test ran


def test_merging_keeps_the_seconds_of_every_cause(browser: Any) -> None:
    def seconds(points: int) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = {}
        for worker in browser.get(f"/api/runs/one/timeline?points={points}")["workers"]:
            for span in worker["spans"]:
                key = worker["name"], span["name"]
                found[key] = found.get(key, 0.0) + span["end_s"] - span["begin_s"]
        return found

    coarse = browser.get("/api/runs/one/timeline?points=10")["workers"][2]["spans"]
    assert len(coarse) < 20
    assert any(span.get("merged") for span in coarse)
    assert seconds(10) == pytest.approx(seconds(5000), abs=1e-3)


def test_a_part_of_the_timeline(browser: Any) -> None:
    found = browser.get(f"/api/runs/one/timeline?from_s={BEGIN_S + 5.0}&to_s={BEGIN_S + 5.75}")

    assert found["whole"] == [BEGIN_S, BEGIN_S + 22.0]
    learner = found["workers"][2]["spans"]
    assert [(span["name"], round(span["end_s"] - span["begin_s"], 3)) for span in learner] == [
        ("waiting for the other role", 0.2), ("waiting for grading", 0.3), ("update", 0.25),
    ]  # fmt: skip


def test_the_seconds_of_workers_add_up(browser: Any) -> None:
    workers = {each["name"]: each for each in browser.get("/api/runs/one/accounting")["workers"]}

    assert workers[GENERATOR]["seconds"]["generation"] == pytest.approx(12.0, abs=1e-3)
    assert workers[LEARNER]["seconds"] == pytest.approx(
        {
            "waiting for the other role": 12.0,
            "update": 5.0,
            "waiting for grading": 3.0,
            "waiting for start-up": 2.0,
        },
        abs=1e-3,
    )
    assert all(sum(each["seconds"].values()) == pytest.approx(each["total_s"]) == 22.0 for each in workers.values())


def test_a_large_timeline_begins_with_its_newest_part(
    browser: Any, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of its own reads the rest; then every second is there as if all had been read at once."""
    expected = browser.get("/api/runs/one/timeline?points=5000")
    monkeypatch.setattr(timelines, "_NEWEST_BYTES", 1500)
    timeline = RunTimeline(runs / "one", Apart())

    first = timeline.view(None, None, 5000)
    assert not first["is_whole"]
    assert first["begin_s"] > BEGIN_S + 10
    until = time.monotonic() + 60
    while not (whole := timeline.view(None, None, 5000))["is_whole"]:
        assert time.monotonic() < until, "the rest was not read"
        time.sleep(0.05)
    assert (whole["begin_s"], whole["end_s"]) == (BEGIN_S, BEGIN_S + 22.0)

    def seconds(view: Any, worker: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for span in view["workers"][worker]["spans"]:
            found[span["name"]] = found.get(span["name"], 0.0) + span["end_s"] - span["begin_s"]
        return found

    assert seconds(whole, 1) == pytest.approx(seconds(expected, 1), abs=1.3)  # a phase at the seam may differ
    assert sum(seconds(whole, 1).values()) == pytest.approx(22.0, abs=1e-3)


def test_a_function_in_a_process_of_its_own() -> None:
    apart = Apart()
    assert apart.call(math.factorial, 5, most_s=60) == 120
    assert apart.call(math.factorial, -1, most_s=60) is None  # it raises an error
    assert apart.call(time.sleep, 60, most_s=0.1) is None
    assert list(apart.each(itertools.repeat, "again", 3, most_s=60)) == ["again"] * 3
    endless = apart.each(itertools.count, most_s=60)
    assert [next(endless) for _ in range(3)] == [0, 1, 2]
    endless.close()
    assert not apart._running
    apart.close()
    assert apart.call(math.factorial, 5, most_s=60) is None


def test_held_out_answers_by_prompt(browser: Any) -> None:
    prompts = browser.get("/api/runs/one/heldout")["prompts"]

    assert [len(each["answers"]) for each in prompts] == [2, 2]
    assert prompts[0]["prompt"] == "first"
    assert [(each["step"], each["answer"], each["score"]) for each in prompts[0]["answers"]] == [
        (0, "first at 0", 0.0), (5, "first at 5", 1.0),
    ]  # fmt: skip
    assert browser.get("/api/runs/two/heldout")["prompts"] == []


def test_two_runs_beside_each_other(browser: Any) -> None:
    found = browser.get("/api/compare?a=one&b=two")

    assert found["recipe"] == [{"key": "optimizer.lr", "a": 0.001, "b": 0.002}, {"key": "steps", "a": 10, "b": 6}]
    assert found["first_difference"] == []
    assert found["num_equal"] == 2  # step_s is the machine's
    assert "ids of two runs" in browser.error("/api/compare?a=one", 400)


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/runs/none", 404, "there is no run 'none'"),
        ("/api/runs/one/metrics?points=many", 400, "points='many' in the address is not a whole number"),
        ("/api/runs/one/metrics?from=nan", 400, "from='nan' in the address is not a number"),
        ("/api/runs/one/rollouts?sort=size", 400, "sort='size'"),
        ("/api/runs/one/rollouts?step=99", 404, "no rollouts of step 99: it has those from step 1 to 4"),
        ("/api/runs/two/rollouts?step=1", 404, "keeps no rollouts"),
        ("/api/runs/one/rollouts/1/55", 404, "no group 55"),
        ("/api/runs/one/rollouts/one/55", 400, "not a whole number"),
        ("/api/runs/one/weights", 404, "there is nothing at"),
        ("/api/nothing", 404, "there is nothing at"),
        ("/nothing.js", 404, "there is nothing at"),
    ],
)
def test_what_is_not_there_is_said(browser: Any, path: str, status: int, text: str) -> None:
    assert text in browser.error(path, status)


def test_broken_folders_are_listed_with_the_reason(browser: Any, runs: Path) -> None:
    for name in ("damaged", "stateless", "recipeless", "strange"):
        (runs / name).mkdir()
    (runs / "damaged" / "run.json").write_text('{"status": "run')
    (runs / "damaged" / "recipe.yaml").write_text("program: sft\nsteps: 3\n")
    (runs / "stateless" / "recipe.yaml").write_text("program: sft\n")
    (runs / "stateless" / "metrics.jsonl").write_text("")
    (runs / "recipeless" / "run.json").write_text("{}")
    (runs / "strange" / "run.json").write_text("[1]")
    (runs / "strange" / "recipe.yaml").write_text("steps: 3\n")
    (runs / "no-run").mkdir()

    rows = {row["id"]: row["broken"] for row in browser.get("/api/runs")["runs"]}
    assert set(rows) == {"one", "two", "damaged", "stateless", "recipeless", "strange"}
    assert "run.json is damaged" in rows["damaged"]
    assert "has no run.json" in rows["stateless"]
    assert "has no recipe.yaml" in rows["recipeless"]
    assert "does not hold an object" in rows["strange"]
    for name in ("damaged", "stateless", "recipeless", "strange"):
        assert browser.error(f"/api/runs/{name}", 422) == rows[name]
    assert rows["one"] is None


def test_half_a_line_waits_for_its_rest(browser: Any, runs: Path) -> None:
    file = runs / "two" / "metrics.jsonl"
    steps = lambda: browser.get("/api/runs/two/metrics?names=loss")["series"]["loss"]["step"]  # noqa: E731
    assert steps() == [1, 2, 3, 4, 5, 6]
    line = json.dumps({"step": 7, "time_s": 0.0, "loss": 1.0}) + "\n"
    with file.open("a") as opened:
        opened.write(line[:9])
        opened.flush()
        assert steps()[-1] == 6
        opened.write(line[9:] + "what is this\n[]\n" + line.replace("7", "8"))
    assert steps() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_resumed_run_has_no_step_twice(browser: Any, runs: Path) -> None:
    """Its metrics file is replaced by a shorter one, which grows again."""
    file = runs / "two" / "metrics.jsonl"
    steps = lambda: browser.get("/api/runs/two/metrics?names=loss")["series"]["loss"]["step"]  # noqa: E731
    assert len(steps()) == 6
    shorter = file.with_suffix(".tmp")
    shorter.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    os.replace(shorter, file)
    append_steps(RunFolder.open(runs / "two"), [4, 5, 6, 7])

    assert steps() == [1, 2, 3, 4, 5, 6, 7]


def test_lines_with_other_metrics_between_the_steps(browser: Any, runs: Path) -> None:
    run = RunFolder.open(runs / "two")
    with run.metrics_file.open("a") as file:
        file.write(json.dumps({"step": 6, "time_s": 1.0, "heldout/loss": 0.5}) + "\n")
    append_steps(run, [7])

    series = browser.get("/api/runs/two/metrics")["series"]
    assert series["heldout/loss"]["step"] == [6]
    assert series["loss"]["step"] == [1, 2, 3, 4, 5, 6, 7]


def test_the_folder_of_one_run_is_a_list_of_one(runs: Path, serve: Serve) -> None:
    assert [row["id"] for row in serve(runs / "one").get("/api/runs")["runs"]] == ["one"]


def test_an_empty_folder_has_no_runs(tmp_path: Path, serve: Serve) -> None:
    assert serve(tmp_path).get("/api/runs")["runs"] == []


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"there is no folder .*Give the folder of your runs"):
        PageServer(tmp_path / "none", files={})


def test_rollouts_of_a_step_come_from_its_file(browser: Any) -> None:
    found = browser.get("/api/runs/one/rollouts?step=2&sort=-reward&size=3")

    assert (found["total"], found["steps"], found["sources"]) == (4, [1, 4], ["sums", "words"])
    assert [(row["group"], row["sample"], row["reward"]) for row in found["rows"]] == [
        (1, 1, 1.1), (1, 0, 1.0), (0, 1, 0.1),
    ]  # fmt: skip
    first = found["rows"][0]
    assert (first["step"], first["length"], first["ending"], first["trained"]) == (2, 6, "stop", True)
    assert first["rewards"] == {"correct": 1.1}
    assert first["preview"] == "What is 1 + 1? → It is 2, at step 2."
    second = browser.get("/api/runs/one/rollouts?step=2&sort=-reward&size=3&page=2")
    assert [(row["group"], row["sample"]) for row in second["rows"]] == [(0, 0)]


def test_rollouts_of_all_steps_are_sorted_and_searched(browser: Any) -> None:
    found = browser.get("/api/runs/one/rollouts?sort=-length&size=4")
    assert found["index"] == {"done": 13, "of": 13}
    assert found["total"] == 13
    assert [(row["step"], row["group"], row["length"]) for row in found["rows"]] == [
        (1, 0, 6), (1, 1, 6), (2, 0, 6), (2, 1, 6),
    ]  # fmt: skip
    worst = browser.get("/api/runs/one/rollouts?sort=reward&source=sums&size=1")
    assert (worst["total"], worst["rows"][0]["reward"]) == (7 - 1, 1.0)
    assert browser.get("/api/runs/one/rollouts?q=at+step+3")["total"] == 4
    assert browser.get("/api/runs/one/rollouts?q=%25")["total"] == 0  # no pattern, but the character
    assert [row["step"] for row in browser.get("/api/runs/one/rollouts?group=1&from=2&sort=step")["rows"]] == [
        2,
        2,
        3,
        3,
    ]
    assert [row["step"] for row in browser.get("/api/runs/one/rollouts?row=0&sort=-step")["rows"]] == [3, 3, 2, 2, 1, 1]


def test_the_index_follows_files_that_come_go_and_change(runs: Path, serve: Serve, tmp_path: Path) -> None:
    def total() -> int:
        found = serve(runs).get("/api/runs/one/rollouts")  # a new server reads the index of the last one
        return int(found["total"])

    assert total() == 13
    write_rollouts(runs / "one", 3, [episode(3, 0, sample) for sample in range(3)])
    (runs / "one" / "rollouts" / "step-00000004.parquet").unlink()
    write_rollouts(runs / "one", 5, [episode(5, 0, 0)])
    assert total() == 4 + 4 + 3 + 1
    assert len(list((tmp_path / "cache").glob("*.sqlite"))) == 1


def test_a_folder_that_cannot_be_written_has_a_temporary_index(runs: Path, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert serve(runs, cache=tmp_path / "file" / "cache").get("/api/runs/one/rollouts")["total"] == 13


def test_a_group_has_its_tokens(browser: Any) -> None:
    episodes = browser.get("/api/runs/one/rollouts/3/1")["episodes"]

    assert [each["sample"] for each in episodes] == [0, 1]
    first = episodes[0]
    assert first["messages"][1] == {"role": "assistant", "content": "It is 1, at step 3."}
    assert first["texts"] == [f" t{at}" for at in range(8)]
    assert first["loss_mask"] == [False] * 3 + [True] * 5
    assert first["versions"] == [None] * 3 + [2] * 5
    assert first["log_probs"] == [None] * 3 + [-0.5] * 5
    assert first["advantages"] == [None] * 3 + [0.25] * 5
    assert first["rewards"] == {"correct": 1.0}


def test_a_file_of_rollouts_that_is_damaged(browser: Any, runs: Path) -> None:
    (runs / "one" / "rollouts" / "step-00000002.parquet").write_bytes(b"PAR1 and no more")

    assert "step-00000002.parquet cannot be read" in browser.error("/api/runs/one/rollouts?step=2", 422)
    assert "step-00000002.parquet cannot be read" in browser.error("/api/runs/one/rollouts/2/1", 422)
    assert browser.get("/api/runs/one/rollouts")["total"] == 9  # the others are there


def test_a_file_with_few_columns(browser: Any, runs: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"group": [4, 4], "reward": [1.0, None]}), runs / "one" / "rollouts" / "step-00000009.parquet"
    )

    rows = browser.get("/api/runs/one/rollouts?step=9&sort=reward")["rows"]
    assert [(row["group"], row["reward"], row["length"], row["preview"]) for row in rows] == [
        (4, 1.0, None, ""), (4, None, None, ""),
    ]  # fmt: skip
    assert [each["messages"] for each in browser.get("/api/runs/one/rollouts/9/4")["episodes"]] == [[], []]


def test_stages_of_a_pipeline_have_it_as_parent(tmp_path: Path, serve: Serve) -> None:
    pipe = tmp_path / "runs" / "pipe"
    make_run_folder(pipe, "first")
    state = {"status": "stopped", "order": ["first", "second"], "parents": {}, "stages": {"first": {"status": "done"}}}
    (pipe / "pipeline.json").write_text(json.dumps(state))

    rows = {row["id"]: row for row in serve(tmp_path / "runs").get("/api/runs")["runs"]}
    assert rows["pipe"]["program"] == "pipeline"
    assert (rows["pipe"]["step"], rows["pipe"]["steps"]) == (1, 2)
    assert rows["pipe:first"]["parent"] == "pipe"
    assert "pipe:second" not in rows


# --- findings ---


def _findings(browser: Any, run_id: str) -> list[dict[str, str]]:
    """Asks as the page does: no answer waits for the process that looks."""
    end_s = time.monotonic() + 60
    while True:
        begin_s = time.monotonic()
        found = browser.get(f"/api/runs/{run_id}/findings")
        assert time.monotonic() - begin_s < 5
        if not found["pending"]:
            return list(found["findings"])
        assert time.monotonic() < end_s, "nothing was found in a minute"
        time.sleep(0.1)


@pytest.mark.slow
def test_what_stands_out_is_found_by_a_process_of_its_own(browser: Any) -> None:
    found = _findings(browser, "one")

    # Of the 20 s after start-up the learner waits for 12 of generation, and the generator for 5 of updates.
    (wait,) = [each for each in found if "wait for the other role" in each["text"]]
    assert (wait["kind"], wait["about"]) == ("note", "time")
    assert wait["text"].startswith("learners and generators wait for the other role 60% and 25% of the time after")
