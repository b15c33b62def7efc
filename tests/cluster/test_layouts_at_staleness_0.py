# SPDX-License-Identifier: Apache-2.0
"""At staleness 0 a run computes the same in every layout, in one process and on Ray, to the last bit: weights,
optimizer state, metrics and ledger. All have one learner, because sums over several are rounded in another order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from golden.runs import fingerprint, make_task, recipe, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 20
METHODS = ("grpo", "tool-agent")  # recipes of the golden runs: episodes of one turn, and with an episode runner
INLINE = {"launcher": "inline", "layout": "colocated", "devices": 1}  # one process has one device, and one layout
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "colocated": {"layout": "colocated", "devices": 1},
    "split": {"layout": "split", "devices": 3, "rollout_devices": 2},  # prompts share a batch with others
    "elastic": {"layout": "elastic", "devices": 2, "rollout_devices": 1},
}
# What only a layout says whose devices change sides.
ELASTIC = ("lending/", "learner/", "rollout/", "response/offered_", "response/trained_", "staleness/", "groups/void/")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    make_task(folder)
    return folder


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def inline(task: Path, method: str) -> dict[str, Any]:
    """What the run computes in one process."""
    return _computed(task, method, "inline", INLINE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_one_process_does(
    task: Path, inline: dict[str, Any], method: str, layout: str, local_ray: None
) -> None:
    found = _computed(task, method, layout, {"launcher": "ray", **LAYOUTS[layout]})

    if layout == "elastic":
        assert found["metrics"].keys() >= {"lending/tokens", "lending/moved_episodes"}
        found, inline = _without_lending(found), _without_lending(inline)
    assert found["metrics"].keys() == inline["metrics"].keys()
    assert not [name for name, value in found["metrics"].items() if value != inline["metrics"][name]]
    assert found == inline


def _computed(task: Path, method: str, name: str, placement: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint after the last step."""
    values = recipe(method)
    values |= {"steps": STEPS, "checkpoint": {"every": STEPS, "background": False}}
    values |= {"placement": {**values["placement"], **placement}, "run": {**values["run"], "name": f"{method}-{name}"}}
    return fingerprint(train(values, task), step=STEPS)


def _without_lending(numbers: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {name: value for name, value in numbers["metrics"].items() if not name.startswith(ELASTIC)}
    return {**numbers, "metrics": metrics}
