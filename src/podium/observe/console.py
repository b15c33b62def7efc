# SPDX-License-Identifier: Apache-2.0
"""The output of a run: a live line on a terminal, plain lines when piped, nothing on ranks other than 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from podium.observe.formats import duration, one_line, rate


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One finished optimizer step as the console shows it. None: not known (yet)."""

    step: int
    num_steps: int
    loss: float
    lr: float
    tokens_per_s: float
    mfu: float | None = None  # share of the device's peak, 0 to 1
    eta_s: float | None = None
    grad_norm: float | None = None
    num_skipped: int = 0  # steps skipped so far, for a loss or gradient that was not finite
    own: tuple[tuple[str, str], ...] = ()  # the program's own values, shown first

    def facts(self) -> list[tuple[str, str]]:
        """(label, value) in the order of display."""
        facts = [*self.own, ("loss", f"{self.loss:.4f}"), ("lr", f"{self.lr:.2e}")]
        if self.grad_norm is not None:
            facts.append(("grad", f"{self.grad_norm:.2f}"))
        facts.append(("tokens/s", rate(self.tokens_per_s)))
        if self.mfu is not None:
            facts.append(("MFU", f"{self.mfu:.1%}"))
        if self.num_skipped:
            facts.append(("skipped", str(self.num_skipped)))
        if self.eta_s is not None:
            facts.append(("ETA", duration(self.eta_s)))
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """One generated answer beside the expected one. `score` is None if nothing scores it."""

    prompt: str
    answer: str
    reference: str | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationView:
    """One evaluation as the console shows it; parts that the recipe does not have are None."""

    step: int
    heldout_loss: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)  # the program's other measurements on held-out data
    score_name: str | None = None
    score: float | None = None  # mean over all scored answers
    num_scored: int = 0
    seconds: float | None = None
    samples: Sequence[SampleView] = ()

    def headline(self) -> str:
        """The evaluation in one line."""
        parts = [f"evaluation at step {self.step}"]
        if self.heldout_loss is not None:
            parts.append(f"held-out loss {self.heldout_loss:.4f}")
        parts += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in self.measured.items()]
        if self.score is not None:
            parts.append(f"{self.score_name or 'score'} {_shown_score(self.score)} of {self.num_scored}")
        if self.seconds is not None:
            parts.append(f"took {self.seconds:.1f} s")
        return "  ".join(parts)


class Console:
    """Receives events and decides how to show them. This one prints nothing: for every rank but the first."""

    def header(self, lines: Sequence[str]) -> None:
        """Shows the run's description before its first step. `label: value` lines are aligned."""

    def step(self, view: StepView) -> None:
        """Shows a finished step."""

    def doing(self, what: str | None) -> None:
        """Shows work other than a step ("evaluating"); None: back to steps."""

    def evaluation(self, view: EvaluationView) -> None:
        """Shows a finished evaluation."""

    def note(self, text: str) -> None:
        """Shows a line."""

    def warning(self, text: str) -> None:
        """Shows a warning that the user should act on."""

    def close(self) -> None:
        """Releases the terminal after the run ended or was interrupted. May be called twice."""


class PlainConsole(Console):
    """One line per logged step, no colours and no cursor movement: for pipes, files and job logs."""

    def __init__(self, stream: TextIO, *, log_every: int) -> None:
        self._stream = stream
        self._log_every = log_every
        self._first = True

    def header(self, lines: Sequence[str]) -> None:
        """Prints the run's description."""
        for line in aligned(lines):
            self._write(line)

    def step(self, view: StepView) -> None:
        """Prints the first step, the last, and every `log_every`-th."""
        # The first step shows that the run has begun, the last one how it ended.
        if self._first or view.step % self._log_every == 0 or view.step == view.num_steps:
            facts = "  ".join(f"{label} {value}" for label, value in view.facts())
            width = len(str(view.num_steps))
            self._write(f"step {view.step:>{width}}/{view.num_steps}  {facts}")
        self._first = False

    def doing(self, what: str | None) -> None:
        """Prints nothing: a log has no line that changes."""

    def evaluation(self, view: EvaluationView) -> None:
        """Prints an evaluation."""
        self._write(view.headline())
        for sample in view.samples:
            for line in _sample_lines(sample):
                self._write("  " + line)

    def note(self, text: str) -> None:
        """Prints a line."""
        self._write(text)

    def warning(self, text: str) -> None:
        """Prints a warning."""
        self._write(f"warning: {text}")

    def close(self) -> None:
        """Flushes what is written."""
        self._stream.flush()

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def aligned(lines: Sequence[str]) -> list[str]:
    """`label: value` lines with their values in one column; other lines as they are."""
    pairs = [line.partition(": ") for line in lines]
    width = max((len(label) for label, colon, _ in pairs if colon), default=0)
    return [f"{label + ':':<{width + 1}} {value}" if colon else label for label, colon, value in pairs]


def _sample_lines(sample: SampleView) -> list[str]:
    """Short ones on one line, others one below the other. The expected answer is left out if the answer is right."""
    parts = [("asked", one_line(sample.prompt)), (_verdict(sample), one_line(sample.answer))]
    if sample.reference is not None and sample.score != 1:
        parts.append(("expected", one_line(sample.reference)))
    if sum(len(text) for _, text in parts) <= 80:
        return ["  ".join(f"{label}: {text}" for label, text in parts)]
    return aligned([f"{label}: {text}" for label, text in parts])


def _verdict(sample: SampleView) -> str:
    match sample.score:
        case None:
            return "answered"
        case 1:
            return "right"
        case 0:
            return "wrong"
        case score:
            return f"score {score:.2f}"


def _shown_score(score: float) -> str:
    return f"{score:.1%}" if 0 <= score <= 1 else f"{score:.4g}"
