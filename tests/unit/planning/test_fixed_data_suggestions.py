# SPDX-License-Identifier: Apache-2.0
"""Suggestions for runs on fixed data, from timelines whose waits are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podium.observe.timeline import TimelineSpan, rank_name
from podium.planning.fixed_data_suggestion import suggest_for_ranks
from podium.recipe import SpmdRecipe, parse_recipe
from podium.runs.accounting import worker_times


def recipe(folder: Path, *, workers: int = 0, **changes: Any) -> SpmdRecipe:
    model, train = folder / "model", folder / "train.jsonl"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    train.write_text('{"prompt": "a", "completion": "b"}\n')
    values = {
        "program": "sft", "model": {"path": str(model)},
        "data": {"train": [{"path": str(train)}], "heldout": [{"path": str(train)}], "workers": workers},
        "tokens_per_step": 64, "optimizer": {"lr": 1e-3}, "steps": 100, "run": {"folder": str(folder / "runs")},
    }  # fmt: skip
    found = parse_recipe({**values, **changes})
    assert isinstance(found, SpmdRecipe)
    return found


def spans(steps: int, *, data_s: float, save_s: float = 0.0, evaluation_s: float = 0.0) -> Iterator[TimelineSpan]:
    """Two ranks: start-up of 100 s, and steps of one second beside waits for data; every 10 steps a checkpoint and an
    evaluation."""
    for rank in (0, 1):
        name, at = rank_name(rank), 0.0
        parts = [("start-up", 100.0)]
        for step in range(1, steps + 1):
            parts += [("data", data_s), ("compute", 1.0)]
            parts += [("checkpoint", save_s), ("evaluation", evaluation_s)] if step % 10 == 0 else []
        yield TimelineSpan(name, "launch", 0.0, 0.0)
        for what, seconds in parts:
            if seconds:
                yield TimelineSpan(name, what, at, at + seconds)
            at += seconds


def suggestion(folder: Path, found: Iterator[TimelineSpan], **changes: Any) -> str | None:
    every = list(found)
    return suggest_for_ranks(recipe(folder, **changes), every, worker_times(every))


@pytest.mark.parametrize(("workers", "more"), [(0, 2), (3, 6)])
def test_a_slow_loader_needs_more_workers(tmp_path: Path, workers: int, more: int) -> None:
    """0.5 s of 1.5 s a step: the loader takes 1.5 s for a batch, and 0.75 s with twice as many."""
    assert suggestion(tmp_path, spans(30, data_s=0.5), workers=workers) == (
        f"ranks wait 33% for data: data.workers {workers} → {more} saves about 0.5 s of 1.5 s a step"
    )


def test_twice_as_many_workers_save_at_most_half_of_a_step(tmp_path: Path) -> None:
    found = suggestion(tmp_path, spans(30, data_s=3.0))
    assert found == "ranks wait 75% for data: data.workers 0 → 2 saves about 2 s of 4 s a step"


def test_frequent_checkpoints_and_evaluations_cost_half_with_half_of_them(tmp_path: Path) -> None:
    """5 s of every 10 steps."""
    checkpoint, evaluation = {"every": 10}, {"every": 10}
    saving = suggestion(tmp_path, spans(30, data_s=0.0, save_s=5.0), checkpoint=checkpoint)
    assert saving == "saves take 33%: checkpoint.every 10 → 20 saves about 0.25 s of 1.5 s a step"
    evaluating = suggestion(tmp_path, spans(30, data_s=0.0, evaluation_s=5.0), evaluation=evaluation)
    assert evaluating == "evaluations take 33%: evaluation.every 10 → 20 saves about 0.25 s of 1.5 s a step"
    assert suggestion(tmp_path, spans(15, data_s=0.0, save_s=5.0), checkpoint=checkpoint) is None  # one in 15 steps


def test_a_run_that_computes_or_is_short_has_none(tmp_path: Path) -> None:
    assert suggestion(tmp_path, spans(30, data_s=0.01)) is None  # 1%
    assert suggestion(tmp_path, spans(5, data_s=3.0)) is None
    assert suggestion(tmp_path, iter(())) is None
