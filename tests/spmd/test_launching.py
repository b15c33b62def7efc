# SPDX-License-Identifier: Apache-2.0
"""Starting ranks as processes: what they return, and what is said when one of them fails."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import spawned_children
from helpers.ranks import (
    answering_rank,
    killed_rank,
    listening_rank,
    raising_rank,
    rank_with_bad_data,
)
from podium.errors import DataError, LaunchError
from podium.spmd.launch import RankPlace, launch, place_under_torchrun

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for left-over processes in /proc"),
    pytest.mark.slow,
]


def launched(main: Callable[..., Any], *args: Any, ranks: int = 2) -> Any:
    return launch(main, args, ranks=ranks, restarts=0, stop_file=None)


def test_one_rank_runs_in_this_process() -> None:
    assert launched(lambda place: (os.getpid(), place), ranks=1) == (os.getpid(), RankPlace())


def test_an_error_on_one_rank_is_the_error_itself() -> None:
    def fails(place: RankPlace) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        launched(fails, ranks=1)


def test_several_ranks_give_what_rank_0_returned() -> None:
    assert launched(answering_rank, 3) == 60
    assert spawned_children() == []


def test_a_killed_rank_ends_the_job_and_is_named() -> None:
    with pytest.raises(LaunchError, match=r"rank 1 \(process \d+\).*SIGKILL"):
        launched(killed_rank)
    assert spawned_children() == []


def test_a_rank_that_raises_shows_its_own_traceback_and_no_others() -> None:
    with pytest.raises(LaunchError) as found:
        launched(raising_rank)
    text = str(found.value)
    assert re.match(r"rank 1 .*\nTraceback", text)
    assert "in raising_rank" in text
    assert text.endswith("ValueError: this is rank 1's own mistake")
    assert text.count("Traceback") == 1
    assert spawned_children() == []


@pytest.mark.slow
def test_a_mistake_of_the_users_comes_back_as_itself() -> None:
    with pytest.raises(DataError, match=r"^train\.jsonl, line 7: this is not JSON$"):
        launched(rank_with_bad_data)
    assert spawned_children() == []


def test_nothing_listens_beyond_loopback_while_ranks_have_met() -> None:
    assert launched(listening_rank) == set()


def test_a_process_that_torchrun_did_not_start_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert place_under_torchrun() is None


def test_torchruns_own_words_are_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("TORCHELASTIC_RESTART_COUNT", "2")):
        monkeypatch.setenv(name, value)
    assert place_under_torchrun() == RankPlace(rank=5, world=8, local_rank=1, local_world=None, attempt=2)
    monkeypatch.setenv("RANK", "five")
    with pytest.raises(LaunchError, match="not numbers"):
        place_under_torchrun()
