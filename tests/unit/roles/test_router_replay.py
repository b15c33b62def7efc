# SPDX-License-Identifier: Apache-2.0
"""Router replay from the engine to the policy's update: gaps, scores, episodes of several turns, recorded steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.engines import make_engine, one_rank
from helpers.on_policy import CASES, Episodes, RecordingEngine, recording_engine, run_update
from helpers.tiny import VOCABULARY, save_tiny_model
from podium.controller.assembly import no_router_replay
from podium.data.routed_experts import RouterShape
from podium.data.trajectories import TrajectoryBlock, TrajectoryId
from podium.engine.scoring import score
from podium.errors import UnsupportedModelError
from podium.recipe import RolloutSection
from podium.roles.blocks import block_of, sampled_so_far
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Completion, Request, Sampling
from podium.weights.canary import LogprobGap

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts that weigh more than in a fresh model: which of them a token goes to matters."""
    path = save_tiny_model("qwen3_moe", tmp_path_factory.mktemp("moe"), num_experts=16, num_experts_per_tok=4)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.mul_(20)
    model.save_pretrained(path)
    return path


def answers(folder: Path, *, noise: float) -> list[Completion]:
    """Sampled by a model whose routers differ from the folder's by this relative noise, as by another rounding."""
    sampler = make_engine(folder).language_model
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for layer in sampler.hf.model.layers:
            gate = layer.mlp.gate.weight
            gate.mul_(1 + noise * torch.randn(gate.shape, generator=generator))
    engine = NativeEngine(sampler, CPU, RolloutSection(), records_experts=True)
    draw = np.random.default_rng(0)
    engine.submit(
        [
            Request(
                id=TrajectoryId(number, 0), prompt=draw.integers(0, VOCABULARY, 6).astype(np.int32),
                sampling=Sampling(max_new_tokens=24),
            )
            for number in range(12)
        ]
    )  # fmt: skip
    return list(engine.results(deadline_s=60))


def gap(engine: RecordingEngine, block: TrajectoryBlock, *, replays: bool) -> LogprobGap:
    return LogprobGap.between(block, score(engine.language_model, one_rank(), block, replays=replays))


@pytest.fixture(scope="module")
def block(folder: Path) -> TrajectoryBlock:
    return block_of(answers(folder, noise=1e-2))[0]


def test_replay_closes_most_of_the_gap_that_other_experts_open(folder: Path, block: TrajectoryBlock) -> None:
    engine = recording_engine(folder)
    without, with_replay = gap(engine, block, replays=False), gap(engine, block, replays=True)
    assert without.mean > 1e-3
    assert with_replay.mean < without.mean / 2
    assert with_replay.largest < without.largest / 2


def update(engine: RecordingEngine, block: TrajectoryBlock, case: str = "clipped") -> Any:
    zeros_T = np.zeros(len(block.tokens_T), np.float32)
    ones_N = np.ones(len(block.ids))
    episodes = Episodes(
        block=block, advantages_N=ones_N, rewards_N=ones_N, reference_T=zeros_T, teachers=(zeros_T, zeros_T),
        temperature=1.0,
    )  # fmt: skip
    return run_update(engine, episodes, CASES[case], max_tokens=64)


def test_an_update_replays_and_says_how_many_choices_differ(folder: Path, block: TrajectoryBlock) -> None:
    engine = recording_engine(folder)
    with_replay, without = update(engine, block), update(engine, replace(block, experts_TLK=None))
    assert with_replay.note.gap.mean == pytest.approx(gap(engine, block, replays=True).mean, rel=1e-3)
    assert without.note.gap.mean == pytest.approx(gap(engine, block, replays=False).mean, rel=1e-3)
    assert 0 < with_replay.note.routers.mismatch < 0.2
    assert without.note.routers.mismatch is None
    assert not torch.equal(with_replay.flat, without.flat)


def test_imitated_episodes_are_routed_as_data_is(folder: Path, block: TrajectoryBlock) -> None:
    engine = recording_engine(folder)
    found, wanted = (update(engine, each, "imitation") for each in (block, replace(block, experts_TLK=None)))
    assert torch.equal(found.flat, wanted.flat)


def test_without_noise_replay_changes_nothing(folder: Path) -> None:
    block, engine = block_of(answers(folder, noise=0.0))[0], recording_engine(folder)
    found, wanted = (update(engine, each) for each in (block, replace(block, experts_TLK=None)))
    assert found.note.routers.mismatch == 0.0
    assert found.note.gap.mean < 1e-5
    torch.testing.assert_close(found.flat, wanted.flat, rtol=1e-4, atol=1e-6)


def test_what_was_begun_elsewhere_has_the_experts_of_its_positions(block: TrajectoryBlock) -> None:
    begun = sampled_so_far(block)[0, 0]
    assert begun.experts is not None
    assert block.experts_TLK is not None
    assert len(begun.experts) == int(block.lengths_N[0]) - 1
    assert np.array_equal(begun.experts, block.experts_TLK[: len(begun.experts)])


def facts(**changes: Any) -> Any:
    return SimpleNamespace(**{"architecture": "A", "routers": None, "router_problem": None, **changes})


def recipe(**rollout: Any) -> Any:
    return SimpleNamespace(rollout=RolloutSection(**rollout), can_be_stale=True)


def test_a_replay_that_is_not_possible_is_said_or_refused() -> None:
    routers = RouterShape(num_layers=1, num_experts=4, per_token=2)
    mixture, unknown = facts(routers=routers), facts(router_problem="its routers are not known")
    assert no_router_replay(recipe(), facts()) is None
    assert no_router_replay(recipe(), mixture) is None
    assert no_router_replay(recipe(router_replay="on"), mixture) is None
    assert no_router_replay(recipe(), unknown) == "its routers are not known"
    assert no_router_replay(recipe(router_replay="off"), unknown) is None
    assert "vllm" in (no_router_replay(recipe(engine="vllm"), mixture) or "")
    for each, reason in ((unknown, "not known"), (facts(), "no experts")):
        with pytest.raises(UnsupportedModelError, match=f"router_replay.*{reason}"):
            no_router_replay(recipe(router_replay="on"), each)
