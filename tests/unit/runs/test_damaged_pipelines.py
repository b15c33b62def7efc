# SPDX-License-Identifier: Apache-2.0
"""Pipelines that were interrupted, moved, damaged or wired wrongly: nothing is run again or exported in error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import tiny_recipe
from helpers.tiny import write_chats
from podium.data.fingerprints import folder_fingerprint
from podium.errors import RecipeError, RunFolderError
from podium.observe import Stopwatch
from podium.programs.pipeline import PipelineResult, Verbs, run_pipeline
from podium.recipe import PipelineRecipe, Recipe
from podium.recipe.pipeline_loading import parse_pipeline
from podium.recipe.resolving import resolved
from podium.runs.folder import RunFolder
from podium.runs.lineage import Prepared, require_what_export_reads, write_note
from podium.runs.pipeline_folder import PipelineFolder
from podium.runs.result import RunResult
from podium.runs.showing import show_lines

STAGE: dict[str, Any] = {
    "program": "sft", "data": {"train": [{"path": "rows.jsonl"}]}, "optimizer": {"lr": 1}, "steps": 2,
}  # fmt: skip


def _pipeline(**stages: dict[str, Any]) -> PipelineRecipe:
    return parse_pipeline({"program": "pipeline", "stages": stages, "run": {"name": "p"}})


# --- a pipeline whose stages take no time: training writes a checkpoint's name, exporting copies the base ---


class _Instant:
    """The verbs of a pipeline, each done at once; `calls` says which were."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.look: Callable[[], None] = lambda: None

    def verbs(self) -> Verbs:
        return Verbs(prepare=self._prepare, train=self._train, resume=self._resume, export=self._export)

    def _prepare(self, recipe: Recipe) -> Prepared:
        self.look()
        return Prepared(recipe=resolved(recipe, {}), model=Path(recipe.model.path))

    def _train(self, prepared: Prepared) -> RunResult:
        self.calls.append(f"train {prepared.recipe.run.name}")
        run = RunFolder.create(prepared.recipe, lineage=prepared.lineage())
        (run.checkpoints / f"step-{prepared.recipe.steps:08d}").mkdir()
        return _result(run.path, prepared.recipe.steps)

    def _resume(self, prepared: Prepared, run: RunFolder) -> RunResult:
        raise AssertionError("nothing here is broken off in the middle of a stage")

    def _export(self, run: RunFolder, out: Path) -> int:
        self.calls.append(f"export {run.path.name}")
        base = Path(run.recipe().model.path)
        out.mkdir()
        for file in base.iterdir():
            if file.name != "podium.json":
                shutil.copy(file, out / file.name)
        write_note(run, out, step=run.recipe().steps)
        return run.recipe().steps


def _result(folder: Path, step: int) -> RunResult:
    return RunResult(
        folder=folder, status="finished", step=step, loss=0.0, heldout_loss=None, score=None, time=Stopwatch().summary()
    )


@pytest.fixture
def recipe(tmp_path: Path, tiny_folder: Path) -> PipelineRecipe:
    stage = {**STAGE, "data": {"train": [{"path": str(write_chats(tmp_path / "rows.jsonl", count=4))}]}}
    values = {
        "program": "pipeline",
        "stages": {
            "first": {**stage, "model": str(tiny_folder)},
            "second": {**stage, "model": {"path": "${stage.first}", "lora": {"rank": 2}}},
        },
        "run": {"name": "p", "folder": str(tmp_path / "runs")},
    }
    return parse_pipeline(values)


def _run(recipe: PipelineRecipe, folder: PipelineFolder, instant: _Instant) -> PipelineResult:
    instant.calls.clear()
    return run_pipeline(recipe, folder, instant.verbs())


@pytest.mark.slow
def test_a_stage_that_is_done_stays_done_when_it_was_only_being_looked_at(recipe: PipelineRecipe) -> None:
    """Its checkpoints were removed to make room: if Ctrl-C took its status, it would be trained again."""
    instant, folder = _Instant(), PipelineFolder.at(recipe)
    _run(recipe, folder, instant)
    shutil.rmtree(folder.run("first").checkpoints / "step-00000002")

    def interrupt() -> None:
        raise KeyboardInterrupt

    instant.look = interrupt
    with pytest.raises(KeyboardInterrupt):
        _run(recipe, folder, instant)
    assert folder.record("first").status == "done"
    assert folder.state()["status"] == "stopped"

    instant.look = lambda: None
    assert [stage.done for stage in _run(recipe, folder, instant).stages] == ["skipped", "skipped"]
    assert instant.calls == []


@pytest.mark.slow
def test_a_moved_pipeline_exports_an_adapter_on_the_base_that_moved_with_it(recipe: PipelineRecipe) -> None:
    instant, folder = _Instant(), PipelineFolder.at(recipe)
    _run(recipe, folder, instant)
    moved = PipelineFolder(path=folder.path.with_name("moved"))
    folder.path.rename(moved.path)
    shutil.rmtree(moved.export("second"))

    outcome = _run(recipe, moved, instant)

    assert [stage.done for stage in outcome.stages] == ["skipped", "exported"]
    assert instant.calls == ["export second"]
    assert moved.run("second").recipe().model.path == str(moved.export("first"))


# --- damaged files ---


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{}", '{"order": ["first"]}', '{"order": [], "parents": {}, "stages": []}',
        '{"order": [], "parents": {}, "stages": {"first": {"unheard_of": 1}}}',
    ],
)  # fmt: skip
def test_a_damaged_pipeline_file_is_named_with_what_to_do(recipe: PipelineRecipe, text: str) -> None:
    folder = PipelineFolder.at(recipe)
    with folder.create_and_hold():
        folder.begin(recipe)
    (folder.path / "pipeline.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"pipeline\.json .*damaged"):
        show_lines(folder.path)


@pytest.mark.slow
def test_a_lineage_that_is_not_whole_is_left_out_of_what_is_shown(recipe: PipelineRecipe) -> None:
    folder, instant = PipelineFolder.at(recipe), _Instant()
    _run(recipe, folder, instant)
    whole = show_lines(folder.path)
    assert any("weights model.path" in line for line in whole)

    folder.run("first").update(lineage=[])
    folder.run("second").update(lineage={"inputs": [{"kind": "weights"}], "code": ["?"], "ancestors": 5})
    shown = show_lines(folder.path)
    assert not any("weights model.path" in line for line in shown)
    assert sum("done" in line for line in shown) == 2

    (folder.run("first").path / "run.json").write_text("[]")
    with pytest.raises(RunFolderError, match=r"run\.json .*damaged"):
        show_lines(folder.path)


# --- stages of the wrong kind ---


def test_a_reward_model_is_no_policy_and_a_policy_no_reward_model() -> None:
    scorer = {**STAGE, "program": "reward_model", "model": "base"}
    on_policy = {**STAGE, "program": "grpo", "rollout": {"max_new_tokens": 4}}
    with pytest.raises(RecipeError, match=r"stages\.policy\.model: .*\bscorer\b"):
        _pipeline(scorer=scorer, policy={**STAGE, "model": "${stage.scorer}"})
    with pytest.raises(RecipeError, match=r"stages\.policy\.reward\.0\.model: .*\bsft\b"):
        _pipeline(
            sft={**STAGE, "model": "base"},
            policy={**on_policy, "model": "${stage.sft}", "reward": [{"model": "${stage.sft}"}]},
        )
    made = _pipeline(
        sft={**STAGE, "model": "base"},
        scorer={**scorer, "model": "${stage.sft}"},
        better={**scorer, "model": "${stage.scorer}"},
        policy={**on_policy, "model": "${stage.sft}", "reward": [{"model": "${stage.better}"}]},
    )
    assert made.order() == ("sft", "scorer", "better", "policy")


def test_a_reference_where_no_checkpoint_is_taken_is_refused() -> None:
    tokens = {"path": "${stage.sft}", "new_tokens": {"tokens": ["${stage.sft}"]}}
    with pytest.raises(RecipeError, match=r"stages\.more\.model\.new_tokens\.tokens\.0: .*stage\.sft\b"):
        _pipeline(sft={**STAGE, "model": "base"}, more={**STAGE, "model": tokens})


# --- what an export reads beside the checkpoint ---


def _begun(recipe: Recipe) -> RunFolder:
    return RunFolder.create(recipe, lineage=Prepared(recipe=recipe, model=Path(recipe.model.path)).lineage())


def test_an_adapter_is_not_exported_on_a_base_that_changed(tmp_path: Path, tiny_folder: Path) -> None:
    base = Path(shutil.copytree(tiny_folder, tmp_path / "base"))
    data = write_chats(tmp_path / "rows.jsonl", count=4)
    run = _begun(tiny_recipe(base, data, tmp_path / "runs", "lora", model={"lora": {"rank": 2}}))
    whole = _begun(tiny_recipe(base, data, tmp_path / "runs", "whole"))
    require_what_export_reads(run)

    before = folder_fingerprint(base)
    weights = base / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert folder_fingerprint(base) != before

    with pytest.raises(RunFolderError, match=r"^model\.path: .*/base .*fingerprint"):
        require_what_export_reads(run)
    require_what_export_reads(whole)  # all its weights are in the checkpoint


def test_new_tokens_are_not_exported_with_a_list_in_another_order(tmp_path: Path, tiny_folder: Path) -> None:
    items, data = tmp_path / "items.txt", write_chats(tmp_path / "rows.jsonl", count=4)
    items.write_text("<a>\n<b>\n")
    run = _begun(tiny_recipe(tiny_folder, data, tmp_path / "runs", "n", model={"new_tokens": {"file": str(items)}}))
    require_what_export_reads(run)
    items.write_text("<b>\n<a>\n")
    with pytest.raises(RunFolderError, match=r"^model\.new_tokens\.file: .*items\.txt .*fingerprint"):
        require_what_export_reads(run)


def test_a_run_without_a_lineage_is_exported_as_before(tmp_path: Path, tiny_folder: Path) -> None:
    data = write_chats(tmp_path / "rows.jsonl", count=4)
    recipe = tiny_recipe(tiny_folder, data, tmp_path / "runs", "old", model={"lora": {"rank": 2}})
    require_what_export_reads(RunFolder.create(recipe))
