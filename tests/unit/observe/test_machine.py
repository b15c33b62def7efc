# SPDX-License-Identifier: Apache-2.0
"""Memory and processors from files as Linux has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from podium.observe.machine import MachineFigures

PAGE = os.sysconf("SC_PAGE_SIZE")


def write(proc: Path, stat: str, pages: int) -> None:
    (proc / "self").mkdir(exist_ok=True)
    (proc / "self" / "statm").write_text(f"999 {pages} 3 4 5 6 7\n")
    (proc / "meminfo").write_text("MemTotal:       8388608 kB\nMemFree: 5 kB\nMemAvailable:    2097152 kB\n")
    (proc / "stat").write_text(f"cpu  {stat}\ncpu0 1 1 1 1 1 1 1 1 1 1\n")


def test_figures_are_those_of_the_files(tmp_path: Path) -> None:
    write(tmp_path, "10 0 10 80 0 0 0 0 0 0", 1)
    figures = MachineFigures(tmp_path, every_s=0.0)
    # Of 100 further ticks 20 + 5 + 5 + 10 are busy; the guests in the last two fields are part of the first two.
    write(tmp_path, "30 5 15 130 10 4 3 3 20 5", (1 << 29) // PAGE)

    assert figures.due() == pytest.approx(
        {"machine/process_memory_gib": 0.5, "machine/memory_gib": 6.0, "machine/cpu": 0.4}
    )
    assert "machine/cpu" not in figures.due()  # no tick has passed


def test_figures_come_once_in_a_while(tmp_path: Path) -> None:
    write(tmp_path, "10 0 10 80 0 0 0 0 0 0", 1)
    figures = MachineFigures(tmp_path)

    assert figures.due()
    assert figures.due() == {}


def test_another_system_has_none(tmp_path: Path) -> None:
    assert MachineFigures(tmp_path / "nothing").due() == {}
