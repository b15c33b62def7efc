# SPDX-License-Identifier: Apache-2.0
"""What a start-up is waiting for, line by line with the seconds that it has taken so far."""

from __future__ import annotations

import time

from podium.observe.console import Console


class StartUpLog:
    """Called with what begins now."""

    def __init__(self, console: Console) -> None:
        self._console, self._began_s = console, time.perf_counter()

    def __call__(self, what: str) -> None:
        self._console.note(f"start-up {time.perf_counter() - self._began_s:5.1f} s: {what}")
