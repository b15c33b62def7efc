# SPDX-License-Identifier: Apache-2.0
"""Selects the console of a process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from podium.observe.console import Console, PlainConsole
from podium.observe.recording import RecordedConsole


def open_console(*, rank: int, log_every: int = 1, stream: TextIO | None = None) -> Console:
    """The matching console: silent on ranks other than 0, live on a terminal, plain otherwise."""
    if rank != 0:
        return Console()
    stream = stream if stream is not None else sys.stdout
    if stream.isatty():
        from podium.observe.terminal import TerminalConsole  # imports rich

        return TerminalConsole(stream)
    return PlainConsole(stream, log_every=log_every)


def open_run_console(*, rank: int, log_every: int = 1, file: Path | None = None) -> Console:
    """The matching console, which also keeps everything as plain text: in `file`, or until `record_in` names one."""
    if rank != 0:
        return Console()
    console = RecordedConsole(open_console(rank=rank, log_every=log_every), log_every=log_every)
    if file is not None:
        console.record_in(file)
    return console
