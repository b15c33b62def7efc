# SPDX-License-Identifier: Apache-2.0
"""How benchmarks/regression.py sets two commits side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import regression

ROOT = Path(__file__).parents[3]


def test_a_ratio_is_of_the_same_turn_and_above_1_is_slower() -> None:
    (figure,) = regression.figures_of(
        [{"step": 2.0}, {"step": 9.0}, {"step": 3.0}], [{"step": 1.0}, {"step": 3.0}, {"step": 2.0}]
    )
    assert figure.ratios == [2.0, 3.0, 1.5]
    assert figure.line().split() == ["step", "2.000", "3.000", "2.00", "(1.50-3.00)"]


@pytest.mark.parametrize(("slowest", "fails"), [(1.2, False), (1.3, True)])
def test_it_fails_only_where_every_turn_is_slower(
    slowest: float, fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def turn(tasks: regression.Tasks, source: Path) -> dict[str, float]:
        return {"a": 1.0 if "before" in source.parts else next(now), "b": 1.0}

    now = iter((slowest, 1.4))
    monkeypatch.setattr(regression.Tasks, "__init__", lambda tasks, scratch: None)
    monkeypatch.setattr(regression.Tasks, "turn", turn)
    monkeypatch.setattr(regression, "source_of", lambda commit, folder: "0" * 40)
    monkeypatch.setattr(sys, "argv", ["regression.py", "--turns", "2", "--json", str(tmp_path / "found.json")])
    if fails:
        with pytest.raises(SystemExit, match=r"slower than 1\.25 times before in every turn: a$"):
            regression.main()
    else:
        regression.main()
    assert "b " in capsys.readouterr().out
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["before"] == "0" * 40
    assert [each["name"] for each in written["figures"]] == ["a", "b"]


def test_the_code_of_a_commit_is_unpacked_and_an_unknown_commit_named(tmp_path: Path) -> None:
    commit = regression.source_of("HEAD", tmp_path)
    assert len(commit) == 40
    assert (tmp_path / "src" / "podium" / "__init__.py").is_file()
    with pytest.raises(SystemExit, match="commit 0123 is not in this clone"):
        regression.source_of("0123", tmp_path)
