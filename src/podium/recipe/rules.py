# SPDX-License-Identifier: Apache-2.0
"""Rules about values of several keys: each gives a sentence with key path, value and fix, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podium.recipe.recipes import Recipe


def shared_rules(recipe: Recipe) -> list[str]:
    """Violated rules of all programs that span several keys."""
    return [
        *_length(recipe),
        *_model(recipe),
        *_fp8(recipe),
        *_dropout(recipe),
        *_schedule(recipe),
        *_evaluation(recipe),
        *_names(recipe),
    ]


def steps_problem(*, has_steps: bool, has_epochs: bool) -> str | None:
    """What is wrong with having both of `steps` and `epochs`, or none of them."""
    if has_steps and has_epochs:
        return "epochs: the run's length is `steps` or `epochs`, and both are given. Remove one of them."
    if not has_steps and not has_epochs:
        return "steps: required, and missing. Give the number of steps, or of `epochs` over data.train."
    return None


def _length(recipe: Recipe) -> Iterator[str]:
    problem = steps_problem(has_steps=recipe.steps > 0, has_epochs=recipe.epochs is not None)
    if problem is not None:
        yield problem


def _model(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    if model.lora is not None and model.new_tokens is not None:
        yield (
            "model.new_tokens: an adapter leaves the embeddings frozen, so new tokens would never be learned. Train "
            "them without model.lora first (in an earlier stage), then the adapter on its result."
        )
    if model.new_tokens is not None and not model.new_tokens.tokens and model.new_tokens.file is None:
        yield "model.new_tokens: names no token. Give `tokens` or `file`, or remove the section."
    if model.new_tokens is not None and model.init == "random":
        yield "model.new_tokens: random weights have no embeddings to begin new ones from. Remove one of the two."
    if model.offload_activations and model.activation_checkpointing != "layers":
        yield (
            "model.offload_activations: moves the inputs of recomputed layers to host memory, and with "
            f"model.activation_checkpointing {model.activation_checkpointing} other tensors are kept beside them. Set "
            "that to layers, or remove this."
        )


def _fp8(recipe: Recipe) -> Iterator[str]:
    placement, model, rollout = recipe.placement, recipe.model, getattr(recipe, "rollout", None)
    generates = rollout is not None and bool(rollout.fp8)
    wanted = [key for key, is_on in {"model.fp8": model.fp8, "rollout.fp8": generates}.items() if is_on]
    for key in wanted:
        if placement.device == "cpu":
            yield f"{key}: CPUs have no products in fp8. Remove it, or set placement.device to cuda."
        if model.dtype == "float32":
            yield f"{key}: results of products in fp8 are bfloat16, and model.dtype is float32. Remove one of the two."
        policy = placement.policy
        tensor = max(getattr(policy, "tensor", 1), getattr(placement, "generator_tensor", 1))
        if tensor > 1:
            yield (
                f"{key}: layers that are divided over {tensor} devices do not compute in fp8. Remove it, or use "
                "placement.policy.shard instead of tensor."
            )
    if generates and getattr(rollout, "engine", "native") == "vllm":
        yield "rollout.fp8: only the native engine computes in fp8. Remove it, or set rollout.engine to native."


def _dropout(recipe: Recipe) -> Iterator[str]:
    if recipe.learns_dropout:
        return
    lora = recipe.model.lora
    switches = {"model.dropout": recipe.model.dropout, "model.lora.dropout": lora is not None and lora.dropout > 0}
    for key, is_on in switches.items():
        if is_on:
            yield (
                f"{key}: {recipe.program} compares the model's log-probs with others that are computed without dropout "
                "(of the rollout, a reference or a teacher), so dropout would change the loss itself. Remove it; sft "
                "and reward_model can train with dropout."
            )


def _schedule(recipe: Recipe) -> Iterator[str]:
    optimizer = recipe.optimizer
    if optimizer.warmup_steps > 0 and optimizer.warmup_ratio is not None:
        yield (
            "optimizer.warmup_ratio: warm-up is `warmup_steps` or `warmup_ratio`, and both are given. Remove one of "
            "them."
        )
    if optimizer.warmup_steps >= recipe.steps > 0 and optimizer.warmup_steps > 0:
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
    is_on = evaluation.every is not None or evaluation.at_start or recipe.generation is not None
    if is_on and not heldout:
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


def _names(recipe: Recipe) -> Iterator[str]:
    known = ", ".join(sorted(recipe.columns))
    for part, sources in (("train", recipe.data.train), ("heldout", recipe.data.heldout)):
        for index, source in enumerate(sources):
            for name in source.columns:
                if name not in recipe.columns:
                    yield (
                        f"data.{part}.{index}.columns.{name}: not a column that Podium reads. "
                        f"The left side is one of {known}; the right side is your column's name."
                    )
