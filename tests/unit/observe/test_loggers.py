# SPDX-License-Identifier: Apache-2.0
"""Loggers of the recipe: trackers behind their extras, others by import path. tests/trackers has the packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from podium.errors import MissingExtraError, RecipeError
from podium.observe.loggers import TableLogger, open_loggers
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


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_tracker_that_is_not_installed_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"run\.loggers\.0: .*pip install podium\[{name}\]"):
        open_loggers([name], tmp_path)


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


def test_tensorboard_hides_what_was_logged_before_a_run_began_again(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for loss in (9.0, 5.0):
        (logger,) = open_loggers(["tensorboard"], tmp_path)
        logger.log(StepMetrics(step=1, time_s=1.0, values={"loss": loss}))
        logger.close()

    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 5.0)]


def test_tensorboard_has_the_recipe_and_samples_as_tables_and_figures_of_the_machine(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tmp_path / "recipe.yaml").write_text("program: sft\noptions: {key: '${env:SECRET}'}\n")
    (logger,) = open_loggers(["tensorboard"], tmp_path)
    assert isinstance(logger, TableLogger)
    logger.log(StepMetrics(step=1, time_s=1.0, values={"loss": 9.0}))
    logger.table(1, "samples", [{"prompt": "a|b\nc", "score": 0.5}, {"prompt": "d", "score": None}])
    logger.close()

    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert texts["recipe/text_summary"] == "    program: sft\n    options: {key: '${env:SECRET}'}\n"
    table = "| prompt | score |\n| --- | --- |\n| a\\|b ⏎ c | 0.5 |\n| d |  |"
    assert texts["samples/text_summary"] == table
    assert 0.01 < events.Scalars("machine/process_memory_gib")[0].value < events.Scalars("machine/memory_gib")[0].value
