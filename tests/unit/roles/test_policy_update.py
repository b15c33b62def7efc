# SPDX-License-Identifier: Apache-2.0
"""The gradient of a policy update, against one written down again with plain transformers, padding and float64."""

# N episodes · L tokens of the longest

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.engines import one_rank, relative_l2
from helpers.on_policy import (
    CASES,
    MAX_NEW_TOKENS,
    TEACHER_WEIGHTS,
    Case,
    Episodes,
    RecordingEngine,
    Updated,
    make_episodes,
    recording_engine,
    run_update,
)
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.engine.scoring import score
from podium.recipe import AlgorithmSection
from podium.roles.token_rows import packed_rows
from podium.weights.canary import LogprobGap

SAME = 1e-5
REDUCTIONS = ("token_mean", "sequence_sum_mean", "sequence_mean_mean", "constant")
LOSSES = ("clipped", "sequence_clipped", "clipped_weights", "policy_gradient")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    folder: Path
    engine: RecordingEngine
    episodes: Episodes


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Tied embeddings, a padded vocabulary, and a temperature that is not 1."""
    return make_setting(tmp_path_factory.mktemp("policy"), "qwen3", temperature=0.8)


def make_setting(folder: Path, name: str, *, temperature: float) -> Setting:
    save_tiny_model(name, folder)
    return Setting(
        folder=folder, engine=recording_engine(folder), episodes=make_episodes(folder, temperature=temperature)
    )


# --- the same in padded rows ---


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Padded:
    """Rows as a rectangle. What is not there is 0, behind everything that a causal model looks at."""

    tokens_NL: Tensor
    trained_NL: Tensor
    episodes: Episodes

    @classmethod
    def of(cls, episodes: Episodes) -> Padded:
        block = episodes.block
        trained = block.loss_mask_T.copy()
        trained[block.offsets[:-1]] = False  # nothing predicts a first token
        self = cls(tokens_NL=torch.empty(0), trained_NL=torch.empty(0), episodes=episodes)
        return replace(
            self,
            tokens_NL=self.spread(block.tokens_T).long(),
            trained_NL=self.spread(trained).bool(),
        )

    def spread(self, values_T: np.ndarray) -> Tensor:
        block = self.episodes.block
        rectangle = torch.zeros(len(block.ids), int(block.lengths_N.max()), dtype=torch.float64)
        for row, (begin, end) in enumerate(zip(block.offsets[:-1], block.offsets[1:], strict=True)):
            rectangle[row, : end - begin] = torch.from_numpy(values_T[begin:end].astype(np.float64))
        return rectangle


def independent_gradient(folder: Path, episodes: Episodes, case: Case) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient of each parameter)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    rows, algorithm = Padded.of(episodes), case.section
    logits_NLV = model(rows.tokens_NL).logits / (1.0 if case.signal == "imitation" else episodes.temperature)
    distribution = torch.log_softmax(logits_NLV[:, :-1], -1)
    logprobs = distribution.gather(2, rows.tokens_NL[:, 1:, None])[..., 0]
    logprobs = torch.cat([torch.zeros(len(logprobs), 1, dtype=torch.float64), logprobs], 1)
    entropy = torch.nn.functional.pad(-(distribution.exp() * distribution).sum(-1), (1, 0))

    behavior = rows.spread(episodes.block.behavior_logprobs_T)
    recomputed = algorithm.correction is not None or algorithm.proximal == "always"
    old = logprobs.detach() if recomputed else behavior
    trained, weights = rows.trained_NL, torch.ones_like(behavior)
    advantages = independent_advantages(rows, case)
    if algorithm.correction is not None:
        weights = independent_weights(old - behavior, trained, algorithm)
        trained = trained & (weights > 0)
    if case.signal == "imitation":
        losses = -logprobs
    else:
        losses = independent_loss(logprobs, old, advantages, trained, algorithm) * weights
        losses = losses - algorithm.entropy * entropy
    if algorithm.kl is not None and algorithm.kl.where == "loss":
        apart = logprobs - rows.spread(episodes.reference_T)
        k2, k3 = apart.square() / 2, (-apart).exp() - 1 + apart
        kl = {"k2": k2, "k3": k3, None: k3.detach() + k2 - k2.detach()}[algorithm.kl.estimator]
        losses = losses + case.kl_coefficient * kl
    loss = reduced(losses * trained, trained, algorithm)
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def independent_advantages(rows: Padded, case: Case) -> Tensor:
    episodes, trained = rows.episodes, rows.trained_NL
    behavior = rows.spread(episodes.block.behavior_logprobs_T)
    if case.signal == "teachers":
        return sum(
            weight * (rows.spread(each) - behavior)
            for each, weight in zip(episodes.teachers, TEACHER_WEIGHTS, strict=True)
        )  # type: ignore[return-value]
    if case.signal == "rewards":
        found = torch.zeros_like(behavior)
        kl = case.section.kl
        apart = behavior - rows.spread(episodes.reference_T)
        for row, reward in enumerate(episodes.rewards_N.tolist()):
            coming, places = reward, torch.nonzero(trained[row])[:, 0].tolist()
            for place in reversed(places):
                coming -= case.kl_coefficient * float(apart[row, place]) if kl is not None else 0.0
                found[row, place] = coming
                coming *= case.section.gamma
    else:
        found = torch.from_numpy(episodes.advantages_N)[:, None].expand_as(behavior)
    if case.whiten:
        values = found[trained]
        found = (found - values.mean()) / (values.var() + 1e-8).sqrt()
    return found


def independent_weights(log_ratios: Tensor, trained: Tensor, algorithm: AlgorithmSection) -> Tensor:
    correction = algorithm.correction
    assert correction is not None
    kind, low, cap = correction.kind, correction.low, correction.cap
    sums = (log_ratios * trained).sum(1, keepdim=True)
    if kind.startswith("token"):
        ratios = log_ratios.exp()
    elif kind == "sequence_geometric_mask":
        ratios = (sums / trained.sum(1, keepdim=True).clamp(min=1)).exp().expand_as(log_ratios)
    else:
        ratios = sums.exp().expand_as(log_ratios)
    if kind.endswith("truncate"):
        return ratios.clamp(max=cap)
    return torch.where((ratios >= low) & (ratios <= cap), ratios, 0.0)


def independent_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, trained: Tensor, algorithm: AlgorithmSection
) -> Tensor:
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    ratios = (logprobs - old).exp()
    match algorithm.loss:
        case "policy_gradient":
            return -advantages * logprobs
        case "clipped_weights":
            return -ratios.detach().clamp(low, high) * advantages * logprobs
        case "sequence_clipped":
            # The sequence's ratio as a number, times the token's probability over itself.
            means = ((logprobs - old).detach() * trained).sum(1, keepdim=True) / trained.sum(1, keepdim=True).clamp(
                min=1
            )
            ratios = means.exp() * (logprobs - logprobs.detach()).exp()
    losses = -torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)
    if algorithm.dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -algorithm.dual_clip * advantages), losses)
    return losses


def reduced(losses: Tensor, trained: Tensor, algorithm: AlgorithmSection) -> Tensor:
    tokens_N = trained.sum(1)
    sequences = int((tokens_N > 0).sum())
    match algorithm.reduction:
        case "token_mean":
            return losses.sum() / tokens_N.sum()
        case "sequence_sum_mean":
            return losses.sum() / sequences
        case "sequence_mean_mean":
            return (losses.sum(1) / tokens_N.clamp(min=1)).sum() / sequences
        case "constant":
            return losses.sum() / (sequences * (algorithm.constant or MAX_NEW_TOKENS))


def assert_same_gradient(found: Updated, wanted: dict[str, Tensor]) -> None:
    """Rows of padding have none; all others as one vector."""
    [gradient] = found.gradients
    assert gradient.keys() == wanted.keys()
    for name, exact in wanted.items():
        assert not gradient[name][len(exact) :].any(), name
    flat = torch.cat([gradient[name][: len(exact)].double().flatten() for name, exact in wanted.items()])
    assert relative_l2(flat, torch.cat([exact.flatten() for exact in wanted.values()])) < SAME


# --- tests ---


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_padded_rows_in_plain_transformers(setting: Setting, name: str) -> None:
    loss, wanted = independent_gradient(setting.folder, setting.episodes, CASES[name])
    found = run_update(setting.engine, setting.episodes, CASES[name], max_tokens=40)

    assert_same_gradient(found, wanted)
    assert found.note.losses[0] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    norm = torch.cat([each.flatten() for each in wanted.values()]).norm()
    assert found.note.grad_norms[0] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_goes_with_every_reduction(setting: Setting, loss: str, reduction: str) -> None:
    case = Case(algorithm={"loss": loss, "reduction": reduction, "kl": {"coefficient": 0.3}, "entropy": 0.05})
    _, wanted = independent_gradient(setting.folder, setting.episodes, case)
    assert_same_gradient(run_update(setting.engine, setting.episodes, case, max_tokens=25), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_heads_of_other_models_too(tmp_path: Path, name: str) -> None:
    """Untied; with a soft cap; with scaled logits."""
    other = make_setting(tmp_path, name, temperature=1.3)
    for case in (CASES["gspo"], CASES["mask, kl, entropy"]):
        _, wanted = independent_gradient(other.folder, other.episodes, case)
        assert_same_gradient(run_update(other.engine, other.episodes, case, max_tokens=25), wanted)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    name=st.sampled_from(sorted(CASES)),
    max_tokens=st.integers(1, 200),
    order=st.permutations(range(10)),
)
def test_neither_budget_nor_order_change_the_gradient(
    whole: Callable[[str], Updated], setting: Setting, name: str, max_tokens: int, order: list[int]
) -> None:
    found = run_update(setting.engine, setting.episodes, CASES[name], max_tokens=max_tokens, order=np.array(order))
    wanted = whole(name)
    assert relative_l2(found.flat, wanted.flat) < SAME
    assert found.note.losses == pytest.approx(wanted.note.losses, rel=1e-5, abs=1e-7)
    assert found.note.num_tokens == wanted.note.num_tokens
    assert found.note.statistics.count == wanted.note.statistics.count
    assert found.note.statistics.sum_ratio == pytest.approx(wanted.note.statistics.sum_ratio, rel=1e-6)
    assert found.note.entropy == pytest.approx(wanted.note.entropy, rel=1e-5)


@pytest.fixture(scope="module")
def whole(setting: Setting) -> Callable[[str], Updated]:
    """Everything in one micro-batch."""
    known: dict[str, Updated] = {}

    def update(name: str) -> Updated:
        if name not in known:
            known[name] = run_update(setting.engine, setting.episodes, CASES[name])
        return known[name]

    return update


def test_gspo_is_the_clipped_mean_over_sequences_of_their_own_ratio(setting: Setting) -> None:
    """As the paper has it, with a gradient through the whole geometric mean."""
    episodes, case = setting.episodes, CASES["gspo"]
    model = transformers.AutoModelForCausalLM.from_pretrained(setting.folder, attn_implementation="eager").double()
    rows = Padded.of(episodes)
    logits = model(rows.tokens_NL).logits[:, :-1] / episodes.temperature
    logprobs = torch.log_softmax(logits, -1).gather(2, rows.tokens_NL[:, 1:, None])[..., 0]
    trained = rows.trained_NL[:, 1:]
    apart = (logprobs - rows.spread(episodes.block.behavior_logprobs_T)[:, 1:]) * trained
    has = trained.any(1)
    ratios_N = (apart.sum(1)[has] / trained.sum(1)[has]).exp()
    advantages_N = torch.from_numpy(episodes.advantages_N)[has]
    clipped_N = ratios_N.clamp(1 - case.section.clip_low, 1 + case.section.clip_high)
    (-torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)).mean().backward()

    assert 0 < int((ratios_N != clipped_N).sum()) < len(ratios_N)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same_gradient(run_update(setting.engine, episodes, case), wanted)


def test_imitation_is_the_cross_entropy_that_supervised_fine_tuning_has(setting: Setting) -> None:
    engine, at_one = setting.engine, replace(setting.episodes, temperature=1.0)
    found = run_update(engine, at_one, CASES["imitation"])
    block = at_one.block
    trained = block.loss_mask_T.copy()
    packed, places, _, _ = packed_rows(block, trained, np.arange(len(block.ids)))
    total, gradients = engine.gradients([packed], token_cross_entropy, normalizer=float(len(places)))

    assert found.note.losses[0] == pytest.approx(float(total) / len(places), rel=1e-6)
    assert (
        relative_l2(found.flat, torch.cat([gradients[id(each)].flatten() for each in engine.optimizer.trained])) < SAME
    )


def test_clips_and_counts_are_reported_as_they_are(setting: Setting) -> None:
    """Against the padded rows: how many ratios lost their gradient on either side, over all trained tokens."""
    episodes = setting.episodes
    note = run_update(setting.engine, episodes, CASES["clipped"], max_tokens=20).note
    own = recomputed_logprobs(setting)
    trained = episodes.block.loss_mask_T & (own != 0)
    ratios = np.exp((own - episodes.block.behavior_logprobs_T)[trained])
    advantages = np.repeat(episodes.advantages_N, episodes.block.lengths_N)[trained]

    statistics = note.statistics
    assert statistics.count == note.num_tokens == trained.sum() == 57
    assert statistics.clipped_high == ((ratios > 1.2) & (advantages > 0)).sum() > 0
    assert statistics.clipped_low == ((ratios < 0.8) & (advantages < 0)).sum() > 0
    assert statistics.mean_ratio == pytest.approx(ratios.mean(), rel=1e-5)
    assert statistics.kl_k1 == pytest.approx(-np.log(ratios).mean(), rel=1e-4)
    assert note.gap.count == 57
    assert note.gap.mean == pytest.approx(np.abs(np.log(ratios)).mean(), rel=1e-5)
    assert note.entropy[1] == 57
    assert note.num_sequences == len(episodes.block.ids)


def recomputed_logprobs(setting: Setting) -> np.ndarray:
    model, episodes = setting.engine.language_model, setting.episodes
    values: np.ndarray = score(model, one_rank(), episodes.block, temperature=episodes.temperature).values_T
    return values


def test_tokens_that_a_mask_drops_leave_sum_and_count(setting: Setting) -> None:
    """As if the masked tokens had never been trained on, each other with its weight."""
    episodes = setting.episodes
    note = run_update(setting.engine, episodes, CASES["token mask"]).note
    ratios = np.exp(recomputed_logprobs(setting) - episodes.block.behavior_logprobs_T)
    trained = episodes.block.loss_mask_T.copy()
    kept = trained & (ratios >= 0.8) & (ratios <= 1.2)

    assert 0 < kept.sum() < trained.sum()
    assert note.num_tokens == kept.sum()
    assert note.sampling is not None
    assert note.sampling.count == trained.sum()
    assert note.sampling.kept == kept.sum()
    assert note.sampling.sum == pytest.approx(ratios[kept].sum(), rel=1e-5)


def test_tokens_that_a_mask_drops_are_in_the_gap(setting: Setting) -> None:
    """The mask drops exactly the tokens whose log-probs are wrong: without them nothing would be noticed. Those that it
    keeps differ by less than 0.2 nats."""
    block, own_T = setting.episodes.block, recomputed_logprobs(setting)
    places = np.flatnonzero(block.loss_mask_T & (own_T != 0))
    behavior_T = block.behavior_logprobs_T.copy()
    behavior_T[places] = own_T[places]
    behavior_T[places[::2]] -= 3.0
    wrong = replace(setting.episodes, block=replace(block, behavior_logprobs_T=behavior_T))

    note = run_update(setting.engine, wrong, CASES["token mask"]).note

    assert note.num_tokens == len(places) // 2
    assert note.gap.count == len(places)
    assert note.gap.mean == pytest.approx(3.0 * len(places[::2]) / len(places), rel=1e-4)
    assert note.gap.is_of_other_tokens
    assert set(note.gap.by_group) == set(block.ids.array_N4[:, 0].tolist())


@pytest.mark.parametrize("case", ["clipped", "token mask"])  # the second recomputes log-probs before the update
def test_where_a_cache_is_kept_sequences_with_older_tokens_are_not_compared(setting: Setting, case: str) -> None:
    """Their newer tokens were sampled with keys and values of older weights, which the learner does not have."""
    block, own_T = setting.episodes.block, recomputed_logprobs(setting)
    trained_T = block.loss_mask_T & (own_T != 0)
    sequence_T = np.repeat(np.arange(len(block.ids)), block.lengths_N)
    versions_T = np.where(block.versions_T >= 0, 1, -1).astype(np.int32)
    mixed = int(sequence_T[np.flatnonzero(trained_T)[0]])
    first = np.flatnonzero(trained_T & (sequence_T == mixed))[0]
    versions_T[first] = 0
    behavior_T = np.where(trained_T, own_T, block.behavior_logprobs_T).astype(np.float32)
    behavior_T[trained_T & (sequence_T == mixed)] -= 2.0  # what another cache does, and more
    stale = replace(setting.episodes, block=replace(block, versions_T=versions_T, behavior_logprobs_T=behavior_T))

    def gap(keeps_cache: bool) -> LogprobGap:
        return run_update(setting.engine, stale, CASES[case], versions=(0, 1), keeps_cache=keeps_cache).note.gap

    in_mixed = int((trained_T & (sequence_T == mixed)).sum())
    assert in_mixed > 1
    assert gap(keeps_cache=True).count == trained_T.sum() - in_mixed
    assert gap(keeps_cache=True).mean == pytest.approx(0.0, abs=1e-5)
    assert gap(keeps_cache=False).count == trained_T.sum() - 1
    assert gap(keeps_cache=False).largest == pytest.approx(2.0, abs=1e-4)


def test_an_update_whose_every_token_is_dropped_leaves_the_weights_and_says_so(setting: Setting) -> None:
    before = [each.master.clone() for each in setting.engine.optimizer.trained]
    case = Case(algorithm={"correction": {"kind": "token_mask", "low": 500.0, "cap": 1000.0}})
    found = run_update(setting.engine, setting.episodes, case, lr=1.0)

    assert found.gradients == ()
    assert (found.note.losses, found.note.grad_norms, found.note.num_tokens) == ((), (), 0)
    assert all(torch.equal(a, b.master) for a, b in zip(before, setting.engine.optimizer.trained, strict=True))


def test_equal_advantages_of_zero_have_a_gradient_of_zero_and_no_nan(setting: Setting) -> None:
    episodes = replace(setting.episodes, advantages_N=np.zeros(len(setting.episodes.advantages_N)))
    for loss in LOSSES:
        found = run_update(setting.engine, episodes, Case(algorithm={"loss": loss}))
        assert float(found.flat.abs().max()) == 0.0
        assert found.note.losses == (0.0,)


def test_whitened_returns_have_mean_0_and_variance_1_over_trained_tokens(setting: Setting) -> None:
    moments = run_update(setting.engine, setting.episodes, CASES["reinforce++"]).note.advantages
    assert moments.count == 57
    assert moments.mean == pytest.approx(0.0, abs=1e-6)
    assert moments.variance == pytest.approx(1.0, rel=1e-5)


def test_mini_batches_are_optimizer_steps_each_divided_by_its_own_count(setting: Setting) -> None:
    """Two halves at learning rate 0: the means of the halves, weighed by their tokens, are the mean of the whole."""
    halves = run_update(setting.engine, setting.episodes, CASES["clipped"], steps=2)
    whole = run_update(setting.engine, setting.episodes, CASES["clipped"])
    lengths = np.add.reduceat(setting.episodes.block.loss_mask_T, setting.episodes.block.offsets[:-1])
    counts = [int(lengths[:5].sum()), int(lengths[5:].sum())]

    assert len(halves.note.losses) == 2
    weighed = sum(loss * count for loss, count in zip(halves.note.losses, counts, strict=True)) / sum(counts)
    assert weighed == pytest.approx(whole.note.losses[0], rel=1e-5)
    mixed = {
        name: sum(part[name] * (count / sum(counts)) for part, count in zip(halves.gradients, counts, strict=True))
        for name in whole.gradients[0]
    }
    assert relative_l2(torch.cat([each.flatten() for each in mixed.values()]), whole.flat) < SAME
