# SPDX-License-Identifier: Apache-2.0
"""Objectives of the fused head (temperature, entropy bonus, losses that tie tokens) against plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.engines import relative_l2
from podium.models.head import HeadSpec, fused_objective, target_logprobs

# S trained tokens · N sequences of them · V vocabulary rows (padded) · E hidden width
S, VOCAB, V, E = 11, 20, 24, 6
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
OLD_S = torch.linspace(-4.0, -2.0, S)
ADVANTAGES_S = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, 0.5, 0.5, 0.5, 0.5, -1.0, -1.0])
SEQUENCE_S = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3])

Loss = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Goal:
    """An objective around a function of log-probs."""

    loss: Loss
    temperature: float = 1.0
    entropy: float = 0.0
    ties_tokens: bool = False
    watches_entropy: bool = True

    def __call__(self, logprobs_C: Tensor, tokens: slice) -> Tensor:
        return self.loss(logprobs_C, tokens)


def clipped(logprobs_C: Tensor, tokens: slice) -> Tensor:
    """PPO's bound, of which some tokens lie outside."""
    ratio = (logprobs_C - OLD_S[tokens].to(logprobs_C)).exp()
    advantages = ADVANTAGES_S[tokens].to(logprobs_C)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.5, 1.5) * advantages)


def of_sequences(logprobs_S: Tensor, tokens: slice) -> Tensor:
    """The geometric mean ratio of whole sequences, differentiable through all of their tokens."""
    assert len(logprobs_S) == S, "a loss that ties tokens is given all of them"
    sums_N = torch.zeros(4, dtype=logprobs_S.dtype).index_add(0, SEQUENCE_S, logprobs_S - OLD_S.to(logprobs_S))
    ratio_S = (sums_N / torch.bincount(SEQUENCE_S))[SEQUENCE_S].exp()
    return -ratio_S * ADVANTAGES_S.to(logprobs_S)


def nothing(logprobs_C: Tensor, tokens: slice) -> Tensor:
    return logprobs_C * 0


def inputs(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(S, E, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(V, E, generator=draw).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (S,), generator=draw)
    return hidden, weight, targets, torch.rand(S, generator=draw)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, spec: HeadSpec, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets, entropies), differentiable, by log_softmax over the real rows."""
    logits = (hidden @ weight.T) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logprobs_SV = torch.log_softmax(logits[:, : spec.vocab_size] / temperature, -1)
    return logprobs_SV.gather(1, targets[:, None])[:, 0], -(logprobs_SV.exp() * logprobs_SV).sum(-1)


def assert_same(goal: Goal, spec: HeadSpec, *, seed: int = 0, tolerance: float = 1e-5) -> None:
    """Value, log-probs, entropies and both gradients, against float64."""
    hidden, weight, targets, weights = inputs(seed=seed)
    value, logprobs, entropies = fused_objective(hidden, weight, targets, weights, goal, spec)
    (3.0 * value).backward()

    exact_hidden, exact_weight, _, _ = inputs(torch.float64, seed=seed)
    exact_logprobs, exact_entropies = plain(exact_hidden, exact_weight, targets, spec, goal.temperature)
    losses = goal(exact_logprobs, slice(0, S)) - goal.entropy * exact_entropies
    wanted = (losses * weights.double()).sum()
    (3.0 * wanted).backward()

    torch.testing.assert_close(value.double(), wanted, **CLOSE)
    torch.testing.assert_close(logprobs.double(), exact_logprobs, **CLOSE)
    torch.testing.assert_close(entropies.double(), exact_entropies, **CLOSE)
    for found, exact in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert found is not None
        assert exact is not None
        assert relative_l2(found.double(), exact) < tolerance


@pytest.mark.parametrize("chunk_tokens", [1, 4, 4096])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (4.0, 1.0), (None, 0.25), (4.0, 0.25)])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("entropy", [0.0, 0.02, -0.5])
@pytest.mark.parametrize(("loss", "ties_tokens"), [(clipped, False), (of_sequences, True)])
def test_value_and_gradients_are_those_of_log_softmax(
    loss: Loss, ties_tokens: bool, entropy: float, temperature: float, softcap: float | None, scale: float,
    chunk_tokens: int,
) -> None:  # fmt: skip
    spec = HeadSpec(vocab_size=VOCAB, softcap=softcap, scale=scale, chunk_tokens=chunk_tokens)
    assert_same(Goal(loss=loss, temperature=temperature, entropy=entropy, ties_tokens=ties_tokens), spec)


@given(
    temperature=st.floats(0.7, 3.0), entropy=st.floats(-1.0, 1.0), chunk_tokens=st.integers(1, 2 * S),
    scale=st.floats(0.1, 1.0), softcap=st.none() | st.floats(1.0, 30.0), seed=st.integers(0, 99), ties=st.booleans(),
)  # fmt: skip
def test_whatever_the_head_is(
    temperature: float, entropy: float, chunk_tokens: int, scale: float, softcap: float | None, seed: int, ties: bool
) -> None:
    spec = HeadSpec(vocab_size=VOCAB, softcap=softcap, scale=scale, chunk_tokens=chunk_tokens)
    # Of the smooth one of the two: a ratio that lies on the clip within rounding has either gradient.
    loss = of_sequences if ties else lambda logprobs, tokens: -ADVANTAGES_S[tokens].to(logprobs) * logprobs
    # float32 against float64: an entropy term as large as the loss cancels digits (1.2e-5 was seen).
    goal = Goal(loss=loss, temperature=temperature, entropy=entropy, ties_tokens=ties)
    assert_same(goal, spec, seed=seed, tolerance=5e-5)


def test_the_entropy_bonus_alone_pushes_towards_the_uniform_distribution() -> None:
    """Two tokens, logits (0, log 3): softmax is (1/4, 3/4), and dH/dlogit = -p (log p + H)."""
    spec = HeadSpec(vocab_size=2)
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[1.0], [3.0]]).log().requires_grad_()
    value, _, entropy = fused_objective(
        hidden, weight, torch.tensor([1]), torch.ones(1), Goal(loss=nothing, entropy=1.0), spec
    )
    value.backward()

    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    h = -(p * p.log()).sum()
    assert float(entropy) == pytest.approx(float(h), abs=1e-6)
    assert float(value.detach()) == pytest.approx(-float(h), abs=1e-6)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[:, 0].double(), p * (p.log() + h), **CLOSE)


@pytest.mark.parametrize("ties_tokens", [False, True])
def test_no_trained_token_at_all_is_a_loss_of_zero_with_gradients_of_zero(ties_tokens: bool) -> None:
    hidden = torch.zeros(0, E, requires_grad=True)
    weight = torch.ones(V, E, requires_grad=True)
    goal = Goal(loss=nothing, entropy=0.1, ties_tokens=ties_tokens)
    none = torch.zeros(0, dtype=torch.int64)

    value, logprobs, entropies = fused_objective(
        hidden, weight, none, torch.zeros(0), goal, HeadSpec(vocab_size=VOCAB, chunk_tokens=4)
    )
    value.backward()

    assert float(value.detach()) == 0.0
    assert logprobs.shape == entropies.shape == (0,)
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, E)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(V, E))


@pytest.mark.parametrize("ties_tokens", [False, True])
def test_padding_rows_change_neither_entropy_nor_gradient_however_large_they_are(ties_tokens: bool) -> None:
    spec = HeadSpec(vocab_size=VOCAB, chunk_tokens=4)
    goal = Goal(loss=of_sequences if ties_tokens else clipped, temperature=0.7, entropy=0.3, ties_tokens=ties_tokens)
    found = []
    for fill in (0.0, 100.0):
        hidden, weight, targets, weights = inputs()
        with torch.no_grad():
            weight[VOCAB:] = fill
        value, _, entropies = fused_objective(hidden, weight, targets, weights, goal, spec)
        value.backward()
        assert weight.grad is not None
        assert hidden.grad is not None
        assert torch.equal(weight.grad[VOCAB:], torch.zeros(V - VOCAB, E))
        found.append((value.detach(), entropies, hidden.grad))
    for small, large in zip(*found, strict=True):
        assert torch.isfinite(large).all()
        torch.testing.assert_close(small, large, **CLOSE)


def test_entropies_are_given_without_a_bonus_too_and_a_zero_weight_hides_a_token() -> None:
    spec = HeadSpec(vocab_size=VOCAB)
    hidden, weight, targets, weights = inputs()
    weights[5:9] = 0.0
    value, logprobs, entropies = fused_objective(hidden, weight, targets, weights, Goal(loss=clipped), spec)
    value.backward()

    assert (entropies > 0).all()
    torch.testing.assert_close(logprobs, target_logprobs(hidden, weight, targets, spec))
    assert hidden.grad is not None
    assert torch.equal(hidden.grad[5:9], torch.zeros(4, E))


def test_a_frozen_head_leaves_the_gradient_of_the_hidden_states_as_it_is() -> None:
    spec = HeadSpec(vocab_size=VOCAB, chunk_tokens=3)
    goal = Goal(loss=of_sequences, temperature=1.3, entropy=0.1, ties_tokens=True)
    gradients = []
    for frozen in (False, True):
        hidden, weight, targets, weights = inputs()
        value = fused_objective(hidden, weight.requires_grad_(not frozen), targets, weights, goal, spec)[0]
        value.backward()
        gradients.append(hidden.grad)
        assert (weight.grad is None) == frozen
    assert torch.equal(*gradients)


def test_without_gradients_the_value_is_the_same() -> None:
    spec = HeadSpec(vocab_size=VOCAB, chunk_tokens=3)
    hidden, weight, targets, weights = inputs()
    goal = Goal(loss=clipped, temperature=0.8, entropy=0.3)
    wanted = fused_objective(hidden, weight, targets, weights, goal, spec)
    with torch.no_grad():
        found = fused_objective(hidden, weight, targets, weights, goal, spec)
    for each, other in zip(found, wanted, strict=True):
        assert torch.equal(each, other)
