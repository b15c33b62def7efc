# SPDX-License-Identifier: Apache-2.0
"""The `algorithm` section of on-policy programs: one class per program, composed of the keys that it reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag
from pydantic.json_schema import JsonSchemaValue

from podium.recipe.fields import Count, Place, Real, Section, Shorthand, Switch
from podium.recipe.plugins import Plugin

AdvantageName = Literal[
    "group_relative", "group_centered", "leave_one_out", "length_weighted", "reinforce_pp", "reinforce_pp_baseline"
]
LossName = Literal["clipped", "sequence_clipped", "clipped_weights", "policy_gradient"]
ReductionName = Literal["token_mean", "sequence_sum_mean", "sequence_mean_mean", "constant"]
CorrectionName = Literal[
    "token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "sequence_geometric_mask"
]

# Only this estimator works with a single episode of a prompt: it compares with the whole step.
_WITHOUT_GROUPS = ("reinforce_pp",)
# Those with a form that compares turns.
_OF_TURNS = ("group_relative", "group_centered", "leave_one_out", "reinforce_pp_baseline")
# Returns of tokens; the others reward whole episodes.
_DISCOUNTED = ("reinforce_pp",)


class SftAlgorithm(Section):
    """sft: the loss of each trained token (docs/training.md)."""

    loss: Literal["cross_entropy"] | Plugin = Field(
        "cross_entropy", description="cross_entropy, or `file.py:function` from log-probs to the loss of each token."
    )


class KlSection(Section):
    """Distance from a reference policy, as a term of the loss or of the reward."""

    coefficient: Real = Field(gt=0, description="Weight of the KL term; with `target`, the first value.")
    where: Literal["loss", "reward"] = Field(
        "loss", description="Add the KL to the loss of each token, or subtract it from the rewards."
    )
    estimator: Literal["k1", "k2", "k3", "k3_straight"] | None = Field(
        None, description="Default: k3_straight in the loss (k3's value, k2's unbiased gradient), k1 in the reward."
    )
    target: Real | None = Field(None, gt=0, description="Adapt the coefficient towards this KL per token.")
    horizon: Real | None = Field(
        None, gt=0, description="Episodes over which an adaptive coefficient moves. Default: 10000."
    )
    reference: Place | None = Field(None, description="The reference's checkpoint; default: model.path.")
    refresh_every: Count | None = Field(
        None, description="Steps after which the reference becomes a copy of the policy again; default: never."
    )

    @property
    def horizon_episodes(self) -> float:
        """`horizon`, or its default."""
        return 10_000.0 if self.horizon is None else self.horizon


class CorrectionSection(Section):
    """Off-policy correction: weights for tokens that other weights (or another engine) sampled."""

    kind: CorrectionName = Field(
        "token_truncate",
        description="Truncate the importance weight at `cap` (TIS), or leave out what lies outside [low, cap].",
    )
    cap: Real = Field(2.0, gt=0, description="Largest importance weight.")
    low: Real = Field(0.0, ge=0, description="Of the masked kinds.")


class CorrectionByName(Shorthand):
    """A correction by its kind alone, or a word for none. YAML reads an unquoted off as false."""

    def in_full(self, value: Any) -> Any:
        """`{kind: ...}` for a text that is not `auto`; None for none."""
        if value is False or value in ("none", "off"):
            return None
        return {"kind": value} if isinstance(value, str) and value != "auto" else value

    def short_schema(self, schema: JsonSchemaValue) -> JsonSchemaValue:
        """A kind, or a word for none."""
        return {"enum": [*get_args(CorrectionName), "none", "off", False]}


def _correction_tag(value: Any) -> str:
    return "correction=auto" if value == "auto" else "correction=section"


AnyCorrection = Annotated[
    Annotated[
        Annotated[Literal["auto"], Tag("correction=auto")] | Annotated[CorrectionSection, Tag("correction=section")],
        Discriminator(_correction_tag),
    ]
    | None,
    CorrectionByName(),
]


class OverlongSection(Section):
    """A penalty that grows linearly over the last tokens before rollout.max_new_tokens (DAPO)."""

    buffer_tokens: Count = Field(description="Tokens before max_new_tokens over which the penalty grows.")
    penalty: Real = Field(1.0, gt=0, description="The penalty of an answer of max_new_tokens.")


class UpdateSection(Section):
    """What every on-policy update has."""

    reduction: ReductionName = Field(
        "token_mean", description="How losses of tokens become one number; see docs/methods.md for the formulas."
    )
    constant: Real | None = Field(
        None, gt=0, description="Tokens that reduction `constant` divides each episode by; default: max_new_tokens."
    )
    epochs: Count = Field(1, description="How often a batch of rollouts is gone through.")
    mini_batches: Count = Field(1, description="Optimizer steps of one epoch.")
    mask_truncated: Switch = Field(False, description="Episodes that ran out of tokens are not trained on.")

    def correction_of(self, *, is_stale: bool, is_truncated: bool) -> CorrectionSection | None:
        """The off-policy correction that applies to such rollouts; None: there is none."""
        return None


class RewardShapingSection(Section):
    """What is added to rewards."""

    overlong: OverlongSection | None = None


class PolicySection(UpdateSection):
    """A policy-gradient update: the loss and its terms."""

    loss: LossName | Plugin = Field(
        "clipped", description="clipped (PPO), sequence_clipped (GSPO), clipped_weights (CISPO), policy_gradient."
    )
    clip_low: Real = Field(0.2, gt=0, description="Ratios below 1 - clip_low are cut.")
    clip_high: Real = Field(0.2, gt=0, description="Ratios above 1 + clip_high are cut; DAPO: 0.28.")
    dual_clip: Real | None = Field(None, gt=1, description="Bounds the loss of bad tokens with a large ratio; verl: 3.")
    entropy: Real = Field(0.0, description="Coefficient of an entropy bonus.")
    kl: KlSection | None = None
    proximal: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Recompute log-probs by the learner before the first update and take ratios against those; auto: "
        "where an off-policy correction is on.",
    )
    correction: AnyCorrection = Field(
        "auto",
        description="Off-policy correction. auto: token_truncate with its default cap where rollout.top_p, top_k or "
        "min_p is set or rollout.staleness is above 0, else none. With staleness it is none too where the clipped loss "
        "has one optimizer step per batch, whose ratios correct by themselves. Or none; a kind; a section.",
    )
    max_kl_behavior: Real | None = Field(
        None,
        gt=0,
        description="Stops the run when kl/behavior or staleness/kl of a step is above this: the mean KL (k3) per "
        "token of the trained policy from the one that its ratios compare with, or of the policy before the update "
        "from the weights that sampled. Default: no limit.",
    )

    def correction_of(self, *, is_stale: bool, is_truncated: bool) -> CorrectionSection | None:
        """The recipe's correction, or what auto means."""
        if self.correction == "auto":
            needs_one = is_truncated or (is_stale and not self._clips_old_tokens)
            return CorrectionSection() if needs_one else None
        return self.correction

    @property
    def _clips_old_tokens(self) -> bool:
        """Whether the loss clips ratios against the weights that sampled, in a batch's only optimizer step. Against
        recomputed log-probs these ratios would all be 1, and nothing would stop tokens that have moved far already."""
        return self.loss == "clipped" and self.epochs == self.mini_batches == 1 and self.proximal != "always"

    @property
    def ignores_age(self) -> bool:
        """Whether the loss, without a correction, treats old tokens like new ones. A custom loss may have ratios."""
        return self.loss == "policy_gradient" or self.proximal == "always"

    @property
    def loss_spans_tokens(self) -> bool:
        """Whether the loss of a token may depend on other tokens of its episode. A custom loss may."""
        return self.loss == "sequence_clipped" or isinstance(self.loss, Plugin)


class GrpoAlgorithm(PolicySection, RewardShapingSection):
    """grpo: episodes of a prompt are compared with each other (docs/methods.md)."""

    advantage: AdvantageName | Plugin = Field(
        "group_relative",
        description="The estimator. A custom function takes (rewards_N, group_N) and gives advantages_N.",
    )
    gamma: Real = Field(1.0, ge=0, le=1, description="Discount of rewards; of reinforce_pp.")
    credit: Literal["episode", "turn", "branch"] = Field(
        "episode",
        description="With an environment: all tokens of an episode get its advantage, or those of each turn their own, "
        "from the rewards of this turn and later ones. With an agent also branch: each branch has its own, from the "
        "rewards of all of its turns.",
    )
    turn_discount: Real = Field(
        1.0, ge=0, le=1, description="With credit turn: discount of a reward for each turn that it comes later."
    )
    dynamic_sampling: Switch = Field(
        False, description="Leave out groups whose rewards are all equal and generate others in their place (DAPO)."
    )
    max_refills: Count | None = Field(
        None,
        description="With dynamic_sampling, a step replaces at most this many times prompts_per_step groups; then it "
        "continues with what it has. Default: 4.",
    )

    @property
    def has_turns(self) -> bool:
        """Whether the estimator can give an advantage to each turn."""
        return not isinstance(self.advantage, Plugin) and self.advantage in _OF_TURNS

    @property
    def needs_groups(self) -> bool:
        """Whether the estimator compares episodes of one prompt. This is unknown for a custom one."""
        return not isinstance(self.advantage, Plugin) and self.advantage not in _WITHOUT_GROUPS

    @property
    def reads_gamma(self) -> bool:
        """Whether the estimator discounts rewards. A custom one may."""
        return isinstance(self.advantage, Plugin) or self.advantage in _DISCOUNTED

    @property
    def num_refills(self) -> int:
        """`max_refills`, or its default."""
        return 4 if self.max_refills is None else self.max_refills


class PpoAlgorithm(PolicySection, RewardShapingSection):
    """ppo: advantages of tokens by GAE, from a critic's values."""

    gamma: Real = Field(1.0, ge=0, le=1, description="Discount of rewards.")
    lam: Real = Field(1.0, ge=0, le=1, description="Of GAE.")


class ExpertAlgorithm(UpdateSection, RewardShapingSection):
    """expert_iteration: solved episodes are imitated."""

    keep_per_prompt: Count = Field(1, description="Solved episodes of a prompt to learn from.")


class CustomAlgorithm(GrpoAlgorithm, PpoAlgorithm, ExpertAlgorithm):
    """Every key: what a custom program has."""


class AlgorithmSection(CustomAlgorithm):
    """What learners and critics are given, whatever the program: every key, and the correction that applies in place
    of `auto`."""

    correction: CorrectionSection | None = None

    @property
    def needs_idle_episodes(self) -> bool:
        """Whether an episode with advantage 0 can still have a loss or a gradient. An entropy bonus, a KL term, a
        correction or a custom loss can give it one."""
        terms = self.entropy != 0 or self.kl is not None or self.correction is not None
        return terms or isinstance(self.loss, Plugin)
