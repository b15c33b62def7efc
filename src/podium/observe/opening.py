# SPDX-License-Identifier: Apache-2.0
"""Selects the console of a process."""

from __future__ import annotations

import sys
from typing import TextIO

from podium.observe.console import Console, PlainConsole


def open_console(*, rank: int, log_every: int = 1, stream: TextIO | None = None) -> Console:
    """The matching console: silent on ranks other than 0, live on a terminal, plain otherwise."""
    if rank != 0:
        return Console()
    stream = stream if stream is not None else sys.stdout
    if stream.isatty():
        from podium.observe.terminal import TerminalConsole  # imports rich

        return TerminalConsole(stream)
    return PlainConsole(stream, log_every=log_every)
