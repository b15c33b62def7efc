# SPDX-License-Identifier: Apache-2.0
"""Long documents on one CUDA device: MFU, step time and peak memory of Podium's train step for each way to save memory.

    python benchmarks/long_documents.py                                  1.7B: 32,768 and 131,072 tokens, all ways
    python benchmarks/long_documents.py --shape tiny --lengths 512 2048  a rehearsal that needs no GPU

A step trains one document of random tokens on a random-init Qwen3 shape: bf16 compute, float32 masters, clipping,
AdamW, compiled layers. MFU counts the FLOPs of the model, without those that are computed again. Each case has its own
process, so that one that does not fit ends alone. On CPU the memory is the process's largest resident set.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

WAYS = {
    "none": {},
    "selective": {"activation_checkpointing": "selective"},
    "all_but_attention": {"activation_checkpointing": "all_but_attention"},
    "layers": {"activation_checkpointing": "layers"},
    "layers, offloaded": {"activation_checkpointing": "layers", "offload_activations": True},
}
_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement."""

    shape: str
    length: int
    way: str
    offload_optimizer: bool
    steps: int
    warmup: int


def measure(case: Case) -> dict[str, object]:
    import numpy as np
    import torch

    from podium.algorithms.dense import token_cross_entropy
    from podium.data.documents import Document, pack
    from podium.engine.mesh import join, leave
    from podium.engine.optimizer import AdamW
    from podium.engine.sharding import place
    from podium.engine.train_step import TrainEngine
    from podium.models.cost import model_cost
    from podium.models.device import matrix_peak
    from podium.recipe import ModelSection, OptimizerSection, PlacementSection
    from sft_step_gpu import SHAPES

    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": case.length + 64,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, **SHAPES[case.shape],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        mesh = join(PlacementSection(), rank=0, world=1, local_rank=0)
        section = ModelSection(path=folder, init="random", **WAYS[case.way])
        model, trained = place(section, Path(folder), mesh, seed=0)
    optimizer = OptimizerSection(lr=1e-5, offload=case.offload_optimizer)
    engine = TrainEngine(model, trained, AdamW(trained, optimizer), mesh, optimizer.clip_norm)
    rng, cuda = np.random.default_rng(0), mesh.device.type == "cuda"
    tokens = rng.integers(0, int(config["vocab_size"]), case.length + 1).astype(np.int32)
    batch = pack([Document(tokens=tokens, trained=np.arange(case.length + 1) > 0)])
    seconds = []
    for _ in range(case.warmup + case.steps):
        began = time.perf_counter()
        report = engine.train_step([batch], token_cross_entropy, normalizer=batch.num_trained, lr=1e-5).resolve()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    each = sum(seconds[case.warmup :]) / case.steps
    peak = matrix_peak(mesh.device, torch.bfloat16 if cuda else torch.float32)
    flops = model_cost(model.hf).training_flops([case.length], batch.num_trained)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    leave(mesh)
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu", "ms": 1e3 * each, "tokens_per_s": case.length / each,
        "mfu": flops / each / peak, "gib": (torch.cuda.max_memory_allocated() if cuda else resident) / 2**30,
        "warmup_s": sum(seconds[: case.warmup]), "loss": report.loss,
    }  # fmt: skip


def in_its_own_process(case: Case) -> dict[str, object]:
    """The result of a case, or the last line of what went wrong."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result after {_TIMEOUT_S} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {
            "failed": next((line for line in lines if "out of memory" in line), lines[-1] if lines else "no message")
        }
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1.7b")
    parser.add_argument("--lengths", nargs="+", type=int, default=[32_768, 131_072])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--offload-optimizer", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(measure(Case(**json.loads(args.case)))))
        return
    for length in args.lengths:
        for way in args.ways:
            case = Case(
                shape=args.shape, length=length, way=way, offload_optimizer=args.offload_optimizer, steps=args.steps,
                warmup=args.warmup,
            )  # fmt: skip
            row = {"length": length, "way": way, **in_its_own_process(case)}
            print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
