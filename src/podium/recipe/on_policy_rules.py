# SPDX-License-Identifier: Apache-2.0
"""Rules about values of on-policy programs: each gives a sentence with key path, value and fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from podium.recipe.agent_rules import agent_rules
from podium.recipe.algorithm import GrpoAlgorithm, PolicySection
from podium.recipe.generator_mesh import generator_rules
from podium.recipe.on_policy import JudgeReward
from podium.recipe.solving import TOTAL

if TYPE_CHECKING:
    from podium.recipe.recipes import OnPolicyRecipe
    from podium.recipe.schema import OnPolicyPlacementSection


def on_policy_rules(recipe: OnPolicyRecipe) -> list[str]:
    """Every rule that does not hold."""
    return [
        *_signal(recipe),
        *_solving(recipe),
        *_judges(recipe),
        *_estimator(recipe),
        *_loss(recipe),
        *_truncation(recipe),
        *_overlong(recipe),
        *_kl(recipe),
        *_batches(recipe),
        *_placement(recipe),
        *generator_rules(recipe),
        *_engine(recipe),
        *_adapter(recipe),
        *_staleness(recipe),
        *_environment(recipe),
    ]


def _signal(recipe: OnPolicyRecipe) -> Iterator[str]:
    if recipe.learns_from_rewards and not recipe.gives_rewards:
        yield (
            f"reward: {recipe.program} needs something that makes an episode good, and there is none. Add for instance "
            "{verifier: exact_match}, or {function: rewards.py:NAME}."
        )


def _solving(recipe: OnPolicyRecipe) -> Iterator[str]:
    solved_by, names = recipe.grading.solved_by, [reward.metric_name for reward in recipe.reward]
    if solved_by is not None and solved_by not in (TOTAL, *names):
        known = ", ".join([*names, TOTAL])
        yield f"grading.solved_by: no reward is called {solved_by!r}. Give one of {known}, or remove it."


def _judges(recipe: OnPolicyRecipe) -> Iterator[str]:
    yield from _policy_judges(recipe)
    generation = recipe.evaluation.generation
    scores_heldout = bool(recipe.data.heldout) and (generation is None or generation.score is None)
    for index, reward in enumerate(recipe.reward):
        if not isinstance(reward, JudgeReward) or reward.judge.compare != "group":
            continue
        key = f"reward.{index}.judge"
        if recipe.rollout.samples_per_prompt < 2:
            yield (
                f"{key}.compare: group compares the answers to a prompt, and rollout.samples_per_prompt 1 leaves one. "
                "Raise it, or compare with the reference."
            )
        if scores_heldout and reward.weight != 0:
            yield (
                f"{key}.compare: group cannot score held-out answers, of which each prompt has one. Set "
                "evaluation.generation.score, compare with the reference, or remove data.heldout."
            )


def _policy_judges(recipe: OnPolicyRecipe) -> Iterator[str]:
    """The generators' engine judges between generation and update, so it must be idle then, and in one process."""
    placement = recipe.placement
    for index, judge in recipe.local_judges.items():
        if not judge.is_policy:
            continue
        key = f"reward.{index}.judge.model"
        if placement.layout != "colocated":
            yield (
                f"{key}: the policy can judge only where learners and generators share their devices. With layout "
                f"{placement.layout} generators do not wait for rewards. Use layout colocated, or a model's folder."
            )
        elif placement.learners_tensor > 1:
            yield (
                f"{key}: the policy can judge only where each engine has one device. Remove the generators' tensor "
                "parallelism, or give the folder of a model."
            )


def _estimator(recipe: OnPolicyRecipe) -> Iterator[str]:
    algorithm = recipe.algorithm
    if not isinstance(algorithm, GrpoAlgorithm):
        return
    lone = recipe.rollout.samples_per_prompt < 2
    # A custom program need not use the estimator.
    if recipe.uses_estimator and algorithm.needs_groups and lone:
        yield (
            f"rollout.samples_per_prompt: 1 leaves {algorithm.advantage} nothing to compare an episode with. Raise it "
            "to 2 or more, or set algorithm.advantage to reinforce_pp."
        )
    if recipe.uses_estimator and algorithm.gamma != 1.0 and not algorithm.reads_gamma:
        yield (
            f"algorithm.gamma: {algorithm.gamma} has no meaning with {algorithm.advantage}, which rewards whole "
            "episodes. Remove it."
        )
    yield from _credit(recipe, algorithm)
    if algorithm.dynamic_sampling and lone:
        yield (
            "algorithm.dynamic_sampling: it leaves out groups of equal rewards, and a group of one always is. "
            "Raise rollout.samples_per_prompt."
        )
    if algorithm.max_refills is not None and not algorithm.dynamic_sampling:
        yield "algorithm.max_refills: has no meaning without dynamic_sampling. Remove it, or switch that on."


def _credit(recipe: OnPolicyRecipe, algorithm: GrpoAlgorithm) -> Iterator[str]:
    credit = algorithm.credit
    if credit != "turn" and algorithm.turn_discount != 1.0:
        yield (
            f"algorithm.turn_discount: {algorithm.turn_discount} has no meaning with credit {credit}. Remove it, or "
            "set algorithm.credit to turn."
        )
    if credit == "episode":
        return
    if recipe.environment is None:
        yield f"algorithm.credit: {credit} needs episodes of several turns, and there is no environment. Remove it."
    elif credit == "branch" and not recipe.environment.is_agent:
        yield "algorithm.credit: branch needs an agent, whose requests may branch. Set it to turn or episode."
    if not algorithm.has_turns:
        yield (
            f"algorithm.credit: {credit} has no form of {algorithm.advantage}. Set algorithm.advantage to "
            "group_relative, group_centered, leave_one_out or reinforce_pp_baseline."
        )
    if algorithm.loss == "sequence_clipped":
        yield (
            f"algorithm.credit: {credit} gives an episode several advantages, and sequence_clipped uses one. Use "
            "clipped."
        )
    if algorithm.dynamic_sampling:
        yield (
            f"algorithm.dynamic_sampling: leaves out groups whose episodes have equal rewards, and with credit "
            f"{credit} their turns may differ. Remove one of the two."
        )


def _loss(recipe: OnPolicyRecipe) -> Iterator[str]:
    algorithm = recipe.algorithm
    if algorithm.constant is not None and algorithm.reduction != "constant":
        yield (
            f"algorithm.constant: {algorithm.constant} has no meaning with reduction {algorithm.reduction}. Set "
            "algorithm.reduction to constant, or remove it."
        )
    if not isinstance(algorithm, PolicySection):
        return
    correction = recipe.correction
    if correction is not None and "truncate" in correction.kind and correction.low:
        yield "algorithm.correction.low: is of the masked kinds; truncation has a cap only. Remove it."
    if correction is not None and correction.low > correction.cap:
        yield (
            f"algorithm.correction.low: {correction.low} is above cap {correction.cap}, so everything would be "
            "dropped. Lower it."
        )
    if algorithm.proximal == "never" and correction is not None:
        yield (
            f"algorithm.proximal: a correction ({correction.kind}) weighs proximal against behaviour log-probs. Remove "
            f"`never`{'' if recipe.rollout.truncated_by else ', or set algorithm.correction to none'}."
        )
    if algorithm.loss != "clipped" and algorithm.dual_clip is not None:
        yield f"algorithm.dual_clip: {algorithm.loss} has none. Remove it, or set algorithm.loss to clipped."


def _truncation(recipe: OnPolicyRecipe) -> Iterator[str]:
    keys, algorithm = " and ".join(f"rollout.{key}" for key in recipe.rollout.truncated_by), recipe.algorithm
    if not keys or not isinstance(algorithm, PolicySection):  # imitated tokens count like data
        return
    if recipe.correction is None:
        yield (
            f"algorithm.correction: with {keys} tokens are sampled from a part of the policy's distribution, and "
            f"ratios between the two would be wrong without a correction. Set it to auto, or remove {keys}."
        )
    if algorithm.kl is not None and algorithm.kl.where == "reward":
        yield (
            f"algorithm.kl.where: the KL in the reward is computed from the engine's log-probs, and with {keys} these "
            f"are of a part of the policy's distribution. Set it to loss, or remove {keys}."
        )


def _overlong(recipe: OnPolicyRecipe) -> Iterator[str]:
    overlong = recipe.full_algorithm.overlong
    if overlong is None:
        return
    if recipe.environment is not None:
        yield (
            "algorithm.overlong: is about the length of a single answer that is rewarded. Remove it; an environment "
            "can give such a penalty itself."
        )
    if overlong.buffer_tokens >= recipe.rollout.max_new_tokens:
        yield (
            f"algorithm.overlong.buffer_tokens: {overlong.buffer_tokens} is not below rollout.max_new_tokens "
            f"{recipe.rollout.max_new_tokens}, so every answer would be penalised. Lower it."
        )


def _kl(recipe: OnPolicyRecipe) -> Iterator[str]:
    kl = recipe.algorithm.kl if isinstance(recipe.algorithm, PolicySection) else None
    if kl is None:
        return
    if kl.target is None and kl.horizon is not None:
        yield "algorithm.kl.horizon: has no meaning without a target. Remove it, or set algorithm.kl.target."
    if kl.refresh_every is not None and kl.reference is not None:
        yield "algorithm.kl.refresh_every: the reference is another checkpoint, not a copy of the policy. Remove one."
    if kl.where == "loss" and kl.estimator == "k1":
        yield (
            "algorithm.kl.estimator: k1 as a loss has a gradient that says nothing about the KL. Use k3_straight (the "
            "default) or k2, or set algorithm.kl.where to reward."
        )
    if kl.where == "reward" and kl.estimator == "k3_straight":
        yield "algorithm.kl.estimator: k3_straight is about gradients; in the reward use k1 (the default), k2 or k3."
    if recipe.only_logs_rewards and kl.where == "reward":
        yield f"algorithm.kl.where: {recipe.program} learns from no rewards. Set it to loss, or remove algorithm.kl."


def _batches(recipe: OnPolicyRecipe) -> Iterator[str]:
    rollout, algorithm = recipe.rollout, recipe.algorithm
    episodes = rollout.prompts_per_step * rollout.samples_per_prompt
    if algorithm.mini_batches > episodes:
        yield (
            f"algorithm.mini_batches: {algorithm.mini_batches} cannot be made of {episodes} episodes. Lower it, or "
            "raise rollout.prompts_per_step."
        )
    critic = recipe.critic_section
    if critic is not None and critic.warmup_steps >= recipe.steps:
        yield (
            f"critic.warmup_steps: {critic.warmup_steps} is not below steps {recipe.steps}, so the policy would "
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


def _most_generators(placement: OnPolicyPlacementSection) -> Iterator[str]:
    most, first = placement.max_rollout_devices, placement.rollout_devices or placement.devices // 2
    if most is None:
        return
    if most < first:
        yield (
            f"placement.max_rollout_devices: {most} is less than the {first} generators of the start "
            "(placement.rollout_devices). Raise it, or remove it."
        )
    if placement.launcher == "inline":
        yield "placement.max_rollout_devices: with launcher inline nothing can join: there is one process. Use ray."


def _placement(recipe: OnPolicyRecipe) -> Iterator[str]:
    placement = recipe.placement
    if placement.layout != "colocated":
        if placement.devices < 2:
            yield (
                f"placement.layout: {placement.layout} needs 2 devices or more. Raise placement.devices, or use "
                "colocated."
            )
        elif placement.rollout_devices is not None and placement.rollout_devices >= placement.devices:
            yield (
                f"placement.rollout_devices: {placement.rollout_devices} of {placement.devices} devices leaves none to "
                f"learn on. Lower it to {placement.devices - 1} or less, or raise placement.devices to "
                f"{placement.rollout_devices + 1} or more."
            )
        yield from _most_generators(placement)
    else:
        for key in ("rollout_devices", "max_rollout_devices"):
            if getattr(placement, key) is not None:
                yield (
                    f"placement.{key}: with layout colocated all devices generate. Remove it, or set layout split or "
                    "elastic."
                )
    if placement.layout == "elastic":
        yield from _elastic(recipe)
    if placement.launcher == "inline" and placement.devices > 1:
        yield (
            f"placement.devices: inline is one process on one device, not {placement.devices}. Use launcher ray, or 1 "
            "device."
        )


def _elastic(recipe: OnPolicyRecipe) -> Iterator[str]:
    """What cannot be lent."""
    if recipe.device_rewards:
        names = ", ".join(
            f"reward.{index}.{'model' if index in recipe.reward_models else 'judge'}" for index in recipe.device_rewards
        )
        yield (
            f"placement.layout: with elastic the learner's devices generate until the batch is graded, and {names} "
            "would grade it on those devices. Use layout split, or a reward function."
        )
    if recipe.rollout.on_new_weights == "finish":
        yield (
            "rollout.on_new_weights: with finish a sequence ends on the weights that it began with. With layout "
            "elastic it may continue on another device with newer ones. Use keep or recompute, or layout split."
        )
    if recipe.rollout.offload_optimizer:
        yield (
            "rollout.offload_optimizer: moves optimizer state away for generation. With layout elastic the learner's "
            "devices change sides too often for that. Remove it, or use layout colocated."
        )


def _engine(recipe: OnPolicyRecipe) -> Iterator[str]:
    if recipe.rollout.router_replay == "on" and not recipe.can_be_stale:
        yield (
            f"rollout.router_replay: {recipe.program} imitates episodes like data, and its routers choose themselves. "
            "Remove it."
        )
    if recipe.rollout.engine != "vllm":
        return
    if recipe.placement.layout != "split":
        yield "rollout.engine: vllm keeps a copy of the weights and needs placement.layout split; or use native."
    if recipe.rollout.speculation.tokens:
        yield (
            "rollout.speculation.tokens: only the native engine proposes tokens from earlier answers. Remove it, or "
            "set rollout.engine to native."
        )
    if recipe.model.lora is not None or recipe.model.new_tokens is not None:
        yield (
            "rollout.engine: vllm is given whole weights of the shapes of model.path, so model.lora and "
            "model.new_tokens need the native engine."
        )


def _adapter(recipe: OnPolicyRecipe) -> Iterator[str]:
    adapter, tensor = recipe.rollout.adapter, recipe.placement.generator_tensor
    if adapter == "merged" and recipe.model.lora is None:
        yield "rollout.adapter: there is no adapter that can be merged. Add model.lora, or remove it."
    elif adapter == "merged" and tensor > 1:
        yield (
            f"rollout.adapter: merged weights are whole on one device, and each generator has {tensor}. Set it to "
            "apart, or remove the generators' tensor parallelism."
        )


def _staleness(recipe: OnPolicyRecipe) -> Iterator[str]:
    rollout, placement = recipe.rollout, recipe.placement
    staleness = rollout.staleness
    if staleness == 0:
        if rollout.on_new_weights != "keep":
            yield (
                f"rollout.on_new_weights: {rollout.on_new_weights} has no meaning with staleness 0: new weights arrive "
                "when no sequence is running. Remove it, or raise rollout.staleness."
            )
        return
    if not recipe.can_be_stale:
        yield (
            f"rollout.staleness: {recipe.program} imitates episodes by cross-entropy. It has no ratios between new and "
            f"old weights, so nothing could correct for tokens of older weights. Set it to 0, not {staleness}."
        )
        return
    # Both launcher inline and layout colocated leave no device to generate on meanwhile: one sentence is enough.
    if placement.launcher == "inline":
        yield (
            f"rollout.staleness: {staleness} needs devices that generate during the update, and launcher inline is one "
            "process on one device. Set it to 0, or use launcher ray with placement.layout split or elastic."
        )
    elif placement.layout == "colocated":
        yield (
            f"rollout.staleness: {staleness} needs devices that generate during the update. With layout colocated, "
            "generation and update take turns on the same devices, so nothing can overlap. Set placement.layout to "
            "split or elastic (2 devices or more), or staleness to 0."
        )
    if staleness >= recipe.steps > 0:
        yield (
            f"rollout.staleness: {staleness} is not below steps {recipe.steps}. The update of step n starts from "
            f"version n - 1, so the last one starts from version {recipe.steps - 1}, and no token can be more than "
            f"{recipe.steps - 1} versions old. Lower it to {recipe.steps - 1} or less, or raise steps."
        )
    if rollout.offload_optimizer:
        yield (
            "rollout.offload_optimizer: moves optimizer state away while episodes are generated, and with staleness "
            f"{staleness} updates run at that time. Remove it, or set rollout.staleness to 0."
        )


def _environment(recipe: OnPolicyRecipe) -> Iterator[str]:
    environment = recipe.environment
    if environment is None:
        return
    if len(environment.kinds) != 1:
        found = " and ".join(f"`{kind}`" for kind in environment.kinds) or "none"
        yield (
            "environment: give exactly one of `environment` (a custom class), `tools` (functions), `gymnasium`, "
            f"`openenv`, `verifiers`, `agent` (a function) and `agent_command`; found {found}."
        )
    if environment.is_agent:
        yield from agent_rules(recipe, environment)
    openenv = environment.openenv
    if openenv is not None and openenv.action is None:
        if openenv.answer == "text" and openenv.field is None:
            yield "environment.openenv.field: name the action's field that an answer fills, or give `action`."
        if openenv.answer == "tool_call":
            yield "environment.openenv.action: name the class of actions, whose fields the tool call has."
