# SPDX-License-Identifier: Apache-2.0
"""Loggers of the recipe: TensorBoard and Weights & Biases behind their extras, others by import path."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from podium.errors import MissingExtraError, RecipeError
from podium.observe.loggers import open_loggers
from podium.observe.metrics import StepMetrics

LISTING = """
from pathlib import Path

class Listing:
    def __init__(self, folder):
        self.file = Path(folder) / "listing.txt"
    def log(self, metrics):
        self.write(f"{metrics.step} {dict(metrics.values)}")
    def text(self, step, name, text):
        self.write(f"{step} {name} {text}")
    def close(self):
        self.write("closed")
    def write(self, line):
        with self.file.open("a") as file:
            file.write(line + "\\n")

def nothing(folder):
    return None
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    (tmp_path / "listing.py").write_text(LISTING)
    return f"{tmp_path / 'listing.py'}"


def test_a_plug_in_is_called_with_the_run_folder(tmp_path: Path, plugin: str) -> None:
    (logger,) = open_loggers([f"{plugin}:Listing"], tmp_path)
    logger.log(StepMetrics(step=3, time_s=0.0, values={"loss": 1.5}))
    logger.text(3, "answers", "85")
    logger.close()
    assert (tmp_path / "listing.txt").read_text() == "3 {'loss': 1.5}\n3 answers 85\nclosed\n"


def test_a_plug_in_that_returns_no_logger_is_named_by_its_key(tmp_path: Path, plugin: str) -> None:
    with pytest.raises(RecipeError, match=r"run\.loggers\.1: .*listing\.py:nothing .*None.*close\(\)"):
        open_loggers([f"{plugin}:Listing", f"{plugin}:nothing"], tmp_path)
    assert (tmp_path / "listing.txt").read_text() == "closed\n"  # the first one was not left open


def test_tensorboard_that_is_not_installed_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install podium\[tensorboard\]"):
        open_loggers(["tensorboard"], tmp_path)


def test_tensorboard_holds_the_scalars_of_a_resumed_run_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (first,) = open_loggers(["tensorboard"], tmp_path)
    for step in (1, 2, 3):
        first.log(StepMetrics(step=step, time_s=float(step), values={"loss": 10.0 - step}))
    first.text(3, "answers", "85")
    first.close()
    (second,) = open_loggers(["tensorboard"], tmp_path, resume_step=1)
    second.log(StepMetrics(step=2, time_s=12.0, values={"loss": 5.0}))
    second.close()

    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 9.0), (2, 5.0)]


class FakeWandb(ModuleType):
    """What the logger uses of the package, without a network."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished = 0

    def Settings(self, **values: Any) -> dict[str, Any]:
        return values

    def Table(self, *, columns: list[str], data: list[list[Any]]) -> list[list[Any]]:
        return data

    def init(self, **arguments: Any) -> FakeWandb:
        self.started.append(arguments)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_metrics_texts_and_the_recipe_and_a_resumed_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    (tmp_path / "recipe.yaml").write_text("program: sft\noptions: {key: '${env:SECRET}'}\n")

    for resume_step in (None, 1):
        (logger,) = open_loggers(["wandb"], tmp_path, resume_step=resume_step)
        logger.log(StepMetrics(step=2, time_s=0.0, values={"loss": 0.5}))
        logger.text(2, "samples", "hello")
        logger.close()
    open_loggers(["wandb"], tmp_path)

    first, resumed, other = (start["id"] for start in wandb.started)
    assert first == resumed != other
    assert wandb.started[0]["project"] == "mine"
    assert wandb.started[0]["config"] == {"program": "sft", "options": {"key": "${env:SECRET}"}}
    assert wandb.logged[:2] == [{"step": 2, "loss": 0.5}, {"step": 2, "samples": [[2, "hello"]]}]
    assert wandb.finished == 2


def test_wandb_that_is_not_installed_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pip install podium\[wandb\]"):
        open_loggers(["wandb"], tmp_path)
