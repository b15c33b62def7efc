# SPDX-License-Identifier: Apache-2.0
"""What the summaries of engine steps say of decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.simulated_runs import simulated, simulated_recipe
from podium.observe.timeline import CONTROLLER, EngineSteps, TimelineFile, TimelineSpan, read_timeline, timeline_file
from podium.planning.run_records import decode_points, read_records
from podium.rollout.native.sizing import choose_sizes


def summary(steps: int, lanes: float, seconds: float, prefill_s: float = 0.0) -> EngineSteps:
    return EngineSteps(
        worker="train[0]@node/cpu#0", begin_s=100.0, end_s=100.0 + seconds, steps=steps, lanes=lanes,
        generated_tokens=round(steps * lanes), prefilled_tokens=0, prefill_s=prefill_s, is_tail=False,
    )  # fmt: skip


def test_points_are_steps_without_prompts(tmp_path: Path) -> None:
    """100 steps of 10 ms with 8 lanes, and 200 of 5 ms with 2; then prompts, too few steps, and an idle engine."""
    records = read_records(simulated(simulated_recipe(tmp_path)).result.folder)
    steps = (
        summary(100, 8.0, 1.0), summary(200, 2.0, 1.0, prefill_s=0.04), summary(50, 8.0, 1.0, prefill_s=0.5),
        summary(3, 8.0, 1.0), summary(0, 0.0, 1.0),
    )  # fmt: skip
    found = decode_points(replace(records, engine_steps=steps))

    assert [(point.lanes, point.step_s, point.steps) for point in found] == [
        (8.0, pytest.approx(0.01), 100), (2.0, pytest.approx(0.005), 200)
    ]  # fmt: skip
    assert [point.seconds for point in found] == pytest.approx([1.0, 1.0])
    assert len(decode_points(replace(records, engine_steps=steps), most_prefill=0.5)) == 3


def test_summaries_are_read_from_the_timeline_of_the_measured_steps(tmp_path: Path) -> None:
    """The first of six steps is not measured: what engines did before its update ended does not count."""
    run = simulated(simulated_recipe(tmp_path)).result.folder
    assert decode_points(read_records(run)) == ()
    ends = [span.end_s for span in read_timeline(run) if (span.worker, span.name) == (CONTROLLER, "update")]
    assert len(ends) == 6
    file = TimelineFile(timeline_file(run))
    values = {"steps": 10, "lanes": 4.5, "generated_tokens": 45, "prefilled_tokens": 0, "prefill_s": 0.0}
    begins = (ends[0] - 0.5, ends[0] + 0.5, ends[-1] + 0.5)
    file.append([TimelineSpan("train[0]@node/cpu#0", "stream > steps", begin, begin + 0.2, values) for begin in begins])
    file.close()

    (point,) = decode_points(read_records(run))
    assert (point.lanes, point.step_s) == (4.5, pytest.approx(0.02, rel=1e-3))


def test_lanes_of_a_run_on_any_device_are_those_of_the_device_that_it_had(tmp_path: Path) -> None:
    """`placement.device: auto` without `rollout.max_running`: an engine has 64 lanes on a CPU and 256 on a GPU."""
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 3, "max_running": None}
    recipe = simulated_recipe(tmp_path, rollout=rollout, placement={"device": "auto"})
    run = simulated(recipe).result.folder
    assert read_records(run).configuration().lanes == 64

    timeline = timeline_file(run)
    timeline.write_text(timeline.read_text().replace("/cpu#", "/gpu0#"))
    assert read_records(run).configuration().lanes == 256
    assert (
        recipe.rollout.running_on("cpu")
        == choose_sizes(recipe.rollout, context=64, token_bytes=1, cuda=False, free_bytes=1 << 30).max_running
    )
