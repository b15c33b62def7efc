# SPDX-License-Identifier: Apache-2.0
"""The output of a run: a live line on a terminal, plain lines when piped, nothing on ranks other than 0."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from podium.observe.formats import duration, one_line, rate

# Columns of plain lines.
WIDTH = 80
# Facts that a step line leaves out first where they do not all fit. The metrics file has them all.
_DROPPED_FIRST = (
    "grad", "lr", "MFU", "entropy", "tokens/s", "s", "loss", "lent", "idle", "length", "KL", "margin", "wait",
)  # fmt: skip


class TextSink(Protocol):
    """What a plain console writes to: an open text file, for instance."""

    def write(self, text: str, /) -> object:
        """Appends text."""

    def flush(self) -> object:
        """Makes it visible to readers."""


class ShownMetric(NamedTuple):
    """A metric that the step line shows, with its label there and its format."""

    metric: str
    label: str
    format: str = ".3f"

    def fact(self, metrics: Mapping[str, float]) -> tuple[str, str]:
        """(label, value) for the step line."""
        return self.label, format(metrics[self.metric], self.format)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One finished optimizer step as the console shows it. None: not known (yet)."""

    step: int
    num_steps: int
    loss: float | None
    lr: float
    tokens_per_s: float
    mfu: float | None = None  # share of the device's peak, 0 to 1
    eta_s: float | None = None
    grad_norm: float | None = None
    num_skipped: int = 0  # steps skipped so far, for a loss or gradient that was not finite
    own: tuple[tuple[str, str], ...] = ()  # the program's own values, shown first

    def facts(self) -> list[tuple[str, str]]:
        """(label, value) in the order of display. The remaining time is first, so that no narrow line cuts it off."""
        facts = [("ETA", duration(self.eta_s))] if self.eta_s is not None else []
        if self.num_skipped:
            facts.append(("skipped", str(self.num_skipped)))
        facts += self.own
        if self.loss is not None:
            facts.append(("loss", f"{self.loss:.4f}"))
        facts.append(("lr", f"{self.lr:.2e}"))
        if self.grad_norm is not None:
            facts.append(("grad", f"{self.grad_norm:.2f}"))
        facts.append(("tokens/s", rate(self.tokens_per_s)))
        if self.mfu is not None:
            facts.append(("MFU", f"{self.mfu:.1%}"))
        return facts

    def fitting_facts(self, width: int) -> list[tuple[str, str]]:
        """The facts that fit this many columns, joined by two spaces; less important ones are left out first."""
        lengths = {label: len(label) + len(value) + 3 for label, value in self.facts()}
        room, left_out = width + 2 - sum(lengths.values()), set[str]()
        for label in _DROPPED_FIRST:
            if room < 0 and label in lengths:
                left_out.add(label)
                room += lengths[label]
        for label in reversed(_DROPPED_FIRST):  # a short one may fit in the place of a long one
            if label in left_out and lengths[label] <= room:
                left_out.remove(label)
                room -= lengths[label]
        return [(label, value) for label, value in self.facts() if label not in left_out]


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
    score_is_share: bool = False  # whether all scores are 0 or 1, so that the mean is a share
    solved: float | None = None  # share of solved answers, where the score is no share
    num_scored: int = 0
    seconds: float | None = None
    samples: Sequence[SampleView] = ()

    def headline(self, width: int = WIDTH) -> list[str]:
        """The evaluation in one line, or more where it does not fit."""
        parts = [f"evaluation at step {self.step}"]
        if self.heldout_loss is not None:
            parts.append(f"held-out loss {self.heldout_loss:.4f}")
        parts += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in self.measured.items()]
        if self.score is not None:
            parts.append(f"{self.score_name or 'score'} {self._shown_score(self.score)}")
        if self.solved is not None:
            parts.append(f"solved {self.solved:.1%}")
        if self.seconds is not None:
            parts.append(f"took {self.seconds:.1f} s")
        lines = parts[:1]
        for part in parts[1:]:
            if len(lines[-1]) + 2 + len(part) <= width:
                lines[-1] += f"  {part}"
            else:
                lines.append(f"  {part}")
        return lines

    def _shown_score(self, score: float) -> str:
        if self.score_is_share:
            return f"{score:.1%} of {self.num_scored}"
        return f"{score:.4g} (mean of {self.num_scored})"


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

    def record_in(self, file: Path) -> None:
        """Writes everything that was shown, and will be shown, to this file too, if the console keeps a log."""


class PlainConsole(Console):
    """One line per logged step, no colours and no cursor movement: for pipes, files and job logs."""

    def __init__(self, stream: TextSink, *, log_every: int = 1) -> None:
        self._stream = stream
        self._log_every = log_every
        self._first = True

    def header(self, lines: Sequence[str]) -> None:
        """Prints the run's description."""
        for line in aligned(lines, WIDTH):
            self._write(line)

    def step(self, view: StepView) -> None:
        """Prints the first step, the last, and every `log_every`-th."""
        # The first step shows that the run has begun, the last one how it ended.
        if self._first or view.step % self._log_every == 0 or view.step == view.num_steps:
            count = f"step {view.step:>{len(str(view.num_steps))}}/{view.num_steps}"
            facts = view.fitting_facts(WIDTH - len(count) - 2)
            self._write("  ".join([count, *(f"{label} {value}" for label, value in facts)]))
        self._first = False

    def doing(self, what: str | None) -> None:
        """Prints nothing: a log has no line that changes."""

    def evaluation(self, view: EvaluationView) -> None:
        """Prints an evaluation."""
        for line in view.headline():
            self._write(line)
        for sample in view.samples:
            for line in _sample_lines(sample):
                for part in wrapped("  " + line, WIDTH, indent="    ", break_words=True):
                    self._write(part)

    def note(self, text: str) -> None:
        """Prints a line, or several."""
        self._write_wrapped(text)

    def warning(self, text: str) -> None:
        """Prints a warning."""
        self._write_wrapped(f"warning: {text}")

    def close(self) -> None:
        """Flushes what is written."""
        self._stream.flush()

    def _write_wrapped(self, text: str) -> None:
        for line in text.splitlines():
            for part in wrapped(line, WIDTH):
                self._write(part)

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def aligned(lines: Sequence[str], width: int | None = None) -> list[str]:
    """`label: value` lines with their values in one column, also where they are wrapped at `width`; other lines as they
    are."""
    pairs = [line.partition(": ") for line in lines]
    column = max((len(label) for label, colon, _ in pairs if colon), default=0) + 2
    whole = [f"{label + ':':<{column}}{value}" if colon else label for label, colon, value in pairs]
    if width is None:
        return whole
    indents = [" " * column if colon else "" for _, colon, _ in pairs]
    return [part for line, indent in zip(whole, indents, strict=True) for part in wrapped(line, width, indent=indent)]


def wrapped(line: str, width: int, *, indent: str = "  ", break_words: bool = False) -> list[str]:
    """A line in parts of at most `width` columns. Paths and other long words stay whole unless `break_words`."""
    parts = textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=break_words, break_on_hyphens=False,
        replace_whitespace=False, expand_tabs=False,
    )  # fmt: skip
    return parts or [""]


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
