# SPDX-License-Identifier: Apache-2.0
"""The console: plain lines when piped, one live line on a terminal, silence beside rank 0."""

import io
import re

import pytest

from podium.observe.console import (
    Console,
    EvaluationView,
    PlainConsole,
    SampleView,
    StepView,
)
from podium.observe.opening import open_console
from podium.observe.terminal import TerminalConsole


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def view(step: int, **changes: float | int | None) -> StepView:
    values = {"loss": 2.34567, "lr": 3e-3, "tokens_per_s": 45_123.0, "mfu": 0.471, "eta_s": 75.0, "grad_norm": 1.5}
    return StepView(step=step, num_steps=200, **(values | changes))  # type: ignore[arg-type]


EVALUATION = EvaluationView(
    step=50,
    heldout_loss=1.25,
    score_name="exact_match",
    score=0.542,
    score_is_share=True,
    num_scored=500,
    seconds=3.21,
    samples=[
        SampleView(prompt="What is 47 plus 38?", answer="85", reference="85", score=1.0),
        SampleView(prompt="9 minus\n2?", answer="\x1b[2J6 [bold]", reference="7", score=0.0),
    ],
)


def test_only_rank_0_speaks() -> None:
    stream = io.StringIO()
    console = open_console(rank=1, stream=stream)
    console.header(["model: m"])
    console.step(view(1))
    console.doing("evaluating")
    console.evaluation(EVALUATION)
    console.note("n")
    console.warning("w")
    console.close()
    assert type(console) is Console
    assert stream.getvalue() == ""


def test_the_stream_decides_between_the_live_line_and_plain_lines() -> None:
    assert isinstance(open_console(rank=0, stream=io.StringIO()), PlainConsole)
    assert isinstance(open_console(rank=0, stream=FakeTerminal()), TerminalConsole)


def test_a_plain_step_is_one_line_with_what_fits_on_it() -> None:
    stream = io.StringIO()
    open_console(rank=0, stream=stream).step(view(7))
    assert stream.getvalue() == "step   7/200  ETA 1:15  loss 2.3457  lr 3.00e-03  tokens/s 45.1k  MFU 47.1%\n"


def test_what_is_not_known_is_left_out_and_skipped_steps_are_reported() -> None:
    stream = io.StringIO()
    open_console(rank=0, stream=stream).step(view(7, mfu=None, eta_s=None, grad_norm=None, num_skipped=2))
    assert stream.getvalue() == "step   7/200  skipped 2  loss 2.3457  lr 3.00e-03  tokens/s 45.1k\n"


def test_plain_steps_come_every_log_every_and_at_both_ends() -> None:
    stream = io.StringIO()
    console = open_console(rank=0, log_every=75, stream=stream)
    for step in range(3, 201):  # a run that was resumed at step 2
        console.step(view(step))
    assert [int(found) for found in re.findall(r"step +(\d+)/", stream.getvalue())] == [3, 75, 150, 200]


def test_header_lines_are_aligned_at_their_values() -> None:
    stream = io.StringIO()
    open_console(rank=0, stream=stream).header(["Podium", "model: a: b", "run folder: runs/x"])
    assert stream.getvalue().splitlines() == ["Podium", "model:      a: b", "run folder: runs/x"]


def test_a_plain_evaluation_shows_loss_score_and_answers_without_their_control_characters() -> None:
    stream = io.StringIO()
    open_console(rank=0, stream=stream).evaluation(EVALUATION)
    assert stream.getvalue().splitlines() == [
        "evaluation at step 50  held-out loss 1.2500  exact_match 54.2% of 500",
        "  took 3.2 s",
        "  asked: What is 47 plus 38?  right: 85",
        r"  asked: 9 minus\n2?  wrong: \x1b[2J6 [bold]  expected: 7",
    ]


def test_a_long_plain_answer_is_written_below_its_question() -> None:
    stream = io.StringIO()
    sample = SampleView(prompt="Tell me a story.", answer="Once " * 20, score=0.5)
    open_console(rank=0, stream=stream).evaluation(EvaluationView(step=3, samples=[sample]))
    assert stream.getvalue().splitlines() == [
        "evaluation at step 3",
        "  asked:      Tell me a story.",
        "  score 0.50: " + ("Once " * 13).rstrip(),
        "    " + ("Once " * 7).rstrip(),
    ]


def test_notes_and_warnings_are_lines_of_their_own() -> None:
    stream = io.StringIO()
    console = open_console(rank=0, stream=stream)
    console.note("saved step 50")
    console.warning("2 rows were truncated")
    console.close()
    assert stream.getvalue() == "saved step 50\nwarning: 2 rows were truncated\n"


def shown(console_width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(console_width))
    monkeypatch.setenv("TERM", "xterm")
    stream = FakeTerminal()
    console = open_console(rank=0, stream=stream)
    console.step(view(200))
    console.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n")


def test_a_wide_terminal_has_a_bar_and_every_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(140, monkeypatch)
    assert "step 200/200" in text
    assert "━━━━━━━━━━" in text
    assert "ETA 1:15  loss 2.3457  lr 3.00e-03  grad 1.50  tokens/s 45.1k  MFU 47.1%" in text


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "step 200/200 ETA 1:15  loss 2.3457  lr 3.00e-03  tokens/s 45.1k  MFU 47.1%"),
        (60, "step 200/200 ETA 1:15  loss 2.3457  tokens/s 45.1k"),
        (40, "step 200/200 ETA 1:15  loss 2.3457"),
    ],
)
def test_on_a_narrow_terminal_the_less_important_facts_give_way(
    width: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [each.strip() for each in shown(width, monkeypatch).splitlines() if each.strip()]
    assert lines
    assert set(lines) == {line}


def test_a_terminal_gets_its_cursor_back_however_often_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = FakeTerminal()
    console = open_console(rank=0, stream=stream)
    console.doing("evaluating")
    console.evaluation(EVALUATION)
    console.step(view(1))
    console.warning("[bold] is not markup")
    console.close()
    console.close()
    console.note("after")
    text = stream.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert "\x1b[2J" not in text  # what the model wrote does not clear the screen
    assert "[bold] is not markup" in re.sub(r"\x1b\[[0-9;]*m", "", text)
