# SPDX-License-Identifier: Apache-2.0
"""Differences between two recipes, and which of them would make a resumed run differ from an uninterrupted one;
pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podium.recipe.plugins import is_pickled
from podium.recipe.recipes import Recipe

# Keys that change speed, place or records, never the resulting weights.
_HARMLESS = (
    "placement",
    "checkpoint",
    "evaluation",
    "micro_batch_tokens",
    "run.loggers",
    "run.log_every",
    "run.folder",
    "run.name",
    "run.cache",
    "run.rollouts",
    "data.workers",
    "data.prefetch",
    "data.on_error",  # a run that reads on has met no bad row, or has skipped it
    "data.max_skipped_share",
    "data.heldout",
    "model.activation_checkpointing",
    "model.offload_activations",
    "model.self_check",
    "model.trust_remote_code",
    "optimizer.max_skipped_in_a_row",
    "optimizer.offload",
    "algorithm.max_kl_behavior",
    "grading.workers",
    "grading.timeout_s",
    "grading.memory_gib",
    "grading.max_failed_share",
    "sandbox.workers",
    "environment.runners",
    "environment.hidden_tools",
    "environment.concurrency",
    "environment.memory_gib",
    "environment.openenv.base_url",  # where the server runs
    "environment.openenv.connect_timeout_s",
    "rollout.record",
)
# What generates is harmless where only evaluation does; else its sizes are, and what is sampled is not.
_ENGINE_SIZES = (
    "rollout.memory_gib",
    "rollout.max_running",
    "rollout.prefill_tokens",
    "rollout.block_size",
    "rollout.reuse_prefixes",
    "rollout.decode",
    "rollout.offload_optimizer",
)
_TRAINING_DATA = re.compile(r"^data\.train\.\d+\.(path|format|split|columns|map)(\.|$)")


_CODE = re.compile(
    r"^(reward\.\d+\.function|environment\.environment|environment\.agent|environment\.tools\.\d+|environment\.(gymnasium|openenv)\.\w+)$"
)


# A resolved recipe has these as `steps` and `optimizer.warmup_steps`.
_RESOLVED = ("epochs", "optimizer.warmup_ratio")


# Newer than the first stored fingerprints: at these values, recipes keep the fingerprint that they had without the key.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "rollout.staleness": (0,),
    "rollout.on_new_weights": ("keep",),
    "rollout.adapter": ("auto", "apart"),
    "model.fp8": (False,),
    "rollout.fp8": (False,),
    "model.control_tokens_in_content": ("text",),
    "environment.gymnasium": (None,),
    "environment.openenv": (None,),
    "environment.verifiers": (None,),
    "environment.agent": (None,),
    "environment.agent_command": ([],),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key with its old and new value; `breaks` says why exactness would be lost, or is None."""

    key: str
    old: Any
    new: Any
    breaks: str | None

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def changes(old: Recipe, new: Recipe) -> list[Change]:
    """All keys whose values differ."""
    before, after = flat_values(old.model_dump(mode="json")), flat_values(new.model_dump(mode="json"))
    return [
        Change(
            key=key,
            old=before.get(key),
            new=after.get(key),
            breaks=None if _is_fixed_code(key, before.get(key)) else reason_against(key, new),
        )
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def written_differences(first: Recipe, second: Recipe) -> dict[str, tuple[Any, Any]]:
    """Key path -> both values, of keys that differ. A value from an environment variable is the reference to it."""
    before, after = flat_values(first.stored_values()), flat_values(second.stored_values())
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def is_training_data(key: str) -> bool:
    """Whether a key says which rows of a source are trained on, and how they are read; not the mix of sources."""
    return _TRAINING_DATA.match(key) is not None


def what_matters(recipe: Recipe) -> dict[str, Any]:
    """Key path -> value, of every key that affects the resulting weights. An option from an environment variable counts
    as the reference that was written: options are where secrets are, and a new password is no other recipe."""
    flat = flat_values(recipe.model_dump(mode="json"))
    flat |= {key: text for key, text in written_options(recipe).items() if key in flat}
    return {
        key: value
        for key, value in flat.items()
        if key not in _RESOLVED and not _is_harmless(key, recipe) and value not in _OFF.get(key, ())
    }


def written_options(recipe: Recipe) -> dict[str, str]:
    """Key path -> reference to environment variables, of values in the `options` of plug-ins."""
    written = {".".join(map(str, parts)): (parts, text) for parts, text in recipe.references.items()}
    return {key: text for key, (parts, text) in written.items() if "options" in parts}


def _is_harmless(key: str, recipe: Recipe) -> bool:
    model = recipe.model
    has_dropout = model.dropout or (model.lora is not None and model.lora.dropout > 0)
    is_split = key in ("micro_batch_tokens", "placement.devices") or key.startswith("placement.policy")
    if has_dropout and is_split:
        return False  # dropout is sampled in every forward, on every rank
    harmless = (*_HARMLESS, "rollout") if recipe.execution == "spmd" else (*_HARMLESS, *_ENGINE_SIZES)
    return any(key == each or key.startswith(each + ".") for each in harmless)


def _is_fixed_code(key: str, old: Any) -> bool:
    """Whether a key replaces code that was given as an object. Files of rewards and environments may be fixed before a
    run is resumed; the name of a pickled one changes with its content."""
    return _CODE.match(key) is not None and isinstance(old, str) and is_pickled(old)


def reason_against(key: str, recipe: Recipe) -> str | None:
    """Why a resumed run would differ from an uninterrupted one if this key had another value; None: it would not."""
    if _is_harmless(key, recipe):
        return None
    if key == "steps":
        if recipe.optimizer.schedule == "constant":
            return None
        return f"the {recipe.optimizer.schedule} schedule ends at `steps`, so the steps already taken used other rates"
    return "the steps already taken used the old value"


def flat_values(value: Any, prefix: str = "") -> dict[str, Any]:
    """Key path -> value, of every value that holds no others."""
    if isinstance(value, Mapping) and value:
        return {k: v for key, item in value.items() for k, v in flat_values(item, f"{prefix}{key}.").items()}
    if isinstance(value, list) and value:
        return {k: v for index, item in enumerate(value) for k, v in flat_values(item, f"{prefix}{index}.").items()}
    return {prefix.rstrip("."): value}
