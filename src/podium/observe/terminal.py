# SPDX-License-Identifier: Apache-2.0
"""The console on a terminal: one live line at the bottom, everything else scrolls above it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from podium.observe.console import Console, EvaluationView, SampleView, StepView, aligned
from podium.observe.formats import one_line

_REFRESH_S = 0.1  # redrawing costs about a millisecond: as often as an eye sees, not as often as steps come
_LEAST_BAR, _WIDEST_BAR = 10, 32


class TerminalConsole(Console):
    """Draws from the caller's thread only: no refresh thread competes with training for a core."""

    def __init__(self, stream: TextIO) -> None:
        self._rich = RichConsole(file=stream, highlight=False, soft_wrap=False)
        self._live: Live | None = None
        self._last: StepView | None = None
        self._doing: str | None = None
        self._drawn_at = -_REFRESH_S

    def header(self, lines: Sequence[str]) -> None:
        """Prints the run's description."""
        for line in aligned(lines, self._rich.width):
            label, colon, value = line.partition(": ")
            is_continued = line.startswith(" ")
            self._print(
                Text(line) if is_continued else Text.assemble((label + colon, "dim"), value) if colon
                else Text(line, style="bold")
            )  # fmt: skip
        self._print(Text())

    def step(self, view: StepView) -> None:
        """Draws the progress line, at most once per refresh interval."""
        self._last, self._doing = view, None
        now = time.monotonic()
        if now - self._drawn_at >= _REFRESH_S or view.step == view.num_steps:
            self._draw()
            self._drawn_at = now

    def doing(self, what: str | None) -> None:
        """Shows work other than steps."""
        self._doing = what
        self._draw()

    def evaluation(self, view: EvaluationView) -> None:
        """Prints an evaluation."""
        self._doing = None
        self._print(Text("\n".join(view.headline(self._rich.width)), style="cyan"))
        if view.samples:
            self._print(_sample_table(view.samples))
        self._draw()

    def note(self, text: str) -> None:
        """Prints a line."""
        self._print(Text(text))

    def warning(self, text: str) -> None:
        """Prints a warning."""
        self._print(Text.assemble(("warning: ", "bold yellow"), text))

    def close(self) -> None:
        """Leaves the last line on the screen and restores the cursor."""
        if self._live is not None:
            self._doing = None
            if self._last is not None:
                self._live.update(self._line(), refresh=True)
            self._live.stop()
            self._live = None

    def _print(self, what: Text | Table) -> None:
        self._rich.print(what)

    def _draw(self) -> None:
        if self._last is None and self._doing is None:
            return
        if self._live is None:
            self._live = Live(console=self._rich, auto_refresh=False, transient=False)
            self._live.start()
        self._live.update(self._line(), refresh=True)

    def _line(self) -> Table:
        line = Table.grid(padding=(0, 1))
        view = self._last
        if view is None:
            line.add_row(Text(f"{self._doing} …", style="magenta"))
            return line
        count = Text(f"step {view.step}/{view.num_steps}", style="bold")
        facts = _facts(view, self._doing, self._rich.width - count.cell_len - 2)
        room = self._rich.width - count.cell_len - facts.cell_len - 3
        if room < _LEAST_BAR:
            line.add_row(count, facts)
        else:
            width = min(room, _WIDEST_BAR)
            line.add_row(count, ProgressBar(total=view.num_steps, completed=view.step, width=width), facts)
        return line


def _facts(view: StepView, doing: str | None, width: int) -> Text:
    """The facts on one line; a narrow terminal omits the less important ones."""
    text = Text(no_wrap=True, overflow="ellipsis")
    if doing is not None:
        text.append(f"{doing} …  ", style="magenta")
    for label, value in view.fitting_facts(width - text.cell_len):
        text.append(f"{label} ", style="dim").append(value, style="bold red" if label == "skipped" else "")
        text.append("  ")
    text.right_crop(2)
    return text


def _sample_table(samples: Sequence[SampleView]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for name in ("", "asked", "answered", "expected"):
        table.add_column(name, overflow="fold")
    for sample in samples:
        expected = "" if sample.reference is None else one_line(sample.reference)
        table.add_row(_mark(sample), Text(one_line(sample.prompt)), Text(one_line(sample.answer)), Text(expected))
    return table


def _mark(sample: SampleView) -> Text:
    if sample.score is None:
        return Text("·", style="dim")
    if sample.score in (0, 1):
        return Text("✓", style="green") if sample.score else Text("✗", style="red")
    return Text(f"{sample.score:.2f}")
