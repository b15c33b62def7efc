# SPDX-License-Identifier: Apache-2.0
"""Recipes of dpo, reward_model and distill: each rule broken once, what is filled in, and which columns there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.recipes import make_recipe
from podium.errors import RecipeError
from podium.recipe.dense_rules import documents_per_row, reference_of
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
    ("overrides", "complaint"),
    [
        # Sections of another program.
        (
            ("preference.beta=0.2",),
            "preference: sft has no use for it. Remove the section, or set program to dpo.",
        ),
        (("reward_model.center=0.1",), "reward_model: sft has no use for it."),
        (("distill.temperature=2",), "distill: sft has no use for it."),
        ((*DPO, "distill.temperature=2"), "distill: dpo has no use for it."),
        ((*DISTILL, "preference.loss=ipo"), "preference: distill has no use for it."),
        ((*RANKED, "preference.beta=1"), "preference: reward_model has no use for it."),
        ((*DPO, "teachers=[{path: t}]"), "teachers: dpo learns from data that is known in advance"),
        ((*RANKED, "reward=[{function: 'mine.py:score'}]"), "reward: reward_model learns from data"),
        ((*DPO, "algorithm.advantage=leave_one_out"), "algorithm: dpo learns from data"),
        (
            ("program=grpo", "reward=[{function: 'mine.py:score'}]", "rows_per_step=4"),
            "rows_per_step: grpo counts rollout.prompts_per_step. Remove it.",
        ),
        ((*DPO, "placement.launcher=inline"), "dpo runs with launcher local or ray"),
        # Preferences.
        ((*DPO, "preference.loss=ipo", "preference.label_smoothing=0.1"), "preference.label_smoothing: loss ipo"),
        ((*DPO, "preference.gamma=2"), "preference.gamma: loss sigmoid has no use for it (it is for simpo)."),
        ((*DPO, "preference.desirable_weight=2"), "preference.desirable_weight: loss sigmoid"),
        ((*DPO, "preference.undesirable_weight=2"), "preference.undesirable_weight: loss sigmoid"),
        ((*DPO, "preference.loss=orpo", "preference.cross_entropy=1"), "preference.cross_entropy: loss orpo"),
        ((*KTO, "preference.cross_entropy=1"), "preference.cross_entropy: loss kto"),
        ((*DPO, "preference.loss=simpo", "preference.reference=live"), "preference.reference: loss simpo"),
        ((*DPO, "preference.loss=orpo", "preference.reference_model=r"), "preference.reference_model: loss orpo"),
        ((*KTO, "preference.reference=cached"), "the reference cannot be computed beforehand. Use live."),
        ((*DPO, "preference.label_smoothing=0.5"), "preference.label_smoothing"),
        ((*DPO, "preference.beta=0"), "preference.beta"),
        ((*DPO, "preference.loss=dpo"), "preference.loss"),
        # Reward models.
        ((*SCORES, "reward_model.center=0.1"), "reward_model.center: scores say themselves where zero is."),
        (
            (*RANKED, HELDOUT, "evaluation.generation={}"),
            "evaluation.generation: a reward model writes no text. Remove it.",
        ),
        # Distillation.
        (("program=distill",), "teachers: distill learns from teachers, and there is none. Add {path: FOLDER}."),
        (
            (*DISTILL, "distill.jsd_beta=0.3"),
            "distill.jsd_beta: forward_kl has none. Remove it, or set distill.divergence to jsd.",
        ),
        (
            (*DISTILL, "distill.top_k=8"),
            "distill.top_k: live teachers give their whole distribution. Remove it, or set distill.targets to cached.",
        ),
        ((*DISTILL, "distill.cross_entropy=1"), "distill.cross_entropy"),
        ((*DISTILL, "distill.divergence=jsd", "distill.jsd_beta=1"), "distill.jsd_beta"),
        # Lengths: a pair is two documents.
        (
            (*DPO, "data.max_length=200", "micro_batch_tokens=300"),
            "data.max_length: 200 does not fit micro_batch_tokens 300; a pair of documents is never cut over two "
            "micro-batches. Lower data.max_length to 150 or raise micro_batch_tokens to 400.",
        ),
        (
            (*RANKED, "data.max_length=200", "tokens_per_step=300"),
            "data.max_length: 200 of each document of a pair is longer than tokens_per_step 300. "
            "Raise tokens_per_step to at least 400.",
        ),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_told_with_its_key(overrides: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(RecipeError) as told:
        make_recipe(*overrides)
    assert complaint in str(told.value)


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
    assert reference_of(make_recipe(*overrides)) == wanted


@pytest.mark.parametrize(("overrides", "count"), [(DPO, 2), (KTO, 1), (RANKED, 2), (SCORES, 1), (DISTILL, 1), ((), 1)])
def test_a_pair_is_two_documents(overrides: tuple[str, ...], count: int) -> None:
    assert documents_per_row(make_recipe(*overrides)) == count


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
    with pytest.raises(RecipeError) as told:
        make_recipe(*overrides, "data.train.0.columns={question: mine}")
    assert f"data.train.0.columns.question: not a column that Podium reads. The left side is one of {known};" in str(
        told.value
    )
