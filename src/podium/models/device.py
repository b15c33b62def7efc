# SPDX-License-Identifier: Apache-2.0
"""What a device can do at best, measured; and on CPU, which threads and kernels suit small models."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product of this dtype on random data: the ceiling that MFU is measured against."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSettings:
    """Torch threads of one rank, and whether oneDNN is on; `measured` says how they were found."""

    threads: int
    onednn: bool
    measured: str

    def apply(self) -> None:
        torch.set_num_threads(self.threads)
        torch.backends.mkldnn.enabled = self.onednn


def choose_cpu_settings(
    *, ranks: int, hidden: int, intermediate: int, tokens: int, threads: int | None = None, onednn: bool | None = None
) -> CpuSettings:
    """Times one linear layer's forward and backward in the model's own shape under each candidate; what the recipe
    fixes is not varied. Small models lose more to thread hand-offs and oneDNN's call overhead than they gain."""
    cores = os.cpu_count() or 1
    per_rank = max(1, cores // ranks)
    thread_choices = [threads] if threads is not None else sorted({1, per_rank})
    onednn_choices = [onednn] if onednn is not None else [False, True]
    before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    times: dict[tuple[int, bool], float] = {}
    work = _linear_work(hidden, intermediate, min(tokens, 4096))
    try:
        for count in thread_choices:
            for on in onednn_choices:
                torch.set_num_threads(count)
                torch.backends.mkldnn.enabled = on
                times[count, on] = _best_time(work)
    finally:
        torch.set_num_threads(before[0])
        torch.backends.mkldnn.enabled = before[1]
    # More threads must pay clearly: the other ranks and the loader want the cores too.
    chosen = min(times, key=lambda each: times[each] * (1.0 if each[0] == 1 else 1.15))
    shown = ", ".join(f"{c} thread{'s' if c > 1 else ''}{'' if on else ' without oneDNN'} {1e3 * t:.2f} ms" for (c, on), t in times.items())
    return CpuSettings(threads=chosen[0], onednn=chosen[1], measured=shown)


def _linear_work(hidden: int, intermediate: int, tokens: int) -> Callable[[], None]:
    x = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(intermediate, hidden, requires_grad=True)

    def work() -> None:
        F.linear(x, weight).sum().backward()

    return work


def _best_time(work: Callable[[], None], budget_s: float = 0.15) -> float:
    work()
    best, until = float("inf"), time.perf_counter() + budget_s
    while True:
        began = time.perf_counter()
        work()
        now = time.perf_counter()
        best = min(best, now - began)
        if now > until:
            return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
