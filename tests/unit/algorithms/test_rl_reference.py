# SPDX-License-Identifier: Apache-2.0
"""Every number of rl_reference.json, value and gradient: what verl 0.9.1 computes, to rounding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from reference_numbers import (
    EXPECT,
    GROUP_N,
    LENGTHS_N,
    OFFSETS,
    REWARDS_N,
    SEQUENCE_T,
    expected,
    given,
)
from torch import Tensor

from podium.algorithms.advantages import (
    group_centered,
    group_relative,
    leave_one_out,
    length_weighted,
)
from podium.algorithms.kl import KlEstimator, adaptive_coefficient, kl_estimate
from podium.algorithms.policy import (
    PolicyTokens,
    RatioLevel,
    clipped,
    clipped_weights,
    policy_statistics,
    sequence_clipped,
)
from podium.algorithms.reduction import Reduction, normalizer, token_weights
from podium.algorithms.returns import gae, moments_of, rewards_to_go
from podium.algorithms.values import value_loss, value_statistics

NUM_SEQUENCES = len(LENGTHS_N)
COVERED = {
    "gae_all", "gae_holes", "reinforce_plus_plus_all", "reinforce_plus_plus_holes",
    "grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "remax",
    "ppo_clip/token-mean", "ppo_clip/seq-mean-token-sum", "ppo_clip/seq-mean-token-mean", "ppo_clip_holes/token-mean",
    "gspo/seq-mean-token-mean", "cispo/token-mean",
    "kl_k1", "kl_k2", "kl_k3", "kl_abs", "value_loss/token-mean", "adaptive_kl",
}  # fmt: skip


def close(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


def test_the_file_holds_nothing_that_is_not_looked_at() -> None:
    assert set(EXPECT) == COVERED


@pytest.mark.parametrize(
    ("name", "estimate"), [("grpo", group_relative), ("dr_grpo", group_centered), ("rloo", leave_one_out)]
)
def test_advantages_within_groups(name: str, estimate: Callable[[Tensor, Tensor], np.ndarray]) -> None:
    close(torch.from_numpy(estimate(REWARDS_N, GROUP_N)), torch.tensor(EXPECT[name]))


def test_opo() -> None:
    close(torch.from_numpy(length_weighted(REWARDS_N, GROUP_N, LENGTHS_N)), torch.tensor(EXPECT["opo"]))


def test_reinforce_plus_plus_with_baseline_is_the_centred_reward_whitened_over_all_tokens() -> None:
    advantages_T = torch.from_numpy(group_centered(REWARDS_N, GROUP_N))[SEQUENCE_T]
    mask_T = torch.ones_like(advantages_T, dtype=torch.bool)
    whitened_T = moments_of(advantages_T, mask_T).whitening().apply(advantages_T, mask_T)
    close(whitened_T, expected("reinforce_plus_plus_baseline"))


@pytest.mark.parametrize("trained", ["all", "holes"])
def test_reinforce_plus_plus(trained: str) -> None:
    name = f"reinforce_plus_plus_{trained}"
    mask_T = given(f"trained_{trained}").bool()
    returns_T = rewards_to_go(given("token_rewards"), mask_T, OFFSETS, gamma=EXPECT[name]["gamma"])
    close(moments_of(returns_T, mask_T).whitening().apply(returns_T, mask_T), expected(name, "advantages"))


@pytest.mark.parametrize("trained", ["all", "holes"])
def test_generalised_advantages(trained: str) -> None:
    name = f"gae_{trained}"
    mask_T = given(f"trained_{trained}").bool()
    advantages_T, returns_T = gae(
        given("token_rewards"), given("values"), mask_T, OFFSETS, gamma=EXPECT[name]["gamma"], lam=EXPECT[name]["lam"]
    )
    close(moments_of(advantages_T, mask_T).whitening().apply(advantages_T, mask_T), expected(name, "advantages"))
    # On purpose: a token that is not trained has no return. verl leaves the carried advantage + its value there.
    close(returns_T, expected(name, "returns") * mask_T)


Loss = Callable[[PolicyTokens], Tensor]
REDUCTIONS: dict[str, Reduction] = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum_mean",
    "seq-mean-token-mean": "sequence_mean_mean",
}


# verl writes dual_clip into every case, and applies it to PPO's clip alone: GSPO and CISPO have none there, nor here.
@pytest.mark.parametrize(
    ("name", "loss", "level", "trained"),
    [
        *(
            (f"ppo_clip/{how}", lambda t: clipped(t, clip_low=0.2, clip_high=0.28, dual_clip=3.0), "token", "all")
            for how in REDUCTIONS
        ),
        (
            "ppo_clip_holes/token-mean",
            lambda t: clipped(t, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
            "token",
            "holes",
        ),
        (
            "gspo/seq-mean-token-mean",
            lambda t: sequence_clipped(t, clip_low=0.0003, clip_high=0.0004),
            "sequence",
            "all",
        ),
        ("cispo/token-mean", lambda t: clipped_weights(t, clip_low=0.2, clip_high=0.28), "token", "all"),
    ],
)
def test_policy_losses(name: str, loss: Loss, level: RatioLevel, trained: str) -> None:
    mask_T = given(f"trained_{trained}").bool()
    logprobs_T = given("logprobs").requires_grad_()
    tokens = PolicyTokens(
        logprobs_S=logprobs_T[mask_T],
        old_logprobs_S=given("behavior_logprobs")[mask_T],
        advantages_S=given("token_advantages")[mask_T],
        sequence_S=SEQUENCE_T[mask_T],
        num_sequences=NUM_SEQUENCES,
    )
    reduction = REDUCTIONS[name.split("/")[1]]
    lengths_N = torch.bincount(tokens.sequence_S, minlength=NUM_SEQUENCES)
    weights_S = token_weights(reduction, lengths_N[tokens.sequence_S])
    divisor = normalizer(
        reduction, num_tokens=len(tokens.sequence_S), num_sequences=int((lengths_N > 0).sum()), constant=None
    )
    total = (loss(tokens) * weights_S).sum() / divisor
    total.backward()
    want = EXPECT[name]
    assert total.item() == pytest.approx(want["loss"], abs=1e-5)
    assert logprobs_T.grad is not None
    # Divided by some hundred tokens, gradients are small: the bound is relative to them.
    torch.testing.assert_close(logprobs_T.grad, expected(name, "grad"), rtol=1e-5, atol=1e-8)

    statistics = policy_statistics(
        tokens, clip_low=want["clip_low"], clip_high=want["clip_high"], dual_clip=want["dual_clip"], level=level
    )
    # verl counts each clipped weight of CISPO, whatever its advantage: those outside of either bound.
    outside = (statistics.above + statistics.below) / statistics.count
    fraction = outside if name.startswith("cispo") else statistics.clip_fraction
    assert fraction == pytest.approx(want["metrics"]["actor/pg_clipfrac"], abs=1e-6)
    assert statistics.kl_k1 == pytest.approx(want["metrics"]["actor/ppo_kl"], abs=1e-6)
    assert statistics.dual_clip_fraction == pytest.approx(want["metrics"]["actor/pg_clipfrac_lower"], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(estimator: KlEstimator) -> None:
    close(kl_estimate(given("logprobs"), given("reference_logprobs"), estimator), expected(f"kl_{estimator}"))


def test_the_size_of_k1_is_the_estimator_that_podium_does_not_offer() -> None:
    close(kl_estimate(given("logprobs"), given("reference_logprobs"), "k1").abs(), expected("kl_abs"))


def test_the_straight_through_estimator_has_the_value_of_k3_and_the_gradient_of_k2() -> None:
    logprobs_T = given("logprobs").requires_grad_()
    estimate_T = kl_estimate(logprobs_T, given("reference_logprobs"), "k3_straight")
    close(estimate_T, expected("kl_k3"))
    estimate_T.sum().backward()
    assert logprobs_T.grad is not None
    close(logprobs_T.grad, expected("kl_k1"))


def test_value_loss() -> None:
    want = EXPECT["value_loss/token-mean"]
    pieces = (given("new_values"), given("values"), given("value_targets"))
    assert value_loss(*pieces, clip=want["clip"]).mean().item() == pytest.approx(want["loss"], abs=1e-5)
    assert value_statistics(*pieces, clip=want["clip"]).clip_fraction == pytest.approx(want["clip_fraction"], abs=1e-6)


def test_adaptive_coefficient() -> None:
    want = EXPECT["adaptive_kl"]
    beta = want["start"]
    for update in want["updates"]:
        beta = adaptive_coefficient(
            beta, update["kl"], target=want["target"], horizon=want["horizon"], count=update["n"]
        )
        assert beta == pytest.approx(update["coefficient"], rel=1e-9)
