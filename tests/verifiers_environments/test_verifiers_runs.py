# SPDX-License-Identifier: Apache-2.0
"""The example with verifiers is a run that learns: its rewards are those of the taskset, its tokens those that were
sampled."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("verifiers") is None:
    pytest.skip("verifiers is not installed in this environment: run `make test-verifiers`", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[1] / "field_environments"))
from lake_runs import ROOT, SMALL, episodes_of, load_file, warm_model

from podium import api
from podium.errors import PodiumError
from podium.observe import read_metrics

pytestmark = [pytest.mark.verifiers, pytest.mark.timeout(600)]

MOVES = ("left", "down", "right", "up")
EXAMPLE = "examples/verifiers/grpo.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("signs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        warm_model(made)
        make = load_file(ROOT / "examples/verifiers/make_rows.py", "make_rows")
        make.make_rows("examples/verifiers/signs.py", Path("demo/signs"), heldout=20)
    return made


def test_the_example_learns_from_rewards_of_the_taskset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = api.train(EXAMPLE, overrides=[*SMALL, "steps=14", "run.name=learns"])
    steps = [dict(record.values) for record in read_metrics(result.folder / "metrics.jsonl")]
    for found in steps:
        assert found["episodes/failed"] == 0
        assert found["environment/trained_tokens"] == found["environment/sampled_tokens"] > 0
        assert found["reward/mean"] == pytest.approx(
            found["environment/reward_right"] + found["environment/reward_is_move"], abs=1e-6
        )
    first, last = (sum(each["reward/mean"] for each in part) / 3 for part in (steps[:3], steps[-3:]))
    assert last > first + 0.15, (first, last)

    dice = random.Random(0)
    shown = [dice.randrange(4) for _ in range(520)]
    episodes = episodes_of(result.folder)
    assert len(episodes) == 14 * 16
    for episode in episodes:
        asked, answered = (str(message["content"]) for message in episode.messages)
        assert int(asked) in shown
        said = answered.strip()
        assert episode.reward == pytest.approx(float(said == "up") + 0.1 * (said in MOVES))


def test_two_runs_are_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    runs = [api.train(EXAMPLE, overrides=[*SMALL, "steps=2", f"run.name={name}"]) for name in ("one", "two")]
    first, second = ([dict(record.values) for record in read_metrics(run.folder / "metrics.jsonl")] for run in runs)
    for one, other in zip(first, second, strict=True):
        assert (one["loss"], one["grad_norm"], one["reward/mean"]) == (
            other["loss"], other["grad_norm"], other["reward/mean"],
        )  # fmt: skip


def test_an_environment_that_cannot_be_loaded_is_an_error_of_the_recipe(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    wrong: list[Any] = [*SMALL, "steps=1", "run.name=wrong", "environment.options={agent: {no_such_key: 1}}"]
    with pytest.raises(PodiumError, match=r"(?s)environment\.verifiers: .*signs\.py cannot be loaded.*no_such_key"):
        api.train(EXAMPLE, overrides=wrong)
