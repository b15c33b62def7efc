# SPDX-License-Identifier: Apache-2.0
"""The fused head against plain autograd through all logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from podium.models import head
from podium.models.head import HeadSpec, fused_token_loss, next_token_scores, target_logprobs

# S trained tokens · V vocabulary rows (padded) · E hidden width
S, VOCAB, V, E = 10, 20, 24, 6


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, E, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(V, E, generator=draw).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (S,), generator=draw)
    return hidden, weight, targets, torch.rand(S, generator=draw)


def reference_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, spec: HeadSpec) -> Tensor:
    logits = (hidden.float() @ weight.float().T) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    return torch.log_softmax(logits[:, : spec.vocab_size], -1).gather(1, targets[:, None])[:, 0]


def cross_entropy(logprobs: Tensor) -> Tensor:
    return -logprobs


def clipped_ratio(logprobs: Tensor) -> Tensor:
    """A policy loss: not linear in the log-prob, and flat for some tokens."""
    return -torch.minimum(2 * (logprobs + 3).exp(), 2 * (logprobs + 3).exp().clamp(0.8, 1.2))


@pytest.mark.parametrize("loss", [cross_entropy, clipped_ratio])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (5.0, 1.0), (None, 0.25), (5.0, 0.25)])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 10, 4096])
def test_value_and_gradients_are_those_of_plain_autograd(
    chunk_tokens: int, softcap: float | None, scale: float, loss: Callable[[Tensor], Tensor]
) -> None:
    spec = HeadSpec(vocab_size=VOCAB, softcap=softcap, scale=scale, chunk_tokens=chunk_tokens)
    hidden, weight, targets, weights = inputs()
    value = fused_token_loss(hidden, weight, targets, weights, loss, spec)
    (3.0 * value).backward()

    plain_hidden, plain_weight, _, _ = inputs()
    wanted = (loss(reference_logprobs(plain_hidden, plain_weight, targets, spec)) * weights).sum()
    (3.0 * wanted).backward()
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(hidden.grad, plain_hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, plain_weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_padded_rows_have_probability_zero_and_gradient_zero_however_large_they_are(softcap: float | None) -> None:
    spec = HeadSpec(vocab_size=VOCAB, softcap=softcap, chunk_tokens=4)
    hidden, weight, targets, weights = inputs()
    before = target_logprobs(hidden, weight, targets, spec)
    with torch.no_grad():
        weight[VOCAB:] = 100.0
    fused_token_loss(hidden, weight, targets, weights, cross_entropy, spec).backward()
    assert torch.equal(target_logprobs(hidden, weight, targets, spec), before)
    assert weight.grad is not None
    assert torch.equal(weight.grad[VOCAB:], torch.zeros(V - VOCAB, E))
    assert next_token_scores(hidden, weight, spec).shape == (S, VOCAB)


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_the_same() -> None:
    spec = HeadSpec(vocab_size=VOCAB, chunk_tokens=4)
    hidden, weight, targets, weights = inputs()
    fused_token_loss(hidden, weight, targets, weights, cross_entropy, spec).backward()
    frozen_hidden, frozen_weight, _, _ = inputs()
    frozen_weight.requires_grad_(False)
    fused_token_loss(frozen_hidden, frozen_weight, targets, weights, cross_entropy, spec).backward()
    assert frozen_weight.grad is None
    assert torch.equal(frozen_hidden.grad, hidden.grad)  # type: ignore[arg-type]


def test_a_frozen_body_gets_no_gradient_and_the_head_the_same() -> None:
    spec = HeadSpec(vocab_size=VOCAB, chunk_tokens=4)
    hidden, weight, targets, weights = inputs()
    fused_token_loss(hidden, weight, targets, weights, cross_entropy, spec).backward()
    frozen_hidden, other_weight, _, _ = inputs()
    frozen_hidden.requires_grad_(False)
    fused_token_loss(frozen_hidden, other_weight, targets, weights, cross_entropy, spec).backward()
    assert frozen_hidden.grad is None
    assert torch.equal(other_weight.grad, weight.grad)  # type: ignore[arg-type]


def test_a_token_of_weight_zero_changes_nothing() -> None:
    spec = HeadSpec(vocab_size=VOCAB, chunk_tokens=4)
    hidden, weight, targets, weights = inputs()
    weights[3] = 0.0
    fused_token_loss(hidden, weight, targets, weights, cross_entropy, spec).backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad[3], torch.zeros(E))


def test_without_gradients_the_value_is_the_same() -> None:
    spec = HeadSpec(vocab_size=VOCAB, chunk_tokens=4)
    hidden, weight, targets, weights = inputs()
    with_gradient = fused_token_loss(hidden, weight, targets, weights, cross_entropy, spec)
    with torch.no_grad():
        without = fused_token_loss(hidden, weight, targets, weights, cross_entropy, spec)
    torch.testing.assert_close(without, with_gradient.detach())


def test_no_trained_token_at_all_is_a_loss_of_zero_that_still_has_a_gradient() -> None:
    hidden, weight, targets, weights = inputs()
    none = slice(0, 0)
    value = fused_token_loss(
        hidden[none], weight, targets[none], weights[none], cross_entropy, HeadSpec(vocab_size=VOCAB)
    )
    value.backward()
    assert value.item() == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_never_more_than_one_chunk_of_logits_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    plain = head._logits

    def recorded(hidden: Tensor, weight: Tensor) -> Tensor:
        seen.append((len(hidden), len(weight)))
        return plain(hidden, weight)

    monkeypatch.setattr(head, "_logits", recorded)
    hidden, weight, targets, weights = inputs()
    spec = HeadSpec(vocab_size=VOCAB, chunk_tokens=4)
    fused_token_loss(hidden, weight, targets, weights, cross_entropy, spec).backward()
    assert seen == [(4, V), (4, V), (2, V)]


def test_bfloat16_states_give_a_float32_loss_and_bfloat16_gradients() -> None:
    spec = HeadSpec(vocab_size=VOCAB, chunk_tokens=4)
    hidden, weight, targets, weights = inputs(torch.bfloat16)
    value = fused_token_loss(hidden, weight, targets, weights, cross_entropy, spec)
    value.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (value.dtype, hidden.grad.dtype, weight.grad.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    wanted = -(reference_logprobs(hidden, weight, targets, spec) * weights).sum()
    torch.testing.assert_close(value, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_the_compiled_kernels_compute_the_same() -> None:
    hidden, weight, targets, weights = inputs()
    other_hidden, other_weight, _, _ = inputs()
    eager = HeadSpec(vocab_size=VOCAB, softcap=5.0, scale=0.25, chunk_tokens=4)
    compiled = HeadSpec(vocab_size=VOCAB, softcap=5.0, scale=0.25, chunk_tokens=4, compiled=True)
    fused_token_loss(hidden, weight, targets, weights, cross_entropy, eager).backward()
    fused_token_loss(other_hidden, other_weight, targets, weights, cross_entropy, compiled).backward()
    torch.testing.assert_close(other_hidden.grad, hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other_weight.grad, weight.grad, rtol=1e-5, atol=1e-6)
