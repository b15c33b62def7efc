# SPDX-License-Identifier: Apache-2.0
"""Where the time of a short run of each program went: causes add up, and almost nothing is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden.runs import LONG_RUNS, RUNS, make_task, run
from helpers.times import times_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs")
    make_task(path)
    return path


@pytest.mark.parametrize("name", [name for name in RUNS if name not in LONG_RUNS])
def test_the_time_of_every_program_is_known(folder: Path, name: str) -> None:
    by_kind = times_of(run(name, folder))
    works = {"ranks"} if "ranks" in by_kind else {"controller", "train"}
    assert by_kind.keys() >= works
    assert "update" in by_kind["ranks" if "ranks" in by_kind else "train"].seconds
