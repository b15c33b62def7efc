# SPDX-License-Identifier: Apache-2.0
"""Memory and processors from files as Linux has them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podium.observe.gpus import GpuFigures
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


def test_a_host_without_the_driver_has_no_gpus() -> None:
    assert GpuFigures("libno-such-driver.so.1").read() == {}
    assert GpuFigures("libc.so.6").read() == {}  # a library without its functions


def test_figures_that_take_long_come_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes 0.1 s: the next figures come after a hundred seconds."""
    clock = [10.0]

    class SlowGpus(GpuFigures):
        def read(self) -> dict[str, float]:
            clock[0] += 0.1
            return {"machine/gpu0_use": 0.5}

    monkeypatch.setattr("podium.observe.machine.time", SimpleNamespace(monotonic=lambda: clock[0]))
    figures = MachineFigures(tmp_path / "nothing", every_s=1.0, gpus=SlowGpus("none"))
    assert figures.due() == {"machine/gpu0_use": 0.5}
    clock[0] = 109.0
    assert figures.due() == {}
    clock[0] = 110.1
    assert figures.due() == {"machine/gpu0_use": 0.5}


def test_gpus_are_read_from_the_structures_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs; the second one tells no use."""

    class Driver:
        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlDeviceGetCount_v2(self, count: Any) -> int:
            count._obj.value = 2
            return 0

        def nvmlDeviceGetHandleByIndex_v2(self, number: int, handle: Any) -> int:
            handle._obj.value = 100 + number
            return 0

        def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
            whole = (ctypes.c_ulonglong * 3)(80 << 30, 60 << 30, (handle.value or 0) - 100 + 20 << 30)
            ctypes.memmove(ctypes.addressof(memory._obj), whole, 24)  # total, free, used
            return 0

        def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, use: Any) -> int:
            ctypes.memmove(ctypes.addressof(use._obj), (ctypes.c_uint * 2)(75, 10), 8)  # of the GPU, of its memory
            return 0 if handle.value == 100 else 3

    monkeypatch.setattr("podium.observe.gpus.ctypes.CDLL", lambda name: Driver())
    assert GpuFigures().read() == {
        "machine/gpu0_memory_gib": 20.0, "machine/gpu0_use": 0.75, "machine/gpu1_memory_gib": 21.0
    }  # fmt: skip
