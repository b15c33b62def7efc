# SPDX-License-Identifier: Apache-2.0
"""The ledger has every episode once, forgets what is undone, and says when it cannot be read."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.controller.ledger import EpisodeRecord, GroupRecord, Ledger
from podium.data.trajectories import TrajectoryId
from podium.errors import RunFolderError


def _record(draw: int, sample: int = 0, *, step: int = 1, state: str = "consumed", attempt: int = 0) -> EpisodeRecord:
    return EpisodeRecord(
        id=TrajectoryId(draw, sample, 0, attempt), step=step, source="sums", state=state, finish="stop",
        version=step - 1, tokens=7, reward=0.5,
    )  # fmt: skip


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "episodes.sqlite")
    yield ledger
    ledger.close()


def test_a_closed_step_is_counted_by_state(ledger: Ledger) -> None:
    ledger.close_step([_record(0, 0), _record(0, 1), _record(1, 0, state="uninformative")])
    ledger.close_step([_record(2, step=2)])

    assert ledger.count() == 4
    assert ledger.count("consumed") == 3
    assert ledger.count("uninformative") == 1
    assert ledger.count("failed") == 0


def test_an_empty_ledger_has_no_episodes(ledger: Ledger) -> None:
    ledger.close_step([])

    assert ledger.count() == 0


def test_what_is_written_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "episodes.sqlite")
    first.close_step([_record(3, 2, step=4)])
    first.close()

    file = sqlite3.connect(tmp_path / "episodes.sqlite")
    rows = file.execute("SELECT * FROM episodes").fetchall()
    file.close()
    assert rows == [(3, 2, 0, 0, 4, "sums", "consumed", "stop", 3, 7, 0.5)]


def test_an_episode_that_is_there_already_is_refused_with_its_whole_step(ledger: Ledger) -> None:
    ledger.close_step([_record(0), _record(1)])

    with pytest.raises(RunFolderError, match=r"step 2\b"):
        ledger.close_step([_record(2, step=2), _record(1, step=2), _record(3, step=2)])
    assert ledger.count() == 2


def test_another_attempt_at_an_episode_is_another_trajectory(ledger: Ledger) -> None:
    ledger.close_step([_record(0), _record(0, attempt=1)])

    assert ledger.count() == 2


def _group(draw: int, *, step: int) -> GroupRecord:
    return GroupRecord(
        prompt_index=draw, step=step, attempts=1, admitted_version=0, oldest_version=0, newest_version=0,
        trained_version=0, void=None,
    )  # fmt: skip


def test_a_group_is_trained_once_and_may_come_again_when_its_step_is_undone(ledger: Ledger) -> None:
    ledger.close_step([_record(0)], [_group(0, step=1)])
    with pytest.raises(RunFolderError):
        ledger.close_step([_record(5, step=2)], [_group(0, step=2)])
    assert ledger.count() == 1  # all of a step, or nothing
    ledger.rewind(0)
    ledger.close_step([_record(0)], [_group(0, step=1)])


def test_rewinding_forgets_later_steps_which_may_then_come_again(ledger: Ledger) -> None:
    for step in (1, 2, 3):
        ledger.close_step([_record(2 * step, step=step), _record(2 * step + 1, step=step)])

    assert ledger.rewind(1) == 4
    assert ledger.count() == 2
    assert ledger.rewind(1) == 0
    ledger.close_step([_record(4, step=2)])
    assert ledger.count() == 3


@pytest.mark.parametrize("content", [b"not a database at all, and long enough to look like one" * 40, b"short"])
def test_a_file_that_is_no_ledger_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "episodes.sqlite"
    file.write_bytes(content)

    with pytest.raises(RunFolderError, match=r"episodes\.sqlite"):
        Ledger(file)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"nowhere/episodes\.sqlite"):
        Ledger(tmp_path / "nowhere" / "episodes.sqlite")


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=20), st.integers(0, 8))
def test_ids_are_unique_whatever_comes(ids: list[tuple[int, int]], keep: int) -> None:
    ledger = Ledger(Path(":memory:"))
    written: dict[tuple[int, int], int] = {}
    for step, id in enumerate(ids, start=1):
        if id in written:
            with pytest.raises(RunFolderError):
                ledger.close_step([_record(*id, step=step)])
        else:
            ledger.close_step([_record(*id, step=step)])
            written[id] = step
    assert ledger.count() == len(written)
    assert ledger.rewind(keep) == sum(step > keep for step in written.values())
    ledger.close()
