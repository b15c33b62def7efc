# SPDX-License-Identifier: Apache-2.0
"""A shared prefix is computed once, and every program has the gradient and the numbers that it has without that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.engines import (
    flat_gradient,
    full_gradient,
    make_engine,
    num_trained,
    one_rank,
    random_documents,
    relative_l2,
)
from helpers.on_policy import CASES, block_of_rows, estimate_and_learn, recording_engine, run_update
from helpers.prefixes import ALWAYS, episodes_with_prefixes, random_tree, sharing_always
from helpers.tiny import save_tiny_model, tiny_config
from podium.data.documents import Document, pack
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.engine.scoring import score, scoring_batches
from podium.engine.train_step import TrainEngine
from podium.models import prefix_sharing
from podium.models.causal_lm import build, load_config
from podium.models.prefix_sharing import prefix_cost
from podium.recipe import ModelSection

SAME = 1e-5
CPU = torch.device("cpu")
# Full attention, windows, soft caps, learned positions and biases, one layer for queries, keys and values.
ARCHITECTURES = ("llama", "gemma3", "gemma2", "mistral", "gpt2", "phi3")


def apart_and_shared(engine: TrainEngine, documents: list[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    engine.prefixes = None
    wanted = full_gradient(engine, documents)
    engine.prefixes = ALWAYS
    packed = pack(documents)
    assert ALWAYS.share(packed.tokens_T, packed.offsets) is not None
    return wanted, full_gradient(engine, documents)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_trees_have_the_gradient_of_whole_documents(name: str, tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model(name, tmp_path))
    assert engine.prefixes is not None
    for seed in range(4):
        wanted, found = apart_and_shared(engine, random_tree(seed))
        assert relative_l2(found, wanted) < SAME


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["layers", "selective", "all_but_attention"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_recomputed_layers_have_it_too(name: str, saved: str, tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model(name, tmp_path), activation_checkpointing=saved)
    wanted, found = apart_and_shared(engine, random_tree(0))
    assert relative_l2(found, wanted) < SAME


def test_adapters_have_it_too(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("qwen3", tmp_path), lora={"rank": 4})
    with torch.no_grad():
        for each in engine.optimizer.trained:
            each.master.add_(0.05)
            each.publish()
    wanted, found = apart_and_shared(engine, random_tree(1))
    assert relative_l2(found, wanted) < SAME


def test_micro_batches_of_both_kinds_add_up(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("qwen3", tmp_path))
    documents, others = random_tree(2), random_documents((3, 9, 9))
    normalizer = num_trained([*documents, *others])
    wanted = flat_gradient(engine, [pack([*documents, *others])], normalizer)
    engine.prefixes = ALWAYS
    assert relative_l2(flat_gradient(engine, [pack(documents), pack(others), pack([])], normalizer), wanted) < SAME


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("name", CASES)
def test_every_policy_update_has_the_gradient_of_whole_episodes(folder: Path, name: str) -> None:
    episodes = episodes_with_prefixes(folder)
    plain = run_update(recording_engine(folder), episodes, CASES[name])
    with sharing_always() as counts:
        shared = run_update(recording_engine(folder), episodes, CASES[name])
    assert counts["computed"] < 0.8 * counts["packed"]
    assert relative_l2(shared.flat, plain.flat) < SAME
    assert shared.note.losses == pytest.approx(plain.note.losses, rel=1e-4, abs=1e-6)
    assert shared.note.num_tokens == plain.note.num_tokens


def test_recomputed_log_probs_are_those_of_the_update_to_the_last_bit(folder: Path) -> None:
    """The first optimizer step of a batch has ratios of exactly 1 where engine and learner are one model."""
    episodes = episodes_with_prefixes(folder)
    with sharing_always() as counts:
        engine = recording_engine(folder)
        own_T = score(engine.language_model, one_rank(), episodes.block, temperature=episodes.temperature).values_T
        same = replace(episodes, block=replace(episodes.block, behavior_logprobs_T=own_T))
        updated = run_update(engine, same, CASES["clipped"])
    assert counts["batches"] == 2
    assert updated.note.gap.largest == 0.0


@pytest.mark.parametrize("max_tokens", [50, 4096])
def test_scores_are_those_of_whole_trajectories(folder: Path, max_tokens: int) -> None:
    block = episodes_with_prefixes(folder).block
    engine = make_engine(folder)
    wanted = score(engine.language_model, one_rank(), block, max_tokens=max_tokens).values_T
    with sharing_always() as counts:
        found = score(engine.language_model, one_rank(), block, max_tokens=max_tokens).values_T
    assert counts["batches"] == (max_tokens == 4096)  # the smaller ones have no two rows that begin alike
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


def test_trajectories_with_one_prompt_are_scored_in_one_micro_batch(folder: Path) -> None:
    """Three prompts of 8 tokens with two answers each of 2: a budget of 12 holds one prompt and its answers."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 250, 8) for _ in range(3)]
    sampled = np.arange(10) >= 8
    rows = [(np.concatenate([prompts[at % 3], draw.integers(0, 250, 2)]), sampled) for at in range(6)]
    block = block_of_rows(rows)
    assert len(scoring_batches(block, max_tokens=12)) == 6
    cost = replace(ALWAYS, per_segment=1.0)
    together = scoring_batches(block, max_tokens=12, prefixes=cost)
    assert len(together) == 3
    assert (
        sorted(np.concatenate([batch.places_S for batch in together]).tolist())
        == np.flatnonzero(block.loss_mask_T).tolist()
    )
    for batch in together:
        assert cost.share(batch.packed.tokens_T, batch.packed.offsets) is not None


def test_a_critic_estimates_and_learns_the_same(tmp_path: Path) -> None:
    policy = save_tiny_model("qwen3", tmp_path / "policy")
    torch.manual_seed(3)
    transformers.AutoModelForSequenceClassification.from_config(tiny_config("qwen3", num_labels=1)).save_pretrained(
        tmp_path / "critic"
    )
    episodes = episodes_with_prefixes(policy)
    plain = estimate_and_learn(one_rank(), tmp_path / "critic", episodes, gamma=0.95, lam=0.9)
    with sharing_always() as counts:
        shared = estimate_and_learn(one_rank(), tmp_path / "critic", episodes, gamma=0.95, lam=0.9)
    assert counts["batches"] == 2  # values, update
    np.testing.assert_allclose(shared.columns.values_T, plain.columns.values_T, rtol=0, atol=2e-6)
    assert (shared.loss, shared.grad_norm) == pytest.approx((plain.loss, plain.grad_norm), rel=SAME)


# --- which models share, and when ---


def test_tiny_models_do_not_share_short_prompts(folder: Path) -> None:
    """A segment's calls would take longer than what it saves. The recorded runs keep their bits by this."""
    cost = make_engine(folder).prefixes
    assert cost is not None
    group = [
        Document(tokens=np.r_[np.arange(60), number].astype(np.int32), trained=np.arange(61) == 60)
        for number in range(4)
    ]
    packed = pack(
        [replace(each, tokens=np.r_[each.tokens, 1].astype(np.int32), trained=np.arange(62) == 61) for each in group]
    )
    assert cost.share(packed.tokens_T, packed.offsets) is None
    assert ALWAYS.share(packed.tokens_T, packed.offsets) is not None


def test_a_model_of_some_size_shares_them(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3", tmp_path)
    changes = {"hidden_size": 1024, "intermediate_size": 3072}
    config = load_config(folder, trust_remote_code=False)
    section = ModelSection(path=str(folder))
    config.update(changes)
    model = build(section, config, device=torch.device("meta"), dtype=torch.float32)
    cost = prefix_cost(model, CPU)
    assert cost is not None
    assert cost.training == pytest.approx(3.0)
    assert not cost.copies_keys
    packed = pack(
        [
            Document(tokens=np.r_[np.arange(60), number, 1].astype(np.int32), trained=np.arange(62) > 59)
            for number in range(4)
        ]
    )
    tree = cost.share(packed.tokens_T, packed.offsets)
    assert tree is not None
    assert tree.num_tokens == 64


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3_next"])
def test_mixtures_and_linear_attention_never_share(name: str, tmp_path: Path) -> None:
    with sharing_always():
        assert make_engine(save_tiny_model(name, tmp_path)).prefixes is None


@pytest.mark.parametrize("section", [{"dropout": True}, {"lora": {"rank": 2, "dropout": 0.1}}])
def test_dropout_turns_sharing_off(folder: Path, section: dict[str, Any]) -> None:
    assert make_engine(folder, **section).prefixes is None
    assert make_engine(folder, lora={"rank": 2}).prefixes is not None


def test_divided_models_and_cuda_do_not_share(folder: Path) -> None:
    model = make_engine(folder).model
    assert prefix_cost(model, CPU) is not None
    assert prefix_cost(model, torch.device("cuda")) is None
    model.context = object()  # type: ignore[assignment]
    assert prefix_cost(model, CPU) is None
    model.context, model.split = None, object()  # type: ignore[assignment]
    assert prefix_cost(model, CPU) is None


def test_architectures_that_were_not_compared_and_code_of_checkpoints_do_not_share(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_engine(folder).model
    monkeypatch.setattr(other.hf.config, "model_type", "gpt_neox_japanese")  # it numbers tokens by their place
    monkeypatch.setattr(prefix_sharing, "_COSTS", {})
    assert prefix_cost(other, CPU) is None
    monkeypatch.undo()
    assert prefix_cost(make_engine(folder).model, CPU) is not None
    monkeypatch.setattr(prefix_sharing, "_COSTS", {})
    for each in type(other.hf).__mro__:
        if each.__module__.startswith("transformers.models."):
            monkeypatch.setattr(each, "__module__", "transformers_modules.remote")
    assert prefix_cost(other, CPU) is None


def test_windows_and_soft_caps_copy_keys(tmp_path: Path) -> None:
    for name in ("gemma2", "mistral"):
        cost = make_engine(save_tiny_model(name, tmp_path / name)).prefixes
        assert cost is not None
        assert cost.copies_keys


def test_sequences_of_one_episode_are_grouped_by_their_own_prompts() -> None:
    """A first sequence of 40 and 2 tokens, a second of 10 and 20: the second has no prompt of 40 tokens to share."""
    num_rows, prompts, answers = 4, (40, 10), (2, 20)
    draw = np.random.default_rng(0)
    shared = [draw.integers(0, 250, prompt) for prompt in prompts]
    tokens, versions, starts = [], [], []
    for _ in range(num_rows):
        for number, (prompt, answer) in enumerate(zip(shared, answers, strict=True)):
            tokens += [prompt, draw.integers(0, 250, answer)]
            versions += [np.full(len(prompt), -1), np.zeros(answer)]
            starts += [number == 1, *[False] * (len(prompt) + answer - 1)]
    versions_T = np.concatenate(versions).astype(np.int32)
    block = TrajectoryBlock(
        ids=TrajectoryIds.of(TrajectoryId(0, sample) for sample in range(num_rows)),
        offsets=np.arange(num_rows + 1, dtype=np.int64) * (sum(prompts) + sum(answers)),
        tokens_T=np.concatenate(tokens).astype(np.int32),
        loss_mask_T=versions_T >= 0,
        behavior_logprobs_T=np.zeros(len(versions_T), np.float32),
        versions_T=versions_T,
        starts_T=np.array(starts),
    )
    batches = scoring_batches(block, max_tokens=60, prefixes=ALWAYS)
    computed = []
    for batch in batches:
        tree = ALWAYS.share(batch.packed.tokens_T, batch.packed.offsets)
        computed.append(batch.packed.num_tokens if tree is None else tree.num_tokens)
    assert max(computed) <= 60
    assert sum(computed) < num_rows * (41 + 29)
    assert sorted(np.concatenate([batch.places_S for batch in batches])) == np.flatnonzero(versions_T >= 0).tolist()
