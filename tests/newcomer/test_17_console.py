# SPDX-License-Identifier: Apache-2.0
"""Lines were longer than a terminal of 80 columns, which cut off the remaining time, and nothing was left of them when
the terminal was closed. Every line fits, and each run folder keeps them in console.log."""

from __future__ import annotations

import errno
import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.made_batches import on_policy_recipe
from helpers.on_policy import rl_recipe
from helpers.workspace import Workspace
from podium.cluster import RayCluster
from podium.controller.start_up import early_start
from podium.controller.step_log import step_view
from podium.observe import Console, EvaluationView, SampleView, StepView, open_run_console
from podium.observe.console import PlainConsole
from podium.observe.opening import open_console
from podium.observe.recording import RecordedConsole
from podium.runs.folder import RunFolder

ON_POLICY = {
    "lr": 1e-6, "tokens_per_s": 1234.5, "step_s": 123.456, "reward/mean": -12.345, "groups/solve_rate": 0.5,
    "response/mean": 12345.6, "kl/reference": 0.0123, "loss": 0.1234, "grad_norm": 12.5, "entropy": 1.234,
}  # fmt: skip
LONG = "groups of equal rewards teach nothing, and here is why that may be, in " + "many words " * 20


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def views() -> list[StepView]:
    """Steps of every kind with large values, late in a long run."""
    times = {"step": 123_456, "num_steps": 200_000, "eta_s": 400_000.0}
    fixed = StepView(loss=12.3456, lr=3e-3, tokens_per_s=45_123.0, mfu=0.471, grad_norm=123.5, num_skipped=12, **times)
    pairs = StepView(
        loss=0.6931, lr=3e-3, tokens_per_s=45_123.0, mfu=0.4, own=(("accuracy", "75.0%"), ("margin", "-12.345")),
        **times,
    )  # fmt: skip
    rewards = step_view(1, on_policy_recipe(), ON_POLICY)
    return [fixed, pairs, StepView(**{**_fields(rewards), **times})]


def _fields(view: StepView) -> dict[str, object]:
    return {name: getattr(view, name) for name in StepView.__dataclass_fields__}


def show(console: Console) -> None:
    console.header(["run: runs/" + "x" * 40, f"program: grpo, 300 steps of {LONG}"])
    console.note(LONG)
    console.warning(LONG)
    for view in views():
        console.step(view)
    samples = [SampleView(prompt="p" * 150, answer="a b " * 60, reference="7", score=0.0)]
    console.evaluation(
        EvaluationView(
            step=50, heldout_loss=1.25, measured={"calibration_error": 0.1, "brier_score": 0.2, "score_margin": 1.0},
            score_name="held-out reward", score=0.27, num_scored=500, seconds=3.2, samples=samples,
        )
    )  # fmt: skip
    console.close()


def lines_of(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()


def too_long(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if len(line) > 80]


def test_plain_lines_fit_80_columns() -> None:
    stream = io.StringIO()
    show(PlainConsole(stream))

    assert not too_long(stream.getvalue().splitlines())
    assert stream.getvalue().count("words") == 20 * 3  # nothing of it is lost


def test_a_terminal_of_80_columns_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    stream = FakeTerminal()
    show(open_console(rank=0, stream=stream))

    lines = lines_of(stream.getvalue())
    assert not too_long([line.rstrip() for line in lines])
    assert all("ETA 4d 15:06" in line for line in lines if line.startswith("step "))


@pytest.mark.parametrize("view", views())
def test_the_remaining_time_and_what_the_method_is_about_are_never_left_out(view: StepView) -> None:
    stream = io.StringIO()
    PlainConsole(stream).step(view)

    line = stream.getvalue()
    assert "ETA 4d 15:06" in line
    for label, value in view.own[:2]:
        assert f"{label} {value}" in line


def test_paths_stay_whole() -> None:
    stream, path = io.StringIO(), "/a/" + "very-long-folder/" * 8
    PlainConsole(stream).warning(f"this file is damaged: {path}")

    assert path in stream.getvalue().splitlines()[1]


# --- console.log ---


def test_what_was_shown_before_the_run_folder_exists_is_recorded_too(tmp_path: Path) -> None:
    stream, file = io.StringIO(), tmp_path / "console.log"
    console = RecordedConsole(PlainConsole(stream), log_every=2)
    console.warning("early")
    console.record_in(file)
    console.note("late")
    console.close()

    assert file.read_text() == stream.getvalue() == "warning: early\nlate\n"


class ClosedPipe(io.StringIO):
    """Its reader leaves after the first line."""

    def write(self, text: str) -> int:
        if self.getvalue():
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return super().write(text)


def test_a_console_without_a_reader_records_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = ClosedPipe()
    monkeypatch.setattr(sys, "stdout", pipe)
    console = RecordedConsole(PlainConsole(pipe), log_every=1)
    console.record_in(tmp_path / "console.log")

    for text in ("first", "second", "third"):
        console.note(text)
    console.close()

    assert pipe.getvalue() == "first\n"
    lines = (tmp_path / "console.log").read_text().splitlines()
    assert [line for line in lines if line in ("first", "second", "third")] == ["first", "second", "third"]
    assert len(lines) == 4  # one of them says why the terminal shows no more


class FailingStream(io.StringIO):
    """Fails with the same error whatever is written."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))


def test_a_console_on_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    console = RecordedConsole(PlainConsole(FailingStream(errno.ENOSPC)), log_every=1)
    console.record_in(tmp_path / "console.log")

    console.note("text")
    console.close()

    assert "text" in (tmp_path / "console.log").read_text()


def test_a_console_that_fails_otherwise_is_an_error() -> None:
    with pytest.raises(OSError, match="Permission denied"):
        RecordedConsole(PlainConsole(FailingStream(errno.EACCES)), log_every=1).note("text")


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_output_any_more(workspace: Workspace) -> None:
    recipe = workspace.recipe("sums", steps=4)
    with subprocess.Popen(
        [sys.executable, "-m", "podium", "train", recipe], cwd=workspace.path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(240) == 0

    assert RunFolder.open(workspace.path / "runs/sums").status == "finished"
    assert "step 4/4" in (workspace.path / "runs/sums/console.log").read_text()


def test_only_rank_0_records(tmp_path: Path) -> None:
    open_run_console(rank=1, file=tmp_path / "console.log").note("hello")

    assert not (tmp_path / "console.log").exists()


def _steps(log: str) -> list[str]:
    return re.findall(r"^step (\d+)/", log, re.MULTILINE)


def test_a_run_on_fixed_data_keeps_what_it_showed_and_a_resumed_one_appends(workspace: Workspace) -> None:
    outcome = workspace.podium("train", workspace.recipe("sums", steps=2))
    log = (workspace.path / "runs/sums/console.log").read_text()
    assert log == outcome.out
    assert _steps(log) == ["1", "2"]

    assert workspace.podium("resume", "runs/sums", "--set", "steps=3").code == 0
    both = (workspace.path / "runs/sums/console.log").read_text()
    assert both.startswith(log)
    assert _steps(both) == ["1", "2", "3"]
    assert "resumed after step 2" in both


@pytest.mark.slow
def test_an_on_policy_run_keeps_what_it_showed(workspace: Workspace) -> None:
    outcome = workspace.podium("train", rl_recipe(workspace, steps=2))

    assert outcome.code == 0, outcome.err
    assert (workspace.path / "runs/sums/console.log").read_text() == outcome.out


@pytest.mark.slow
def test_the_end_of_a_failed_run_is_recorded(workspace: Workspace) -> None:
    (workspace.path / "rewards.py").write_text(
        "calls = []\n"
        "def late(answer):\n"
        "    calls.append(1)\n"
        "    return 'no' if len(calls) > 20 else float(len(answer))\n"
    )
    recipe = rl_recipe(
        workspace, steps=5, reward=[{"function": "rewards.py:late"}], grading={"on_error": "fail"},
        checkpoint={"every": 1},
    )  # fmt: skip

    outcome = workspace.podium("train", recipe)

    assert outcome.code == 2
    log = (workspace.path / "runs/sums/console.log").read_text()
    assert log.endswith(outcome.err)
    assert "podium resume" in log


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["ray", "two-ranks", "on-policy-ray"])
def test_every_launcher_keeps_a_log(workspace: Workspace, kind: str) -> None:
    match kind:
        case "ray":
            recipe = workspace.recipe("sums", steps=2, placement={"launcher": "ray", "devices": 1})
        case "two-ranks":
            recipe = workspace.recipe("sums", steps=2, placement={"devices": 2})
        case _:
            recipe = rl_recipe(workspace, steps=2, placement={"launcher": "ray"})

    outcome = workspace.process("train", recipe)

    assert outcome.code == 0, outcome.err
    assert (workspace.path / "runs/sums/console.log").read_text() == outcome.out
    assert not too_long([line for line in outcome.out.splitlines() if not line.startswith(("run:", "  export"))])
    if "ray" in kind:
        assert outcome.out.startswith("start-up   0.0 s: ")


# --- the first words of a start-up on Ray ---


class Heard(Console):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_run_that_joins_a_cluster_says_something_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    console = Heard()

    with early_start(on_policy_recipe("placement.launcher=ray"), console) as start_up:
        assert start_up.ray is None
        assert len(console.notes) == 1
        assert "start-up   0.0 s" in console.notes[0]


@pytest.mark.parametrize(
    ("given", "environment", "address"),
    [
        (None, None, None),
        (None, "", None),
        (None, "local", None),
        (None, "head:6379", "head:6379"),
        ("other:1", "head:6379", "other:1"),
        ("auto", None, "auto"),
    ],
)
def test_which_ray_is_joined(
    monkeypatch: pytest.MonkeyPatch, given: str | None, environment: str | None, address: str | None
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setitem(os.environ, "RAY_ADDRESS", environment)

    assert RayCluster(address=given).running_address == address
