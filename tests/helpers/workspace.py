# SPDX-License-Identifier: Apache-2.0
"""A folder as a user has it, and the command line to type into."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from podium import cli
from podium.observe import read_metrics
from podium.recipe import OnPolicyRecipe, SpmdRecipe
from podium.recipe.programs import BUILT_IN


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command left: exit code and what it printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The current folder of a user; `podium(...)` is what they type."""

    path: Path
    model: Path
    capture: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def podium(self, *arguments: str) -> Outcome:
        """Through the real entry point, in this process."""
        self.capture.readouterr()
        self.monkeypatch.setattr(sys, "argv", ["podium", *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        printed = self.capture.readouterr()
        return Outcome(code=code, out=printed.out, err=printed.err)

    def process(self, *arguments: str) -> Outcome:
        """In a process of its own, as from a shell."""
        done = subprocess.run(
            [sys.executable, "-m", "podium", *arguments], cwd=self.path, capture_output=True, text=True, timeout=240
        )
        return Outcome(code=done.returncode, out=done.stdout, err=done.stderr)

    def recipe(self, name: str = "sums", **changes: Any) -> str:
        """Writes NAME.yaml: four steps on chats; a change replaces keys of its section."""
        values: dict[str, Any] = {
            "program": "sft",
            "model": {"path": str(self.model)},
            "data": {"train": [{"path": "train.jsonl"}]},
            "optimizer": {"lr": 3e-3},
            "steps": 4,
            "placement": {"device": "cpu", "threads": 1, "onednn": False},
        }
        program = BUILT_IN.get(changes.get("program", "sft"), SpmdRecipe)
        if not issubclass(program, OnPolicyRecipe) and changes.get("signal") != "on_policy":
            values |= {"tokens_per_step": 256, "data": {**values["data"], "packing_window": 16}}
        for key, change in changes.items():
            values[key] = {**values.get(key, {}), **change} if isinstance(change, dict) else change
        file = self.path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        return file.name

    def rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        (self.path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def metric(self, run: str, name: str) -> dict[int, float]:
        """Step -> value, of the steps that have it."""
        lines = read_metrics(self.path / "runs" / run / "metrics.jsonl")
        return {line.step: line.values[name] for line in lines if name in line.values}

    def refused(self, outcome: Outcome, *parts: str, left: tuple[str, ...] = ()) -> None:
        """Exit code 2, the reason without a traceback, and no run folder but those in `left`."""
        assert outcome.code == 2, outcome
        assert outcome.err.startswith("error: "), outcome
        assert "Traceback" not in outcome.err + outcome.out
        for part in parts:
            assert part in outcome.err
        runs = self.path / "runs"
        assert sorted(run.name for run in runs.iterdir()) == sorted(left) if runs.exists() else not left
