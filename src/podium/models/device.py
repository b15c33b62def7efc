# SPDX-License-Identifier: Apache-2.0
"""Measures the peak of a device and, on CPU, the threads and kernels that suit small models."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from podium.models.cpu_settings import CpuSettings


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product of this dtype on random data: the ceiling that MFU is measured against. Measured
    once in a process, under each setting of threads and kernels."""
    return _measured_peak(device, dtype, torch.get_num_threads(), bool(torch.backends.mkldnn.enabled))


@functools.cache
def _measured_peak(device: torch.device, dtype: torch.dtype, threads: int, onednn: bool) -> float:
    """The last two are those in effect, which the measured rate depends on."""
    size, repeats = (8192, 10) if device.type == "cuda" else (512, 5)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        left @ right
    _wait(device)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(repeats):
            left @ right
        _wait(device)
        best = min(best, (time.perf_counter() - began) / repeats)
    return 2.0 * size**3 / best


# More threads must be clearly faster: the loader and other ranks need cores too, and busy cores make hand-offs slow.
_THREADS_MUST_PAY = 1.3


@contextmanager
def onednn_off() -> Iterator[None]:
    """A context in which products on CPU do not use oneDNN. It affects the whole process: nothing else may compute
    inside."""
    was_on = torch.backends.mkldnn.set_flags(False)[0]
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(was_on)


def choose_cpu_settings(
    work: Callable[[], object], *, ranks: int, threads: int | None = None, onednn: bool | None = None
) -> CpuSettings:
    """Times `work` (a few forwards and backwards of the model itself) under each candidate; settings fixed by the
    recipe are not varied. Small models lose more to thread hand-offs and to oneDNN's cost per call than they gain.
    Every rank runs `work` the same number of times, so it may use collectives; never, if there is nothing to choose."""
    per_rank = max(1, (os.cpu_count() or 1) // ranks)
    thread_choices = [threads] if threads is not None else sorted({1, per_rank})
    onednn_choices = [onednn] if onednn is not None else [False, True]
    candidates = [CpuSettings(threads=count, onednn=on) for count in thread_choices for on in onednn_choices]
    if len(candidates) == 1:
        return dataclasses.replace(candidates[0], measured="as the recipe says")
    times: dict[CpuSettings, float] = {}
    for candidate in candidates:
        candidate.apply()
        times[candidate] = _best_of(work, repeats=3)
    chosen = min(times, key=lambda each: times[each] * (1.0 if each.threads == 1 else _THREADS_MUST_PAY))
    measured_times = ", ".join(f"{each} {1e3 * time_s:.1f} ms" for each, time_s in times.items())
    return dataclasses.replace(chosen, measured=measured_times)


def _best_of(work: Callable[[], object], repeats: int) -> float:
    work()  # warms up caches and thread pools
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
