# SPDX-License-Identifier: Apache-2.0
"""Sections of programs that learn from what the current weights generate: method, rewards, environment, teachers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from podium.recipe.fields import Count, NonNegative, Place, Real, Section, Switch, Text
from podium.recipe.plugins import PluginPath

AdvantageName = Literal[
    "group_relative",
    "group_centered",
    "leave_one_out",
    "length_weighted",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gae",
    "teacher",
]
LossName = Literal["clipped", "sequence_clipped", "clipped_weights", "policy_gradient"]
ReductionName = Literal["token_mean", "sequence_sum_mean", "sequence_mean_mean", "constant"]
VerifierName = Literal["exact_match", "numeric", "regex", "json_schema", "math_verify", "length"]


class RewardSection(Section):
    """One reward. Exactly one of `function`, `verifier` and `model` says where it comes from."""

    function: PluginPath | None = Field(
        None, description="`file.py:function`; Podium's own signature, verl's or TRL's (see docs/rewards.md)."
    )
    verifier: VerifierName | None = Field(None, description="One of the verifiers that Podium ships.")
    model: Place | None = Field(
        None, description="Folder or hub id of a Hugging Face sequence-classification checkpoint that scores episodes."
    )
    name: Text | None = Field(None, description="What it is called in the metrics; default: its function's name.")
    weight: Real = Field(1.0, description="The total is the weighted sum of all rewards; 0 only logs it.")
    style: Literal["auto", "podium", "verl", "trl"] = Field(
        "auto", description="Whose signature the function has; auto tells by the names of its parameters."
    )
    per: Literal["sample", "batch", "group"] = Field(
        "sample", description="Podium's own style: what one call of the function is given."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Further keyword arguments of the function or verifier."
    )


class GradingSection(Section):
    """How rewards are computed, and what becomes of episodes whose reward cannot be had."""

    workers: Count = Field(1, description="Processes that run reward functions.")
    timeout_s: Real = Field(30.0, gt=0, description="Longest time of one call of a reward function.")
    on_error: Literal["drop_group", "zero", "fail"] = Field(
        "drop_group",
        description="When a reward raises, hangs or gives no finite number: leave the prompt's whole group out, count "
        "the episode's reward as 0, or stop the run.",
    )
    max_failed_share: Real = Field(
        0.5, ge=0, le=1, description="The run stops when more than this share of a step's episodes failed."
    )
    solved_at: Real = Field(1.0, description="A total reward from which on an episode counts as solved.")


class KlSection(Section):
    """Distance from a reference policy, as a term of the loss or of the reward."""

    coefficient: Real = Field(gt=0)
    where: Literal["loss", "reward"] = "loss"
    estimator: Literal["k1", "k2", "k3", "k3_straight"] | None = Field(
        None, description="Default: k3_straight in the loss (k3's value, k2's unbiased gradient), k1 in the reward."
    )
    target: Real | None = Field(None, gt=0, description="Adapt the coefficient towards this KL per token.")
    horizon: Real = Field(10_000.0, gt=0, description="Episodes over which an adaptive coefficient moves.")
    reference: Place | None = Field(None, description="The reference's checkpoint; default: model.path.")
    refresh_every: Count | None = Field(
        None, description="Steps after which the reference becomes a copy of the policy again; default: never."
    )


class CorrectionSection(Section):
    """Off-policy correction: weights for tokens that other weights (or another engine) sampled."""

    kind: Literal["token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "sequence_geometric_mask"] = (
        Field(
            "token_truncate",
            description="Truncate the importance weight at `cap` (TIS), or leave out what lies outside [low, cap].",
        )
    )
    cap: Real = Field(2.0, gt=0)
    low: Real = Field(0.0, ge=0, description="Of the masked kinds.")


class OverlongSection(Section):
    """A penalty that grows linearly over the last tokens before rollout.max_new_tokens (DAPO)."""

    buffer_tokens: Count
    penalty: Real = Field(1.0, gt=0)


class AlgorithmSection(Section):
    """An estimator, a loss and a reduction; the named methods are combinations of them (docs/methods.md)."""

    advantage: AdvantageName | PluginPath | None = Field(
        None,
        description="Default: group_relative (grpo), gae (ppo), teacher (on_policy_distill). A function of one's own "
        "takes (rewards_N, group_N) and gives advantages_N.",
    )
    loss: LossName | PluginPath = Field(
        "clipped", description="clipped (PPO), sequence_clipped (GSPO), clipped_weights (CISPO), policy_gradient."
    )
    reduction: ReductionName = "token_mean"
    constant: Real | None = Field(
        None, gt=0, description="Tokens that reduction `constant` divides each episode by; default: max_new_tokens."
    )
    clip_low: Real = Field(0.2, gt=0, description="Ratios below 1 - clip_low are cut.")
    clip_high: Real = Field(0.2, gt=0, description="Ratios above 1 + clip_high are cut; DAPO: 0.28.")
    dual_clip: Real | None = Field(None, gt=1, description="Bounds the loss of bad tokens with a large ratio; verl: 3.")
    gamma: Real = Field(1.0, ge=0, le=1)
    lam: Real = Field(1.0, ge=0, le=1, description="Of GAE.")
    entropy: Real = Field(0.0, description="Coefficient of an entropy bonus.")
    kl: KlSection | None = None
    epochs: Count = Field(1, description="How often a batch of rollouts is gone through.")
    mini_batches: Count = Field(1, description="Optimizer steps of one epoch.")
    proximal: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Recompute log-probs by the learner before the first update and take ratios against those; auto: "
        "where an off-policy correction is on.",
    )
    correction: CorrectionSection | None = None
    dynamic_sampling: Switch = Field(
        False, description="Leave out groups whose rewards are all equal and generate others in their place (DAPO)."
    )
    max_refills: Count = Field(
        4, description="Rounds of generation in one step with dynamic_sampling; then the step goes on with what it has."
    )
    overlong: OverlongSection | None = None
    mask_truncated: Switch = Field(False, description="Episodes that ran out of tokens are not trained on.")
    keep_per_prompt: Count = Field(1, description="expert_iteration: solved episodes of a prompt to learn from.")


class CriticSection(Section):
    """PPO's value model."""

    path: Place | None = Field(
        None,
        description="A language model (its value head begins at 0) or a classifier of one label; default: model.path.",
    )
    lr: Real | None = Field(None, gt=0, description="Default: optimizer.lr.")
    value_clip: Real | None = Field(0.2, gt=0, description="Values may move this far from the old ones; null: freely.")
    warmup_steps: NonNegative = Field(0, description="First steps that train the critic only.")


class TeacherSection(Section):
    """A model whose distribution the student or policy is drawn towards."""

    path: Place
    weight: Real = Field(1.0, gt=0, description="Relative to the other teachers.")

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        """A folder alone is short for {path: FOLDER}."""
        return {"path": value} if isinstance(value, str) else value


class EnvironmentSection(Section):
    """Episodes of several turns: an environment of one's own, or tools that the model may call."""

    environment: PluginPath | None = Field(None, description="`file.py:Class` with async reset and step.")
    tools: tuple[PluginPath, ...] = Field((), description="Python functions that the model may call.")
    max_turns: Count = Field(8, description="Answers of the model in one episode.")
    max_episode_tokens: Count | None = Field(
        None, description="Tokens behind the prompt, the environment's too; default: what the engine's context allows."
    )
    runners: Count = Field(1, description="Processes that run episodes.")
    concurrency: Count = Field(256, description="Episodes that one runner has under way at the same time.")
    timeout_s: Real = Field(60.0, gt=0, description="Longest time of one call of reset, step or a tool.")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the environment's class; with tools: max_chars, max_calls, role.",
    )
