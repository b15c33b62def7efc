# SPDX-License-Identifier: Apache-2.0
"""Cross-field rules of a recipe: each returns a sentence with key path, value and fix, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from podium.recipe.dense_rules import dense_rules, documents_per_row
from podium.recipe.on_policy_rules import on_policy_rules
from podium.recipe.programs import SIGNALS

if TYPE_CHECKING:
    from podium.recipe.schema import Recipe


def broken_rules(recipe: Recipe) -> list[str]:
    """All rules that span several keys and do not hold."""
    controlled = SIGNALS[recipe.program].execution == "controlled"
    own = on_policy_rules(recipe) if controlled else [*_lengths(recipe), *_only_on_policy(recipe)]
    return [*own, *dense_rules(recipe), *_schedule(recipe), *_evaluation(recipe), *_names(recipe)]


def _lengths(recipe: Recipe) -> Iterator[str]:
    longest, budget, step = recipe.data.max_length, recipe.micro_batch_tokens, recipe.tokens_per_step
    count = documents_per_row(recipe)
    what = "a document" if count == 1 else "a pair of documents"
    if longest is not None and budget is not None and count * longest > budget:
        yield (
            f"data.max_length: {longest} does not fit micro_batch_tokens {budget}; {what} is never cut over two "
            f"micro-batches. Lower data.max_length to {budget // count} or raise micro_batch_tokens to "
            f"{count * longest}."
        )
    if longest is not None and count * longest > step and recipe.rows_per_step is None:
        whose = "" if count == 1 else "of each document of a pair "
        yield (
            f"data.max_length: {longest} {whose}is longer than tokens_per_step {step}. "
            f"Raise tokens_per_step to at least {count * longest}."
        )
    if longest is not None and longest < 2:
        yield f"data.max_length: {longest} leaves no token to predict. Use at least 2."


def _schedule(recipe: Recipe) -> Iterator[str]:
    optimizer = recipe.optimizer
    if optimizer.warmup_steps >= recipe.steps and optimizer.warmup_steps > 0:
        yield (
            f"optimizer.warmup_steps: {optimizer.warmup_steps} is not below steps {recipe.steps}, so the full "
            f"learning rate would never be reached. Lower it to {recipe.steps // 10} or raise steps."
        )
    if optimizer.schedule == "constant" and optimizer.final_lr_ratio != 0.0:
        yield (
            f"optimizer.final_lr_ratio: {optimizer.final_lr_ratio} has no meaning with schedule constant. "
            "Remove it, or set optimizer.schedule to linear or cosine."
        )


def _evaluation(recipe: Recipe) -> Iterator[str]:
    evaluation, heldout = recipe.evaluation, recipe.data.heldout
    asked = evaluation.every is not None or evaluation.at_start or evaluation.generation is not None
    if asked and not heldout:
        yield (
            "evaluation: there is nothing to evaluate on, data.heldout is empty. Add a source to data.heldout or "
            "remove the evaluation section."
        )
    if recipe.checkpoint.keep_best:
        if not heldout:
            yield "checkpoint.keep_best: needs held-out data to say which is best. Add a source to data.heldout."
        every, saved = evaluation.every, recipe.checkpoint.every
        if every is None or saved is None:
            yield (
                "checkpoint.keep_best: needs checkpoint.every and evaluation.every, so that a saved step is also "
                "an evaluated one. Set both."
            )
        elif saved % every:
            yield (
                f"checkpoint.keep_best: checkpoint.every {saved} is not a multiple of evaluation.every {every}, so "
                f"some saved steps would have no held-out loss. Set evaluation.every to a divisor of {saved}."
            )


def _only_on_policy(recipe: Recipe) -> Iterator[str]:
    """Sections that a program with fixed data would leave unread."""
    if recipe.rollout.engine != "native":
        yield (
            f"rollout.engine: {recipe.rollout.engine} does not answer in {recipe.program}, whose evaluation uses the "
            "learner's own weights. Remove it; `podium generate --engine vllm` answers with an exported model."
        )
    fields = type(recipe).model_fields
    for name in ("reward", "grading", "algorithm", "critic", "teachers", "environment"):
        if name == "teachers" and recipe.program == "distill":
            continue
        if getattr(recipe, name) != fields[name].get_default(call_default_factory=True):
            yield (
                f"{name}: {recipe.program} learns from data that is known in advance and has no use for it. Remove "
                "the section, or choose an on-policy program (grpo, ppo, on_policy_distill, expert_iteration)."
            )
    if recipe.placement.launcher == "inline" or recipe.placement.layout != "colocated":
        yield (
            f"placement: layout {recipe.placement.layout} and launcher {recipe.placement.launcher} are for on-policy "
            f"programs; {recipe.program} runs with launcher local or ray."
        )


def _names(recipe: Recipe) -> Iterator[str]:
    known = _columns(recipe)
    for part in ("train", "heldout"):
        for index, source in enumerate(getattr(recipe.data, part)):
            for name in source.columns:
                if name not in known:
                    yield (
                        f"data.{part}.{index}.columns.{name}: not a column that Podium reads. "
                        f"The left side is one of {', '.join(sorted(known))}; the right side is your column's name."
                    )


def _columns(recipe: Recipe) -> set[str]:
    """Names that rows of this program may have."""
    pairs = {"prompt", "chosen", "rejected", "tools"}
    known = {"messages", "prompt", "completion", "text"}
    match recipe.program:
        case "dpo":
            return {"prompt", "completion", "label", "tools"} if recipe.preference.loss == "kto" else pairs
        case "reward_model":
            return pairs | {"margin"} if recipe.reward_model.learns == "pairs" else known | {"score", "tools"}
        case "sft" | "distill":
            return known
        case _:
            return known | {"reference", "data_source", "tools"}
