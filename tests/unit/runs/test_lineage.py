# SPDX-License-Identifier: Apache-2.0
"""What a run is made of is kept with it, goes on into what is exported from it, and from there into its children."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.runs import tiny_recipe
from helpers.tiny import write_chats
from podium.recipe import Recipe
from podium.recipe.resolving import resolved
from podium.runs.folder import RunFolder
from podium.runs.lineage import NOTE, Prepared, code_version, inputs_of, read_note, write_note
from podium.runs.showing import show_lines


@pytest.fixture
def recipe(tmp_path: Path, tiny_folder: Path) -> Recipe:
    data = write_chats(tmp_path / "train.jsonl", count=4)
    return resolved(tiny_recipe(tiny_folder, data, tmp_path / "runs", "one"), {})


def _prepared(recipe: Recipe, model: Path | None = None) -> Prepared:
    at = (
        recipe
        if model is None
        else recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(model)})})
    )
    return Prepared(recipe=at, model=Path(at.model.path))


def test_code_that_resumes_a_run_is_added_only_where_it_is_other_code(recipe: Recipe) -> None:
    begun = _prepared(recipe).lineage()
    assert begun["code"] == [{**code_version(), "after_step": 0}]

    same = _prepared(recipe).lineage(begun, step=3)
    assert same == begun

    older = {**begun, "code": [{"podium": "0.0.1", "source": "0123", "after_step": 0}]}
    mixed = _prepared(recipe).lineage(older, step=3)
    assert mixed["code"] == [*older["code"], {**code_version(), "after_step": 3}]


def test_an_exported_folder_hands_its_descent_on(recipe: Recipe, tmp_path: Path, tiny_folder: Path) -> None:
    run = RunFolder.create(recipe, lineage=_prepared(recipe).lineage())
    out = tmp_path / "out"
    out.mkdir()
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (out / file).write_bytes((tiny_folder / file).read_bytes())
    write_note(run, out, step=8)

    lineage = _prepared(recipe, out).lineage()

    (weights,) = inputs_of(lineage, "weights")
    ((fingerprint, maker),) = lineage["ancestors"].items()
    assert fingerprint == weights["fingerprint"]
    assert (maker["run"], maker["step"], maker["program"]) == (str(run.path), 8, "sft")
    (first,) = inputs_of(maker, "weights")
    assert first["path"] == str(tiny_folder)


def test_a_line_of_descent_grows_by_one_maker_a_generation(recipe: Recipe, tmp_path: Path) -> None:
    """Also where each generation reads the one before at two keys, as policy and as reference."""
    model: Path | None = None
    for number in range(6):
        made = _prepared(recipe, model)
        run = RunFolder(path=tmp_path / f"run-{number}")
        run.path.mkdir()
        twice = replace(made.inputs[0], key="algorithm.kl.reference")
        object.__setattr__(made, "inputs", (*made.inputs, twice))
        run.update(program="sft", lineage=made.lineage(), status="finished")
        model = tmp_path / f"model-{number}"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"generation": number}))
        write_note(run, model, step=1)
    assert model is not None
    note = read_note(model)
    assert note is not None
    assert len(note["ancestors"]) == 5
    assert len(json.dumps(note)) < 20_000


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 99}', ""])
def test_a_note_that_is_not_podiums_is_no_note(content: str, tmp_path: Path) -> None:
    (tmp_path / NOTE).write_text(content)
    assert read_note(tmp_path) is None


def test_a_run_of_before_there_was_lineage_is_shown_too(recipe: Recipe) -> None:
    run = RunFolder.create(recipe)
    state = json.loads((run.path / "run.json").read_text())
    for key in ("lineage", "files"):
        del state[key]
    (run.path / "run.json").write_text(json.dumps(state))

    lines = show_lines(run.path)

    assert "checkpoints: none" in lines
    assert any(line.startswith("status: ") and "dead" in line and line.endswith(", step 0 of 8") for line in lines)


def test_a_run_that_lives_is_not_called_broken_off(recipe: Recipe) -> None:
    run = RunFolder.create(recipe)
    with run.held():
        (status,) = (line for line in show_lines(run.path) if line.startswith("status: "))
        assert status.split() == ["status:", "starting,", "step", "0", "of", "8"]
