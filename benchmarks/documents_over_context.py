# SPDX-License-Identifier: Apache-2.0
"""One long document on CPU, over the ranks of a context axis and on one rank: the loss, gradient norm and gradient of a
training step, its time, and the peak memory of each rank.

    python benchmarks/documents_over_context.py                                     131,072 tokens, context 4
    python benchmarks/documents_over_context.py --context 1 --threads 4             that document on one rank alone
    python benchmarks/documents_over_context.py --length 2048 --context 2 --heads 3 a rehearsal, of the ring

A tiny random-init Qwen3 in float32 (heads of width 8) trains one document of random tokens over gloo. Where `--context`
divides `--heads`, ranks exchange heads; else keys and values travel around them. Ends with status 1 if loss, gradient
norm or gradient differ from those of one rank by more than 1e-5. Memory is the largest resident set of a rank's
process, which has torch and transformers in it; beside it what it was before the step. Each of several ranks has one
thread, and the one rank has `--threads`. They share this machine's cores, so times say nothing of several devices.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, PackedBatch, pack
from podium.engine.mesh import Mesh, join, leave
from podium.engine.optimizer import AdamW
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.recipe import ModelSection, OptimizerSection, PlacementSection
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import RankPlace, launch

_VOCABULARY = 256
_TOLERANCE = 1e-5
_TIMEOUT_S = 1500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The model and its document."""

    length: int
    layers: int
    heads: int
    kv_heads: int

    @property
    def config(self) -> dict[str, object]:
        """Of the model."""
        return {
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": _VOCABULARY,
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": 8,
            "max_position_embeddings": self.length + 1, "rope_theta": 1e6, "tie_word_embeddings": False,
        }  # fmt: skip

    def batch(self) -> PackedBatch:
        """One document of random tokens, all trained."""
        tokens = np.random.default_rng(0).integers(0, _VOCABULARY, self.length + 1).astype(np.int32)
        return pack([Document(tokens=tokens, trained=np.arange(self.length + 1) > 0)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """Results of one training step."""

    loss: float
    grad_norm: float
    seconds: float
    peaks: tuple[int, ...]  # bytes, of each rank
    before: tuple[int, ...]  # the same before the step
    moments: dict[str, Tensor]  # whole first moments: the gradient times one constant


def step_on(place_of_rank: RankPlace, task: Task, threads: int) -> Step:
    """One step of this rank. Collective."""
    section = PlacementSection(device="cpu", timeout_s=_TIMEOUT_S)
    world = place_of_rank.world
    torch.set_num_threads(threads)
    sizes = MeshSizes(context=world) if world > 1 else None
    mesh = join(
        section, rank=place_of_rank.rank, world=world, local_rank=place_of_rank.local_rank,
        meeting=place_of_rank.meeting, sizes=sizes,
    )  # fmt: skip
    try:
        return _step(mesh, task)
    finally:
        leave(mesh)


def _step(mesh: Mesh, task: Task) -> Step:
    optimizer = OptimizerSection(lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(task.config), encoding="utf-8")
        model, trained = place(ModelSection(path=folder, init="random"), Path(folder), mesh, seed=0)
    engine = TrainEngine(model, trained, AdamW(trained, optimizer), mesh, optimizer.clip_norm)
    batch, before = task.batch(), _peak()
    mesh.barrier()
    began = time.perf_counter()
    report = engine.train_step([batch], token_cross_entropy, normalizer=float(batch.num_trained), lr=1e-3).resolve()
    seconds, peak = time.perf_counter() - began, _peak()
    held = [
        (each.name, each.shape, each.box, moment)
        for each, moment in zip(engine.optimizer.trained, engine.optimizer.first_moments, strict=True)
    ]
    whole = {name: torch.zeros(shape) for name, shape, _, _ in held}
    for part in mesh.gather([(name, box, moment.clone()) for name, _, box, moment in held]):
        for name, box, moment in part:
            whole[name][box.slices()] = moment
    numbers = mesh.gather((before, peak))
    return Step(
        loss=report.loss, grad_norm=report.grad_norm, seconds=seconds, peaks=tuple(peak for _, peak in numbers),
        before=tuple(before for before, _ in numbers), moments=whole,
    )  # fmt: skip


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def differences(found: Step, wanted: Step) -> dict[str, float]:
    """Relative, of the loss, of the gradient's norm, and of the gradient itself (L2)."""
    difference = torch.cat([(found.moments[name] - each).flatten() for name, each in wanted.moments.items()])
    whole = torch.cat([each.flatten() for each in wanted.moments.values()])
    return {
        "loss": abs(found.loss / wanted.loss - 1),
        "grad_norm": abs(found.grad_norm / wanted.grad_norm - 1),
        "gradient": float(difference.norm() / whole.norm()),
    }


def _printed(ranks: int, task: Task, step: Step) -> None:
    mib = [round(each / 2**20) for each in step.peaks]
    before = [round(each / 2**20) for each in step.before]
    row = {
        "context": ranks, "length": task.length, "layers": task.layers, "heads": task.heads, "loss": step.loss,
        "grad_norm": step.grad_norm, "seconds": round(step.seconds, 1), "peak_mib": mib, "before_mib": before,
    }  # fmt: skip
    print(json.dumps(row), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--context", type=int, default=4)
    parser.add_argument("--threads", type=int, default=None, help="of the one rank; default: the size of context")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=None, help="default: half of the heads if even, else 1")
    args = parser.parse_args()
    kv_heads = args.kv_heads or (args.heads // 2 if args.heads % 2 == 0 else 1)
    task = Task(length=args.length, layers=args.layers, heads=args.heads, kv_heads=kv_heads)
    found: Step | None = None
    if args.context > 1:
        found = launch(step_on, (task, 1), ranks=args.context, restarts=0, stop_file=None)
        _printed(args.context, task, found)
    wanted = step_on(RankPlace(), task, args.threads or args.context)
    _printed(1, task, wanted)
    if found is None:
        return 0
    differing = differences(found, wanted)
    print(json.dumps({"differences": differing}), flush=True)
    return 1 if max(differing.values()) > _TOLERANCE else 0


if __name__ == "__main__":
    sys.exit(main())
