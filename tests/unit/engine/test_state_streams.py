# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in host memory: the same weights and moments to the bit, in pieces of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.engines import make_engine, num_trained, random_documents
from helpers.ranks import whole_state
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import pack
from podium.engine import state_streams
from podium.engine.offload import what_can_leave
from podium.engine.resuming import checkpoint_shards
from podium.engine.state_streams import ParameterState
from podium.engine.train_step import TrainEngine
from podium.recipe import OptimizerSection

SECTION = OptimizerSection(lr=1e-2, weight_decay=0.1, clip_norm=0.5)
OFFLOADED = SECTION.model_copy(update={"offload": True})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("model"))


def trained(engine: TrainEngine, steps: int = 2) -> TrainEngine:
    for seed in range(steps):
        documents = random_documents(seed=seed)
        engine.train_step([pack(documents)], token_cross_entropy, normalizer=num_trained(documents), lr=1e-2).resolve()
    return engine


def require_same(found: TrainEngine, wanted: TrainEngine) -> None:
    ours, theirs = whole_state(found), whole_state(wanted)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for mine, other in zip(found.model.parameters(), wanted.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert found.optimizer.updates == wanted.optimizer.updates


@pytest.mark.parametrize("model", [{}, {"dtype": "bfloat16"}], ids=["float32", "bfloat16"])
# A piece of 37 would leave other elements to the scalar end of a vector loop, which rounds differently with AVX-512.
@pytest.mark.parametrize("piece", [64, pytest.param(state_streams.PIECE_ELEMENTS, marks=pytest.mark.slow)])
def test_weights_and_moments_are_those_of_a_device_that_holds_them(
    folder: Path, model: dict[str, Any], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_streams, "PIECE_ELEMENTS", piece)
    wanted, found = (trained(make_engine(folder, optimizer=each, **model)) for each in (SECTION, OFFLOADED))
    require_same(found, wanted)
    assert found.optimizer.is_offloaded
    begun = make_engine(folder, **model)
    assert not torch.equal(found.optimizer.trained[0].master, begun.optimizer.trained[0].master)


def test_adapters_are_too(folder: Path) -> None:
    pytest.importorskip("peft")
    wanted, found = (trained(make_engine(folder, optimizer=each, lora={"rank": 4})) for each in (SECTION, OFFLOADED))
    require_same(found, wanted)


def test_a_step_without_finite_gradient_changes_nothing(folder: Path) -> None:
    engine = trained(make_engine(folder, optimizer=OFFLOADED), steps=1)
    before = {name: tensor.clone() for name, tensor in whole_state(engine).items()}
    report = engine.train_step(
        [pack(random_documents())], token_cross_entropy, normalizer=float("nan"), lr=1e-2
    ).resolve()
    assert report.skipped
    after = whole_state(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_parameters_without_a_gradient_count_their_updates(tmp_path: Path) -> None:
    """As with experts that no token reaches, of models that keep each in a tensor of its own."""
    folder = save_tiny_model("llama", tmp_path)
    results = []
    for section in (SECTION, OFFLOADED):
        engine = make_engine(folder, optimizer=section)
        ones = {id(each): torch.ones_like(each.master) for each in engine.optimizer.trained}
        some = {key: value for key, value in ones.items() if key != id(engine.optimizer.trained[1])}
        for gradients in (ones, some, ones):
            engine.optimizer.step(gradients, lr=1e-2, clip=torch.tensor(1.0), skip=torch.tensor(0.0))
        assert list(engine.optimizer.missed_updates().values()) == [1]
        results.append(engine)
    require_same(results[1], results[0])


def test_only_gradients_can_leave_for_generation(folder: Path) -> None:
    engine = make_engine(folder, optimizer=OFFLOADED)
    assert what_can_leave(engine.optimizer) == []
    assert len(what_can_leave(make_engine(folder).optimizer)) == 2 * len(engine.optimizer.trained)


@pytest.mark.slow
def test_checkpoints_are_the_same(folder: Path) -> None:
    wanted, found = (
        checkpoint_shards(trained(make_engine(folder, optimizer=each, dtype="bfloat16")))
        for each in (SECTION, OFFLOADED)
    )
    assert [each.name for each in found] == [each.name for each in wanted]
    assert all(torch.equal(mine.local, other.local) for mine, other in zip(found, wanted, strict=True))


def test_pieces_cover_each_element_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_streams, "PIECE_ELEMENTS", 4)
    whole = torch.arange(10.0).view(2, 5)
    state = ParameterState(
        index=0, gradient=whole, master=whole, first=whole, second=whole, copy=None, device=whole.device
    )
    assert [piece.master.tolist() for piece in state.pieces()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    odd = ParameterState(
        index=0, gradient=whole, master=whole.T, first=whole, second=whole, copy=None, device=whole.device
    )
    (only,) = odd.pieces()
    assert only is odd
