# SPDX-License-Identifier: Apache-2.0
"""Which threads and kernels are chosen from given timings."""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Mapping

import pytest
import torch

from podium.models import device
from podium.models.cpu_settings import CpuSettings
from podium.models.device import choose_cpu_settings, matrix_peak

Times = Mapping[tuple[int, bool], float]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], list[tuple[int, bool]]]:
    """Four cores on which work takes the given seconds under (threads, oneDNN); returns what was tried."""

    def patch(times: Times) -> list[tuple[int, bool]]:
        tried: list[tuple[int, bool]] = []

        def fake(work: Callable[[], object], repeats: int) -> float:
            tried.append((torch.get_num_threads(), bool(torch.backends.mkldnn.enabled)))
            return times[tried[-1]]

        monkeypatch.setattr(device, "_best_of", fake)
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        return tried

    return patch


def chosen(**fixed: object) -> tuple[int, bool]:
    found = choose_cpu_settings(lambda: None, **{"ranks": 1, **fixed})  # type: ignore[arg-type]
    return found.threads, found.onednn


def test_the_quickest_is_chosen(timed: Callable[[Times], list[tuple[int, bool]]]) -> None:
    tried = timed({(1, False): 1.0, (1, True): 3.0, (4, False): 0.9, (4, True): 0.5})
    assert chosen() == (4, True)
    assert sorted(tried) == [(1, False), (1, True), (4, False), (4, True)]


def test_more_threads_must_pay_by_a_third(timed: Callable[[Times], list[tuple[int, bool]]]) -> None:
    timed({(1, False): 1.0, (1, True): 3.0, (4, False): 0.8, (4, True): 3.0})
    assert chosen() == (1, False)


def test_ranks_share_the_cores(timed: Callable[[Times], list[tuple[int, bool]]]) -> None:
    tried = timed({(1, False): 1.0, (1, True): 0.9, (2, False): 0.1, (2, True): 0.2})
    assert chosen(ranks=2) == (2, False)
    assert {threads for threads, _ in tried} == {1, 2}


def test_as_many_ranks_as_cores_have_one_thread_each(timed: Callable[[Times], list[tuple[int, bool]]]) -> None:
    tried = timed({(1, False): 1.0, (1, True): 0.5})
    assert chosen(ranks=4) == (1, True)
    assert len(tried) == 2


def test_what_the_recipe_fixes_is_not_varied(timed: Callable[[Times], list[tuple[int, bool]]]) -> None:
    tried = timed({(3, False): 9.0, (3, True): 8.0})
    assert chosen(threads=3) == (3, True)
    assert sorted(tried) == [(3, False), (3, True)]


def test_nothing_to_choose_is_said(timed: Callable[[Times], list[tuple[int, bool]]]) -> None:
    tried = timed({(2, False): 1.0})
    found = choose_cpu_settings(lambda: None, ranks=1, threads=2, onednn=False)
    assert (found.threads, found.onednn) == (2, False)
    assert "recipe" in found.measured
    assert tried == []


def test_the_choice_says_what_was_measured(timed: Callable[[Times], list[tuple[int, bool]]]) -> None:
    timed({(1, False): 0.001, (1, True): 0.0305})
    found = choose_cpu_settings(lambda: None, ranks=4)
    assert re.fullmatch(r"1 thread\b.* oneDNN off", str(found))
    assert re.fullmatch(rf"{found} 1\.0 ms.* 1 thread\b.* oneDNN on 30\.5 ms", found.measured)


def test_every_candidate_runs_the_work_equally_often() -> None:
    """Else ranks that hold collectives in it would wait for each other."""
    calls = []
    choose_cpu_settings(lambda: calls.append(bool(torch.backends.mkldnn.enabled)), ranks=10_000)
    assert calls.count(True) == calls.count(False)


def test_settings_are_applied() -> None:
    CpuSettings(threads=2, onednn=True).apply()
    assert (torch.get_num_threads(), bool(torch.backends.mkldnn.enabled)) == (2, True)


def test_the_matrix_peak_is_a_plausible_rate() -> None:
    assert 1e8 < matrix_peak(torch.device("cpu"), torch.float32) < 1e14


def test_the_matrix_peak_is_measured_once_for_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_measured_peak", functools.cache(device._measured_peak.__wrapped__))
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock) ** 2))  # every measurement takes longer

    first = matrix_peak(torch.device("cpu"), torch.float32)
    assert matrix_peak(torch.device("cpu"), torch.float32) == first
    torch.set_num_threads(2)
    assert matrix_peak(torch.device("cpu"), torch.float32) < first
    torch.set_num_threads(1)
    assert matrix_peak(torch.device("cpu"), torch.float32) == first
