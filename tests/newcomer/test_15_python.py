# SPDX-License-Identifier: Apache-2.0
"""From Python everything had to be a file: rewards, environments and loggers as `file.py:name`, rows as JSONL. A
notebook could not start an on-policy run at all, because it has an event loop already."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest

import podium
from helpers.messages import facts
from helpers.workspace import Workspace
from podium.cluster.blocking import run_to_end
from podium.data.python_rows import write_rows
from podium.errors import DataError, MissingExtraError, PodiumError, RecipeError, RunFolderError
from podium.observe import StepMetrics, frames, read_metrics
from podium.python_hints import python_hint
from podium.recipe import plugins

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "podium.ipynb"
ROWS = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(40)]


def sft(model: Path, **changes: Any) -> dict[str, Any]:
    """Three steps on rows in memory."""
    values: dict[str, Any] = {
        "program": "sft",
        "model": {"path": model},
        "data": {"train": ROWS, "packing_window": 16},
        "optimizer": {"lr": 3e-3},
        "steps": 3,
        "tokens_per_step": 256,
        "placement": {"device": "cpu", "threads": 1, "onednn": False},
        "run": {"name": "sums"},
    }
    return {**values, **changes}


def grpo(model: Path, **changes: Any) -> dict[str, Any]:
    """Two steps in this process, on rows in memory."""
    values = {key: value for key, value in sft(model).items() if key != "tokens_per_step"}
    values |= {
        "program": "grpo",
        "data": {"train": [{"prompt": row["prompt"], "reference": row["completion"]} for row in ROWS]},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 4},
        "placement": {"device": "cpu", "launcher": "inline", "threads": 1, "onednn": False},
        "steps": 2,
    }
    return {**values, **changes}


def digits(weight: float) -> Callable[..., float]:
    """A reward that no import path leads to: it holds a number of this call."""

    def reward(answer: str, reference: str) -> float:
        return weight * sum(letter.isdigit() for letter in answer) / max(1, len(answer))

    return reward


def keep_short(row: dict[str, Any]) -> dict[str, Any] | None:
    return row if len(row["prompt"]) < 5 else None


# --- rows in memory ---


def test_rows_and_datasets_train_as_their_files_do(workspace: Workspace) -> None:
    workspace.rows("rows.jsonl", ROWS)
    sources = {"file": [{"path": "rows.jsonl"}], "rows": ROWS, "dataset": datasets.Dataset.from_list(ROWS)}
    found = {}
    for name, train in sources.items():
        podium.train(sft(workspace.model, run={"name": name}), data={"train": train, "heldout": train})
        found[name] = workspace.metric(name, "loss"), workspace.metric(name, "heldout/loss")
    assert found["rows"] == found["file"]
    assert found["dataset"] == found["file"]


def test_the_same_rows_are_written_once_and_a_resumed_run_reads_them(workspace: Workspace) -> None:
    result = podium.train(sft(workspace.model, checkpoint={"every": 1, "background": False}))
    podium.train(sft(workspace.model, run={"name": "again"}))
    assert len(list((workspace.path / "runs" / ".cache").glob("rows-*"))) == 1
    before = workspace.metric("sums", "loss")
    assert podium.resume(result.folder, step=2).step == 3
    assert workspace.metric("sums", "loss") == before
    changed = next((workspace.path / "runs" / ".cache").glob("rows-*"))
    changed.write_text(changed.read_text().replace("+", "-"))
    with pytest.raises(RecipeError, match=changed.name):
        podium.resume(result.folder, step=2)


def test_a_source_may_have_rows_as_its_path_beside_its_other_keys(workspace: Workspace) -> None:
    renamed = [{"question": row["prompt"], "completion": row["completion"]} for row in ROWS]
    source = {"path": renamed, "columns": {"prompt": "question"}, "map": keep_short, "weight": 2.0}
    result = podium.train(sft(workspace.model, data={"train": [source, datasets.Dataset.from_list(ROWS)]}))
    recipe = podium.load_recipe(result.folder / "recipe.yaml")
    assert [Path(each.path).suffix for each in recipe.data.train] == [".jsonl", ".parquet"]
    assert (recipe.data.train[0].map or "").endswith("test_15_python.py:keep_short")


def test_rows_keep_numbers_of_numpy_and_refuse_what_json_has_not(tmp_path: Path) -> None:
    file = write_rows([{"prompt": "é", "score": np.float32(0.5), "tags": np.array([1, 2])}], tmp_path, "data.train")
    assert json.loads(file.read_text(encoding="utf-8")) == {"prompt": "é", "score": 0.5, "tags": [1, 2]}
    for rows, part in (([{"prompt": object()}], "row 0"), ([{"a": 1}, "text"], "row 1"), ([], "empty")):
        with pytest.raises(DataError, match=part):
            write_rows(rows, tmp_path, "data.train")
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(DataError, match="train"):
        write_rows(datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), tmp_path, "data.train")
    with pytest.raises(DataError, match="IterableDataset"):
        write_rows(datasets.Dataset.from_list(ROWS).to_iterable_dataset(), tmp_path, "data.train")


# --- functions and classes ---


@pytest.mark.slow
def test_an_on_policy_run_takes_a_reward_and_a_logger_inside_an_event_loop(workspace: Workspace) -> None:
    seen: list[int] = []

    def log(metrics: StepMetrics) -> None:
        seen.append(metrics.step)

    async def cell() -> Any:
        return podium.train(grpo(workspace.model), reward=[digits(0.5)], loggers=[log])

    result = asyncio.run(cell())
    assert (result.status, result.step) == ("finished", 2)
    assert seen == [1, 2]
    recipe = podium.load_recipe(result.folder / "recipe.yaml")
    path = recipe.reward[0].function  # type: ignore[attr-defined]
    assert plugins.split_plugin(path)[1] == "reward"
    assert Path(plugins.split_plugin(path)[0]).is_file()
    metrics = podium.metrics(result)
    assert list(metrics["step"]) == [1, 2]
    assert metrics.filter(like="reward").to_numpy().max() <= 0.5


@pytest.mark.slow
def test_another_process_reads_what_was_given(workspace: Workspace) -> None:
    """As a rank, a grader or a resume does."""
    recipe = grpo(workspace.model, reward=[{"function": digits(0.25), "name": "digits", "weight": 2}])
    result = podium.train(recipe, overrides=["steps=1"])
    path = podium.load_recipe(result.folder / "recipe.yaml").reward[0].function  # type: ignore[attr-defined]
    plugins._registered.clear()
    assert plugins.load(path, "reward.0.function")("12", "12") == 0.25
    outcome = workspace.podium("resume", str(result.folder), "--set", "steps=2")
    assert outcome.code == 0, outcome
    Path(plugins.split_plugin(path)[0]).unlink()
    outcome = workspace.podium("resume", str(result.folder), "--set", "steps=3")
    assert outcome.code == 2
    assert "reward.0.function" in outcome.err


@pytest.mark.slow
def test_a_reward_is_replaced_before_a_run_continues(workspace: Workspace) -> None:
    recipe = grpo(workspace.model, reward=[{"function": lambda answer, reference: 2.0, "weight": 0.5}])
    result = podium.train(recipe, overrides={"steps": 1})
    with pytest.raises(RecipeError, match="reward"):
        podium.resume(result.folder, overrides={"steps": 2}, reward=[digits(1.0), digits(2.0)])
    assert podium.resume(result.folder, overrides={"steps": 2}, reward=[digits(1.0)]).step == 2
    section = podium.load_recipe(result.folder / "recipe.yaml").reward[0]  # type: ignore[attr-defined]
    assert (section.weight, section.function.name) == (0.5, "reward")


def test_two_objects_of_equal_content_stay_two(workspace: Workspace) -> None:
    first, second, third, fourth = Remembering([]), Remembering([]), Connected(), Connected()
    podium.train(sft(workspace.model), loggers=[first, second, third, fourth])
    assert [each.steps for each in (first, second, third, fourth)] == [[1, 2, 3]] * 4


@pytest.mark.slow
def test_an_environment_is_given_as_a_class(workspace: Workspace) -> None:
    from podium.environments.protocol import Outcome

    class Echo:
        async def reset(self, task: Any) -> None:
            return None

        async def step(self, turn: Any) -> Outcome:
            return Outcome(reward=1.0, done=True)

    result = podium.train(grpo(workspace.model, steps=1), environment=Echo)
    assert result.status == "finished"


def test_functions_of_modules_are_named_by_import_path_and_others_are_not() -> None:
    assert (plugins.import_path(keep_short) or "").endswith("test_15_python.py:keep_short")
    assert plugins.import_path(read_metrics) == "podium.observe.metrics:read_metrics"
    assert plugins.import_path(digits(1.0)) is None
    assert plugins.import_path(len) is None


def test_a_file_that_changed_is_loaded_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(answer): return 1.0\n")
    path = f"{file}:reward"
    plugins.register(path, lambda answer: 2.0)
    assert plugins.load(path, "key")("x") == 2.0
    file.write_text("def reward(answer): return 3.0\n")
    os.utime(file, ns=(1, 1))
    assert plugins.load(path, "key")("x") == 3.0


@dataclass
class Remembering:
    """A logger that is open already."""

    steps: list[int]

    def log(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics.step)

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


class Connected(Remembering):
    """A logger that holds what no other process can have."""

    def __init__(self) -> None:
        super().__init__([])
        self.lock = threading.Lock()


def test_an_open_logger_stays_in_this_process_or_is_refused(workspace: Workspace) -> None:
    logger = Connected()
    values = sft(workspace.model, checkpoint={"every": 1, "background": False})
    result = podium.train(values, loggers=[logger])
    assert logger.steps == [1, 2, 3]
    with pytest.raises(RecipeError, match=r"run\.loggers\.0.*lock"):
        podium.check(values, loggers=[logger], overrides={"placement.devices": 2})
    plugins._registered.clear()
    with pytest.raises(RecipeError, match=r"run\.loggers\.0"):
        podium.resume(result.folder, step=2)
    again = Connected()
    podium.resume(result.folder, step=2, loggers=[again])
    assert again.steps == [3]


@pytest.mark.slow
def test_two_ranks_read_rows_and_functions_of_this_process(workspace: Workspace) -> None:
    limit = 4
    source = {"path": ROWS, "map": lambda row: row if len(row["prompt"]) <= limit else None}
    found = {}
    for devices in (1, 2):
        recipe = sft(workspace.model, data={"train": [source]}, run={"name": f"on-{devices}"})
        podium.train(recipe, overrides={"placement.devices": devices})
        found[devices] = list(workspace.metric(f"on-{devices}", "loss").values())
    assert found[2] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.serial
def test_a_run_on_ray_starts_from_a_notebook_and_grades_with_its_function(workspace: Workspace) -> None:
    recipe = grpo(workspace.model, placement={"device": "cpu", "launcher": "ray", "threads": 1, "onednn": False})
    seen: list[int] = []

    async def cell() -> Any:
        return podium.train(recipe, reward=[digits(0.5)], loggers=[Remembering(seen)])

    result = asyncio.run(cell())
    assert (result.status, seen) == ("finished", [1, 2])


# --- checks and mistakes ---


def test_a_check_leaves_nothing_behind(workspace: Workspace) -> None:
    before = set(workspace.path.iterdir())
    assert podium.check(grpo(workspace.model, reward=digits(1.0)))[0].startswith("program grpo")
    assert podium.check(sft(workspace.model), deep=True)
    assert set(workspace.path.iterdir()) == before


@pytest.mark.slow
def test_a_trial_leaves_nothing_behind(workspace: Workspace) -> None:
    before = set(workspace.path.rglob("*"))
    trial = podium.try_recipe(grpo(workspace.model, reward=lambda answer, reference: 1.0), prompts=1, samples=1)
    assert [episode.reward for episode in trial.episodes] == [1.0]
    assert set(workspace.path.rglob("*")) == before


@pytest.mark.slow
def test_a_trial_takes_rows_and_a_reward_beside_the_recipe(workspace: Workspace) -> None:
    rows = [{"prompt": "of mine", "answer": "1"}]
    trial = podium.try_recipe(
        grpo(workspace.model), prompts=1, samples=1, data={"train": rows}, reward=lambda answer: 0.125
    )
    assert [(episode.prompt, episode.reward) for episode in trial.episodes] == [("of mine", 0.125)]


def test_a_row_given_in_python_is_named_by_its_index(workspace: Workspace) -> None:
    rows: list[dict[str, Any]] = [*ROWS[:3], {"prompt": 5, "completion": "6"}, *ROWS[4:]]
    for train in (rows, [{"path": rows}]):
        with pytest.raises(DataError, match=facts("row 3 of data.train", "given")) as raised:
            podium.check(sft(workspace.model, data={"train": train}), all_rows=True)
        assert ".cache" not in str(raised.value)


def test_errors_advise_calls_of_python_and_the_command_line_leaves_them_out(workspace: Workspace) -> None:
    values = sft(workspace.model, checkpoint={"every": 1, "background": False})
    folder = podium.train(values).folder
    with pytest.raises(RunFolderError) as raised:
        podium.train(values)
    (note,) = raised.value.__notes__
    for fact in (f"podium.resume('{folder}')", "overwrite=True", "overrides={'run.name'"):
        assert fact in note
    assert "in Python" not in workspace.podium("train", workspace.recipe("sums")).err


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("continue from step 2 with: podium resume runs/a", "podium.resume('runs/a')"),
        ("all is saved: podium export runs/a OUT", "podium.export('runs/a', 'OUT')"),
        (
            "go on with `podium resume runs/a --accept-changed-data`.",
            "podium.resume('runs/a', accept_changed_data=True)",
        ),
        ("Give the run: `podium evaluate runs/a --step 3`.", "podium.evaluate('runs/a', which=3)"),
        ("are skipped with: --set data.on_error=skip", "overrides={'data.on_error': ...}"),
        ("nothing to advise", None),
    ],
)
def test_commands_in_texts_are_calls_in_python(text: str, hint: str | None) -> None:
    assert python_hint(text) == hint


def test_objects_beside_a_recipe_file_or_a_recipe_replace_its_own(workspace: Workspace) -> None:
    file = workspace.recipe("file", tokens_per_step=256)
    assert podium.train(file, data={"train": ROWS}).folder.name == "file"
    recipe = podium.load_recipe(file, overrides=["run.name=object"])
    result = podium.train(recipe, data={"train": ROWS}, overrides={"steps": 2})
    assert result.step == 2
    assert workspace.metric("object", "loss")[1] == workspace.metric("file", "loss")[1]


def test_stages_of_a_pipeline_take_objects(workspace: Workspace) -> None:
    stage = {key: value for key, value in sft(workspace.model).items() if key != "run"}
    pipeline = {"program": "pipeline", "stages": {"first": stage}, "run": {"name": "both"}}
    assert podium.check(pipeline)
    with pytest.raises(RecipeError, match="stages"):
        podium.check(pipeline, data={"train": ROWS})


MISTAKES: dict[str, Callable[[Path], object]] = {
    "a number": lambda model: podium.train(5),  # type: ignore[arg-type]
    "no file": lambda model: podium.train("none.yaml"),
    "an unknown key": lambda model: podium.train(sft(model, stepz=3)),
    "no name": lambda model: podium.train(sft(model, run={})),
    "a text for a section": lambda model: podium.train({**sft(model), "model": 5}),
    "no rows": lambda model: podium.train(sft(model, data={"train": []})),
    "a frame": lambda model: podium.train(sft(model, data={"train": pd.DataFrame(ROWS)})),
    "a number as reward": lambda model: podium.check(grpo(model, reward=[3])),
    "a reward with other parameters": lambda model: podium.train(grpo(model, reward=[lambda wrong: 1.0])),
    "a logger that is none": lambda model: podium.train(sft(model), loggers=[lambda folder: 3]),
    "no overrides": lambda model: podium.train(sft(model), overrides=5),  # type: ignore[arg-type]
    "a reward that is no import path": lambda model: podium.check(grpo(model, reward="mine")),
    "no model": lambda model: podium.train(sft(Path("./none"))),
    "no model to verify": lambda model: podium.verify("./none"),
    "a number as prompts": lambda model: podium.generate(model, 5, "out.jsonl", sampling={"max_new_tokens": 3}),
    "a text for a number": lambda model: podium.generate(model, ROWS, "o.jsonl", sampling={"max_new_tokens": "3"}),
    "a text for samples": lambda model: podium.generate(
        model,
        ROWS,
        "o.jsonl",
        sampling={"max_new_tokens": 3},
        samples="2",  # type: ignore[arg-type]
    ),
    "no prompts": lambda model: podium.generate(model, [], "out.jsonl", sampling={"max_new_tokens": 3}),
    "loggers of a pipeline": lambda model: podium.check({"program": "pipeline", "stages": {}}, loggers=[print]),
    "overrides as text": lambda model: podium.train(sft(model), overrides="steps=3"),
    "an object as override": lambda model: podium.train(sft(model), overrides={"steps": object()}),
    "a list of recipes": lambda model: podium.parse_recipe([sft(model)]),  # type: ignore[arg-type]
    "no recipe": lambda model: podium.load_recipe(None),  # type: ignore[arg-type]
    "no folder": lambda model: podium.resume("runs/none"),
    "None as a folder": lambda model: podium.resume(None),  # type: ignore[arg-type]
    "show None": lambda model: podium.show(None),  # type: ignore[arg-type]
    "export nothing": lambda model: podium.export("runs/none", "out"),
    "no metrics": lambda model: podium.metrics("runs/none"),
    "an unknown library": lambda model: podium.metrics("runs/none", library="numpy"),  # type: ignore[arg-type]
    "an unknown device": lambda model: podium.verify(model, device="tpu"),  # type: ignore[arg-type]
    "sampling": lambda model: podium.generate(model, ROWS, "out.jsonl", sampling={"tokens": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_an_error_of_podium(workspace: Workspace, name: str) -> None:
    with pytest.raises(PodiumError):
        MISTAKES[name](workspace.model)


def test_values_may_be_of_numpy_and_pathlib_and_a_reward_may_be_an_import_path(workspace: Workspace) -> None:
    (workspace.path / "mine.py").write_text("def right(answer, reference): return float(answer == reference)\n")
    values = grpo(workspace.model, steps=np.int64(2), optimizer={"lr": np.float32(0.5)}, reward="mine.py:right")
    assert podium.check({**values, "run": {"name": "r", "folder": Path("elsewhere")}})


def test_prompts_may_be_rows(workspace: Workspace) -> None:
    done = podium.generate(
        workspace.model, [{"prompt": "1+1="}], "out.jsonl", sampling={"max_new_tokens": 3}, device="cpu", progress=False
    )
    assert done.answers == 1


# --- metrics ---


def test_metrics_are_a_table_with_one_row_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"step": 1, "time_s": 1.0, "loss": 2.0}, {"step": 1, "time_s": 2.0, "heldout/loss": 3.0}]
    lines.append({"step": 2, "time_s": 3.0, "loss": 1.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    frame = podium.metrics(str(tmp_path))
    assert isinstance(frame, pd.DataFrame)
    assert list(frame.columns) == ["step", "time_s", "loss", "heldout/loss"]
    assert frame["loss"].tolist() == [2.0, 1.0]
    assert frame["heldout/loss"].isna().tolist() == [False, True]
    assert read_metrics(str(tmp_path)) == read_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(RunFolderError):
        read_metrics(tmp_path / "none.jsonl")
    monkeypatch.setattr(frames.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pandas"):
        podium.metrics(tmp_path)


# --- a notebook ---


async def _now() -> int:
    return threading.get_ident()


def test_a_coroutine_runs_beside_a_running_loop_and_signals_are_heard_while_it_does() -> None:
    """The handler runs in the thread that waits, as Jupyter's interrupt button needs."""
    heard = threading.Event()
    handlers: list[int] = []

    def handle(number: int, frame: object) -> None:
        handlers.append(threading.get_ident())
        heard.set()

    async def wait() -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.to_thread(heard.wait, 20)
        return threading.get_ident()

    async def cell() -> int:
        return run_to_end(wait())

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        assert run_to_end(_now()) == threading.get_ident()
        assert asyncio.run(cell()) != threading.get_ident()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handlers == [threading.get_ident()]


@pytest.mark.slow
def test_an_interrupt_in_a_notebook_saves_and_stops_the_run(workspace: Workspace) -> None:
    def interrupt(metrics: StepMetrics) -> None:
        if metrics.step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> Any:
        return podium.train(grpo(workspace.model, steps=500), reward=[digits(1.0)], loggers=[interrupt])

    result = asyncio.run(cell())
    assert result.status == "stopped"
    assert 1 <= result.step < 500


@pytest.mark.slow
def test_the_notebook_runs_as_in_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code cells, one after the other in one process with a running event loop; `await` may stand at the top of a
    cell, as in Jupyter."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    names: dict[str, Any] = {"__name__": "__main__"}

    async def kernel() -> None:
        for number, cell in enumerate(cells):
            code = compile("".join(cell["source"]), f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            waiting = eval(code, names)
            if asyncio.iscoroutine(waiting):
                await waiting

    asyncio.run(kernel())
    assert names["result"].status == "finished"
    assert len(names["history"]) == names["result"].step
    assert {"step", "reward/mean"} <= set(names["table"].columns)
