# SPDX-License-Identifier: Apache-2.0
"""Reports the phases of a start-up, line by line with the seconds so far."""

from __future__ import annotations

import time

from podium.observe.console import Console


class StartUpLog:
    """Called with the name of the phase that begins."""

    def __init__(self, console: Console) -> None:
        self._console, self._began_s = console, time.perf_counter()

    def __call__(self, what: str) -> None:
        self._console.note(f"start-up {time.perf_counter() - self._began_s:5.1f} s: {what}")
