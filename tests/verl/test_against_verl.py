# SPDX-License-Identifier: Apache-2.0
"""The formulas beside verl's own, on fresh random steps: values and gradients.

Where Podium differs on purpose it is said at the test: what stands at untrained tokens (0 here), and k3, which verl
bounds at 10.
"""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.algorithms.advantages import (
    group_centered,
    group_relative,
    leave_one_out,
    length_weighted,
)
from podium.algorithms.corrections import CorrectionKind, effective_sample_size, importance_weights
from podium.algorithms.kl import KlEstimator, adaptive_coefficient, kl_estimate
from podium.algorithms.policy import PolicyTokens, clipped, clipped_weights, policy_statistics, sequence_clipped
from podium.algorithms.reduction import Reduction, normalizer, token_weights
from podium.algorithms.returns import gae, moments_of, rewards_to_go
from podium.algorithms.statistics import PolicyStatistics
from podium.algorithms.values import value_loss, value_statistics

try:
    _VERSION = metadata.version("verl")
except metadata.PackageNotFoundError:
    pytest.skip("verl is not installed in this environment: run `make test-verl`", allow_module_level=True)

from padded_batches import Step, random_step
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

pytestmark = pytest.mark.verl


@pytest.fixture(params=range(8))
def step(request: pytest.FixtureRequest) -> Step:
    return random_step(request.param)


def close(actual: Tensor, wanted: Tensor, *, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=atol)


def whitened(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """As a run does it: from the moments of two shards."""
    half = len(values_T) // 2
    moments = moments_of(values_T[:half], mask_T[:half]) + moments_of(values_T[half:], mask_T[half:])
    return moments.whitening().apply(values_T, mask_T)


def test_this_is_the_version_that_was_compared() -> None:
    assert _VERSION == "0.9.1"


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo"])
def test_advantages_within_groups(step: Step, name: str) -> None:
    rewards_NL, mask_NL = step.padded(step.token_rewards_T()), step.mask_NL
    match name:
        case "grpo":
            theirs_NL, _ = core_algos.compute_grpo_outcome_advantage(rewards_NL, mask_NL, step.labels)
            ours_N = group_relative(step.rewards_N, step.group_N)
        case "dr_grpo":
            theirs_NL, _ = core_algos.compute_grpo_outcome_advantage(
                rewards_NL, mask_NL, step.labels, norm_adv_by_std_in_grpo=False
            )
            ours_N = group_centered(step.rewards_N, step.group_N)
        case "rloo":
            theirs_NL, _ = core_algos.compute_rloo_outcome_advantage(rewards_NL, mask_NL, step.labels)
            ours_N = leave_one_out(step.rewards_N, step.group_N)
        case _:
            theirs_NL, _ = core_algos.compute_opo_outcome_advantage(rewards_NL, mask_NL, step.labels)
            ours_N = length_weighted(step.rewards_N, step.group_N, step.trained_N)
    ours_N = torch.from_numpy(ours_N)
    # Four rewards of 0.3 have a mean that is not quite 0.3 in verl's float32. Over a deviation of 0 + 1e-6 the rest
    # can become 0.03; ours is exactly 0.
    even_N = step.group_N == 1
    assert (ours_N[even_N] == 0).all()
    kept_T = step.mask_T & ~even_N[step.sequence_T]
    close(ours_N[step.sequence_T][kept_T], step.flat(theirs_NL)[kept_T])
    assert step.flat(theirs_NL)[step.mask_T & ~kept_T].abs().max() < 0.05


def test_reinforce_plus_plus_with_baseline(step: Step) -> None:
    theirs_NL, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        step.padded(step.token_rewards_T()), step.mask_NL, step.labels
    )
    ours_T = whitened(torch.from_numpy(group_centered(step.rewards_N, step.group_N))[step.sequence_T], step.mask_T)
    close(ours_T, step.flat(theirs_NL))


@pytest.mark.parametrize("gamma", [1.0, 0.97])
def test_reinforce_plus_plus(step: Step, gamma: float) -> None:
    rewards_T = step.token_rewards_T() + 0.1 * step.noise_T()
    theirs_NL, their_returns_NL = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        step.padded(rewards_T), step.mask_NL, config=SimpleNamespace(gamma=gamma)
    )
    returns_T = rewards_to_go(rewards_T, step.mask_T, step.offsets, gamma=gamma)
    close(returns_T, step.flat(their_returns_NL))
    close(whitened(returns_T, step.mask_T), step.flat(theirs_NL))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0)])
def test_generalised_advantages(step: Step, gamma: float, lam: float) -> None:
    rewards_T, values_T = step.token_rewards_T() + 0.1 * step.noise_T(), step.noise_T()
    theirs_NL, their_returns_NL = core_algos.compute_gae_advantage_return(
        step.padded(rewards_T), step.padded(values_T), step.mask_NL, gamma, lam
    )
    advantages_T, returns_T = gae(rewards_T, values_T, step.mask_T, step.offsets, gamma=gamma, lam=lam)
    # On purpose: verl leaves what it carries through untrained tokens there, which nothing may read.
    close(whitened(advantages_T, step.mask_T), step.flat(theirs_NL) * step.mask_T)
    close(returns_T, step.flat(their_returns_NL) * step.mask_T)


REDUCTIONS: dict[str, Reduction] = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum_mean",
    "seq-mean-token-mean": "sequence_mean_mean",
    "seq-mean-token-sum-norm": "constant",
}
CONSTANT = 64


def reduced(loss_S: Tensor, tokens: PolicyTokens, reduction: Reduction) -> Tensor:
    """The loss of the step, from its trained tokens."""
    lengths_N = torch.bincount(tokens.sequence_S, minlength=tokens.num_sequences)
    divisor = normalizer(
        reduction,
        num_tokens=len(loss_S),
        num_sequences=int((lengths_N > 0).sum()),
        constant=float(CONSTANT),
    )
    return (loss_S * token_weights(reduction, lengths_N[tokens.sequence_S])).sum() / divisor


@pytest.mark.parametrize("their_reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("name", "clip_low", "clip_high"),
    [("vanilla", 0.2, 0.28), ("vanilla", 0.2, 0.2), ("gspo", 0.0003, 0.0004), ("gspo", 0.1, 0.2), ("cispo", 0.2, 0.28)],
)
# Small moves; moves with ratios beyond the dual clip; moves beyond the bounds of ±20 and of 10.
@pytest.mark.parametrize("size", [0.2, 1.5, 15.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_policy_losses(
    step: Step, name: str, clip_low: float, clip_high: float, their_reduction: str, size: float, train_batch: bool
) -> None:
    old_T = -step.noise_T().abs() - 1
    logprobs_T = (old_T + step.noise_T(size)).requires_grad_()
    advantages_T, weights_T = step.noise_T(), step.noise_T().exp()
    settings = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=clip_low,
        clip_ratio_high=clip_high,
        clip_ratio_c=3.0,
        global_batch_info={"loss_scale_factor": CONSTANT},
    )
    theirs, their_metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=step.padded(old_T),
        log_prob=step.padded(logprobs_T),
        advantages=step.padded(advantages_T),
        response_mask=step.mask_NL,
        loss_agg_mode=their_reduction,
        config=settings,
        rollout_is_weights=step.padded(weights_T) if train_batch else None,
    )
    (their_gradient_T,) = torch.autograd.grad(theirs, logprobs_T)

    tokens = PolicyTokens(
        logprobs_S=logprobs_T[step.mask_T],
        old_logprobs_S=old_T[step.mask_T],
        advantages_S=advantages_T[step.mask_T],
        sequence_S=step.sequence_T[step.mask_T],
        num_sequences=step.num_sequences,
    )
    loss_S = policy_loss(name, tokens, clip_low, clip_high)
    if train_batch:
        loss_S = loss_S * weights_T[step.mask_T]
    ours = reduced(loss_S, tokens, REDUCTIONS[their_reduction])
    (our_gradient_T,) = torch.autograd.grad(ours, logprobs_T)
    close(ours, theirs, atol=1e-5 * max(1.0, loss_S.abs().mean().item()))
    close(our_gradient_T, their_gradient_T, atol=1e-7)

    statistics = policy_statistics(
        tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=3.0, level="sequence" if name == "gspo" else "token"
    )
    agree_on_metrics(statistics, name, their_metrics, bounded=size > 3)


def policy_loss(name: str, tokens: PolicyTokens, clip_low: float, clip_high: float) -> Tensor:
    match name:
        case "vanilla":
            return clipped(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=3.0)
        case "gspo":
            # verl's GSPO takes no notice of clip_ratio_c.
            return sequence_clipped(tokens, clip_low=clip_low, clip_high=clip_high)
        case _:
            return clipped_weights(tokens, clip_low=clip_low, clip_high=clip_high)


def agree_on_metrics(statistics: PolicyStatistics, name: str, theirs: dict[str, Any], *, bounded: bool) -> None:
    outside = (statistics.above + statistics.below) / statistics.count
    fraction = outside if name == "cispo" else statistics.clip_fraction
    assert fraction == pytest.approx(theirs["actor/pg_clipfrac"], abs=1e-6)
    if name == "vanilla":
        assert statistics.dual_clip_fraction == pytest.approx(theirs["actor/pg_clipfrac_lower"], abs=1e-6)
    # On purpose: our KL is of differences within ±20 under every loss, verl's not under GSPO.
    if not (bounded and name == "gspo"):
        assert statistics.kl_k1 == pytest.approx(theirs["actor/ppo_kl"], abs=1e-5)


def test_verl_divides_by_the_padded_width_where_it_has_no_constant(step: Step) -> None:
    loss_T = step.noise_T()
    theirs = core_algos.agg_loss(step.padded(loss_T), step.mask_NL, "seq-mean-token-sum-norm")
    divisor = normalizer(
        "constant",
        num_tokens=int(step.mask_T.sum()),
        num_sequences=step.num_sequences,
        constant=float(step.lengths_N.max()),
    )
    close(loss_T[step.mask_T].sum() / divisor, theirs)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("k3_straight", "k3+")]
)
# verl bounds k3 at 10, which a difference of -2.5 (exp(2.5) - 1 - 2.5 = 8.7) does not reach.
def test_kl_estimators(step: Step, ours: KlEstimator, theirs: str) -> None:
    reference_T = -step.noise_T().abs()
    logprobs_T = (reference_T + step.noise_T().clamp(-2.5, 2.5)).requires_grad_()
    factors_T = step.noise_T()
    estimates = (
        kl_estimate(logprobs_T, reference_T, ours),
        core_algos.kl_penalty(logprobs_T, reference_T, theirs),
    )
    close(*estimates)
    close(*(torch.autograd.grad((estimate_T * factors_T).sum(), logprobs_T)[0] for estimate_T in estimates))


def test_value_losses(step: Step) -> None:
    old_T, returns_T = step.noise_T(), step.noise_T()
    values_T = (old_T + step.noise_T(0.4)).requires_grad_()
    theirs, their_fraction = core_algos.compute_value_loss(
        *map(step.padded, (values_T, returns_T, old_T)), step.mask_NL, cliprange_value=0.2
    )
    pieces = (values_T[step.mask_T], old_T[step.mask_T], returns_T[step.mask_T])
    ours = value_loss(*pieces, clip=0.2).sum() / step.mask_T.sum()
    close(ours, theirs)
    close(torch.autograd.grad(ours, values_T)[0], torch.autograd.grad(theirs, values_T)[0], atol=1e-7)
    assert value_statistics(*pieces, clip=0.2).clip_fraction == pytest.approx(their_fraction.item(), abs=1e-6)


def test_adaptive_coefficients() -> None:
    theirs = core_algos.AdaptiveKLController(init_kl_coef=0.2, target_kl=0.05, horizon=500)
    ours = 0.2
    for observed, count in [(0.01, 64), (0.2, 64), (0.052, 32), (0.05, 8), (-0.3, 64)]:
        theirs.update(observed, count)
        ours = adaptive_coefficient(ours, observed, target=0.05, horizon=500, count=count)
        assert ours == pytest.approx(float(theirs.value), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "level", "threshold"),
    [
        ("token_truncate", "token", 2.0),
        ("sequence_truncate", "sequence", 2.0),
        ("token_mask", "token", "0.5_2.0"),
        ("sequence_mask", "sequence", "0.5_2.0"),
    ],
)
def test_importance_weights(step: Step, kind: CorrectionKind, level: str, threshold: float | str) -> None:
    behavior_T = -step.noise_T().abs()
    proximal_T = behavior_T + step.noise_T(0.4)
    theirs_NL, their_metrics = compute_rollout_correction_weights(
        step.padded(proximal_T - behavior_T), step.mask_NL, level, threshold
    )
    ours_S = importance_weights(
        proximal_T[step.mask_T],
        behavior_T[step.mask_T],
        step.sequence_T[step.mask_T],
        step.num_sequences,
        kind=kind,
        cap=2.0,
        low=0.5,
    )
    close(ours_S, step.flat(theirs_NL)[step.mask_T])
    if kind.endswith("truncate"):
        share = effective_sample_size(ours_S).share
        assert share == pytest.approx(their_metrics["rollout_is_eff_sample_size"], abs=1e-4)
