# SPDX-License-Identifier: Apache-2.0
"""Rules of programs with fixed data, and of adapters, that span several keys: each gives a sentence with its fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from podium.recipe.dense import DistillSection, PreferenceSection
from podium.recipe.programs import SIGNALS

if TYPE_CHECKING:
    from podium.recipe.schema import Recipe

# Sections that only one program reads.
_OWNERS = {"preference": "dpo", "reward_model": "reward_model", "distill": "distill"}
# Losses that compare with a reference; the others have none.
WITH_REFERENCE = ("sigmoid", "ipo", "kto")
# Programs whose loss compares the policy's log-probs with nothing that was computed without dropout.
_WITH_DROPOUT = ("sft", "reward_model")


def dense_rules(recipe: Recipe) -> list[str]:
    """Every rule that does not hold, whatever the program."""
    return [*_owners(recipe), *_preference(recipe), *_reward_model(recipe), *_distill(recipe), *_model(recipe)]


def reference_of(recipe: Recipe) -> str | None:
    """Where dpo's reference log-probs come from: `cached`, `live` or `base` (an adapter switched off); None: the loss
    has no reference."""
    preference = recipe.preference
    if preference.loss not in WITH_REFERENCE:
        return None
    lora = recipe.model.lora
    is_base = lora is not None and lora.adapter is None and preference.reference_model is None
    is_cached = preference.reference == "cached"
    if preference.reference == "auto":
        is_cached = not is_base and preference.loss != "kto"
    return "cached" if is_cached else "base" if is_base else "live"


def documents_per_row(recipe: Recipe) -> int:
    """A pair is two documents that go through the model together."""
    paired = {"dpo": recipe.preference.loss != "kto", "reward_model": recipe.reward_model.learns == "pairs"}
    return 2 if paired.get(recipe.program, False) else 1


def _owners(recipe: Recipe) -> Iterator[str]:
    fields = type(recipe).model_fields
    for name, program in _OWNERS.items():
        if recipe.program != program and getattr(recipe, name) != fields[name].default:
            yield f"{name}: {recipe.program} has no use for it. Remove the section, or set program to {program}."
    if recipe.program in ("dpo", "reward_model") and recipe.data.trained != "assistant":
        yield (
            f"data.trained: {recipe.program} compares completions or scores whole texts, whatever is said here "
            f"({recipe.data.trained}). Remove it."
        )
    if recipe.rows_per_step is not None and SIGNALS[recipe.program].execution == "controlled":
        yield f"rows_per_step: {recipe.program} counts rollout.prompts_per_step. Remove it."


def _preference(recipe: Recipe) -> Iterator[str]:
    if recipe.program != "dpo":
        return
    preference, default = recipe.preference, PreferenceSection.model_fields
    users = {
        "label_smoothing": ("sigmoid", "simpo"),
        "gamma": ("simpo",),
        "desirable_weight": ("kto",),
        "undesirable_weight": ("kto",),
        "reference": WITH_REFERENCE,
        "reference_model": WITH_REFERENCE,
        "cross_entropy": ("sigmoid", "ipo", "simpo"),
    }
    for name, losses in users.items():
        if getattr(preference, name) != default[name].default and preference.loss not in losses:
            yield (
                f"preference.{name}: loss {preference.loss} has no use for it (it is for {', '.join(losses)}). "
                "Remove it, or change preference.loss."
            )
    if preference.loss == "kto" and preference.reference == "cached":
        yield (
            "preference.reference: kto estimates its baseline from completions that are paired anew with other prompts "
            "in every step, so the reference cannot be computed beforehand. Use live."
        )


def _reward_model(recipe: Recipe) -> Iterator[str]:
    if recipe.program != "reward_model":
        return
    if recipe.reward_model.learns == "scores" and recipe.reward_model.center:
        yield "reward_model.center: scores say themselves where zero is. Remove it, or set learns to pairs."
    if recipe.evaluation.generation is not None:
        yield "evaluation.generation: a reward model writes no text. Remove it."


def _distill(recipe: Recipe) -> Iterator[str]:
    if recipe.program != "distill":
        return
    distill, default = recipe.distill, DistillSection.model_fields
    if not recipe.teachers:
        yield "teachers: distill learns from teachers, and there is none. Add {path: FOLDER}."
    if distill.jsd_beta != default["jsd_beta"].default and distill.divergence != "jsd":
        yield f"distill.jsd_beta: {distill.divergence} has none. Remove it, or set distill.divergence to jsd."
    if distill.top_k != default["top_k"].default and distill.targets != "cached":
        yield "distill.top_k: live teachers give their whole distribution. Remove it, or set distill.targets to cached."


def _model(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    if model.lora is not None and model.new_tokens is not None:
        yield (
            "model.new_tokens: an adapter leaves the embeddings frozen, so new tokens would never be learned. Train "
            "them without model.lora first (a stage of its own), then the adapter on its result."
        )
    yield from _dropout(recipe)
    if model.lora is not None and model.init == "random":
        yield "model.lora: an adapter of random weights learns little. Remove model.init, or model.lora."
    if model.new_tokens is not None and not model.new_tokens.tokens and model.new_tokens.file is None:
        yield "model.new_tokens: names no token. Give `tokens` or `file`, or remove the section."
    if model.new_tokens is not None and model.init == "random":
        yield "model.new_tokens: random weights have no embeddings to begin new ones from. Remove one of the two."
    if recipe.rollout.engine == "vllm" and (model.lora is not None or model.new_tokens is not None):
        yield (
            "rollout.engine: vllm is given whole weights of the shapes of model.path, so model.lora and "
            "model.new_tokens need the native engine."
        )


def _dropout(recipe: Recipe) -> Iterator[str]:
    if recipe.program in _WITH_DROPOUT:
        return
    lora = recipe.model.lora
    asked = {"model.dropout": recipe.model.dropout, "model.lora.dropout": lora is not None and lora.dropout}
    for key, value in asked.items():
        if value:
            yield (
                f"{key}: {recipe.program} compares the model's log-probs with others that are computed without dropout "
                f"(of the rollout, a reference or a teacher), so dropout would change the loss itself. Remove it; "
                f"{' and '.join(_WITH_DROPOUT)} can train with dropout."
            )
