# SPDX-License-Identifier: Apache-2.0
"""`podium evaluate --tasks`: what lm-eval is asked for, and what is refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from podium.cli import app
from podium.errors import MissingExtraError
from podium.lm_evaluating import LmTasks, command, require_lm_eval
from podium.recipe import ModelSection, RolloutSection
from podium.serving import ServedModel, ServingJob

JOB = ServingJob(model=ModelSection(path="some/model"), name="mine", rollout=RolloutSection())
SERVED = ServedModel(url="http://127.0.0.1:4321/v1", max_length=512)


def test_lm_eval_is_asked_for_the_tasks_at_the_server_s_address() -> None:
    tasks = LmTasks(
        names=("a", "b"), num_fewshot=0, limit=10, include=Path("/tasks"), chat=True, output=Path("/out")
    )  # fmt: skip
    assert command(JOB, tasks, SERVED) == [
        sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args",
        "model=mine,base_url=http://127.0.0.1:4321/v1/completions,tokenizer=some/model,max_length=512,"
        "num_concurrent=16,trust_remote_code=False",
        "--tasks", "a,b", "--num_fewshot", "0", "--limit", "10", "--include_path", "/tasks", "--output_path", "/out",
        "--apply_chat_template", "--log_samples",
    ]  # fmt: skip
    assert command(JOB, LmTasks(names=("a",)), SERVED)[-2:] == ["--tasks", "a"]


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "lm_eval" else find(name))
    with pytest.raises(MissingExtraError, match=r"needs the package `lm-eval`.*pip install podium\[lm-eval\]"):
        require_lm_eval()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--tasks", "a", "--recipe", "r.yaml"], "--recipe, --set and --json are for held-out data"),
        (["--tasks", "a", "--best", "--step", "3"], "--best or --step"),
        (["--tasks", ","], "name a task"),
        (["--limit", "3"], "are for --tasks"),
    ],
)
def test_options_of_the_other_kind_are_refused(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["evaluate", "somewhere", *arguments])
    assert result.exit_code == 2
    assert why in " ".join(result.output.replace("│", " ").split())
