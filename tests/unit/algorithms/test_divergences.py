# SPDX-License-Identifier: Apache-2.0
"""Divergences of a student from a teacher: by hand, at their ends, over all of the vocabulary and over a part."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from podium.algorithms.divergences import (
    LOGPROB_FLOOR,
    DivergenceKind,
    divergence,
    mixture_logprobs,
    top_k_divergence,
)
from podium.algorithms.logarithms import log1mexp, widened

KINDS: tuple[DivergenceKind, ...] = get_args(DivergenceKind)

# Student (1/2, 1/4, 1/4), teacher (1/4, 1/4, 1/2).
STUDENT = [math.log(1 / 2), math.log(1 / 4), math.log(1 / 4)]
TEACHER = [math.log(1 / 4), math.log(1 / 4), math.log(1 / 2)]


def random_pair(seed: int, *, scale: float = 2.0, V: int = 7, C: int = 5) -> tuple[Tensor, Tensor]:
    """Student logits and teacher log-probs, in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, C, V, generator=generator, dtype=torch.float64) * scale
    return logits[0], logits[1].log_softmax(dim=-1)


def largest(teacher_CV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    logprobs_CK, ids_CK = teacher_CV.topk(k)
    return ids_CK, logprobs_CK


def test_both_kls_by_hand() -> None:
    student_CV, teacher_CV = torch.tensor([STUDENT]), torch.tensor([TEACHER])
    # Forward: 1/4 log(1/2) + 0 + 1/2 log 2 = 1/4 log 2. Reverse: 1/2 log 2 + 0 + 1/4 log(1/2), the same by symmetry.
    assert divergence("forward_kl", student_CV, teacher_CV).item() == pytest.approx(0.25 * math.log(2))
    assert divergence("reverse_kl", student_CV, teacher_CV).item() == pytest.approx(0.25 * math.log(2))
    # Student (1/2, 1/2), teacher (3/4, 1/4): forward 3/4 log 3/2 + 1/4 log 1/2, reverse 1/2 log 2/3 + 1/2 log 2.
    student_CV, teacher_CV = torch.zeros(1, 2), torch.tensor([[0.75, 0.25]]).log()
    assert divergence("forward_kl", student_CV, teacher_CV).item() == pytest.approx(0.1308120, abs=1e-6)
    assert divergence("reverse_kl", student_CV, teacher_CV).item() == pytest.approx(0.1438410, abs=1e-6)


def test_the_generalised_divergence_by_hand() -> None:
    # Student (1/2, 1/2), teacher (1, 0), beta 1/4: the mixture is 1/4 (1, 0) + 3/4 (1/2, 1/2) = (5/8, 3/8).
    # 1/4 log(8/5) + 3/4 (1/2 log(4/5) + 1/2 log(4/3))
    wanted = 0.25 * math.log(8 / 5) + 0.375 * (math.log(4 / 5) + math.log(4 / 3))
    teacher_CV = torch.tensor([[0.0, -math.inf]])
    assert divergence("jsd", torch.zeros(1, 2), teacher_CV, beta=0.25).item() == pytest.approx(wanted, abs=1e-6)


def test_the_temperature_flattens_the_student_and_scales_nothing_else() -> None:
    # Logits (2 log 3, 0) at temperature 2 are (3/4, 1/4); against (1/2, 1/2): log 1/2 - 1/2 log 3/16.
    student_CV, teacher_CV = torch.tensor([[2 * math.log(3), 0.0]]), torch.tensor([[0.5, 0.5]]).log()
    assert divergence("forward_kl", student_CV, teacher_CV, temperature=2.0).item() == pytest.approx(
        0.1438410, abs=1e-6
    )
    assert divergence("reverse_kl", student_CV, teacher_CV, temperature=2.0).item() == pytest.approx(
        0.1308120, abs=1e-6
    )
    at_one = divergence("jsd", torch.tensor([[math.log(3), 0.0]]), teacher_CV)
    assert divergence("jsd", student_CV, teacher_CV, temperature=2.0).item() == pytest.approx(at_one.item())


def test_the_gradient_of_the_forward_kl_is_the_difference_of_probabilities_over_the_temperature() -> None:
    student_CV = torch.tensor([STUDENT], requires_grad=True)
    divergence("forward_kl", student_CV, torch.tensor([TEACHER])).sum().backward()
    assert student_CV.grad is not None
    assert student_CV.grad[0].tolist() == pytest.approx([0.25, 0.0, -0.25], abs=1e-6)
    doubled_CV = (2 * student_CV.detach()).requires_grad_()
    divergence("forward_kl", doubled_CV, torch.tensor([TEACHER]), temperature=2.0).sum().backward()
    assert doubled_CV.grad is not None
    assert doubled_CV.grad[0].tolist() == pytest.approx([0.125, 0.0, -0.125], abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_finite_differences(kind: DivergenceKind, beta: float) -> None:
    student_CV, teacher_CV = random_pair(0)
    student_CV.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda logits_CV: divergence(kind, logits_CV, teacher_CV, temperature=1.7, beta=beta), student_CV
    )
    assert torch.autograd.gradcheck(
        lambda logits_CV: top_k_divergence(kind, logits_CV, *largest(teacher_CV, 3), temperature=1.7, beta=beta),
        student_CV,
    )


def test_at_its_ends_the_generalised_divergence_is_the_two_kls() -> None:
    student_CV, teacher_CV = random_pair(1)
    torch.testing.assert_close(
        divergence("jsd", student_CV, teacher_CV, beta=0.0),
        divergence("forward_kl", student_CV, teacher_CV),
        rtol=0,
        atol=0,
    )
    torch.testing.assert_close(
        divergence("jsd", student_CV, teacher_CV, beta=1.0),
        divergence("reverse_kl", student_CV, teacher_CV),
        rtol=0,
        atol=0,
    )


def test_near_its_ends_the_generalised_divergence_shrinks_like_beta() -> None:
    student_CV, teacher_CV = random_pair(2)
    near_0_C = divergence("jsd", student_CV, teacher_CV, beta=1e-6) / 1e-6
    near_1_C = divergence("jsd", student_CV, teacher_CV, beta=1 - 1e-6) / 1e-6
    torch.testing.assert_close(near_0_C, divergence("forward_kl", student_CV, teacher_CV), rtol=1e-2, atol=0)
    torch.testing.assert_close(near_1_C, divergence("reverse_kl", student_CV, teacher_CV), rtol=1e-2, atol=0)


def test_the_generalised_divergence_is_the_same_with_sides_and_beta_exchanged_and_at_most_log_two() -> None:
    student_CV, teacher_CV = random_pair(3, scale=20.0)
    left_C = divergence("jsd", student_CV, teacher_CV, beta=0.3)
    right_C = divergence("jsd", teacher_CV, student_CV.log_softmax(dim=-1), beta=0.7)
    torch.testing.assert_close(left_C, right_C)
    assert (divergence("jsd", student_CV, teacher_CV) <= math.log(2)).all()


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 1.0, 5.0]), kind=st.sampled_from(KINDS))
def test_a_divergence_is_never_negative_and_zero_only_at_equality(
    seed: int, scale: float, kind: DivergenceKind
) -> None:
    student_CV, teacher_CV = random_pair(seed, scale=scale)
    assert (divergence(kind, student_CV, teacher_CV) > 0).all()
    # A constant added to the logits changes nothing.
    assert divergence(kind, teacher_CV + 3.0, teacher_CV).abs().max() < 1e-12


@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS), beta=st.sampled_from([0.1, 0.5, 0.9]))
def test_a_teachers_largest_bound_the_divergence_from_below_and_more_of_them_more_closely(
    seed: int, kind: DivergenceKind, beta: float
) -> None:
    student_CV, teacher_CV = random_pair(seed)
    whole_C = divergence(kind, student_CV, teacher_CV, temperature=1.3, beta=beta)
    bounds = [
        top_k_divergence(kind, student_CV, *largest(teacher_CV, k), temperature=1.3, beta=beta) for k in range(1, 8)
    ]
    for fewer_C, more_C in pairwise(bounds):
        assert (fewer_C <= more_C + 1e-9).all()  # a rest far below 1 is known to the rounding of 1
    assert (bounds[0] >= -1e-12).all()
    # All but one token leave a rest that is one token.
    torch.testing.assert_close(bounds[-2], whole_C, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(bounds[-1], whole_C, rtol=1e-12, atol=1e-12)


def test_the_rest_is_one_outcome_by_hand() -> None:
    # The teacher's largest is token 2 with 1/2; the student has 1/4 there: two outcomes, (1/2, 1/2) and (1/4, 3/4).
    student_CV, ids_CK, logprobs_CK = torch.tensor([STUDENT]), torch.tensor([[2]]), torch.tensor([[math.log(1 / 2)]])
    forward = top_k_divergence("forward_kl", student_CV, ids_CK, logprobs_CK)
    assert forward.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-6)
    reverse = top_k_divergence("reverse_kl", student_CV, ids_CK, logprobs_CK)
    assert reverse.item() == pytest.approx(0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2), abs=1e-6)


def test_a_students_rest_below_the_rounding_of_one_still_pulls() -> None:
    # The student is sure of token 0 to 2e-13; the teacher leaves 0.1 to the rest: 0.9 log 0.9 + 0.1 (log 0.1 + 30) of
    # two others that share it, log 2 less.
    student_CV = torch.tensor([[30.0, 0.0, 0.0]], requires_grad=True)
    loss_C = top_k_divergence("forward_kl", student_CV, torch.tensor([[0]]), torch.tensor([[math.log(0.9)]]))
    wanted = 0.9 * math.log(0.9) + 0.1 * (math.log(0.1) + 30 - math.log(2))
    assert loss_C.item() == pytest.approx(wanted, rel=1e-5)
    loss_C.sum().backward()
    assert student_CV.grad is not None
    assert student_CV.grad[0].tolist() == pytest.approx([0.1, -0.05, -0.05], abs=1e-5)


def test_a_teacher_that_is_certain_to_rounding_leaves_a_finite_rest() -> None:
    student_CV = torch.zeros(1, 4, requires_grad=True)
    ids_CK, logprobs_CK = torch.tensor([[1, 0]]), torch.tensor([[1e-7, -math.inf]])
    for kind in KINDS:
        loss_C = top_k_divergence(kind, student_CV, ids_CK, logprobs_CK)
        (gradient_CV,) = torch.autograd.grad(loss_C.sum(), student_CV)
        assert loss_C.isfinite().all()
        assert gradient_CV.isfinite().all()
    # Of four even tokens, one is wanted: log 4.
    forward = top_k_divergence("forward_kl", student_CV, ids_CK, logprobs_CK)
    assert forward.item() == pytest.approx(math.log(4), abs=1e-5)


def test_tokens_that_the_teacher_rules_out_cost_nothing_forward_and_the_floor_in_reverse() -> None:
    teacher_CV = torch.tensor([[0.0, -math.inf, -math.inf]])
    student_CV = torch.tensor([STUDENT], requires_grad=True)
    # Forward: log 2. Reverse: half of the student is elsewhere: -H(student) + 1/2 * 100, H = 3/2 log 2.
    assert divergence("forward_kl", student_CV, teacher_CV).item() == pytest.approx(math.log(2))
    reverse_C = divergence("reverse_kl", student_CV, teacher_CV)
    assert reverse_C.item() == pytest.approx(-1.5 * math.log(2) - 0.5 * LOGPROB_FLOOR)
    (gradient_CV,) = torch.autograd.grad(reverse_C.sum(), student_CV)
    assert gradient_CV[0, 0] < 0
    assert (gradient_CV[0, 1:] > 0).all()
    # JSD at 1/2: the mixture is (3/4, 1/8, 1/8).
    wanted = 0.5 * math.log(4 / 3) + 0.5 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    assert divergence("jsd", student_CV, teacher_CV).item() == pytest.approx(wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [None, 1, 2])
@pytest.mark.parametrize("teacher", [[1e4, 0.0, -1e4], [-1e4, 0.0, 1e4], [0.0, 0.0, 0.0]])
def test_extreme_logits_give_finite_losses_and_gradients(
    kind: DivergenceKind, k: int | None, teacher: list[float]
) -> None:
    student_CV = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    teacher_CV = torch.tensor([teacher]).log_softmax(dim=-1)
    if k is None:
        loss_C = divergence(kind, student_CV, teacher_CV)
    else:
        loss_C = top_k_divergence(kind, student_CV, *largest(teacher_CV, k))
    loss_C.sum().backward()
    assert student_CV.grad is not None
    assert loss_C.isfinite().all()
    assert student_CV.grad.isfinite().all()


def test_bfloat16_is_computed_in_float32_and_the_teacher_gets_no_gradient() -> None:
    student_CV = torch.randn(2, 5, dtype=torch.bfloat16, requires_grad=True)
    teacher_CV = torch.randn(2, 5).log_softmax(dim=-1).requires_grad_()
    for kind in KINDS:
        loss_C = divergence(kind, student_CV, teacher_CV)
        part_C = top_k_divergence(kind, student_CV, *largest(teacher_CV, 2))
        assert loss_C.dtype == part_C.dtype == torch.float32
        (loss_C + part_C).sum().backward()
    assert student_CV.grad is not None
    assert teacher_CV.grad is None


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(AssertionError, match="shape"):
        divergence("forward_kl", torch.zeros(2, 3), torch.zeros(1, 3))
    with pytest.raises(AssertionError, match="shape"):
        top_k_divergence("forward_kl", torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 1))


def test_a_mixture_is_the_weighted_mean_of_probabilities() -> None:
    first_CV, second_CV = torch.tensor([[0.0, -math.inf, -math.inf]]), torch.tensor([TEACHER])
    # 3/4 (1, 0, 0) + 1/4 (1/4, 1/4, 1/2)
    mixture_CV = mixture_logprobs([first_CV, second_CV], [3.0, 1.0])
    assert mixture_CV.exp()[0].tolist() == pytest.approx([13 / 16, 1 / 16, 2 / 16])
    assert mixture_logprobs([first_CV, first_CV], [0.5, 0.5]).exp()[0].tolist() == [1.0, 0.0, 0.0]
    torch.testing.assert_close(mixture_logprobs([second_CV], [0.2]), second_CV)


def test_a_mixture_needs_a_weight_for_each_teacher() -> None:
    with pytest.raises(ValueError, match="zip"):
        mixture_logprobs([torch.zeros(1, 1)], [0.5, 0.5])


def test_everything_else_is_exact_near_zero_and_near_one() -> None:
    # 1 - 1e-12 and 1e-12; log(1 - exp(-1e-12)) = log 1e-12 up to 5e-13.
    near_CV = torch.tensor([-1e-12, math.log(0.5), -40.0, -math.inf], dtype=torch.float64)
    wanted = [math.log(1e-12), math.log(0.5), -math.exp(-40.0), 0.0]
    assert log1mexp(near_CV).tolist() == pytest.approx(wanted, rel=1e-9, abs=0)
    edge = torch.tensor([0.0, 1e-7, -1e-10], requires_grad=True)
    value = log1mexp(edge)
    value.sum().backward()
    assert value.tolist() == pytest.approx([math.log(2**-23)] * 3, rel=1e-6)
    assert edge.grad is not None
    assert edge.grad.isfinite().all()


def test_only_narrow_types_are_widened() -> None:
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    assert [widened(torch.zeros(1, dtype=dtype)).dtype for dtype in dtypes] == [torch.float32] * 3 + [torch.float64]
