# SPDX-License-Identifier: Apache-2.0
"""Measures this machine for the planner: products, copies, and tiny models through the engines themselves.

Torch is imported only when something is measured. Two shapes are timed: the smaller one tells what a layer and an
update cost whatever their size, the larger one which share of the peaks the engines reach. On CPU one thread's own time
counts, so that other work on the machine does not."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podium.errors import RecipeError
from podium.models.cpu_settings import CpuSettings
from podium.planning.devices import Device, found_device, keep_calibration
from podium.planning.model_shape import ModelShape, shape_of
from podium.planning.shape_costs import generation_cost, training_step
from podium.recipe import EngineSection, ModelSection, OptimizerSection

if TYPE_CHECKING:
    import torch

_QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}  # fmt: skip
_SHAPES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "cpu": (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
        {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048},
    ),
    "cuda": (
        {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 8192},
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32_768},
    ),
}  # fmt: skip
_DOCUMENT, _CONTEXT, _NEW_TOKENS = 128, 64, 32
_BATCHES = {"cpu": (2, 8), "cuda": (16, 96)}  # documents of the two updates that are timed
_LANES = {"cpu": (2, 16), "cuda": (16, 128)}
_PRODUCT = {"cpu": 512, "cuda": 8192}
_COPIED_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured, and where it is kept."""

    device: Device
    file: Path
    seconds: float

    def lines(self) -> list[str]:
        """For the console."""
        device, share = self.device, self.device.efficiency
        return [
            f"{device.name}: {device.matrix_flops / 1e9:,.0f} GFLOP/s in products, {device.bandwidth / 1e9:,.1f} GB/s "
            "in copies",
            f"updates reach {share.matrix:.0%} of the products' speed, and take {1e3 * share.update_s:.1f} ms beside",
            f"a decoding step takes {1e6 * share.decode_layer_s:.0f} µs a layer beside what it reads",
            f"measured in {self.seconds:.0f} s; later plans take it from {self.file}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """Seconds of one shape, for few and for many documents or lanes."""

    shape: ModelShape
    updates_s: tuple[float, float]
    decodes_s: tuple[float, float]


def calibrate(
    kind: Literal["auto", "cpu", "cuda"] = "auto", *, cache: Path | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Calibration:  # fmt: skip
    """Measures the device that a run here would take, and keeps the result for the planner. On a quiet machine: what
    else runs makes it slower than it is."""
    import torch

    began = time.perf_counter()
    known = found_device(kind, cache=Path("/nonexistent"))
    if known is None:
        raise RecipeError(
            "--calibrate: there is no GPU here that the device table has. Set placement.device to cpu, or run it on "
            "the machine that trains."
        )
    device = torch.device(known.kind)
    dtype = torch.bfloat16 if known.kind == "cuda" else torch.float32
    before = CpuSettings(threads=torch.get_num_threads(), onednn=_has_onednn())
    torch.set_num_threads(1)  # as a worker has by default
    try:
        note("products and copies")
        known = replace(known, matrix_flops=_peak(device, dtype), bandwidth=_bandwidth(device))
        note("updates and decoding of a small model")
        small, large = (_time_shape(values, device) for values in _SHAPES[known.kind])
    finally:
        before.apply()
    measured = fit(known, small, large)
    file = keep_calibration(measured, cache)
    return Calibration(device=replace(measured, is_measured=True), file=file, seconds=time.perf_counter() - began)


def fit(device: Device, small: _Timed, large: _Timed) -> Device:
    """The shares and constants with which the planner's formulas give what was timed: the growth with tokens and lanes
    of the larger shape, and the rest of the smaller one."""
    documents, lanes = _BATCHES[device.kind], _LANES[device.kind]
    told = [training_step(large.shape, device, [float(_DOCUMENT)] * count).token_s_sum for count in documents]
    factor = (told[1] - told[0]) / max(large.updates_s[1] - large.updates_s[0], 1e-9)
    efficiency = replace(
        device.efficiency,
        matrix=device.efficiency.matrix * factor,
        attention=device.efficiency.attention * factor,
        copying=device.efficiency.copying * factor,
    )
    device = replace(device, efficiency=efficiency)
    alone = training_step(small.shape, device, [float(_DOCUMENT)] * documents[0]).total_s
    update_s = max(0.0, small.updates_s[0] - alone)
    context = _CONTEXT + _NEW_TOKENS / 2
    lane_s = (large.decodes_s[1] - large.decodes_s[0]) / (lanes[1] - lanes[0])
    reading = replace(device, efficiency=replace(efficiency, decode_matrix=0.0, decode_layer_s=0.0, decode_s=0.0))
    cached_s = generation_cost(large.shape, reading, context).lane_s
    computing_s = lane_s - cached_s
    if computing_s > 0 and device.kind == "cpu":
        matrix = 2.0 * large.shape.active_parameters() / computing_s / device.matrix_flops
        efficiency = replace(efficiency, decode_matrix=min(matrix, 1.0))
    device = replace(device, efficiency=replace(efficiency, decode_layer_s=0.0, decode_s=0.0, update_s=update_s))
    rest_s = small.decodes_s[0] - generation_cost(small.shape, device, context).token_s(lanes[0])
    layer_s = max(0.0, rest_s) / small.shape.num_layers
    return replace(device, efficiency=replace(device.efficiency, decode_layer_s=layer_s))


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product."""
    import torch

    size = _PRODUCT[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / _best(lambda: left @ right, device, repeats=8)


def _has_onednn() -> bool:
    import torch

    was_on: bool = torch.backends.mkldnn.set_flags(True)[0]
    torch.backends.mkldnn.set_flags(was_on)
    return was_on


def _bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy of a large array reads and writes."""
    import torch

    source = torch.ones(_COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    seconds = _best(lambda: target.copy_(source), device, repeats=5)
    return 2.0 * source.nbytes / seconds


def _time_shape(values: dict[str, int], device: torch.device) -> _Timed:
    from podium.algorithms.dense import token_cross_entropy
    from podium.engine.mesh import Mesh
    from podium.engine.optimizer import AdamW
    from podium.engine.sharding import place
    from podium.engine.train_step import TrainEngine
    from podium.models.device import choose_cpu_settings
    from podium.models.verify import random_batch

    with tempfile.TemporaryDirectory(prefix="podium-calibration-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({**_QWEN, **values}), encoding="utf-8")
        section = ModelSection(path=name, init="random")
        mesh = Mesh(rank=0, world=1, device=device, devices=None)
        model, trained = place(section, folder, mesh, seed=0)
        shape = shape_of(section)
    engine = TrainEngine(model, trained, AdamW(trained, OptimizerSection(lr=1e-6)), mesh, 1.0)

    def update_s(count: int) -> float:
        batch = random_batch(shape.vocab_size, lengths=(_DOCUMENT,) * count)

        def step() -> None:
            engine.train_step([batch], token_cross_entropy, normalizer=1.0, lr=1e-6).resolve()

        return _best(step, device, repeats=3)

    if device.type == "cpu":  # a worker chooses its kernels by the model as well
        batch = random_batch(shape.vocab_size, lengths=(16,) * 8 + (128,))
        choose_cpu_settings(
            lambda: engine.gradients([batch], token_cross_entropy, normalizer=1.0), ranks=1, threads=1
        ).apply()
    few, many = _BATCHES[device.type]
    updates = update_s(few), update_s(many)
    few, many = _LANES[device.type]
    return _Timed(
        shape=shape, updates_s=updates, decodes_s=(_decode_s(model, device, few), _decode_s(model, device, many))
    )


def _decode_s(model: Any, device: torch.device, lanes: int) -> float:
    """Seconds of one decoding step with so many running lanes, their prefill left out."""
    import numpy as np

    from podium.data.trajectories import TrajectoryId
    from podium.rollout.native.engine import NativeEngine
    from podium.rollout.requests import Request, Sampling

    section = EngineSection(max_running=lanes, max_length=256, memory_gib=1.0, reuse_prefixes=False)
    engine = NativeEngine(model, device, section)
    draw = np.random.default_rng(0)
    clock, number = _clock(device), 0

    def answered(new_tokens: int) -> float:
        """Seconds until all lanes have so many tokens."""
        nonlocal number
        sampling = Sampling(max_new_tokens=new_tokens)
        requests = []
        for _ in range(lanes):
            prompt = draw.integers(0, model.vocab_size, _CONTEXT).astype(np.int32)
            requests.append(Request(id=TrajectoryId(number, 0), prompt=prompt, sampling=sampling))
            number += 1
        began = clock()
        engine.submit(requests)
        for _ in engine.results(deadline_s=60.0):
            pass
        return clock() - began

    try:
        answered(_NEW_TOKENS)  # warms up
        short = min(answered(1) for _ in range(2))
        long = min(answered(1 + _NEW_TOKENS) for _ in range(2))
    finally:
        engine.close()
    return max(0.0, long - short) / _NEW_TOKENS


def _best(work: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    clock, times = _clock(device), []
    work()
    wait()
    for _ in range(repeats):
        began = clock()
        work()
        wait()
        times.append(clock() - began)
    return min(times)


def _clock(device: torch.device) -> Callable[[], float]:
    return time.perf_counter if device.type == "cuda" else time.process_time
