# SPDX-License-Identifier: Apache-2.0
"""The folder of somebody who followed an example up to its model, and episodes of their runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium import api
from podium.runs.rollout_files import KeptEpisode, read_rollouts

ROOT = Path(__file__).parents[2]
ONE_THREAD = ("placement.threads=1", "placement.onednn=false")
SMALL = (
    *ONE_THREAD, "placement.launcher=inline", "evaluation.every=null", "evaluation.at_start=false",
    "evaluation.generation=null", "data.heldout=[]", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
    "run.rollouts.keep=all", "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
)  # fmt: skip


def load_file(file: Path, name: str) -> Any:
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def warm_model(folder: Path) -> None:
    """demo/lake/warm in the current folder, which has learned to answer with moves."""
    (folder / "examples").symlink_to(ROOT / "examples")
    load_file(ROOT / "examples/gymnasium/make_task.py", "make_lake").make_task(Path("demo/lake"), seed=0)
    result = api.train("examples/gymnasium/sft.yaml", overrides=ONE_THREAD)
    api.export(result.folder, "demo/lake/warm")


def conversation(episode: KeptEpisode) -> tuple[list[str], list[str]]:
    """(what the environment said, what the model answered), from the first observation on."""
    said = [str(message["content"]) for message in episode.messages if message["role"] == "user"]
    answers = [str(message["content"]) for message in episode.messages if message["role"] == "assistant"]
    return said, answers


def episodes_of(folder: Path) -> Sequence[KeptEpisode]:
    """All episodes of a run."""
    return list(read_rollouts(folder))
