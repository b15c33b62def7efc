# SPDX-License-Identifier: Apache-2.0
"""Updates from tokens of truncated sampling: by hand on three tokens, and of a model whose engine kept a known mass."""

# S tokens · V vocabulary

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.engines import relative_l2
from helpers.on_policy import CASES, Case, Episodes, RecordingEngine, make_episodes, recording_engine, run_update
from helpers.tiny import save_tiny_model
from podium.algorithms.corrections import effective_sample_size, importance_weights
from podium.algorithms.policy import PolicyTokens, clipped
from podium.engine.scoring import score
from podium.weights.canary import LogprobGap

KEPT = 0.8
TOKEN_TRUNCATE = {"correction": {"kind": "token_truncate", "cap": 2.0}}


def test_the_weight_of_a_truncated_token_is_the_kept_mass() -> None:
    """The policy is (1/2, 1/4, 1/4). top_k 2 keeps 3/4 of it, so the engine samples from (2/3, 1/3)."""
    policy_S, behavior_S = torch.tensor([1 / 2, 1 / 4]).log(), torch.tensor([2 / 3, 1 / 3]).log()
    sequence_S = torch.tensor([0, 0])
    weights_S = importance_weights(policy_S, behavior_S, sequence_S, 1, kind="token_truncate", cap=2.0)
    assert weights_S.tolist() == pytest.approx([3 / 4, 3 / 4])
    assert effective_sample_size(weights_S).share == pytest.approx(1.0)
    product_S = importance_weights(policy_S, behavior_S, sequence_S, 1, kind="sequence_truncate", cap=2.0)
    assert product_S.tolist() == pytest.approx([9 / 16, 9 / 16])


def test_the_expected_gradient_is_that_of_the_policy_over_the_kept_tokens() -> None:
    """The policy is p = (1/2, 1/4, 1/4), the engine samples from (2/3, 1/3), and the advantages are 1 and -1. For logit
    j the expected gradient of the loss is -Σ p(a) A(a) (δ(a, j) - p(j)) over the two kept tokens."""
    probabilities_V = torch.tensor([1 / 2, 1 / 4, 1 / 4])
    logits_V = probabilities_V.log().requires_grad_()
    logprobs_S, sampled_from_S = logits_V.log_softmax(0)[:2], torch.tensor([2 / 3, 1 / 3])
    tokens = PolicyTokens(
        logprobs_S=logprobs_S,
        old_logprobs_S=logprobs_S.detach(),
        advantages_S=torch.tensor([1.0, -1.0]),
        sequence_S=torch.tensor([0, 1]),
        num_sequences=2,
    )
    weights_S = importance_weights(
        tokens.old_logprobs_S, sampled_from_S.log(), tokens.sequence_S, 2, kind="token_truncate", cap=2.0
    )
    loss_S = clipped(tokens, clip_low=0.2, clip_high=0.2) * weights_S
    assert loss_S.tolist() == pytest.approx([-3 / 4, 3 / 4])
    (sampled_from_S * loss_S).sum().backward()
    assert logits_V.grad is not None
    assert logits_V.grad.tolist() == pytest.approx([-3 / 8, 5 / 16, 1 / 16])


def test_ratios_against_the_truncated_distribution_would_be_clipped_before_any_step() -> None:
    """Without recomputed log-probs the first ratio is the kept mass, 3/4: below 1 - clip_low, with no gradient left for
    a token that did badly."""
    logprobs_S = torch.tensor([1 / 2]).log().requires_grad_()
    tokens = PolicyTokens(
        logprobs_S=logprobs_S,
        old_logprobs_S=torch.tensor([2 / 3]).log(),
        advantages_S=torch.tensor([-1.0]),
        sequence_S=torch.tensor([0]),
        num_sequences=1,
    )
    clipped(tokens, clip_low=0.2, clip_high=0.2).sum().backward()
    assert logprobs_S.grad is not None
    assert logprobs_S.grad.item() == 0.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> RecordingEngine:
    return recording_engine(save_tiny_model("llama", tmp_path_factory.mktemp("truncated")))


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory, engine: RecordingEngine) -> Episodes:
    """Sampled by the very policy, with its own log-probs."""
    folder: Path = save_tiny_model("llama", tmp_path_factory.mktemp("truncated"))
    made = make_episodes(folder, temperature=0.8)
    own_T = score(engine.language_model, engine.mesh, made.block, temperature=0.8).values_T
    return replace(made, block=replace(made.block, behavior_logprobs_T=np.where(made.block.loss_mask_T, own_T, 0)))


def truncated(episodes: Episodes) -> Episodes:
    """As an engine reports them that kept a mass of KEPT before every token."""
    block = episodes.block
    behavior_T = np.where(block.loss_mask_T, block.behavior_logprobs_T - np.log(KEPT), 0).astype(np.float32)
    return replace(episodes, block=replace(block, behavior_logprobs_T=behavior_T))


@pytest.mark.parametrize(
    "case",
    [
        Case(algorithm=TOKEN_TRUNCATE),
        Case(algorithm={**TOKEN_TRUNCATE, "loss": "sequence_clipped"}),
        Case(algorithm={**TOKEN_TRUNCATE, "loss": "policy_gradient"}, signal="teachers"),
    ],
    ids=["clipped", "gspo", "teachers"],
)
def test_the_gradient_is_that_of_whole_sampling_times_the_kept_mass(
    engine: RecordingEngine, episodes: Episodes, case: Case
) -> None:
    """Ratios are 1, and a teacher is compared with the policy and not with the truncated distribution."""
    whole = run_update(engine, episodes, case)
    found = run_update(engine, truncated(episodes), case, is_truncated=True)

    assert relative_l2(found.flat, KEPT * whole.flat) < 1e-4
    assert found.note.advantages.mean == pytest.approx(whole.note.advantages.mean, abs=1e-5)
    assert found.note.statistics.mean_ratio == pytest.approx(1.0, abs=1e-5)
    assert found.note.statistics.clip_fraction == 0.0


def test_the_kept_mass_is_reported_in_place_of_a_gap(engine: RecordingEngine, episodes: Episodes) -> None:
    note = run_update(engine, truncated(episodes), Case(algorithm=TOKEN_TRUNCATE), is_truncated=True).note
    total, count = note.kept_mass
    assert count == note.num_tokens > 0
    assert total / count == pytest.approx(KEPT, abs=1e-5)
    assert note.gap.is_truncated
    assert (note.gap.count, note.gap.mean) == (count, pytest.approx(0.0, abs=1e-5))
    assert note.sampling is not None
    assert note.sampling.mean == pytest.approx(KEPT, abs=1e-5)
    assert note.sampling.share == pytest.approx(1.0, abs=1e-5)

    whole = run_update(engine, episodes, Case(algorithm=TOKEN_TRUNCATE)).note
    assert whole.kept_mass == (0.0, 0.0)
    assert whole.gap.count == count


def test_only_tokens_of_the_current_version_have_a_kept_mass(engine: RecordingEngine, episodes: Episodes) -> None:
    """The probability of an older token has changed since, so that its weight is not the kept mass alone."""
    block = truncated(episodes).block
    of_others = replace(block, versions_T=np.full_like(block.versions_T, 5))
    case = Case(algorithm=TOKEN_TRUNCATE)
    note = run_update(engine, replace(episodes, block=of_others), case, is_truncated=True).note
    assert note.kept_mass == (0.0, 0.0)


def test_where_a_cache_is_kept_sequences_with_older_tokens_have_no_kept_mass(
    engine: RecordingEngine, episodes: Episodes
) -> None:
    """As for the gap: the engine's probability of their newer tokens is that of another cache."""
    block = truncated(episodes).block
    first = np.flatnonzero(block.loss_mask_T)[0]
    sequence_T = np.repeat(np.arange(len(block.ids)), block.lengths_N)
    versions_T = np.where(block.versions_T >= 0, 1, -1).astype(np.int32)
    versions_T[first] = 0
    mixed, case = replace(episodes, block=replace(block, versions_T=versions_T)), Case(algorithm=TOKEN_TRUNCATE)
    num_mixed = int(block.loss_mask_T[sequence_T == sequence_T[first]].sum())
    assert num_mixed > 1

    def num_tokens(keeps_cache: bool) -> float:
        note = run_update(engine, mixed, case, is_truncated=True, versions=(0, 1), keeps_cache=keeps_cache).note
        assert note.num_tokens == block.loss_mask_T.sum()
        return note.kept_mass[1]

    assert num_tokens(keeps_cache=True) == block.loss_mask_T.sum() - num_mixed
    assert num_tokens(keeps_cache=False) == block.loss_mask_T.sum() - 1


def test_log_probs_of_other_tokens_are_noticed_where_sampling_is_truncated(
    engine: RecordingEngine, episodes: Episodes
) -> None:
    """A share of what is kept is never below the whole probability. By hand: 1 nat below it at every token, or 3 nats
    at half of the tokens and above it at the others."""
    block, case = episodes.block, Case(algorithm=TOKEN_TRUNCATE)
    places = np.flatnonzero(block.loss_mask_T)

    def report(shift_S: np.ndarray) -> LogprobGap:
        behavior_T = block.behavior_logprobs_T.copy()
        behavior_T[places] += shift_S.astype(np.float32)
        of_shift = replace(episodes, block=replace(block, behavior_logprobs_T=behavior_T))
        return run_update(engine, of_shift, case, is_truncated=True).note.gap

    below = report(np.full(len(places), -1.0))
    assert below.mean == pytest.approx(1.0, abs=1e-5)
    assert below.is_of_other_tokens
    mixed = report(np.where(np.arange(len(places)) % 2, 5.0, -3.0))
    assert 1.0 < mixed.mean < 2.0
    assert mixed.is_of_other_tokens
    assert not report(np.full(len(places), 5.0)).is_of_other_tokens  # that little may have been kept


def test_imitated_tokens_have_no_weights(engine: RecordingEngine, episodes: Episodes) -> None:
    """A custom program may imitate truncated samples: they count like data."""
    plain = run_update(engine, truncated(episodes), CASES["imitation"], is_truncated=True)
    found = run_update(
        engine, truncated(episodes), Case(signal="imitation", algorithm=TOKEN_TRUNCATE), is_truncated=True
    )
    assert torch.equal(found.flat, plain.flat)
    assert found.note.sampling is None
    assert plain.note.gap.count == 0
