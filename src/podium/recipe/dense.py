# SPDX-License-Identifier: Apache-2.0
"""Sections of the programs with fixed data beside SFT: preferences, reward models, distillation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from podium.recipe.fields import Count, Place, Real, Section

PreferenceLoss = Literal["sigmoid", "ipo", "simpo", "orpo", "kto"]
DivergenceName = Literal["forward_kl", "reverse_kl", "jsd"]


class PreferenceSection(Section):
    """dpo: which loss teaches the preference, and against which reference (docs/preferences.md)."""

    loss: PreferenceLoss = Field(
        "sigmoid", description="sigmoid (DPO), ipo, simpo, orpo on pairs; kto on rows with a `label`."
    )
    beta: Real | None = Field(
        None,
        gt=0,
        description="How strongly log-ratios count; orpo: weight of the odds ratio. Default: 0.1, of simpo 2.",
    )
    label_smoothing: Real = Field(
        0.0, ge=0, lt=0.5, description="sigmoid and simpo: share of pairs that are taken to be the wrong way round."
    )
    gamma: Real = Field(1.0, ge=0, description="simpo: by how much beta times the mean log-prob is to be ahead.")
    cross_entropy: Real = Field(
        0.0, ge=0, description="Adds this times the chosen completion's mean negative log-likelihood (orpo has it: 1)."
    )
    desirable_weight: Real = Field(1.0, gt=0, description="kto: of rows whose label is true.")
    undesirable_weight: Real = Field(1.0, gt=0, description="kto: of rows whose label is false.")
    reference: Literal["auto", "cached", "live"] = Field(
        "auto",
        description="cached: log-probs of the reference are computed once, before training. live: with every step; an "
        "adapter's reference is its base, without a second copy. auto: live with adapters and for kto, else cached.",
    )
    reference_model: Place | None = Field(None, description="The reference's checkpoint; default: model.path.")

    @property
    def strength(self) -> float:
        """`beta`, or what suits the loss: simpo's counts means over tokens, which are smaller than sums."""
        if self.beta is not None:
            return self.beta
        return 2.0 if self.loss == "simpo" else 0.1


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

    divergence: DivergenceName = "forward_kl"
    jsd_beta: Real = Field(
        0.5,
        gt=0,
        lt=1,
        description="jsd: the teachers' share of the mixture; towards 0 a small forward_kl, towards 1 a small "
        "reverse_kl.",
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
    top_k: Count = Field(64, description="cached: how many; what is left is one more outcome.")
