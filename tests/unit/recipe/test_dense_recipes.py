# SPDX-License-Identifier: Apache-2.0
"""Recipes of dpo, reward_model and distill: each rule broken once, what is filled in, and which columns there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.recipes import make_recipe
from podium.errors import RecipeError
from podium.recipe import DpoRecipe, SpmdRecipe
from podium.recipe.resolving import resolved

CONFIG = {"max_position_embeddings": 512}
HELDOUT = "data.heldout=[{path: h.jsonl}]"
DPO, KTO = ("program=dpo",), ("program=dpo", "preference.loss=kto")
RANKED, SCORES = ("program=reward_model",), ("program=reward_model", "reward_model.learns=scores")
DISTILL = ("program=distill", "teachers=[{path: models/teacher}]")


@pytest.mark.parametrize("overrides", [DPO, KTO, RANKED, SCORES, DISTILL])
def test_the_shortest_recipe_of_each_program_is_valid(overrides: tuple[str, ...]) -> None:
    make_recipe(*overrides)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        # Preferences.
        ((*DPO, "preference.loss=ipo", "preference.label_smoothing=0.1"), "preference.label_smoothing"),
        ((*DPO, "preference.gamma=2"), "preference.gamma"),
        ((*DPO, "preference.desirable_weight=2"), "preference.desirable_weight"),
        ((*DPO, "preference.undesirable_weight=2"), "preference.undesirable_weight"),
        ((*DPO, "preference.loss=orpo", "preference.cross_entropy=1"), "preference.cross_entropy"),
        ((*KTO, "preference.cross_entropy=1"), "preference.cross_entropy"),
        ((*DPO, "preference.loss=simpo", "preference.reference=live"), "preference.reference"),
        ((*DPO, "preference.loss=orpo", "preference.reference_model=r"), "preference.reference_model"),
        ((*KTO, "preference.reference=cached"), "preference.reference"),
        ((*DPO, "preference.label_smoothing=0.5"), "preference.label_smoothing"),
        ((*DPO, "preference.beta=0"), "preference.beta"),
        ((*DPO, "preference.loss=dpo"), "preference.loss"),
        # A key that another loss has is refused at its default too.
        ((*DPO, "preference.gamma=1"), "preference.gamma"),
        # Reward models.
        ((*SCORES, "reward_model.center=0.1"), "reward_model.center"),
        ((*RANKED, HELDOUT, "evaluation.generation={}"), "evaluation.generation"),
        # Distillation.
        (("program=distill",), "teachers"),
        (("program=distill", "teachers=[]"), "teachers"),
        ((*DISTILL, "distill.jsd_beta=0.3"), "distill.jsd_beta"),
        ((*DISTILL, "distill.jsd_beta=0.5"), "distill.jsd_beta"),
        ((*DISTILL, "distill.top_k=8"), "distill.top_k"),
        ((*DISTILL, "distill.cross_entropy=1"), "distill.cross_entropy"),
        ((*DISTILL, "distill.divergence=jsd", "distill.jsd_beta=1"), "distill.jsd_beta"),
        # Lengths: a pair is two documents.
        ((*DPO, "data.max_length=200", "micro_batch_tokens=300"), "data.max_length"),
        ((*RANKED, "data.max_length=200", "tokens_per_step=300"), "data.max_length"),
    ],
)
def test_what_breaks_a_rule_is_reported_with_its_key(overrides: tuple[str, ...], key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_recipe(*overrides)
    assert f"\n  {key}: " in str(caught.value)
    assert "(1 problem)" in str(caught.value)


def test_a_key_of_another_loss_is_named_with_the_losses_that_have_it() -> None:
    with pytest.raises(RecipeError, match=r"preference\.gamma: sigmoid [^,]*\bsimpo\b"):
        make_recipe(*DPO, "preference.gamma=2")


def test_pairs_that_do_not_fit_are_refused_with_lengths_that_do() -> None:
    with pytest.raises(RecipeError, match=r"data\.max_length: .* 150\b.*micro_batch_tokens .*\b400\b"):
        make_recipe(*DPO, "data.max_length=200", "micro_batch_tokens=300")


@pytest.mark.parametrize(
    ("loss", "beta"), [("sigmoid", 0.1), ("ipo", 0.1), ("simpo", 2.0), ("orpo", 0.1), ("kto", 0.1)]
)
def test_each_loss_has_a_strength_that_suits_it(loss: str, beta: float) -> None:
    assert make_recipe(*DPO, f"preference.loss={loss}").preference.beta == beta


@pytest.mark.parametrize(
    "overrides",
    [
        (*DPO, "preference.loss=simpo", "preference.gamma=1", "preference.label_smoothing=0.1"),
        (*DPO, "preference.loss=ipo", "preference.cross_entropy=0.5", "preference.reference=live"),
        (*KTO, "preference.desirable_weight=2", "preference.reference=live", "preference.reference_model=r"),
        (*RANKED, "reward_model.center=0.01"),
        (*DISTILL, "distill.targets=cached", "distill.top_k=8"),
        (*DISTILL, "distill.divergence=jsd", "distill.jsd_beta=0.3"),
        (*KTO, "data.max_length=200", "micro_batch_tokens=300", "tokens_per_step=300"),
        (*SCORES, "data.max_length=200", "micro_batch_tokens=300", "tokens_per_step=300"),
        # Rows are counted, so tokens_per_step bounds nothing.
        (*DPO, "data.max_length=200", "tokens_per_step=300", "rows_per_step=4"),
    ],
)
def test_what_a_loss_has_a_use_for_is_accepted(overrides: tuple[str, ...]) -> None:
    make_recipe(*overrides)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (DPO, "cached"),
        ((*DPO, "preference.reference=live"), "live"),
        ((*DPO, "preference.loss=ipo"), "cached"),
        (KTO, "live"),
        ((*DPO, "preference.loss=simpo"), None),
        ((*DPO, "preference.loss=orpo"), None),
        ((*DPO, "model.lora={}"), "base"),
        ((*KTO, "model.lora={}"), "base"),
        ((*DPO, "model.lora={}", "preference.reference=live"), "base"),
        ((*DPO, "model.lora={}", "preference.reference=cached"), "cached"),
        # The reference is what the policy began as, and that is not the base here.
        ((*DPO, "model.lora={adapter: a}"), "cached"),
        ((*DPO, "model.lora={}", "preference.reference_model=r"), "cached"),
        ((*DPO, "model.lora={}", "preference.reference_model=r", "preference.reference=live"), "live"),
    ],
)
def test_where_the_reference_comes_from(overrides: tuple[str, ...], wanted: str | None) -> None:
    recipe = make_recipe(*overrides)
    assert isinstance(recipe, DpoRecipe)
    assert recipe.reference_source == wanted


@pytest.mark.parametrize(("overrides", "count"), [(DPO, 2), (KTO, 1), (RANKED, 2), (SCORES, 1), (DISTILL, 1), ((), 1)])
def test_a_pair_is_two_documents(overrides: tuple[str, ...], count: int) -> None:
    recipe = make_recipe(*overrides)
    assert isinstance(recipe, SpmdRecipe)
    assert recipe.documents_per_row == count


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        ((*DPO, "tokens_per_step=600"), 300),
        ((*KTO, "tokens_per_step=400"), 400),
        ((*RANKED, "tokens_per_step=600"), 300),
        ((*SCORES, "tokens_per_step=400"), 400),
        ((*DISTILL, "tokens_per_step=400"), 400),
        ((*DPO, "tokens_per_step=5000"), 512),
        ((*DPO, "tokens_per_step=600", "rows_per_step=8"), 512),
        ((*DPO, "tokens_per_step=600", "data.max_length=100"), 100),
    ],
)
def test_the_longest_length_leaves_room_for_both_sides_of_a_pair(overrides: tuple[str, ...], longest: int) -> None:
    recipe = resolved(make_recipe(*overrides), CONFIG)
    assert recipe.data.max_length == longest
    assert resolved(recipe, CONFIG).data.max_length == longest


def test_rows_without_a_known_context_are_bounded_by_the_step() -> None:
    assert resolved(make_recipe(*DPO, "tokens_per_step=600", "rows_per_step=8"), {}).data.max_length == 300


def test_checkpoints_beside_the_policy_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models/teacher").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolved(make_recipe(*DISTILL), CONFIG).teachers[0].path == str(tmp_path / "models/teacher")
    recipe = resolved(make_recipe(*DPO, "preference.reference_model=models/teacher"), CONFIG)
    assert recipe.preference.reference_model == str(tmp_path / "models/teacher")
    recipe = resolved(make_recipe(*DPO, "preference.reference_model=some/hub-id"), CONFIG)
    assert recipe.preference.reference_model == "some/hub-id"


@pytest.mark.parametrize(
    ("overrides", "known"),
    [
        (DPO, "chosen, prompt, rejected, tools"),
        (KTO, "completion, label, prompt, tools"),
        (RANKED, "chosen, margin, prompt, rejected, tools"),
        (SCORES, "completion, messages, prompt, score, text, tools"),
        (DISTILL, "completion, messages, prompt, text"),
    ],
)
def test_columns_that_a_program_reads_can_be_renamed_and_others_not(overrides: tuple[str, ...], known: str) -> None:
    make_recipe(*overrides, f"data.train.0.columns={{{known.split(', ')[0]}: mine}}")
    with pytest.raises(RecipeError, match=rf"data\.train\.0\.columns\.question: .*[^,] {known}[^\w,]"):
        make_recipe(*overrides, "data.train.0.columns={question: mine}")
