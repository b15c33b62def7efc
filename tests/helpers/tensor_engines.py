# SPDX-License-Identifier: Apache-2.0
"""A native engine over several ranks, which are threads of this process."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.thread_axis import ThreadAxis
from helpers.tiny import tiny_tokenizer
from podium.engine.mesh import Mesh
from podium.engine.sharding import place
from podium.models.causal_lm import PackedCausalLM
from podium.recipe import ModelSection, RolloutSection
from podium.recipe.schema import LoraSection
from podium.rollout.native.engine import NativeEngine
from podium.rollout.native.follower import Follower
from podium.rollout.native.tensor_group import TensorLeader

CPU = torch.device("cpu")
TIMEOUT_S = 60.0
# transformers replaces functions of its classes while it builds a model, for all threads.
_BUILDING = threading.Lock()


def engine_on_threads(
    folder: Path,
    section: RolloutSection,
    *,
    size: int = 2,
    lora: LoraSection | None = None,
    records_experts: bool = False,
) -> NativeEngine:
    """An engine of `size` ranks; rank 0 is this thread, or whichever iterates over its results."""
    if size == 1:
        model = _model(folder, None, lora)
        return NativeEngine(model, CPU, section, decode=tiny_tokenizer().decode, records_experts=records_experts)
    barrier, shared = threading.Barrier(size, timeout=TIMEOUT_S), dict[int, Tensor]()
    axes: list[Any] = [ThreadAxis(rank, size, barrier, shared) for rank in range(size)]
    connections = []
    for axis in axes[1:]:
        ours, theirs = multiprocessing.Pipe()
        connections.append(ours)
        threading.Thread(target=_follow, args=(folder, axis, theirs, lora), daemon=True).start()
    leader = TensorLeader(axes[0], connections, CPU, timeout_s=TIMEOUT_S, end=lambda grace_s: barrier.abort())
    model = _model(folder, axes[0], lora)
    return NativeEngine(
        model, CPU, section, decode=tiny_tokenizer().decode, group=leader, records_experts=records_experts
    )


def _follow(folder: Path, axis: Any, connection: Any, lora: LoraSection | None) -> None:
    try:
        Follower(_model(folder, axis, lora), CPU, receive=connection.recv, answer=connection.send).serve()
    except (EOFError, OSError, threading.BrokenBarrierError):
        return  # rank 0 has ended


def _model(folder: Path, axis: Any, lora: LoraSection | None) -> PackedCausalLM:
    mesh = Mesh(rank=0, world=1, device=CPU, devices=None, tensor=axis)
    with _BUILDING:
        return place(ModelSection(path=str(folder), lora=lora), folder, mesh, seed=0)[0]
