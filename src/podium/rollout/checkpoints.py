# SPDX-License-Identifier: Apache-2.0
"""An engine for the weights of a checkpoint folder, without training state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from podium.data.tokenizer import answer_text, require_embeddings
from podium.engine.mesh import Mesh
from podium.engine.sharding import compute_dtype
from podium.errors import RolloutError
from podium.models.causal_lm import PackedCausalLM, load_config
from podium.models.cpu_settings import CpuSettings
from podium.recipe import ModelSection, RolloutSection
from podium.rollout.engine import RolloutEngine
from podium.rollout.native.engine import NativeEngine
from podium.rollout.native.loading import load_for_engine
from podium.rollout.native.merged_copy import MergedCopy
from podium.rollout.native.speculation import require_speculation

_GIB = 1 << 30
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
    tensor: int = 1,
    timeout_s: float = 600.0,
    on_death: Callable[[str], object] = lambda reason: None,
    merges_adapter: bool = False,
) -> OpenedEngine:
    """Opens the engine that `rollout` names. `cpu`: settings measured by an earlier start, which are reused.
    `records_experts`: completions say which experts of a mixture their tokens went to. `tensor`: number
    of devices that hold the model together, from that of the mesh on. `timeout_s`: longest wait of these for each
    other; `on_death` is told why one of them has ended (native engine). `merges_adapter`: the engine generates with
    the adapter merged into its base (native engine)."""
    rollout = rollout.model_copy(update={"max_length": max_length})
    if rollout.engine == "vllm":
        return _open_vllm(section, folder, mesh, rollout, records_experts=records_experts, tensor=tensor)
    return _open_native(
        section, folder, mesh, rollout, tokenizer, cpu, records_experts=records_experts, tensor=tensor,
        timeout_s=timeout_s, on_death=on_death, merges_adapter=merges_adapter,
    )  # fmt: skip


def _open_native(
    section: ModelSection, folder: Path, mesh: Mesh, rollout: RolloutSection, tokenizer: Any, cpu: CpuSettings | None,
    *, records_experts: bool, tensor: int, timeout_s: float, on_death: Callable[[str], object],
    merges_adapter: bool,
) -> OpenedEngine:  # fmt: skip
    require_speculation(mesh.device.type, rollout.speculation.tokens)
    group = None
    if tensor > 1:
        from podium.rollout.native.tensor_ranks import start_ranks

        group = start_ranks(
            section, folder, mesh.device, size=tensor, max_length=rollout.max_length, cpu=cpu, timeout_s=timeout_s,
        )  # fmt: skip
        mesh = replace(mesh, tensor=group.axis)
    with nullcontext() if group is None else group.together():
        model, cpu = load_for_engine(section, folder, mesh, max_length=rollout.max_length, cpu=cpu)
        require_embeddings(tokenizer, model.vocab_size)
    dtype = compute_dtype(section, mesh.device)

    def decode(tokens: Sequence[int]) -> str:
        return answer_text(tokenizer, tokens)

    try:
        merged = merged_copy(model, section, folder, mesh.device) if merges_adapter else None
        engine = NativeEngine(
            model, mesh.device, rollout, decode=decode, records_experts=records_experts, group=group, merged=merged
        )
    except BaseException:
        if group is not None:
            group.close()
        raise
    if group is not None:
        group.on_death = on_death
    split = model.split
    count = sum(
        each.numel() if split is None else split.numel(name, each) for name, each in model.hf.named_parameters()
    )
    place_name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else f"CPU, {cpu}"
    ranks = "" if tensor == 1 else f"{tensor} × "
    words = f"{type(model.hf).__name__}, {count / 1e6:.2f}M parameters, {_name(dtype)} on {ranks}{place_name}"
    return OpenedEngine(engine=engine, words=words, cpu=cpu if mesh.device.type == "cpu" else None)


def merged_copy(model: PackedCausalLM, section: ModelSection, folder: Path, device: torch.device) -> MergedCopy:
    """Weights for generation in which the adapter of `model` is merged."""
    config = load_config(folder, trust_remote_code=section.trust_remote_code)
    return MergedCopy(model, section, config, device)


def _open_vllm(
    section: ModelSection, folder: Path, mesh: Mesh, rollout: RolloutSection, *, records_experts: bool, tensor: int
) -> OpenedEngine:
    from podium.rollout.vllm.engine import VllmEngine
    from podium.rollout.vllm.settings import VllmSettings

    kind, dtype = mesh.device.type, compute_dtype(section, mesh.device)
    if rollout.speculation.tokens:
        raise RolloutError("rollout.speculation.tokens needs the native engine. Set it to 0, or engine to native.")
    assert rollout.max_length is not None
    memory_gib = rollout.memory_gib or (None if kind == "cuda" else _VLLM_CPU_GIB)
    settings = VllmSettings(
        folder=str(folder),
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        max_length=rollout.max_length,
        max_running=rollout.running_on("cuda" if kind == "cuda" else "cpu"),
        cache_bytes=None if memory_gib is None else int(memory_gib * _GIB),
        tensor_parallel=tensor,
        records_experts=records_experts,
    )
    ranks = "" if tensor == 1 else f"{tensor} × "
    words = f"{folder}, {_name(dtype)} in vLLM on {ranks}{kind}"
    return OpenedEngine(engine=VllmEngine(settings), words=words, cpu=None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
