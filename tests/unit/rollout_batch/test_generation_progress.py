# SPDX-License-Identifier: Apache-2.0
"""What is shown while answers are generated, and what the summary says."""

from __future__ import annotations

import io
import re
from pathlib import Path

from podium.rollout.engine import Load
from podium.rollout.jobs import GenerationSummary
from podium.rollout.progress import Progress, Standing, describe

LOAD = Load(
    cache_tokens=1000,
    waiting=5, running=8, cache_tokens_used=0, cache_tokens_kept=0, finished=0, generated_tokens=4000,
    prefilled_tokens=0, reused_tokens=0, preemptions=0,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_counts_what_was_there_and_estimates_from_what_has_finished() -> None:
    standing = Standing(before=10, finished=20, wanted=100)

    line = describe(standing, LOAD, tokens_per_s=1234.0, elapsed_s=40.0)

    # 70 are left; 20 took 40 s.
    assert line == "answers 30/100  tokens/s 1.23k  running 8  waiting 62  time left 2:20"


def test_nothing_is_estimated_before_the_first_answer() -> None:
    line = describe(Standing(before=0, finished=0, wanted=3), LOAD, tokens_per_s=0.0, elapsed_s=1.0)

    assert line == "answers 0/3  tokens/s 0  running 8  waiting 0"


def test_a_terminal_keeps_one_line_and_is_given_back() -> None:
    stream = Terminal()
    with Progress(stream, lambda: Standing(before=0, finished=1, wanted=2), lambda: LOAD):
        pass

    assert re.fullmatch(r"(\ranswers 1/2  [^\n]*\x1b\[K)+\n", stream.getvalue())


def test_a_pipe_gets_no_line_of_a_short_run_and_no_control_characters() -> None:
    stream = io.StringIO()
    with Progress(stream, lambda: Standing(before=0, finished=1, wanted=2), lambda: LOAD):
        pass

    assert stream.getvalue() == ""


def test_the_summary_says_what_this_start_did() -> None:
    summary = GenerationSummary(
        out=Path("a.jsonl"), answers=10, finishes={"stop": 6, "length": 3, "error": 1}, new_answers=4, new_tokens=2000,
        prefilled_tokens=25, reused_tokens=75, seconds=2.0,
    )  # fmt: skip

    assert summary.lines() == [
        "answers: 10 (6 of an earlier start)",
        "finished by: error 1, length 3, stop 6",
        "tokens: 2000 in 0:02, 1.00k/s",
        "prompt tokens: 100, of which 75% were reused",
        "file: a.jsonl",
        "1 could not be answered; their lines say why (`error`)",
    ]
