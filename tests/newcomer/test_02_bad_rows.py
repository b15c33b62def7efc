# SPDX-License-Identifier: Apache-2.0
"""One bad row in the middle of the data ended a training run, and after the row was fixed the run could not be resumed.
Bad rows can be skipped and are named, all of them can be found beforehand, and changed data is accepted if asked."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import podium
from helpers.made_batches import on_policy_recipe
from helpers.trials import CountingEncoder
from helpers.workspace import Workspace
from podium.controller.prompts import PromptSource
from podium.data.composing import StepSize
from podium.data.examples import MakerSpec
from podium.data.loader import StepLoader, decode, encode
from podium.data.rows import LinePlace
from podium.data.skipping import SkipCounts, SkipPolicy
from podium.data.sources import open_source
from podium.errors import BadRowError, DataError, RecipeError
from podium.observe import read_metrics
from podium.recipe import ModelSection, SourceSection

NULL = '{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": null}]}'
TORN = '{"messages": [{"role": "user"'


def chat(number: int) -> str:
    messages = [{"role": "user", "content": f"{number}+1?"}, {"role": "assistant", "content": str(number + 1)}]
    return json.dumps({"messages": messages})


def write(path: Path, bad: dict[int, str], count: int = 64) -> Path:
    """Lines are numbered from 1."""
    lines = [bad.get(number, chat(number)) for number in range(1, count + 1)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def spec_of(tiny_folder: Path, path: Path, **values: Any) -> MakerSpec:
    return MakerSpec(
        model=ModelSection(path=str(tiny_folder)), sections=(SourceSection(path=str(path)),), key="data.train",
        trained="assistant", max_length=64, overlong="truncate", **values,
    )  # fmt: skip


def loader(spec: MakerSpec, policy: SkipPolicy, **values: Any) -> StepLoader:
    sources = [open_source(each, f"data.train.{at}", keep_bad=policy.skips) for at, each in enumerate(spec.sections)]
    size = StepSize(tokens=200)
    settings: dict[str, Any] = {"seed": 0, "shuffle": True, "shuffle_rows": 64, "window": 8, "workers": 0}
    return StepLoader(sources, spec, size=size, prefetch=2, policy=policy, **{**settings, **values})


def tokens_of(step: Any) -> list[list[int]]:
    return [document.tokens.tolist() for example in step.examples for document in example.documents]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_skipped_rows_leave_the_same_steps_when_resumed_at_any_of_them(
    tmp_path: Path, tiny_folder: Path, workers: int
) -> None:
    path = write(tmp_path / "train.jsonl", {7: NULL, 20: TORN, 33: '["no", "object"]'})
    policy, spec = SkipPolicy(skips=True, max_share=0.2), spec_of(tiny_folder, path, skips=True)

    with loader(spec, policy, workers=workers) as whole:
        steps = [next(whole) for _ in range(9)]
    values, arrays = encode(steps[2].state)
    with loader(spec, policy, state=decode(json.loads(json.dumps(values)), arrays)) as rest:
        again = [next(rest) for _ in range(6)]

    assert [tokens_of(step) for step in again] == [tokens_of(step) for step in steps[3:]]
    assert [step.skipped for step in again] == [step.skipped for step in steps[3:]]
    assert again[-1].counts == steps[-1].counts
    places = {row.place for step in steps for row in step.skipped}
    assert places == {f"{path}, line {line}" for line in (7, 20, 33)}
    assert steps[-1].counts.skipped == sum(len(step.skipped) for step in steps) == 3  # each once, in all epochs


def test_without_skipping_a_bad_row_ends_the_run_and_names_its_line(tmp_path: Path, tiny_folder: Path) -> None:
    path = write(tmp_path / "train.jsonl", {7: NULL})
    with loader(spec_of(tiny_folder, path), SkipPolicy()) as steps, pytest.raises(BadRowError, match="line 7"):
        list(islice(steps, 9))


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "b"}),
        ("labels", {"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "b", "label": 7}),
        ("ranked", {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b"}),
        ("scores", {"text": "a", "score": 1.0}, {"text": "a", "score": "high"}),
    ],
)
def test_rows_of_preferences_and_scores_are_skipped_too(
    tmp_path: Path, tiny_folder: Path, shape: Any, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(bad if at == 5 else good) + "\n" for at in range(1, 33)))
    policy = SkipPolicy(skips=True, max_share=0.2)

    with loader(spec_of(tiny_folder, path, shape=shape, skips=True), policy, shuffle=False) as steps:
        first = next(steps)

    assert {row.place for row in first.skipped} == {f"{path}, line 5"}


def test_too_large_a_share_of_bad_rows_is_an_error_that_names_the_first() -> None:
    policy = SkipPolicy(skips=True, max_share=0.01)
    policy.check(SkipCounts(read=20, skipped=10, first=("a",)), "data.train")  # ten of the first thousand
    policy.check(SkipCounts(read=5000, skipped=50, first=("a",)), "data.train")
    with pytest.raises(DataError, match=r"(?s)data\.train: 11 .*data\.max_skipped_share.*line 3"):
        policy.check(SkipCounts(read=20, skipped=11, first=("x.jsonl, line 3: no",)), "data.train")
    with pytest.raises(DataError, match="51"):
        policy.check(SkipCounts(read=5000, skipped=51, first=("a",)), "data.train")


def test_a_recipe_that_only_has_bad_rows_ends_with_the_share(workspace: Workspace) -> None:
    write(workspace.path / "train.jsonl", dict.fromkeys(range(1, 65), NULL))
    outcome = workspace.podium("train", workspace.recipe(data={"on_error": "skip"}))
    workspace.refused(outcome, "data.max_skipped_share", "train.jsonl, line ")


def test_a_run_skips_names_resumes_and_counts(workspace: Workspace) -> None:
    write(workspace.path / "train.jsonl", {1: TORN, 9: NULL})
    write(workspace.path / "heldout.jsonl", {2: NULL}, count=6)
    recipe = workspace.recipe(
        data={"on_error": "skip", "max_skipped_share": 0.2, "heldout": [{"path": "heldout.jsonl"}]},
        checkpoint={"every": 2},
    )
    outcome = workspace.podium("train", recipe)

    assert outcome.code == 0, outcome
    run = workspace.path / "runs/sums"
    before = (run / "skipped_rows.jsonl").read_text()
    places = {json.loads(line)["place"].rpartition("/")[2] for line in before.splitlines()}
    assert places == {"train.jsonl, line 1", "train.jsonl, line 9", "heldout.jsonl, line 2"}
    assert "train.jsonl, line 9" in " ".join((outcome.out + outcome.err).split())
    skipped, losses = workspace.metric("sums", "rows_skipped"), workspace.metric("sums", "loss")
    assert skipped[4] >= 2

    assert workspace.podium("resume", "runs/sums", "--step", "2").code == 0
    assert (run / "skipped_rows.jsonl").read_text() == before
    assert workspace.metric("sums", "loss") == losses
    assert workspace.metric("sums", "rows_skipped") == skipped


def test_a_run_that_a_bad_row_ended_goes_on_with_skipping(workspace: Workspace) -> None:
    write(workspace.path / "train.jsonl", {20: NULL}, count=24)
    recipe = workspace.recipe(
        data={"shuffle": False, "packing_window": 1}, checkpoint={"every": 1}, tokens_per_step=64, steps=12
    )
    failed = workspace.podium("train", recipe)
    assert failed.code == 2
    assert "train.jsonl, line 20" in failed.err

    outcome = workspace.podium("resume", "runs/sums", "--set", "data.on_error=skip")

    assert outcome.code == 0, outcome
    assert len(workspace.metric("sums", "loss")) == 12


@pytest.mark.slow
def test_changed_data_is_refused_with_the_option_that_accepts_it_and_recorded(workspace: Workspace) -> None:
    file = write(workspace.path / "train.jsonl", {20: NULL}, count=24)
    recipe = workspace.recipe(
        data={"shuffle": False, "packing_window": 1}, checkpoint={"every": 1}, tokens_per_step=64, steps=12
    )
    assert workspace.podium("train", recipe).code == 2
    write(file, {}, count=24)

    refused = workspace.podium("resume", "runs/sums")
    workspace.refused(refused, "train.jsonl", "podium resume runs/sums --accept-changed-data", left=("sums",))
    accepted = workspace.podium("resume", "runs/sums", "--accept-changed-data")

    assert accepted.code == 0, accepted
    (entry,) = json.loads((workspace.path / "runs/sums/run.json").read_text())["lineage"]["changed_data"]
    assert entry["key"] == "data.train.0.path"
    assert entry["old"] != entry["new"]
    assert entry["after_step"] > 0
    assert entry["new"][:12] in workspace.podium("show", "runs/sums").out
    # The new data is the run's from now on.
    assert workspace.podium("resume", "runs/sums", "--set", "steps=13").code == 0


def test_another_change_is_refused_although_changed_data_is_accepted(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe(checkpoint={"every": 2}))
    write(workspace.path / "train.jsonl", {})
    with pytest.raises(RecipeError, match=r"data\.shuffle"):
        podium.resume("runs/sums", step=2, overrides=["data.shuffle=false"], accept_changed_data=True)


def test_all_bad_rows_are_found_before_a_run(workspace: Workspace) -> None:
    bad = dict.fromkeys(range(201, 226), NULL)
    write(workspace.path / "train.jsonl", bad, count=250)
    recipe = workspace.recipe()
    workspace.monkeypatch.setattr("podium.checks._DEEP_ROWS", 100)

    assert workspace.podium("check", recipe, "--deep").code == 0  # reads the first rows
    outcome = workspace.podium("check", recipe, "--deep", "--all")

    assert outcome.code == 2
    named = [line for line in outcome.err.splitlines() if "train.jsonl, line 2" in line]
    assert len(named) == 20
    assert "data.train.0: 25 of 250" in outcome.err
    assert "5 more" in outcome.err
    lenient = workspace.recipe("lenient", data={"on_error": "skip", "max_skipped_share": 0.5})
    outcome = workspace.podium("check", lenient, "--deep", "--all")
    assert outcome.code == 0
    assert "25 of 250" in outcome.out


def prompts(folder: Path, bad: dict[int, str], *overrides: str, state: Any = None) -> PromptSource:
    path = folder / "prompts.jsonl"
    lines = [bad.get(at, json.dumps({"prompt": "?" * (at % 7 + 1), "number": at})) for at in range(1, 41)]
    path.write_text("\n".join(lines) + "\n")
    recipe = on_policy_recipe(f"data.train.0.path={path}", "data.on_error=skip", *overrides)
    return PromptSource(recipe, CountingEncoder(), state)  # type: ignore[arg-type]


def test_prompts_are_skipped_counted_and_resumed(tmp_path: Path) -> None:
    bad = {3: '{"answer": "4"}', 8: TORN, 21: '{"prompt": ""}'}
    source = prompts(tmp_path, bad)
    source.take(10)
    state, named = json.loads(json.dumps(source.state())), source.take_skipped()
    source.take_ahead(50)
    assert source.take_skipped() == []  # rows of prompts taken ahead belong to the next step
    ahead = source.take(50)
    named_later = source.take_skipped()

    rest = prompts(tmp_path, bad, state=state)
    assert [each.task.row for each in rest.take(50)] == [each.task.row for each in ahead]
    assert rest.take_skipped() == named_later
    assert rest.metrics() == source.metrics()
    assert source.metrics()["prompts/skipped"] == len(named) + len(named_later) == 3  # each once, in all epochs
    lines = {row.place.rpartition(" ")[2] for row in [*named, *named_later]}
    assert lines == {"3", "8", "21"}


def test_many_rows_of_a_large_file_are_numbered_without_reading_it_again(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    path.write_bytes(b"x" * 1023 + b"\n" + (b"y" * 1023 + b"\n") * (9 << 10))
    places = [str(LinePlace(str(path), 1024 * line)) for line in (9000, 10, 5000, 0)]
    assert places == [f"{path}, line {line + 1}" for line in (9000, 10, 5000, 0)]


def test_metrics_without_skipping_have_no_new_name(workspace: Workspace) -> None:
    workspace.podium("train", workspace.recipe(steps=1))
    (line,) = read_metrics(workspace.path / "runs/sums/metrics.jsonl")
    assert "rows_skipped" not in line.values


def test_a_bad_row_of_a_small_file_counts_and_is_named_once_in_all_epochs(workspace: Workspace) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]}
        for n in range(24)
    ]
    rows[6] = {"messages": [{"role": "user", "content": None}]}
    workspace.rows("small.jsonl", rows)
    data = {"train": "small.jsonl", "on_error": "skip", "packing_window": 1}

    outcome = workspace.podium("train", workspace.recipe(data=data, steps=40))

    assert outcome.code == 0, outcome.err
    assert workspace.metric("sums", "epoch")[40] >= 2
    assert set(workspace.metric("sums", "rows_skipped").values()) <= {0.0, 1.0}
    assert len((workspace.path / "runs/sums/skipped_rows.jsonl").read_text().splitlines()) == 1
