# SPDX-License-Identifier: Apache-2.0
"""An engine for the weights of a checkpoint folder, on one device and without training state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from podium.data.tokenizer import answer_text, require_embeddings
from podium.engine.mesh import Mesh
from podium.engine.sharding import compute_dtype, place
from podium.models.causal_lm import PackedCausalLM, load_config
from podium.models.cpu_settings import CpuSettings
from podium.models.device import choose_cpu_settings
from podium.models.packing import to_device
from podium.models.verify import random_batch, self_check
from podium.recipe import ModelSection, RolloutSection
from podium.rollout.engine import RolloutEngine
from podium.rollout.native.engine import NativeEngine

_GIB = 1 << 30
_VLLM_RUNNING = {"cuda": 256, "cpu": 64}
_VLLM_CPU_GIB = 2.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenedEngine:
    """An engine, its description, and the CPU settings that were measured to be fastest."""

    engine: RolloutEngine
    words: str
    cpu: CpuSettings | None


def context_of(section: ModelSection, folder: Path) -> int | None:
    """The longest sequence that the model supports, if its config says so."""
    config = load_config(folder, trust_remote_code=section.trust_remote_code)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(positions) if positions else None


def require_engine(rollout: RolloutSection) -> None:
    """Raises an error with install instructions if the engine's package is missing."""
    if rollout.engine == "vllm":
        from podium.rollout.vllm.settings import require_vllm

        require_vllm()


def open_engine(
    section: ModelSection,
    folder: Path,
    mesh: Mesh,
    rollout: RolloutSection,
    *,
    tokenizer: Any,
    max_length: int,
    cpu: CpuSettings | None,
    records_experts: bool = False,
) -> OpenedEngine:
    """Opens the engine that `rollout` names. `cpu`: settings measured by an earlier start, which are reused.
    `records_experts`: completions say which experts of a mixture their tokens went to (native engine)."""
    rollout = rollout.model_copy(update={"max_length": max_length})
    if rollout.engine == "vllm":
        return _open_vllm(section, folder, mesh, rollout)
    return _open_native(section, folder, mesh, rollout, tokenizer, cpu, records_experts=records_experts)


def _open_native(
    section: ModelSection, folder: Path, mesh: Mesh, rollout: RolloutSection, tokenizer: Any, cpu: CpuSettings | None,
    *, records_experts: bool,
) -> OpenedEngine:  # fmt: skip
    torch.set_num_threads(1)
    model, _ = place(section, folder, mesh, seed=0)  # float32 masters, if any, are freed at once
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
    require_embeddings(tokenizer, model.vocab_size)
    dtype = compute_dtype(section, mesh.device)
    self_check(model, mesh.device, dtype, max_length=rollout.max_length)
    if mesh.device.type == "cpu":
        cpu = cpu or _measured(model, mesh.device)
        cpu.apply()

    def decode(tokens: Sequence[int]) -> str:
        return answer_text(tokenizer, tokens)

    engine = NativeEngine(model, mesh.device, rollout, decode=decode, records_experts=records_experts)
    count = sum(parameter.numel() for parameter in model.hf.parameters())
    place_name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else f"CPU, {cpu}"
    words = f"{type(model.hf).__name__}, {count / 1e6:.2f}M parameters, {_name(dtype)} on {place_name}"
    return OpenedEngine(engine=engine, words=words, cpu=cpu if mesh.device.type == "cpu" else None)


@torch.no_grad()
def _measured(model: PackedCausalLM, device: torch.device) -> CpuSettings:
    model.eval()
    batch = to_device(random_batch(model.vocab_size, lengths=(16,) * 8 + (128,)), device)
    return choose_cpu_settings(lambda: model(batch, None, kind="scores"), ranks=1)


def _open_vllm(section: ModelSection, folder: Path, mesh: Mesh, rollout: RolloutSection) -> OpenedEngine:
    from podium.rollout.vllm.engine import VllmEngine
    from podium.rollout.vllm.settings import VllmSettings

    kind, dtype = mesh.device.type, compute_dtype(section, mesh.device)
    assert rollout.max_length is not None
    memory_gib = rollout.memory_gib or (None if kind == "cuda" else _VLLM_CPU_GIB)
    settings = VllmSettings(
        folder=str(folder),
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        max_length=rollout.max_length,
        max_running=rollout.max_running or _VLLM_RUNNING[kind],
        cache_bytes=None if memory_gib is None else int(memory_gib * _GIB),
    )
    return OpenedEngine(engine=VllmEngine(settings), words=f"{folder}, {_name(dtype)} in vLLM on {kind}", cpu=None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
