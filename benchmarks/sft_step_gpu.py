# SPDX-License-Identifier: Apache-2.0
"""MFU of Podium's train step on one CUDA device: random-init Qwen3 shapes, packed tokens, a new layout every step.

    python benchmarks/sft_step_gpu.py --shapes 0.6b 1.7b
    python benchmarks/sft_step_gpu.py --shapes 1.7b --lora 16

Documents are log-normal in length (median about 550, at most 4096). The step is the engine's own: bf16 compute,
float32 masters, clipping, AdamW. `--profile` prints the kernels that take the time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, pack
from podium.data.packing import compose_step
from podium.engine.mesh import join, leave
from podium.engine.optimizer import AdamW
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.models.cost import model_cost
from podium.models.device import matrix_peak
from podium.recipe import ModelSection, OptimizerSection, PlacementSection
from podium.recipe.schema import LoraSection

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
}  # fmt: skip


def documents(rng: np.random.Generator, vocab: int, count: int) -> list[Document]:
    lengths = np.clip(rng.lognormal(np.log(550), 1.0, count), 16, 4096).astype(int)
    made = []
    for length in lengths:
        trained = np.ones(length + 1, bool)
        trained[0] = False
        made.append(Document(tokens=rng.integers(0, vocab, length + 1).astype(np.int32), trained=trained))
    return made


def steps(rng: np.random.Generator, vocab: int, budget: int, count: int) -> list[list[Document]]:
    waiting: list[Document] = []
    made = []
    for _ in range(count):
        waiting += documents(rng, vocab, 512 - len(waiting))
        chosen = set(compose_step(waiting, budget))
        made.append([waiting[i] for i in sorted(chosen)])
        waiting = [each for i, each in enumerate(waiting) if i not in chosen]
    return made


def measure(shape: str, args: argparse.Namespace, peak: float) -> dict[str, float | str]:
    config = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], max_position_embeddings=8192,
                  tie_word_embeddings=True, rms_norm_eps=1e-6, rope_theta=1e6, **SHAPES[shape])  # fmt: skip
    vocab = int(config["vocab_size"])
    rng = np.random.default_rng(0)
    plan = steps(rng, vocab, args.tokens, args.warmup + args.steps)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        mesh = join(PlacementSection(), rank=0, world=1, local_rank=0)
        lora = None if args.lora is None else LoraSection(rank=args.lora)
        section = ModelSection(path=folder, init="random", activation_checkpointing=args.checkpointing, lora=lora)
        model, trained = place(section, Path(folder), mesh, seed=0)
    optimizer = OptimizerSection(lr=1e-5)
    engine = TrainEngine(model, trained, AdamW(trained, optimizer), mesh, optimizer.clip_norm)
    cost = model_cost(model.hf)

    def run(docs: list[Document]) -> object:
        batch = pack(sorted(docs, key=lambda each: each.num_inputs))
        return engine.train_step([batch], token_cross_entropy, normalizer=batch.num_trained, lr=1e-5)

    began = time.perf_counter()
    for docs in plan[: args.warmup]:
        report = run(docs).resolve()
    compiled_s = time.perf_counter() - began
    timed = plan[args.warmup :]
    sync = torch.cuda.synchronize if mesh.device.type == "cuda" else (lambda: None)
    sync()
    began, pending = time.perf_counter(), None
    for docs in timed:
        latest = run(docs)
        if pending is not None:
            pending.resolve()  # one step behind, as the run loop reads it
        pending = latest
    assert pending is not None
    report = pending.resolve()
    sync()
    seconds = time.perf_counter() - began
    tokens = sum(each.num_inputs for docs in timed for each in docs)
    flops = sum(
        cost.training_flops([each.num_inputs for each in docs], sum(d.num_trained for d in docs)) for docs in timed
    )
    if args.profile:
        profile(run, timed[0], sync)
    memory = torch.cuda.max_memory_allocated() / 2**30 if mesh.device.type == "cuda" else 0.0
    leave(mesh)
    return {
        "shape": shape, "parameters": sum(p.numel() for p in model.parameters()), "ms": 1e3 * seconds / len(timed),
        "tokens_per_s": tokens / seconds, "mfu": flops / seconds / peak, "filled": tokens / len(timed) / args.tokens,
        "gib": memory, "warmup_s": compiled_s, "loss": report.loss,
    }  # fmt: skip


def profile(run: object, docs: list[Document], sync: object) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        for _ in range(2):
            run(docs)  # type: ignore[operator]
        sync()  # type: ignore[operator]
    print(prof.key_averages().table(sort_by="self_device_time_total", row_limit=28, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "1.7b"], choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--checkpointing", default="none")
    parser.add_argument("--lora", type=int, default=None, help="rank of an adapter; default: all weights are trained")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = matrix_peak(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    print(
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}: measured peak {peak / 1e12:.1f} TFLOP/s"
    )
    for shape in args.shapes:
        row = measure(shape, args, peak)
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
