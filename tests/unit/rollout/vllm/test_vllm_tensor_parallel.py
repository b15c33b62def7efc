# SPDX-License-Identifier: Apache-2.0
"""What vLLM is given for an engine of several devices, without vLLM: its arguments, and whole weights on the host."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.engines import one_rank
from helpers.tiny import save_tiny_model, tiny_tokenizer
from podium.errors import RolloutError
from podium.recipe import ModelSection, RolloutSection
from podium.rollout import checkpoints
from podium.rollout.vllm import compat, engine, settings
from podium.rollout.vllm.installing import load_weights
from rollout.judge import Judge, Weights


class Engine:
    """vLLM's engine of so many ranks, as far as it is called here."""

    def __init__(self, ranks: int, missing: tuple[str, ...] = ()) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks))
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._ranks, self._missing = ranks, missing

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((name, args))
        if name == "podium_finish_weights":  # the last rank lacks some
            return [*([] for _ in range(self._ranks - 1)), list(self._missing)]
        return [None] * self._ranks


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of the engines that were made."""
    found: list[dict[str, Any]] = []
    module: Any = ModuleType("vllm")
    module.EngineArgs = lambda **named: found.append(named) or SimpleNamespace(**named)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(settings, "require_vllm", lambda: None)
    monkeypatch.setattr(compat, "is_cuda", lambda: False)
    monkeypatch.setattr(compat, "make_llm_engine", lambda arguments: Engine(arguments.tensor_parallel_size))
    return found


@pytest.mark.parametrize(("tensor", "backend"), [(1, None), (4, "mp")])
def test_one_engine_gets_all_devices_of_its_worker(
    tmp_path: Path, arguments: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tensor: int, backend: str | None
) -> None:
    monkeypatch.setattr(engine.VllmEngine, "_measure", lambda self: None)
    folder = save_tiny_model("llama", tmp_path / "model")
    opened = checkpoints.open_engine(
        ModelSection(path=str(folder)), folder, one_rank(), RolloutSection(engine="vllm", max_running=8),
        tokenizer=tiny_tokenizer(), max_length=64, cpu=None, tensor=tensor,
    )  # fmt: skip
    (named,) = arguments
    assert named["tensor_parallel_size"] == tensor
    # In Ray's placement group vLLM would otherwise start actors, for which there is no room.
    assert named["distributed_executor_backend"] == backend
    assert ("4 × cpu" in opened.words) == (tensor == 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("vllm") / "model")


def test_all_ranks_get_whole_weights_on_the_host_and_keep_their_part_themselves(folder: Path) -> None:
    weights, to_two = Weights.of(Judge(folder).model), Engine(2)
    load_weights(to_two, weights.version(3), weights, str(folder))
    names = [name for name, _ in to_two.calls]
    assert names[0] == "podium_begin_weights"
    assert names[-1] == "podium_finish_weights"
    taken = dict(pair for name, args in to_two.calls if name == "podium_take_weights" for pair in args[0])
    assert taken.keys() == weights.tensors_by_name.keys()
    for name, tensor in taken.items():  # copies: the delivery's buffer is overwritten
        assert tensor.device == torch.device("cpu")
        assert torch.equal(tensor, weights.tensors_by_name[name])


def test_a_parameter_that_one_rank_did_not_get_is_named(folder: Path) -> None:
    weights = Weights.of(Judge(folder).model)
    with pytest.raises(RolloutError, match=r"no weights for model\.norm\.weight"):
        load_weights(Engine(2, missing=("model.norm.weight",)), weights.version(3), weights, str(folder))
