# SPDX-License-Identifier: Apache-2.0
"""Lines of `podium show` about what devices did, and about workers that died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.recipes import make_recipe
from podium.runs.events import EVENTS_FILE, append_membership, append_recovery, membership_changes, recoveries
from podium.runs.folder import RunFolder
from podium.runs.showing import show_lines


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(make_recipe(f"run.folder={tmp_path / 'runs'}"))


def line(folder: RunFolder, begin: str) -> str:
    """The line with this title, without the spaces that align it."""
    (found,) = [" ".join(each.split()) for each in show_lines(folder.path) if each.startswith(begin)]
    return found


def write_steps(folder: RunFolder, *steps: dict[str, float]) -> None:
    lines = [json.dumps({"step": number, "time_s": 0.0, **values}) for number, values in enumerate(steps, 1)]
    folder.metrics_file.write_text("\n".join(lines) + "\n")


def test_what_lent_devices_did(folder: RunFolder) -> None:
    common = {"staleness/queue": 0.5, "trained_tokens": 100.0, "step_s": 10.0}
    lent = {"lending/tokens": 60.0, "rollout/generated_tokens": 200.0, "lending/lent_s": 4.0, "lending/switch_s": 1.0}
    not_lent = {
        "lending/tokens": 0.0,
        "rollout/generated_tokens": 100.0,
        "lending/lent_s": 0.0,
        "lending/switch_s": 0.0,
    }
    write_steps(folder, {**common, **lent}, {**common, **not_lent})

    assert line(folder, "lent devices") == (
        "lent devices: generate 20.0%, change sides 5.0%; 20.0% of the generated tokens"
    )


def test_a_run_without_lending_has_no_such_line(folder: RunFolder) -> None:
    write_steps(folder, {"staleness/queue": 0.5, "trained_tokens": 100.0, "step_s": 10.0})

    assert not [each for each in show_lines(folder.path) if each.startswith("lent devices")]


def test_recoveries_are_counted(folder: RunFolder) -> None:
    append_recovery(folder.path, part="learner", cause="train[0] died.", remedy="rewind", step=3, seconds=1.5)
    append_recovery(folder.path, part="generator", cause="rollout[1] died.", remedy="rewind", step=7, seconds=70.5)
    append_recovery(folder.path, part="learner", cause="train[1] died.", remedy="rewind", step=9, seconds=48.0)

    assert line(folder, "recoveries") == (
        "recoveries: 3 (generator 1, learner 2) in 2:00; the last after step 9: train[1] died."
    )


def test_generators_that_joined_and_left_are_counted(folder: RunFolder) -> None:
    for change, name, generators in (("joined", "rollout[2]@b/cpu#0", 3), ("left", "rollout[0]", 2)):
        append_membership(
            folder.path, change=change, generator=name, cause="it got SIGTERM", step=4, generators=generators
        )

    assert line(folder, "generators") == (
        "generators: 1 joined, 1 left; 2 after the last change, at step 4: rollout[0] has left (it got SIGTERM)"
    )
    assert [each.change for each in membership_changes(folder.path)] == ["joined", "left"]
    assert list(recoveries(folder.path)) == []


def test_a_run_that_nobody_disturbed_has_no_such_line(folder: RunFolder) -> None:
    names = ("recoveries", "generators")
    assert not [each for each in show_lines(folder.path) if each.startswith(names)]


def test_a_line_that_was_cut_is_left_out(folder: RunFolder) -> None:
    append_recovery(folder.path, part="learner", cause="train[0] died.", remedy="rewind", step=3, seconds=1.5)
    with (folder.path / EVENTS_FILE).open("a") as file:
        file.write('{"event": "recovery", "part": "lea\n{"event": "something else"}\n[]\n')

    assert [each.step for each in recoveries(folder.path)] == [3]
