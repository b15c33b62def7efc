# SPDX-License-Identifier: Apache-2.0
"""Losses of preferences, reward models and distillation beside TRL's own: values and gradients.

Where Podium differs on purpose it is said at the test: label smoothing, which TRL's DPO has under another loss, and
the likelihood in ORPO.
"""

from __future__ import annotations

import copy
import math
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from podium.algorithms.divergences import divergence, top_k_divergence
from podium.algorithms.preferences import ipo, kto, kto_baseline, log_odds_ratio, orpo, sigmoid_dpo, simpo
from podium.algorithms.reward_models import bradley_terry

try:
    _VERSION = metadata.version("trl")
except metadata.PackageNotFoundError:
    pytest.skip("TRL is not installed in this environment: run `make test-trl`", allow_module_level=True)

from trainer_batches import (
    LABELS,
    PAIRS,
    completion_sums,
    loss_and_gradient,
    only_batch,
    tiny_llama,
    tiny_scorer,
    token_logprobs,
    trainer,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.server_distillation import server_distillation_trainer as server_distillation

pytestmark = pytest.mark.trl


def close(actual: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Loss to 1e-5, gradient to 1e-5 of its length; neither nothing."""
    torch.testing.assert_close(actual[0], wanted[0], rtol=1e-5, atol=1e-6)
    assert wanted[1].norm() > 1e-3
    assert (actual[1] - wanted[1]).norm() < 1e-5 * wanted[1].norm()


def random_sums(seed: int, R: int = 6) -> tuple[list[Tensor], list[Tensor]]:
    """Summed log-probs and token counts of chosen and rejected completions, in float64."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(1, 20, (R,), generator=generator) for _ in range(2)]
    sums = [-(torch.rand(R, generator=generator, dtype=torch.float64) * 3 + 0.01) * count for count in tokens]
    return [column.requires_grad_() for column in sums], tokens


def gradients(loss_R: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    # Unequal weights: a loss that mixed its rows up would show.
    return list(torch.autograd.grad(loss_R @ torch.arange(1.0, len(loss_R) + 1, dtype=loss_R.dtype), leaves))


def like_cpo(**settings: Any) -> Any:
    """As much of a CPO or ORPO trainer as its loss reads."""
    return SimpleNamespace(alpha=0.0, accelerator=SimpleNamespace(device=torch.device("cpu")), **settings)


def test_the_version_is_the_one_that_the_tests_were_written_for() -> None:
    assert _VERSION == "1.16.0"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_logistic_loss_with_smoothed_labels(seed: int, smoothing: float) -> None:
    # TRL's DPO offers smoothing only as its `robust` loss, another formula. CPO has the same one without a reference:
    # that of a reference which finds both completions equally likely.
    leaves, _ = random_sums(seed)
    even_R = torch.full_like(leaves[0], -7.0)
    ours_R = sigmoid_dpo(*leaves, even_R, even_R, beta=0.3, label_smoothing=smoothing)
    theirs_R, *_ = CPOTrainer.cpo_loss(like_cpo(loss_type="sigmoid", beta=0.3, label_smoothing=smoothing), *leaves)
    torch.testing.assert_close(ours_R, theirs_R)
    torch.testing.assert_close(gradients(ours_R, leaves), gradients(theirs_R, leaves))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo(seed: int, smoothing: float) -> None:
    leaves, tokens = random_sums(seed)
    ours_R = simpo(*leaves, *tokens, beta=2.0, gamma=0.7, label_smoothing=smoothing)
    means = [leaf / count for leaf, count in zip(leaves, tokens, strict=True)]
    settings = like_cpo(loss_type="simpo", beta=2.0, simpo_gamma=0.7, label_smoothing=smoothing)
    theirs_R, *_ = CPOTrainer.cpo_loss(settings, *means)
    torch.testing.assert_close(ours_R, theirs_R)
    torch.testing.assert_close(gradients(ours_R, leaves), gradients(theirs_R, leaves))


@pytest.mark.parametrize("seed", range(4))
def test_the_odds_ratio(seed: int) -> None:
    leaves, tokens = random_sums(seed)
    means = [leaf / count for leaf, count in zip(leaves, tokens, strict=True)]
    ours_R = -0.4 * logsigmoid(log_odds_ratio(*leaves, *tokens))
    # TRL's has the opposite sign, and rounds to float32.
    theirs_R, *_ = ORPOTrainer.odds_ratio_loss(like_cpo(beta=0.4), *means)
    torch.testing.assert_close(ours_R.float(), -theirs_R, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(ours_R, leaves), gradients(-theirs_R, leaves), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_the_generalised_divergence(beta: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 5, 11, generator=generator, dtype=torch.float64) * 3
    student.requires_grad_()
    labels = torch.tensor([[-100, -100, 1, 1, 1], [-100, 1, 1, 1, -100]])
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=temperature)
    trained = labels != -100
    teacher_CV = (teacher[trained] / temperature).log_softmax(dim=-1)
    ours = divergence("jsd", student[trained], teacher_CV, temperature=temperature, beta=beta).mean()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, student), torch.autograd.grad(theirs, student))
    ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
    if beta in ends:
        torch.testing.assert_close(
            divergence(ends[beta], student[trained], teacher_CV, temperature=temperature).mean(), theirs
        )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_the_divergence_from_a_teachers_largest(beta: float, k: int) -> None:
    generator = torch.Generator().manual_seed(1)
    student_CV, teacher_CV = torch.randn(2, 5, 11, generator=generator, dtype=torch.float64) * 2
    student_CV.requires_grad_()
    logprobs_CK, ids_CK = teacher_CV.log_softmax(dim=-1).topk(k)
    ours_C = top_k_divergence("jsd", student_CV, ids_CK, logprobs_CK, temperature=1.5, beta=beta)
    sides = [(student_CV / 1.5).log_softmax(dim=-1).gather(-1, ids_CK), logprobs_CK]
    known = torch.ones_like(ids_CK, dtype=torch.bool)
    (student, support), (teacher, _) = (server_distillation._add_tail_bucket(side, known) for side in sides)
    theirs_C = server_distillation._jsd_divergence(student, teacher, beta, support).sum(dim=-1)
    torch.testing.assert_close(ours_C, theirs_C)
    torch.testing.assert_close(gradients(ours_C, [student_CV]), gradients(theirs_C, [student_CV]))


def test_a_whole_batch_of_dpo(tmp_path: Path) -> None:
    _dpo_batch(tmp_path, "sigmoid")


def test_a_whole_batch_of_ipo(tmp_path: Path) -> None:
    _dpo_batch(tmp_path, "ipo")


def _dpo_batch(folder: Path, loss: str) -> None:
    policy, reference = tiny_llama(folder / "policy", seed=1), tiny_llama(folder / "reference", seed=2)
    plain = copy.deepcopy(policy)
    ready = trainer(DPOTrainer, DPOConfig, policy, PAIRS, folder, copy.deepcopy(reference), loss_type=[loss], beta=0.3)
    batch = only_batch(ready)
    theirs = loss_and_gradient(ready.compute_loss(policy, dict(batch)), policy)
    rectangle = batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
    (chosen_R, rejected_R), (chosen_tokens_R, rejected_tokens_R) = (
        column.chunk(2) for column in completion_sums(plain, *rectangle)
    )
    with torch.no_grad():
        references = completion_sums(reference.eval(), *rectangle)[0].chunk(2)
    if loss == "sigmoid":
        loss_R = sigmoid_dpo(chosen_R, rejected_R, *references, beta=0.3)
    else:
        loss_R = ipo(chosen_R, rejected_R, *references, chosen_tokens_R, rejected_tokens_R, beta=0.3)
    close(loss_and_gradient(loss_R.mean(), plain), theirs)


def test_a_whole_batch_of_simpo(tmp_path: Path) -> None:
    policy = tiny_llama(tmp_path / "policy", seed=1)
    plain = copy.deepcopy(policy)
    # cpo_alpha would add the chosen completions' likelihood.
    ready = trainer(
        CPOTrainer, CPOConfig, policy, PAIRS, tmp_path, loss_type="simpo", beta=2.0, simpo_gamma=0.7, cpo_alpha=0.0
    )
    batch = only_batch(ready)
    theirs = loss_and_gradient(ready.get_batch_loss_metrics(policy, dict(batch))[0], policy)
    (chosen_R, chosen_tokens_R), (rejected_R, rejected_tokens_R) = (_side(plain, batch, side) for side in _SIDES)
    loss_R = simpo(chosen_R, rejected_R, chosen_tokens_R, rejected_tokens_R, beta=2.0, gamma=0.7)
    close(loss_and_gradient(loss_R.mean(), plain), theirs)


def test_a_whole_batch_of_orpo_but_for_the_likelihood(tmp_path: Path) -> None:
    policy = tiny_llama(tmp_path / "policy", seed=1)
    plain = copy.deepcopy(policy)
    ready = trainer(ORPOTrainer, ORPOConfig, policy, PAIRS, tmp_path, beta=0.4)
    batch = only_batch(ready)
    theirs = loss_and_gradient(ready.get_batch_loss_metrics(policy, dict(batch))[0], policy)
    (chosen_R, chosen_tokens_R), (rejected_R, rejected_tokens_R) = (_side(plain, batch, side) for side in _SIDES)
    loss_R = orpo(chosen_R, rejected_R, chosen_tokens_R, rejected_tokens_R, beta=0.4)
    # Podium's likelihood is of completions, a mean of each row's mean. TRL's is of prompts too, a mean over tokens.
    tokens_RL, attention_RL = batch["chosen_input_ids"], batch["chosen_attention_mask"]
    counted_RL = attention_RL[:, 1:].bool()
    with_prompts = -token_logprobs(plain, tokens_RL, attention_RL)[counted_RL].mean()
    of_completions = -(chosen_R / chosen_tokens_R).mean()
    close(loss_and_gradient(loss_R.mean() - of_completions + with_prompts, plain), theirs)
    assert abs(with_prompts.item() - of_completions.item()) > 1e-3


_SIDES = ("chosen", "rejected")


def _side(model: Any, batch: dict[str, Tensor], side: str) -> tuple[Tensor, Tensor]:
    mask_RL = batch[f"{side}_labels"] != -100
    return completion_sums(model, batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"], mask_RL)


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_whole_batch_of_kto(tmp_path: Path, exchanged: bool) -> None:
    seeds = (2, 1) if exchanged else (1, 2)
    policy, reference = (tiny_llama(tmp_path / f"model-{seed}", seed=seed) for seed in seeds)
    plain = copy.deepcopy(policy)
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    ready = trainer(KTOTrainer, KTOConfig, policy, LABELS, tmp_path, copy.deepcopy(reference), beta=0.2, **weights)
    batch = only_batch(ready)
    theirs = loss_and_gradient(ready.compute_loss(policy, dict(batch)), policy)
    matched, mismatched = (
        tuple(batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "completion_mask"))
        for prefix in ("", "KL_")
    )
    with torch.no_grad():
        reference_R = completion_sums(reference.eval(), *matched)[0]
        others_R = completion_sums(plain, *mismatched)[0] - completion_sums(reference, *mismatched)[0]
    baseline = kto_baseline(others_R.sum(), len(others_R))
    # With policy and reference exchanged the estimate changes its sign, so that both sides of max(0, ·) are seen.
    assert (baseline.item() > 0.1) == (others_R.sum().item() > 0)
    logratio_R = completion_sums(plain, *matched)[0] - reference_R
    loss_R = kto(logratio_R, batch["label"], baseline, beta=0.2, **weights)
    close(loss_and_gradient(loss_R.mean(), plain), theirs)


@pytest.mark.parametrize(("with_margin", "center"), [(False, 0.0), (True, 0.0), (True, 0.01)])
def test_a_whole_batch_of_a_reward_model(tmp_path: Path, with_margin: bool, center: float) -> None:
    scorer = tiny_scorer(tmp_path / "scorer", seed=1)
    margins = [0.5, 0.0, 1.0, 2.0]
    rows = {**PAIRS, **({"margin": margins} if with_margin else {})}
    ready = trainer(RewardTrainer, RewardConfig, scorer, rows, tmp_path, center_rewards_coefficient=center or None)
    plain = copy.deepcopy(scorer)
    batch = only_batch(ready)
    theirs = loss_and_gradient(ready.compute_loss(scorer, dict(batch)), scorer)
    scores = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    chosen_R, rejected_R = scores.squeeze(-1).chunk(2)
    margin_R = batch["margin"] if with_margin else None
    assert (margin_R is not None and math.isclose(margin_R.sum().item(), sum(margins))) == with_margin
    close(loss_and_gradient(bradley_terry(chosen_R, rejected_R, margin_R, center=center).mean(), plain), theirs)
