# SPDX-License-Identifier: Apache-2.0
"""A resolved recipe means the same from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.recipes import make_recipe
from podium.errors import RecipeError
from podium.recipe.resolving import resolved

CONFIG = {"max_position_embeddings": 512}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model, data and a plug-in file in it."""
    for folder in ("models/base", "data"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("data/train.jsonl", "chat.jinja", "mine.py"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paths_that_exist_become_absolute(here: Path) -> None:
    recipe = resolved(
        make_recipe(
            "model.tokenizer=models/base", "model.chat_template=chat.jinja", "data.train.0.map=mine.py:f",
            "data.heldout=[{path: data/train.jsonl}]", "evaluation.generation={score: 'mine.py:g'}",
            "run.loggers=[tensorboard, 'mine.py:h']",
        ),
        CONFIG,
    )  # fmt: skip

    assert recipe.model.path == recipe.model.tokenizer == str(here / "models/base")
    assert recipe.model.chat_template == str(here / "chat.jinja")
    assert recipe.data.train[0].path == recipe.data.heldout[0].path == str(here / "data/train.jsonl")
    assert recipe.data.train[0].map == f"{here}/mine.py:f"
    assert recipe.evaluation.generation is not None
    assert recipe.evaluation.generation.score == f"{here}/mine.py:g"
    assert recipe.run.loggers == ("tensorboard", f"{here}/mine.py:h")


@pytest.mark.parametrize(
    "path", ["owner/name", "s3://bucket/rows.jsonl", "hf://datasets/owner/name/x.parquet", "missing.jsonl"]
)
def test_hub_ids_and_urls_stay_as_they_are(here: Path, path: str) -> None:
    recipe = resolved(make_recipe(f"data.train.0.path='{path}'", "model.path=owner/model"), CONFIG)

    assert recipe.data.train[0].path == path
    assert recipe.model.path == "owner/model"


def test_a_module_plugin_and_a_named_score_stay_as_they_are(here: Path) -> None:
    recipe = resolved(
        make_recipe(
            "data.train.0.map=package.module:f",
            "data.heldout=[{path: h}]",
            "evaluation.generation={score: exact_match}",
        ),
        CONFIG,
    )

    assert recipe.data.train[0].map == "package.module:f"
    assert recipe.evaluation.generation is not None
    assert recipe.evaluation.generation.score == "exact_match"


@pytest.mark.parametrize("pattern", ["data/*.jsonl", "data/train.json?", "data/[a-t]*.jsonl", "*.jsonl"])
def test_a_glob_beneath_a_folder_that_exists_becomes_absolute(here: Path, pattern: str) -> None:
    recipe = resolved(make_recipe(f"data.train.0.path='{pattern}'"), CONFIG)

    assert recipe.data.train[0].path == str(here / pattern)


def test_the_home_folder_is_spelt_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))

    assert resolved(make_recipe("model.path=~/models/base"), CONFIG).model.path == str(here / "models/base")


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        ((), 512),
        (("tokens_per_step=300",), 300),
        (("tokens_per_step=300", "micro_batch_tokens=400"), 300),
        (("data.max_length=100",), 100),
        (("data.max_length=512",), 512),
    ],
)
def test_the_longest_document_is_what_step_and_model_allow(overrides: tuple[str, ...], longest: int) -> None:
    assert resolved(make_recipe(*overrides), CONFIG).data.max_length == longest


def test_a_micro_batch_never_shortens_documents_by_itself() -> None:
    with pytest.raises(RecipeError, match=r"data\.max_length: 512 .*micro_batch_tokens 200\b.*max_length to 200\b"):
        resolved(make_recipe("micro_batch_tokens=200"), CONFIG)
    assert resolved(make_recipe("micro_batch_tokens=200", "data.max_length=200"), CONFIG).data.max_length == 200


def test_a_config_that_nests_its_text_part_is_understood() -> None:
    config = {"text_config": {"max_position_embeddings": 128}}

    assert resolved(make_recipe(), config).data.max_length == 128


def test_a_config_without_a_context_length_does_not_limit() -> None:
    assert resolved(make_recipe("tokens_per_step=700"), {}).data.max_length == 700


def test_a_longer_document_than_the_models_context_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.max_length: 513 .* 512\b"):
        resolved(make_recipe("data.max_length=513"), CONFIG)


def test_resolving_again_changes_nothing_even_from_another_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = resolved(make_recipe("data.train.0.map=mine.py:f", "tokens_per_step=300"), CONFIG)
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")

    assert resolved(once, CONFIG) == once
