# SPDX-License-Identifier: Apache-2.0
"""Podium's AdamW against torch's, step by step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from podium.engine.optimizer import AdamW
from podium.engine.parameters import TrainedParameter
from podium.models.tensor_shards import Box
from podium.recipe import OptimizerSection

SHAPES = ((5, 3), (3,), (2, 3, 4), (1,))
SECTION = OptimizerSection(lr=0.1, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-6)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]


def trained(made: list[nn.Parameter]) -> list[TrainedParameter]:
    return [
        TrainedParameter(
            name=str(index), parameter=each, box=Box.whole(each.shape), shape=tuple(each.shape),
            master=each.detach() if each.dtype == torch.float32 else each.detach().float(),
        )
        for index, each in enumerate(made)
    ]  # fmt: skip


def step(optimizer: AdamW, gradients: list[Tensor], *, lr: float = 0.1, clip: float = 1.0, skip: float = 0.0) -> None:
    by_id = {id(each): gradient.clone() for each, gradient in zip(optimizer.trained, gradients, strict=True)}
    optimizer.step(by_id, lr=lr, clip=torch.tensor(clip), skip=torch.tensor(skip))


def random_gradients(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def torch_adamw(made: list[nn.Parameter]) -> torch.optim.AdamW:
    """Matrices are decayed, vectors are not."""
    groups = [
        {"params": [each for each in made if each.dim() >= 2], "weight_decay": 0.3},
        {"params": [each for each in made if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.95), eps=1e-6, foreach=False)


def test_five_steps_with_decay_clipping_and_a_changing_rate_are_those_of_torch() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = AdamW(trained(ours), SECTION), torch_adamw(theirs)
    for number, lr in enumerate((0.1, 0.2, 0.05, 0.1, 0.01)):
        gradients = random_gradients(number)
        for each, gradient in zip(theirs, gradients, strict=True):
            each.grad = gradient.clone()
        norm = nn.utils.clip_grad_norm_(theirs, 0.5)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        step(optimizer, gradients, lr=lr, clip=0.5 / (float(norm) + 1e-6))
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    for index, other in enumerate(theirs):
        state = reference.state[other]
        torch.testing.assert_close(optimizer.first_moments[index], state["exp_avg"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.second_moments[index], state["exp_avg_sq"], rtol=1e-5, atol=1e-6)


def test_without_a_gradient_only_matrices_shrink() -> None:
    made = parameters()
    before = [each.detach().clone() for each in made]
    step(AdamW(trained(made), SECTION), [torch.zeros(shape) for shape in SHAPES])
    for mine, was in zip(made, before, strict=True):
        torch.testing.assert_close(mine.detach(), was * (1 - 0.1 * 0.3) if was.dim() >= 2 else was)


def test_parameters_without_a_gradient_are_left_alone_as_torch_does() -> None:
    """None, not zeros: the first never gets one, the second only in some steps, and one step is skipped."""
    ours, theirs = parameters(), parameters()
    optimizer, reference = AdamW(trained(ours), SECTION), torch_adamw(theirs)
    for number, present in enumerate(((1, 2, 3), (2, 3), (2, 3), (1, 2, 3), (1, 2))):
        gradients = random_gradients(number)
        for at, each in enumerate(theirs):
            each.grad = gradients[at].clone() if at in present else None
        by_id = {id(optimizer.trained[at]): gradients[at].clone() for at in present}
        if number == 2:
            optimizer.step(by_id, lr=0.1, clip=torch.tensor(1.0), skip=torch.tensor(1.0))
            continue
        reference.step()
        optimizer.step(by_id, lr=0.1, clip=torch.tensor(1.0), skip=torch.tensor(0.0))
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours[0], parameters()[0])
    assert optimizer.updates == 4
    assert optimizer.missed_updates() == {"0": 4, "1": 1, "3": 1}


def test_an_optimizer_whose_parameters_missed_updates_is_resumed_bit_for_bit() -> None:
    made = parameters()
    optimizer = AdamW(trained(made), SECTION)
    for number, present in enumerate(((1, 2), (2, 3), (1, 2, 3))):
        gradients = random_gradients(number)
        by_id = {id(optimizer.trained[at]): gradients[at] for at in present}
        optimizer.step(by_id, lr=0.1, clip=torch.tensor(1.0), skip=torch.tensor(0.0))
    copies = [nn.Parameter(each.detach().clone()) for each in made]
    resumed = AdamW(trained(copies), SECTION)
    for old, new in zip(
        (*optimizer.first_moments, *optimizer.second_moments), (*resumed.first_moments, *resumed.second_moments),
        strict=True,
    ):  # fmt: skip
        new.copy_(old)
    resumed.set_updates(optimizer.updates, optimizer.missed_updates())
    for each in (optimizer, resumed):
        step(each, random_gradients(9))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, copies, strict=True))
    assert resumed.missed_updates() == optimizer.missed_updates() == {"0": 3, "1": 1, "3": 1}


def test_a_skipped_step_changes_nothing_and_does_not_count() -> None:
    made, other = parameters(), parameters()
    optimizer, reference = AdamW(trained(made), SECTION), AdamW(trained(other), SECTION)
    step(optimizer, random_gradients(0))
    before = [each.detach().clone() for each in (*made, *optimizer.first_moments, *optimizer.second_moments)]
    step(optimizer, [torch.full(shape, float("nan")) for shape in SHAPES], skip=1.0)
    after = [*made, *optimizer.first_moments, *optimizer.second_moments]
    assert all(torch.equal(now, was) for now, was in zip(after, before, strict=True))
    # The bias correction of the next step is that of the second update, not the third.
    step(optimizer, random_gradients(2))
    for seed in (0, 2):
        step(reference, random_gradients(seed))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, other, strict=True))


def test_a_resumed_optimizer_continues_bit_for_bit() -> None:
    made = parameters()
    optimizer = AdamW(trained(made), SECTION)
    for seed in range(3):
        step(optimizer, random_gradients(seed))
    copies = [nn.Parameter(each.detach().clone()) for each in made]
    resumed = AdamW(trained(copies), SECTION)
    for old, new in zip(
        (*optimizer.first_moments, *optimizer.second_moments), (*resumed.first_moments, *resumed.second_moments),
        strict=True,
    ):  # fmt: skip
        new.copy_(old)
    resumed.set_updates(3)
    step(optimizer, random_gradients(9))
    step(resumed, random_gradients(9))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, copies, strict=True))


def test_bfloat16_parameters_follow_float32_masters() -> None:
    """Updates smaller than bfloat16 can show add up in the master."""
    made = parameters(torch.bfloat16)
    held = trained(made)
    optimizer = AdamW(held, OptimizerSection(lr=1e-4))
    start = held[0].master.clone()
    assert held[0].has_own_master
    for _ in range(10):
        step(optimizer, [torch.ones(shape) for shape in SHAPES], lr=1e-4)
    torch.testing.assert_close(held[0].master, start - 10 * 1e-4, rtol=0, atol=1e-6)
    assert all(torch.equal(each.parameter, each.master.bfloat16()) for each in held)


def test_a_rank_that_holds_no_row_of_a_tensor_steps_the_others() -> None:
    whole = parameters()[0]
    empty = TrainedParameter(
        name="elsewhere", parameter=nn.Parameter(torch.zeros(1, 3)), master=torch.zeros(0, 3), box=Box((1, 0), (1, 3)),
        shape=(1, 3),
    )  # fmt: skip
    held = [empty, *trained([whole])]
    optimizer, before = AdamW(held, SECTION), whole.detach().clone()
    step(optimizer, [torch.zeros(0, 3), torch.ones(5, 3)])
    assert not torch.equal(whole.detach(), before)
