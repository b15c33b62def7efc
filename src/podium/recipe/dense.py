# SPDX-License-Identifier: Apache-2.0
"""Sections of the programs with fixed data beside SFT: preferences, reward models, distillation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from podium.recipe.fields import Count, Place, Real, Section
from podium.recipe.losses import PAIR_INPUTS, declared_inputs, reads_reference
from podium.recipe.plugins import Plugin

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd"]


class PreferenceSection(Section):
    """dpo: how the loss teaches the preference. One class per loss (docs/preferences.md)."""

    is_paired: ClassVar[bool] = True
    loss: str
    beta: Real = Field(0.1, gt=0, description="How strongly log-ratios count.")


class ReferencedPreference(PreferenceSection):
    """Losses that compare with a reference."""

    reference: Literal["auto", "cached", "live"] = Field(
        "auto",
        description="cached: log-probs of the reference are computed once, before training. live: with every step; an "
        "adapter's reference is its base, without a second copy. auto: live with adapters, else cached.",
    )
    reference_model: Place | None = Field(None, description="The reference's checkpoint; default: model.path.")

    @property
    def reads_reference(self) -> bool:
        """Whether the loss compares with the reference. A custom one may not."""
        return True


class ImitatingPreference(PreferenceSection):
    """Losses on pairs that may also imitate the chosen completion."""

    cross_entropy: Real = Field(
        0.0, ge=0, description="Adds this times the chosen completion's mean negative log-likelihood."
    )


class SigmoidPreference(ReferencedPreference, ImitatingPreference):
    """DPO."""

    loss: Literal["sigmoid"] = "sigmoid"
    label_smoothing: Real = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs that are taken to be the wrong way round."
    )


class IpoPreference(ReferencedPreference, ImitatingPreference):
    """IPO."""

    loss: Literal["ipo"] = "ipo"


class SimpoPreference(ImitatingPreference):
    """SimPO: mean log-probs, without a reference."""

    loss: Literal["simpo"] = "simpo"
    beta: Real = Field(2.0, gt=0, description="How strongly mean log-probs count; they are smaller than sums.")
    gamma: Real = Field(1.0, ge=0, description="By how much beta times the mean log-prob is to be ahead.")
    label_smoothing: Real = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs that are taken to be the wrong way round."
    )


class OrpoPreference(PreferenceSection):
    """ORPO: imitates the chosen completion by itself, without a reference."""

    loss: Literal["orpo"] = "orpo"
    beta: Real = Field(0.1, gt=0, description="Weight of the odds ratio.")


class KtoPreference(ReferencedPreference):
    """KTO: rows with a `label` in place of pairs."""

    is_paired: ClassVar[bool] = False
    loss: Literal["kto"] = "kto"
    desirable_weight: Real = Field(1.0, gt=0, description="Of rows whose label is true.")
    undesirable_weight: Real = Field(1.0, gt=0, description="Of rows whose label is false.")
    reference: Literal["auto", "live"] = Field(
        "auto",
        description="Always live: kto's baseline pairs completions anew with other prompts in every step, so the "
        "reference cannot be computed beforehand.",
    )


class CustomPreference(ReferencedPreference):
    """A custom loss on pairs."""

    loss: Plugin = Field(description="`file.py:function` from log-probs of pairs to the loss of each pair.")

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the loss takes: names of PAIR_INPUTS. Reads the loss's file."""
        return declared_inputs(self.loss, "preference.loss", PAIR_INPUTS)

    @property
    def reads_reference(self) -> bool:
        """Whether the loss takes a reference's log-probs. Reads the loss's file."""
        return reads_reference(self.inputs)


def _loss_tag(value: Any) -> str:
    loss = value.get("loss", "sigmoid") if isinstance(value, dict) else getattr(value, "loss", "sigmoid")
    return "loss=file.py:function" if Plugin.has_shape(loss) else f"loss={loss}"


AnyPreference = Annotated[
    Annotated[SigmoidPreference, Tag("loss=sigmoid")]
    | Annotated[IpoPreference, Tag("loss=ipo")]
    | Annotated[SimpoPreference, Tag("loss=simpo")]
    | Annotated[OrpoPreference, Tag("loss=orpo")]
    | Annotated[KtoPreference, Tag("loss=kto")]
    | Annotated[CustomPreference, Tag("loss=file.py:function")],
    Discriminator(_loss_tag),
]


class RewardModelSection(Section):
    """reward_model: what the score learns from."""

    learns: Literal["pairs", "scores"] = Field(
        "pairs", description="`chosen` and `rejected` (Bradley-Terry, with an optional `margin`), or rows with `score`."
    )
    center: Real = Field(
        0.0, ge=0, description="pairs: weight of (chosen + rejected)², which keeps scores around zero; 0.01 is usual."
    )


class DistillSection(Section):
    """distill: how the student's distribution is drawn to the teachers' at every trained token of the data."""

    divergence: DivergenceName = Field(
        "forward_kl", description="KL(teacher, student), KL(student, teacher), or a Jensen-Shannon mixture of both."
    )
    jsd_beta: Real | None = Field(
        None,
        gt=0,
        lt=1,
        description="jsd: the teachers' share of the mixture; towards 0 a small forward_kl, towards 1 a small "
        "reverse_kl. Default: 0.5.",
    )
    temperature: Real = Field(1.0, gt=0, description="Of both distributions.")
    cross_entropy: Real = Field(
        0.0, ge=0, lt=1, description="Share of the data's own cross-entropy in the loss; the divergence has the rest."
    )
    targets: Literal["live", "cached"] = Field(
        "live",
        description="live: teachers run beside the student. cached: their `top_k` largest log-probs are computed once, "
        "before training, and read from disk.",
    )
    top_k: Count | None = Field(
        None, description="cached: how many log-probs of a token; what is left is one more outcome. Default: 64."
    )

    @property
    def mixture_share(self) -> float:
        """`jsd_beta`, or its default."""
        return 0.5 if self.jsd_beta is None else self.jsd_beta

    @property
    def num_cached(self) -> int:
        """`top_k`, or its default."""
        return 64 if self.top_k is None else self.top_k
