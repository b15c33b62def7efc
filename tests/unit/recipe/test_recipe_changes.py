# SPDX-License-Identifier: Apache-2.0
"""Which changes of a recipe a resumed run may have, and which would make it another run."""

from __future__ import annotations

import re

import pytest

from helpers.recipes import make_recipe
from podium.recipe.changes import changes

HELDOUT = "data.heldout=[{path: h.jsonl}]"


def test_equal_recipes_have_no_changes() -> None:
    assert changes(make_recipe(), make_recipe()) == []


def test_a_change_says_key_old_and_new() -> None:
    (change,) = changes(make_recipe(), make_recipe("optimizer.lr=0.5"))

    assert str(change) == "optimizer.lr: 0.001 -> 0.5"
    assert change.breaks is not None


@pytest.mark.parametrize(
    "override",
    [
        "placement.devices=2",
        "placement.threads=1",
        "checkpoint.every=5",
        "checkpoint.keep=7",
        "micro_batch_tokens=64",
        "run.loggers=[tensorboard]",
        "run.log_every=9",
        "run.name=other",
        "run.folder=elsewhere",
        "data.workers=2",
        "data.prefetch=1",
        HELDOUT,
        "model.activation_checkpointing=layers",
        "model.self_check=false",
        "optimizer.max_skipped_in_a_row=9",
    ],
)
def test_what_never_reaches_the_weights_is_harmless(override: str) -> None:
    found = changes(make_recipe(), make_recipe(override))

    assert found
    assert all(change.breaks is None for change in found)


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=0.5",
        "optimizer.betas=[0.8, 0.99]",
        "optimizer.clip_norm=null",
        "optimizer.schedule=linear",
        "tokens_per_step=64",
        "run.seed=1",
        "model.path=models/other",
        "model.dtype=bfloat16",
        "model.pad_vocab_to=128",
        "data.train.0.path=other.jsonl",
        "data.train.0.weight=2",
        "data.train=[{path: data/train.jsonl}, {path: more.jsonl}]",
        "data.trained=everything",
        "data.max_length=64",
        "data.packing_window=8",
        "data.shuffle=false",
        "data.shuffle_rows=8",
    ],
)
def test_what_reaches_the_weights_breaks_exactness(override: str) -> None:
    found = changes(make_recipe(), make_recipe(override))

    assert [change for change in found if change.breaks is not None]


def test_a_source_that_is_added_is_shown_key_by_key() -> None:
    found = changes(make_recipe(), make_recipe("data.train=[{path: data/train.jsonl}, {path: more.jsonl}]"))

    assert "data.train.1.path: None -> 'more.jsonl'" in [str(change) for change in found]


def test_evaluation_switched_on_later_is_harmless() -> None:
    old, new = make_recipe(HELDOUT), make_recipe(HELDOUT, "evaluation.every=2", "evaluation.generation={prompts: 1}")

    found = changes(old, new)

    assert "evaluation.generation.prompts" in {change.key for change in found}
    assert all(change.breaks is None for change in found)


def test_more_steps_are_harmless_when_the_rate_is_constant() -> None:
    (change,) = changes(make_recipe(), make_recipe("steps=200"))

    assert (change.key, change.breaks) == ("steps", None)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_more_steps_break_a_schedule_that_ends_at_them(schedule: str) -> None:
    rates = f"optimizer.schedule={schedule}"

    (change,) = changes(make_recipe(rates), make_recipe(rates, "steps=200"))

    assert change.breaks is not None
    assert re.search(f"{schedule}.*`steps`", change.breaks)


def test_a_key_that_only_begins_like_a_harmless_one_is_not_harmless() -> None:
    (change,) = changes(make_recipe(), make_recipe("run.seed=3"))

    assert change.breaks is not None
