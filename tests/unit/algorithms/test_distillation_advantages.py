# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: teachers as the advantage of each token."""

from __future__ import annotations

import torch

from podium.algorithms.distillation import several_teachers_advantages


def test_a_token_that_the_teacher_likes_better_than_the_student_is_good() -> None:
    student_T = torch.tensor([-2.0, -2.0], requires_grad=True)
    advantages_T = several_teachers_advantages(torch.tensor([[-1.0, -3.0]]), student_T, torch.ones(1))
    assert advantages_T.tolist() == [1.0, -1.0]
    assert not advantages_T.requires_grad


def test_the_policy_gradient_of_these_advantages_is_that_of_the_reverse_divergence() -> None:
    """Exact expectations over a small vocabulary: no sampling."""
    logits_V = torch.tensor([0.3, -1.0, 0.8], requires_grad=True)
    teacher_V = torch.tensor([0.0, 0.5, -0.5]).log_softmax(0)
    student_V = logits_V.log_softmax(0)
    (divergence_gradient_V,) = torch.autograd.grad(
        (student_V.exp() * (student_V - teacher_V)).sum(), logits_V, retain_graph=True
    )
    advantages_V = several_teachers_advantages(teacher_V[None], student_V, torch.ones(1))
    (policy_gradient_V,) = torch.autograd.grad(-(student_V.exp().detach() * advantages_V * student_V).sum(), logits_V)
    torch.testing.assert_close(policy_gradient_V, divergence_gradient_V)


def test_several_teachers_are_weighed() -> None:
    # 0.75 * (-1 + 2) + 0.25 * (-4 + 2)
    advantages_T = several_teachers_advantages(
        torch.tensor([[-1.0], [-4.0]]), torch.tensor([-2.0]), torch.tensor([0.75, 0.25])
    )
    assert advantages_T.tolist() == [0.25]
