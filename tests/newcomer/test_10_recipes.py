# SPDX-License-Identifier: Apache-2.0
"""Newcomers repeated blocks because anchors were refused, wrote secrets into recipes because there was no way to refer
to the environment, and had to know that a file is a list of sources and that a run is counted in steps alone."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from helpers.on_policy import rl_recipe
from helpers.recipes import make_recipe, recipe_values
from helpers.tiny import write_chats
from helpers.workspace import Workspace
from podium.errors import RecipeError
from podium.recipe import apply_overrides, dump_recipe, load_recipe, parse_recipe
from podium.recipe.changes import what_matters
from podium.recipe.pipeline_loading import load_any_recipe, parse_pipeline, recipe_schema
from podium.recipe.programs import BUILT_IN, CUSTOM
from podium.recipe.resolving import resolved
from podium.runs.folder import RunFolder

SECRET = "hush-7f3a"

MERGED = """
x-base: &base {lr: 1.0e-3, schedule: linear}
x-data:
  deep: &source {<<: &plain {path: a.jsonl, weight: 2}, weight: 3}
program: sft
model: models/base
data: {train: [{<<: *source, path: b.jsonl}, *plain]}
optimizer: {<<: *base, lr: 2.0e-3}
steps: 10
"""


def _file(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def _refused(*overrides: str, **values: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe({**recipe_values(*overrides), **values})
    return str(caught.value)


# --- anchors ---


def test_merge_keys_and_a_place_for_anchors(tmp_path: Path) -> None:
    recipe = load_recipe(_file(tmp_path, MERGED))
    jsonschema.Draft202012Validator(recipe_schema()).validate(yaml.safe_load(MERGED))

    assert (recipe.optimizer.lr, recipe.optimizer.schedule) == (2e-3, "linear")
    assert [(source.path, source.weight) for source in recipe.data.train] == [("b.jsonl", 3), ("a.jsonl", 2)]
    assert "x-" not in dump_recipe(recipe)


def test_a_key_written_twice_is_still_refused_and_so_are_two_merges(tmp_path: Path) -> None:
    for line in ("a: {b: 1, b: 2}", "x-a: &a {b: 1}\nc: {<<: *a, <<: *a}"):
        with pytest.raises(RecipeError, match="twice"):
            load_recipe(_file(tmp_path, line))


def test_anchors_have_a_place_in_pipelines_too(tmp_path: Path) -> None:
    stage = {"program": "sft", "model": "m", "data": {"train": "a.jsonl"}, "optimizer": {"lr": 1}, "steps": 1}
    pipeline = parse_pipeline({"x-note": 1, "program": "pipeline", "stages": {"a": stage}})
    assert set(pipeline.stages) == {"a"}
    with pytest.raises(RecipeError, match=r"stages\.a\.x-note"):
        parse_pipeline({"program": "pipeline", "stages": {"a": {**stage, "x-note": 1}}})


# --- the environment ---


def test_a_variable_is_resolved_in_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", "/models")
    monkeypatch.setenv("LR", "2e-5")
    monkeypatch.setenv("STEPS", "7")
    monkeypatch.setenv("DIGITS", "007")
    monkeypatch.delenv("MISSING", raising=False)
    recipe = make_recipe(
        "program='p.py:f'", "signal=fixed", "model=${env:FOLDER}/base", "optimizer.lr=${env:LR}",
        "steps=${env:STEPS}", "data.train=${env:MISSING:fallback}.jsonl", "data.shuffle=${env:MISSING:false}",
        "options={key: '${env:DIGITS}', none: '${env:MISSING:}'}",
    )  # fmt: skip

    assert (recipe.model.path, recipe.optimizer.lr, recipe.steps) == ("/models/base", 2e-5, 7)
    assert (recipe.data.train[0].path, recipe.data.shuffle) == ("fallback.jsonl", False)
    assert recipe.options == {"key": "007", "none": ""}, "where any value may stand, a variable is a text"


def test_what_is_written_has_the_reference_and_reads_back_as_the_same_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    recipe = make_recipe("model=${env:SECRET}", "data.train=dir/${env:SECRET}.jsonl", "run.seed=${env:N:3}")
    whole = resolved(recipe, {"max_position_embeddings": 64})
    written = dump_recipe(whole)

    assert SECRET not in written
    assert load_recipe(_file(tmp_path, written)) == whole
    assert whole.stored_values()["model"]["path"] == "${env:SECRET}"
    assert (whole.model.path, whole.run.seed) == (SECRET, 3)


def test_a_missing_variable_is_refused_with_key_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MISSING", raising=False)
    message = _refused("model.tokenizer=${env:MISSING}", "data.train.0.path=a/${env:MISSING}.jsonl")

    assert "model.tokenizer: " in message
    assert "data.train.0.path: " in message
    assert message.count("MISSING is not set") == 2
    assert "model.path: " in _refused("model.path=${env:}")


def test_a_refused_value_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for secret in (SECRET, SECRET * 20):
        monkeypatch.setenv("SECRET", secret)
        message = _refused(
            "optimizer.schedule=${env:SECRET}", "run.loggers=${env:SECRET}", "placement=${env:SECRET}", "steps=0",
            "tokens_per_step=${env:SECRET}", "data.train.0.map=${env:SECRET}", "run.seed=${env:NUMBER:1.5}",
        )  # fmt: skip
        assert SECRET not in message
    assert "${env:SECRET}" in message


def test_another_value_of_an_option_is_the_same_recipe_and_of_another_key_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VALUE", "0.1")
    overrides = ("program='p.py:f'", "signal=fixed", "options.key=${env:VALUE}", "optimizer.lr=${env:VALUE}")
    before = what_matters(make_recipe(*overrides))
    monkeypatch.setenv("VALUE", "0.2")
    after = what_matters(make_recipe(*overrides))

    assert {key for key in before if before[key] != after[key]} == {"optimizer.lr"}


PROGRAM = """
from podium.programs.sft import sft

def train(run):
    assert run.recipe.options["key"] == "hush-7f3a"
    sft(run)
"""


def _files_with(text: str, folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path.relative_to(folder)) for path in files if text.encode() in path.read_bytes()]


def test_no_secret_is_stored_by_a_run_its_checkpoints_and_its_export(workspace: Workspace) -> None:
    workspace.monkeypatch.setenv("SECRET", SECRET)
    workspace.monkeypatch.setenv("PLACE", str(workspace.path / SECRET))
    (workspace.path / "p.py").write_text(PROGRAM, encoding="utf-8")
    shutil.copytree(workspace.model, workspace.path / SECRET / "model")
    write_chats(workspace.path / SECRET / "train.jsonl", count=32)
    recipe = workspace.recipe(
        program="p.py:train", signal="fixed", options={"key": "${env:SECRET}"}, model={"path": "${env:PLACE}/model"},
        data={"train": "${env:PLACE}/train.jsonl"}, optimizer={"lr": "${env:LR:3e-3}"}, checkpoint={"every": 2},
        run={"cache": "${env:PLACE}/cache"},
    )  # fmt: skip
    assert workspace.podium("train", recipe).code == 0
    run = workspace.path / "runs/sums"
    assert _files_with(SECRET, run) == []
    assert load_recipe(run / "recipe.yaml").options == {"key": SECRET}

    # Another learning rate is another run; another password is not. Looking and exporting need no password.
    workspace.monkeypatch.setenv("LR", "1e-3")
    workspace.refused(workspace.podium("resume", "runs/sums", "--step", "2"), "optimizer.lr", left=("sums",))
    workspace.monkeypatch.delenv("LR")
    assert workspace.podium("resume", "runs/sums", "--step", "2").code == 0
    assert _files_with(SECRET, run) == []
    workspace.monkeypatch.delenv("SECRET")
    assert workspace.podium("show", "runs/sums").code == 0
    assert workspace.podium("export", "runs/sums", "out").code == 0
    assert _files_with(SECRET, workspace.path / "out") == []
    assert "SECRET" in workspace.podium("resume", "runs/sums", "--step", "2").err


REWARD = """
def f(answer, *, key):
    assert key == "hush-7f3a"
    return float(len(answer) % 2)
"""


@pytest.mark.slow
def test_no_secret_is_stored_by_a_controlled_run(workspace: Workspace) -> None:
    workspace.monkeypatch.setenv("SECRET", SECRET)
    (workspace.path / "rewards.py").write_text(REWARD, encoding="utf-8")
    reward = {"function": "rewards.py:f", "options": {"key": "${env:SECRET}"}}
    recipe = rl_recipe(workspace, "agent", reward=[reward], steps=1)
    assert workspace.podium("train", recipe).code == 0, workspace.capture.readouterr()
    run = workspace.path / "runs/agent"
    assert _files_with(SECRET, run) == []
    assert any("${env:SECRET}" in path.read_text(encoding="utf-8") for path in run.rglob("checkpoint.json"))


@pytest.mark.slow
def test_a_pipeline_keeps_references(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("NAME", "twice")
    stage = yaml.safe_load((workspace.path / workspace.recipe(steps=1)).read_text(encoding="utf-8"))
    (workspace.path / SECRET).mkdir()
    write_chats(workspace.path / SECRET / "train.jsonl", count=32)
    first = {**stage, "data": {**stage["data"], "train": "${env:SECRET}/train.jsonl"}}
    second = {**stage, "model": "${stage.a}"}
    pipeline = {"program": "pipeline", "stages": {"a": first, "b": second}, "run": {"name": "${env:NAME}"}}
    _file(workspace.path, yaml.safe_dump(pipeline), "two.yaml")

    assert workspace.podium("train", "two.yaml").code == 0
    run = workspace.path / "runs/twice"
    assert _files_with(SECRET, run) == []
    assert yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))["run"]["name"] == "${env:NAME}"
    assert "not run again" in workspace.podium("resume", "runs/twice").out
    monkeypatch.delenv("SECRET")
    assert workspace.podium("show", "runs/twice").code == 0
    assert "SECRET" in workspace.podium("resume", "runs/twice").err


# --- one instead of a list ---

SHORT = {
    "sft": {"data": {"train": "a.jsonl", "heldout": "b.jsonl"}, "run": {"loggers": "tensorboard"}},
    "grpo": {"reward": "rewards.py:f", "rollout": {"stop": "\n"}, "environment": {"tools": "t.py:f"}},
    "expert_iteration": {"reward": {"function": "rewards.py:f", "weight": 2}},
    "ppo": {"reward": "exact_match", "model": {"path": "m", "lora": {"targets": "q_proj"}}},
    "distill": {"teachers": "models/teacher", "model": {"path": "m", "new_tokens": {"tokens": "<a>"}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("program", SHORT)
def test_one_stands_for_a_list_of_one_also_in_the_schema(program: str) -> None:
    values = {**recipe_values(f"program={program}"), **SHORT[program]}
    recipe = parse_recipe(values)
    jsonschema.Draft202012Validator(recipe_schema()).validate(values)

    full = json.loads(json.dumps(recipe.stored_values()))
    assert parse_recipe(full) == recipe
    for section, given in SHORT[program].items():
        keys = {section: given} if not isinstance(given, dict) or section == "reward" else given
        for key in keys:
            value = full[section] if key == section else full[section][key]
            if key not in ("path", "lora", "new_tokens"):
                assert isinstance(value, list)
                assert len(value) == 1
    assert not jsonschema.Draft202012Validator(recipe_schema()).is_valid({**values, "steps": "many"})


def test_a_word_that_is_no_reward_is_refused() -> None:
    assert "reward.0" in _refused("program=grpo", reward="models/judge")
    assert "teachers" in _refused("program=distill", teachers=[])


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("model.lora.rank=4", ("model", "lora", "rank"), 4),
        ("data.train.0.weight=2", ("data", "train", 0, "weight"), 2.0),
        ("teachers.0.weight=2", ("teachers", 0, "weight"), 2.0),
        ("reward.0.weight=2", ("reward", 0, "weight"), 2.0),
    ],
)
def test_an_override_leads_into_a_shorthand(override: str, path: tuple[str | int, ...], value: float) -> None:
    short = {"model": "m", "data": {"train": "a.jsonl"}, "teachers": "t", "reward": "exact_match"}
    found: Any = parse_recipe(
        apply_overrides({**recipe_values("program=on_policy_distill"), **short}, [override])
    ).stored_values()
    for part in path:
        found = found[part]
    assert found == value


def test_an_override_leads_into_a_shorthand_of_a_stage(tmp_path: Path) -> None:
    stage = {"program": "sft", "model": "m", "data": {"train": "a.jsonl"}, "optimizer": {"lr": 1}, "steps": 1}
    file = _file(tmp_path, yaml.safe_dump({"program": "pipeline", "stages": {"a": stage}}))
    pipeline = load_any_recipe(file, ["stages.a.model.lora.rank=4", "stages.a.data.train.0.weight=2"])
    merged = pipeline.merged("a")  # type: ignore[union-attr]
    assert (merged["model"], merged["data"]["train"][0]["weight"]) == ({"path": "m", "lora": {"rank": 4}}, 2)


# --- epochs and warm-up ---


def test_a_run_has_steps_or_epochs_and_one_kind_of_warm_up() -> None:
    assert "epochs: " in _refused("epochs=2")
    assert "steps: required, and missing." in _refused("steps=null")
    assert make_recipe("steps=null", "epochs=0.5").epochs == 0.5
    assert "optimizer.warmup_ratio: " in _refused("optimizer.warmup_ratio=0.1", "optimizer.warmup_steps=3")
    whole = resolved(make_recipe("steps=25", "optimizer.warmup_ratio=0.1"), {"max_position_embeddings": 64})
    assert (whole.optimizer.warmup_steps, whole.optimizer.warmup_ratio) == (3, None)
    assert resolved(whole, {"max_position_embeddings": 64}) == whole


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2.5])
def test_epochs_over_fixed_data_are_counted_as_the_loader_packs(workspace: Workspace, epochs: float) -> None:
    recipe = workspace.recipe(
        steps=None, epochs=epochs, checkpoint={"every": 2, "keep": 99}, optimizer={"warmup_ratio": 0.1}
    )
    assert f"{epochs:g} epochs" in workspace.podium("check", recipe).out
    outcome = workspace.podium("train", recipe)
    stored = RunFolder.open("runs/sums").recipe()
    assert outcome.code == 0
    assert f"{epochs:g} epochs are {stored.steps} steps" in outcome.out
    rows = workspace.metric("sums", "rows")

    assert (stored.steps, stored.epochs) == (len(rows), None)
    assert stored.optimizer.warmup_steps == math.ceil(0.1 * stored.steps)
    assert sum(rows.values()) >= epochs * 64 > sum(rows.values()) - rows[stored.steps]
    assert workspace.podium("resume", "runs/sums", "--step", "2").code == 0
    assert workspace.metric("sums", "rows") == rows


def test_epochs_of_a_number_of_rows_leave_out_dropped_rows(workspace: Workspace) -> None:
    (workspace.path / "maps.py").write_text(
        "def f(row):\n    return row if len(str(row)) % 2 else None\n", encoding="utf-8"
    )
    kept = sum(
        len(str(json.loads(line))) % 2 for line in (workspace.path / "train.jsonl").read_text("utf-8").splitlines()
    )
    recipe = workspace.recipe(
        steps=None, epochs=3, rows_per_step=5, data={"train": {"path": "train.jsonl", "map": "maps.py:f"}}
    )
    assert 0 < kept < 64
    assert workspace.podium("train", recipe).code == 0
    assert RunFolder.open("runs/sums").recipe().steps == math.ceil(3 * kept / 5)


def test_epochs_on_policy_are_passes_over_the_prompts(workspace: Workspace) -> None:
    recipe = rl_recipe(workspace, "agent", steps=None, epochs=1)
    loaded = load_recipe(recipe)
    from podium.execution import prepare

    prepared = prepare(loaded).recipe
    num_prompts = len((workspace.path / loaded.data.train[0].path).read_text("utf-8").splitlines())
    assert prepared.steps == math.ceil(num_prompts / loaded.rollout.prompts_per_step)  # type: ignore[attr-defined]


def test_every_program_has_both_keys() -> None:
    for kind in (*BUILT_IN.values(), *CUSTOM.values()):
        assert {"steps", "epochs"} <= kind.model_fields.keys()


# --- overwriting, and checking for several devices ---


def test_overwrite_removes_an_earlier_run_and_nothing_else(workspace: Workspace) -> None:
    recipe = workspace.recipe(steps=1)
    assert workspace.podium("train", recipe, "--overwrite").code == 0
    (workspace.path / "runs/sums/mine.txt").write_text("old", encoding="utf-8")
    workspace.refused(workspace.podium("train", recipe), "runs/sums", left=("sums",))
    assert workspace.podium("train", recipe, "--overwrite").code == 0
    assert not (workspace.path / "runs/sums/mine.txt").exists()

    with RunFolder.open("runs/sums").held():
        workspace.refused(workspace.podium("train", recipe, "--overwrite"), "process ", left=("sums",))
    workspace.refused(
        workspace.podium("train", recipe, "--overwrite", "--set", "optimizer.lr=-1"), "optimizer.lr", left=("sums",)
    )
    assert (workspace.path / "runs/sums/metrics.jsonl").is_file()
    assert workspace.podium("export", "runs/sums", "runs/sums/out").code == 0
    workspace.refused(
        workspace.podium("train", recipe, "--overwrite", "--set", "model.path=runs/sums/out"), "model.path",
        left=("sums",),
    )  # fmt: skip

    (workspace.path / "runs/notes").mkdir()
    workspace.refused(
        workspace.podium("train", recipe, "--overwrite", "--set", "run.name=notes"), "runs/notes",
        left=("notes", "sums"),
    )  # fmt: skip
    assert (workspace.path / "runs/notes").is_dir()


@pytest.mark.slow
def test_overwrite_removes_an_earlier_pipeline(workspace: Workspace) -> None:
    stage = yaml.safe_load((workspace.path / workspace.recipe(steps=1)).read_text(encoding="utf-8"))
    _file(workspace.path, yaml.safe_dump({"program": "pipeline", "stages": {"a": stage}}), "one.yaml")
    assert workspace.podium("train", "one.yaml").code == 0
    with RunFolder.open("runs/one/a").held():
        workspace.refused(workspace.podium("train", "one.yaml", "--overwrite"), "process ", left=("one",))
    assert "not run again" in workspace.podium("train", "one.yaml").out
    own = ("--overwrite", "--set", "stages.a.model.path=runs/one/a/export")
    workspace.refused(workspace.podium("train", "one.yaml", *own), "model.path", left=("one",))
    assert "not run again" not in workspace.podium("train", "one.yaml", "--overwrite").out
    workspace.refused(
        workspace.podium("train", "sums.yaml", "--overwrite", "--set", "run.name=one"), "runs/one", left=("one",)
    )


def test_check_takes_the_devices_that_train_takes(workspace: Workspace) -> None:
    recipe = workspace.recipe(program="grpo", reward="exact_match", placement={"launcher": "inline"})
    assert workspace.podium("check", recipe).code == 0
    assert "placement.devices" in workspace.podium("check", recipe, "--devices", "2").err


def test_a_run_that_is_to_be_overwritten_stays_until_the_new_one_has_begun(workspace: Workspace) -> None:
    recipe = workspace.recipe(steps=1)
    assert workspace.podium("train", recipe).code == 0
    before = (workspace.path / "runs/sums/metrics.jsonl").read_bytes()
    (workspace.path / "broken.jsonl").write_text("{")

    outcome = workspace.podium("train", recipe, "--overwrite", "--set", "data.train=broken.jsonl")

    workspace.refused(outcome, "broken.jsonl", left=("sums",))
    assert (workspace.path / "runs/sums/metrics.jsonl").read_bytes() == before
    workspace.rows("late.jsonl", [{"messages": [{"role": "user", "content": "1+1="}]}] * 3)
    outcome = workspace.podium("train", recipe, "--overwrite", "--set", "data.train=late.jsonl")
    assert outcome.code == 2
    assert (workspace.path / "runs/sums/metrics.jsonl").read_bytes() == before
    assert workspace.podium("train", recipe, "--overwrite", "--set", "steps=2").code == 0
    assert [path.name for path in (workspace.path / "runs").iterdir()] == ["sums"]


def _pipeline_file(workspace: Workspace) -> str:
    stage = yaml.safe_load((workspace.path / workspace.recipe(steps=1)).read_text(encoding="utf-8"))
    values = {"program": "pipeline", "stages": {"a": stage}}
    return str(_file(workspace.path, yaml.safe_dump(values), "one.yaml"))


@pytest.mark.slow
def test_a_pipeline_that_is_to_be_overwritten_stays_until_the_new_one_has_begun(workspace: Workspace) -> None:
    file = _pipeline_file(workspace)
    assert workspace.podium("train", file).code == 0
    metrics = workspace.path / "runs/one/a/metrics.jsonl"
    before, state = metrics.read_bytes(), (workspace.path / "runs/one/pipeline.json").read_bytes()
    workspace.rows("late.jsonl", [{"messages": [{"role": "user", "content": "1+1="}]}] * 3)  # fails before a step

    outcome = workspace.podium("train", file, "--overwrite", "--set", "stages.a.data.train=late.jsonl")

    assert outcome.code == 2
    assert "podium resume" not in outcome.err
    assert metrics.read_bytes() == before
    assert (workspace.path / "runs/one/pipeline.json").read_bytes() == state
    assert workspace.podium("train", file, "--overwrite", "--set", "stages.a.steps=2").code == 0
    assert workspace.metric("one/a", "loss").keys() == {1, 2}
    assert [path.name for path in (workspace.path / "runs").iterdir()] == ["one"]
