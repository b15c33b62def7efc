# SPDX-License-Identifier: Apache-2.0
"""What leaves the device comes back bit for bit into the same tensors, and training continues as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.engines import LENGTHS, make_engine, num_trained, random_documents
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import pack
from podium.engine.offload import OffloadedTensors, OffloadError, what_can_leave
from podium.engine.train_step import TrainEngine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model("qwen3", tmp_path / "qwen3")


def step(engine: TrainEngine, seed: int) -> float:
    documents = random_documents(LENGTHS, seed=seed)
    report = engine.train_step([pack(documents)], token_cross_entropy, normalizer=num_trained(documents), lr=1e-2)
    return report.resolve().loss


def test_tensors_come_back_in_place_bit_for_bit() -> None:
    tensors = [torch.randn(5, 7), torch.arange(9), torch.empty(0), torch.randn(3).bfloat16()]
    wanted, view = [tensor.clone() for tensor in tensors], tensors[0][1:3]
    away = OffloadedTensors(tensors)
    size = 5 * 7 * 4 + 9 * 8 + 3 * 2
    assert away.nbytes == size
    for _ in range(2):
        assert away.offload() == size
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0, 0, 0]
        assert [tensor.shape for tensor in tensors] == [tensor.shape for tensor in wanted]
        assert away.restore() == size
        assert all(torch.equal(tensor, each) for tensor, each in zip(tensors, wanted, strict=True))
        assert torch.equal(view, wanted[0][1:3])  # an older view still sees it
        tensors[0].add_(1)
        wanted[0].add_(1)


def test_leaving_twice_and_coming_back_without_leaving_are_refused() -> None:
    away = OffloadedTensors([torch.ones(3)])
    with pytest.raises(OffloadError):
        away.restore()
    away.offload()
    with pytest.raises(OffloadError):
        away.offload()
    away.restore()
    whole = torch.ones(4)
    with pytest.raises(OffloadError, match="share"):
        OffloadedTensors([whole, whole[2:]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_continues_as_if_nothing_had_left(folder: Path, dtype: str) -> None:
    stayed, travelled = make_engine(folder, dtype=dtype), make_engine(folder, dtype=dtype)
    wanted = [step(stayed, seed) for seed in (1, 2, 3)]
    away = OffloadedTensors(what_can_leave(travelled.optimizer))
    found = []
    for seed in (1, 2, 3):
        away.offload()
        weights = [each.parameter.detach().float().sum().item() for each in travelled.optimizer.trained]
        assert all(map(torch.isfinite, map(torch.tensor, weights)))  # the weights themselves stay to generate with
        away.restore()
        found.append(step(travelled, seed))
    assert found == wanted


def test_masters_leave_only_where_the_model_computes_with_another_copy(folder: Path) -> None:
    exact, half = make_engine(folder, dtype="float32"), make_engine(folder, dtype="bfloat16")
    numel = sum(each.master.numel() for each in exact.optimizer.trained)
    assert OffloadedTensors(what_can_leave(exact.optimizer)).nbytes == 2 * 4 * numel
    assert OffloadedTensors(what_can_leave(half.optimizer)).nbytes == 3 * 4 * numel
    for each in exact.optimizer.trained:
        each.parameter.grad = torch.zeros_like(each.parameter)
    assert OffloadedTensors(what_can_leave(exact.optimizer)).nbytes == 3 * 4 * numel
