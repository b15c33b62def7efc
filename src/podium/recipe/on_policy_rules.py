# SPDX-License-Identifier: Apache-2.0
"""Rules of on-policy programs that span several keys: each gives a sentence with key path, value and fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from podium.recipe.on_policy import AlgorithmSection, CriticSection, KlSection

if TYPE_CHECKING:
    from podium.recipe.schema import Recipe

# Estimators that say nothing about a lone episode of a prompt.
_NEEDS_GROUPS = ("group_relative", "group_centered", "leave_one_out", "length_weighted", "reinforce_pp_baseline")
_PER_TOKEN = ("reinforce_pp", "gae")


def on_policy_rules(recipe: Recipe) -> list[str]:
    """Every rule that does not hold."""
    return [
        *_signal(recipe),
        *_estimator(recipe),
        *_kl(recipe),
        *_batches(recipe),
        *_sampling(recipe),
        *_placement(recipe),
        *_environment(recipe),
        *_rewards(recipe),
    ]


def advantage_of(recipe: Recipe) -> str:
    """The estimator's name or import path, the program's own where the recipe does not say."""
    defaults = {"grpo": "group_relative", "ppo": "gae", "on_policy_distill": "teacher", "expert_iteration": "solved"}
    return recipe.algorithm.advantage or defaults[recipe.program]


def _signal(recipe: Recipe) -> Iterator[str]:
    if recipe.program == "on_policy_distill":
        if not recipe.teachers:
            yield "teachers: on_policy_distill learns from teachers, and there is none. Add {path: FOLDER}."
    elif recipe.teachers:
        yield f"teachers: {recipe.program} has no use for them. Remove them, or set program to on_policy_distill."
    elif not recipe.reward and recipe.environment is None:
        yield (
            f"reward: {recipe.program} needs something that makes an episode good, and there is none. Add for instance "
            "{verifier: exact_match}, or {function: rewards.py:NAME}."
        )


def _estimator(recipe: Recipe) -> Iterator[str]:
    name, algorithm = advantage_of(recipe), recipe.algorithm
    fitting = {"ppo": ("gae",), "on_policy_distill": ("teacher",), "expert_iteration": ("solved",)}.get(recipe.program)
    if fitting is not None and name not in fitting:
        yield (
            f"algorithm.advantage: {name} is not what {recipe.program} estimates with ({', '.join(fitting)}). Remove "
            "it, or set program to grpo."
        )
    if recipe.program == "grpo" and name in ("gae", "teacher"):
        other = "ppo" if name == "gae" else "on_policy_distill"
        yield f"algorithm.advantage: {name} needs more than rewards. Set program to {other}."
    if name in _NEEDS_GROUPS and recipe.rollout.samples_per_prompt < 2:
        yield (
            f"rollout.samples_per_prompt: 1 leaves {name} nothing to compare an episode with. Raise it to 2 or more, "
            "or set algorithm.advantage to reinforce_pp."
        )
    if algorithm.dynamic_sampling and recipe.rollout.samples_per_prompt < 2:
        yield (
            "algorithm.dynamic_sampling: it leaves out groups of equal rewards, and a group of one always is. "
            "Raise rollout.samples_per_prompt."
        )
    if algorithm.dynamic_sampling and recipe.program != "grpo":
        yield f"algorithm.dynamic_sampling: {recipe.program} does not compare within groups. Remove it."
    if algorithm.constant is not None and algorithm.reduction != "constant":
        yield (
            f"algorithm.constant: {algorithm.constant} has no meaning with reduction {algorithm.reduction}. Set "
            "algorithm.reduction to constant, or remove it."
        )
    if algorithm.gamma != 1.0 and name not in _PER_TOKEN and ":" not in name:
        yield f"algorithm.gamma: {algorithm.gamma} has no meaning with {name}, which rewards whole episodes. Remove it."
    if algorithm.lam != 1.0 and name != "gae":
        yield f"algorithm.lam: {algorithm.lam} has no meaning with {name}. Remove it, or set program to ppo."
    if algorithm.keep_per_prompt != 1 and recipe.program != "expert_iteration":
        yield f"algorithm.keep_per_prompt: {recipe.program} learns from all episodes. Remove it."
    if recipe.program == "expert_iteration":
        for key in ("loss", "entropy", "clip_low", "clip_high", "dual_clip", "proximal", "correction"):
            if getattr(algorithm, key) != AlgorithmSection.model_fields[key].default:
                yield f"algorithm.{key}: expert_iteration imitates and has no use for it. Remove it."
    correction = algorithm.correction
    if correction is not None and "truncate" in correction.kind and correction.low:
        yield "algorithm.correction.low: is of the masked kinds; truncation has a cap only. Remove it."
    if correction is not None and correction.low > correction.cap:
        yield (
            f"algorithm.correction.low: {correction.low} is above cap {correction.cap}, so everything would be "
            "dropped. Lower it."
        )
    if algorithm.max_refills != AlgorithmSection.model_fields["max_refills"].default and not algorithm.dynamic_sampling:
        yield "algorithm.max_refills: has no meaning without dynamic_sampling. Remove it, or switch that on."
    if algorithm.overlong is not None and (recipe.environment is not None or recipe.program == "on_policy_distill"):
        yield (
            "algorithm.overlong: is about the length of a single answer that is rewarded. Remove it; an environment "
            "can give such a penalty itself."
        )
    if recipe.program != "ppo" and recipe.critic != CriticSection():
        yield f"critic: {recipe.program} has none. Remove the section, or set program to ppo."
    if algorithm.loss != "clipped" and algorithm.dual_clip is not None:
        yield f"algorithm.dual_clip: {algorithm.loss} has none. Remove it, or set algorithm.loss to clipped."
    if algorithm.overlong is not None and algorithm.overlong.buffer_tokens >= recipe.rollout.max_new_tokens:
        yield (
            f"algorithm.overlong.buffer_tokens: {algorithm.overlong.buffer_tokens} is not below rollout.max_new_tokens "
            f"{recipe.rollout.max_new_tokens}, so every answer would be penalised. Lower it."
        )


def _kl(recipe: Recipe) -> Iterator[str]:
    kl = recipe.algorithm.kl
    if kl is None:
        return
    if kl.target is None and kl.horizon != KlSection.model_fields["horizon"].default:
        yield "algorithm.kl.horizon: has no meaning without a target. Remove it, or set algorithm.kl.target."
    if kl.refresh_every is not None and kl.reference is not None:
        yield "algorithm.kl.refresh_every: a reference of its own cannot become a copy of the policy. Remove one."
    if kl.where == "loss" and kl.estimator == "k1":
        yield (
            "algorithm.kl.estimator: k1 as a loss has a gradient that says nothing about the KL. Use k3_straight (the "
            "default) or k2, or set algorithm.kl.where to reward."
        )
    if kl.where == "reward" and kl.estimator == "k3_straight":
        yield "algorithm.kl.estimator: k3_straight is about gradients; in the reward use k1 (the default), k2 or k3."
    if recipe.program == "expert_iteration":
        yield "algorithm.kl: expert_iteration imitates and has no KL term. Remove it."
    if recipe.program == "on_policy_distill" and kl.where == "reward":
        yield "algorithm.kl.where: on_policy_distill has no rewards. Set it to loss, or remove algorithm.kl."


def _batches(recipe: Recipe) -> Iterator[str]:
    rollout, algorithm = recipe.rollout, recipe.algorithm
    episodes = rollout.prompts_per_step * rollout.samples_per_prompt
    if algorithm.mini_batches > episodes:
        yield (
            f"algorithm.mini_batches: {algorithm.mini_batches} cannot be made of {episodes} episodes. Lower it, or "
            "raise rollout.prompts_per_step."
        )
    if algorithm.proximal == "never" and algorithm.correction is not None:
        yield "algorithm.proximal: a correction weighs proximal against behaviour log-probs. Remove `never`."
    if recipe.critic.warmup_steps >= recipe.steps and recipe.program == "ppo":
        yield (
            f"critic.warmup_steps: {recipe.critic.warmup_steps} is not below steps {recipe.steps}, so the policy would "
            "never be trained. Lower it."
        )
    longest, budget = recipe.data.max_length, recipe.micro_batch_tokens
    if longest is not None and budget is not None and longest > budget:
        yield (
            f"data.max_length: {longest} does not fit micro_batch_tokens {budget}; an episode is never cut over two "
            f"micro-batches. Lower data.max_length to {budget} or raise micro_batch_tokens to {longest}."
        )
    if longest is not None and longest <= rollout.max_new_tokens:
        yield (
            f"data.max_length: {longest} leaves no room for a prompt beside rollout.max_new_tokens "
            f"{rollout.max_new_tokens}. Raise data.max_length or lower rollout.max_new_tokens."
        )


def _sampling(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.rollout
    bent = [
        f"rollout.{name} {value}"
        for name, value, off in (
            ("top_p", rollout.top_p, 1.0),
            ("top_k", rollout.top_k, 0),
            ("min_p", rollout.min_p, 0.0),
        )
        if value != off
    ]
    if bent and recipe.program != "expert_iteration":
        yield (
            f"{' and '.join(bent)}: what is drawn so is not drawn from the policy, and its log-probs do not know it, "
            "so ratios would be wrong. Remove it; expert_iteration, which only imitates, allows it."
        )


def _placement(recipe: Recipe) -> Iterator[str]:
    placement = recipe.placement
    if placement.launcher == "local":
        yield (
            f"placement.launcher: local starts ranks without a controller, and {recipe.program} has one. Remove it, or "
            "use ray or inline."
        )
    if placement.layout == "split":
        if placement.devices < 2:
            yield "placement.layout: split needs 2 devices or more. Raise placement.devices, or use colocated."
        elif placement.rollout_devices is not None and placement.rollout_devices >= placement.devices:
            yield (
                f"placement.rollout_devices: {placement.rollout_devices} of {placement.devices} devices leaves none to "
                "learn on. Lower it."
            )
    elif placement.rollout_devices is not None:
        yield "placement.rollout_devices: with layout colocated all devices generate. Remove it, or set layout split."
    if placement.launcher == "inline" and placement.devices > 1:
        yield (
            f"placement.devices: inline is one process on one device, not {placement.devices}. Use launcher ray, or 1 "
            "device."
        )
    if placement.restarts:
        yield "placement.restarts: is about ranks without a controller. Remove it; `podium resume` goes on instead."
    if recipe.rollout.engine == "vllm" and placement.layout == "colocated":
        yield "rollout.engine: vllm has weights of its own and needs placement.layout split. Set it, or use native."


def _environment(recipe: Recipe) -> Iterator[str]:
    environment = recipe.environment
    if environment is None:
        return
    if (environment.environment is None) == (not environment.tools):
        yield "environment: give either `environment` (a class of one's own) or `tools` (functions), and one of them."


def _rewards(recipe: Recipe) -> Iterator[str]:
    for index, reward in enumerate(recipe.reward):
        given = [name for name in ("function", "verifier", "model") if getattr(reward, name) is not None]
        if len(given) != 1:
            yield (
                f"reward.{index}: needs exactly one of function, verifier and model, and has "
                f"{' and '.join(given) or 'none'}."
            )
        if reward.function is None and (reward.style != "auto" or reward.per != "sample"):
            yield f"reward.{index}: style and per are about functions. Remove them."
        if reward.model is not None and reward.options:
            yield f"reward.{index}.options: a reward model has none. Remove them."
