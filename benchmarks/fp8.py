# SPDX-License-Identifier: Apache-2.0
"""What fp8 products of the linear layers give and cost on one GPU: tokens/s of SFT steps and of the native engine, the
loss after the same steps, and the gap between log-probs of the engine and of the learner.

    python benchmarks/fp8.py                              about four minutes on an H200
    python benchmarks/fp8.py --rehearse                   a tiny model on CPU with emulated products: no figure counts

Every case is a process of its own. Models have Qwen3's shapes and random weights, which learn chains of tokens first,
so that some tokens are certain and others are not. `mfu` is against the measured peak of bfloat16 for both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, pack
from podium.data.packing import compose_step
from podium.data.trajectories import TrajectoryId
from podium.engine.mesh import Mesh, join, leave
from podium.engine.optimizer import AdamW
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.models import fp8
from podium.models.causal_lm import PackedCausalLM
from podium.models.cost import model_cost
from podium.models.device import matrix_peak
from podium.models.packing import to_device
from podium.recipe import ModelSection, OptimizerSection, PlacementSection, RolloutSection
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Completion, Request, Sampling

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "8b-8-layers": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 8,
                    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
}  # fmt: skip
WAYS = ("bf16", "fp8")
LR = 2e-4
KINDS = 64  # of tokens
PROMPT = 32


def chain(rng: np.random.Generator, length: int) -> np.ndarray:
    """Each token follows from the one before, but for one in four, which is drawn."""
    tokens = np.empty(length, np.int32)
    drawn, is_drawn = rng.integers(0, KINDS, length), rng.random(length) < 0.25
    tokens[0] = drawn[0]
    for at in range(1, length):
        tokens[at] = drawn[at] if is_drawn[at] else (17 * tokens[at - 1] + 5) % KINDS
    return tokens


def steps(rng: np.random.Generator, budget: int, count: int, longest: int) -> list[list[Document]]:
    """Documents of log-normal lengths, a new layout every step."""
    waiting: list[Document] = []
    made = []
    for _ in range(count):
        while sum(each.num_inputs for each in waiting) < 2 * budget:
            length = int(np.clip(rng.lognormal(np.log(550), 1.0), 16, longest))
            waiting.append(Document(tokens=chain(rng, length + 1), trained=np.arange(length + 1) > 0))
        chosen = set(compose_step(waiting, budget))
        made.append([waiting[at] for at in sorted(chosen)])
        waiting = [each for at, each in enumerate(waiting) if at not in chosen]
    return made


def train(way: str, arguments: argparse.Namespace) -> tuple[PackedCausalLM, Mesh, dict[str, Any]]:
    """Steps from the same weights on the same data; the last ones are timed."""
    config = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], max_position_embeddings=8192,
                  tie_word_embeddings=True, rms_norm_eps=1e-6, rope_theta=1e6, **SHAPES[arguments.shape])  # fmt: skip
    plan = steps(np.random.default_rng(0), arguments.tokens, arguments.warmup + arguments.steps, arguments.longest)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        mesh = join(PlacementSection(), rank=0, world=1, local_rank=0)
        section = ModelSection(path=folder, init="random", fp8=way == "fp8")
        model, trained = place(section, Path(folder), mesh, seed=0)
    optimizer = OptimizerSection(lr=LR)
    engine = TrainEngine(model, trained, AdamW(trained, optimizer), mesh, optimizer.clip_norm)
    cost, sync = model_cost(model.hf), synchronizer(mesh.device)

    def run(docs: list[Document]) -> Any:
        batch = pack(sorted(docs, key=lambda each: each.num_inputs))
        return engine.train_step([batch], token_cross_entropy, normalizer=batch.num_trained, lr=LR)

    began = time.perf_counter()
    losses = [run(docs).resolve().loss for docs in plan[: arguments.warmup]]
    sync()
    warmup_s, began = time.perf_counter() - began, time.perf_counter()
    timed = plan[arguments.warmup :]
    reports = [run(docs) for docs in timed]
    sync()
    seconds = time.perf_counter() - began
    losses += [report.resolve().loss for report in reports]
    peak = matrix_peak(mesh.device, torch.bfloat16 if mesh.device.type == "cuda" else torch.float32)
    flops = sum(
        cost.training_flops([each.num_inputs for each in docs], sum(d.num_trained for d in docs)) for docs in timed
    )
    tokens = sum(each.num_inputs for docs in timed for each in docs)
    assert np.isfinite(losses).all(), losses
    return model, mesh, {
        "tokens_per_s": tokens / seconds, "ms": 1e3 * seconds / len(timed), "mfu": flops / seconds / peak,
        "gib": torch.cuda.max_memory_allocated() / 2**30 if mesh.device.type == "cuda" else 0.0,
        "warmup_s": warmup_s, "losses": losses, "peak_tflops": peak / 1e12,
        "fp8_layers": 0 if model.fp8 is None else len(model.fp8.layers),
    }  # fmt: skip


def generate(
    model: PackedCausalLM, mesh: Mesh, lanes: int, new_tokens: int, *, in_fp8: bool, decode: str
) -> tuple[float, list[tuple[Request, Completion]]]:
    """Tokens per second of the second round (the first compiles and captures), and its answers."""
    section = RolloutSection.model_validate(
        {"fp8": in_fp8, "max_running": lanes, "max_length": PROMPT + new_tokens, "memory_gib": 24.0, "decode": decode}
        if mesh.device.type == "cuda"
        else {"fp8": in_fp8, "max_running": lanes, "max_length": PROMPT + new_tokens}
    )
    with torch.no_grad():
        engine = NativeEngine(model, mesh.device, section)
    sync = synchronizer(mesh.device)
    rng, seconds = np.random.default_rng(1), 0.0
    for turn in range(2):
        requests = [
            Request(
                id=TrajectoryId(number, 0, 0, turn), prompt=chain(rng, PROMPT),
                sampling=Sampling(max_new_tokens=new_tokens, temperature=1.0), seed=turn,
            )
            for number in range(lanes)
        ]  # fmt: skip
        sync()
        began = time.perf_counter()
        engine.submit(requests)
        done = {each.id: each for each in engine.results(deadline_s=300)}
        sync()
        seconds = time.perf_counter() - began
    engine.close()
    assert all(each.error is None for each in done.values())
    count = sum(each.num_tokens for each in done.values())
    return count / seconds, [(request, done[request.id]) for request in requests]


@torch.no_grad()
def gap(model: PackedCausalLM, mesh: Mesh, answers: list[tuple[Request, Completion]]) -> dict[str, float]:
    """Learner's log-probs minus the engine's, over sampled tokens."""
    documents, sampled = [], []
    for request, answer in answers:
        new = np.asarray(answer.tokens_L, np.int32)
        tokens = np.concatenate([np.asarray(request.prompt, np.int32), new])
        documents.append(Document(tokens=tokens, trained=np.arange(len(tokens)) >= len(request.prompt)))
        sampled.append(np.asarray(answer.logprobs_L, np.float64))
    model.eval()
    multiple = 64 if mesh.device.type == "cuda" else 1
    with torch.compiler.set_stance("force_eager"):
        out = model(to_device(pack(documents), mesh.device, multiple=multiple), None, kind="logprobs")
    delta = out.float().cpu().numpy().astype(np.float64) - np.concatenate(sampled)
    return {
        "mean": float(np.abs(delta).mean()), "largest": float(np.abs(delta).max()),
        "ratio": float(np.exp(delta).mean()), "kl_k3": float((np.exp(delta) - 1 - delta).mean()),
        "tokens": len(delta), "logprob": float(np.concatenate(sampled).mean()),
    }  # fmt: skip


def synchronizer(device: torch.device) -> Any:
    return torch.cuda.synchronize if device.type == "cuda" else (lambda: None)


def case(arguments: argparse.Namespace) -> dict[str, Any]:
    """One process: training in one way, and generation after it if asked."""
    torch.manual_seed(0)
    model, mesh, found = train(arguments.case, arguments)
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
    found["generation"] = []
    for lanes in arguments.lanes:
        # Beside a learner in fp8 only the gap is new, and uncompiled layers give it.
        for way in WAYS if arguments.case == "bf16" else ("fp8",):
            decode = "compiled" if arguments.case == "bf16" else "captured"
            speed, answers = generate(
                model, mesh, lanes, arguments.new_tokens, in_fp8=way == "fp8", decode=decode
            )  # fmt: skip
            differs = gap(model, mesh, answers[:64])
            row = {"engine": way, "learner": arguments.case, "lanes": lanes, "tokens_per_s": speed, "decode": decode}
            found["generation"].append(row | {"gap": differs})
            print(row, differs, file=sys.stderr, flush=True)
    leave(mesh)
    return found


def run_case(shape: str, way: str, lanes: list[int], arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Starts the process of a case and reads its last line."""
    command = [
        sys.executable, __file__, "--case", way, "--shape", shape, "--tokens", str(arguments.tokens),
        "--steps", str(arguments.steps), "--warmup", str(arguments.warmup), "--longest", str(arguments.longest),
        "--new-tokens", str(arguments.new_tokens), "--lanes", *map(str, lanes),
        *(["--rehearse"] if arguments.rehearse else []),
    ]  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    if done.returncode:
        print(f"FAILED: {shape} {way} ended with status {done.returncode}", flush=True)
        return None
    print(f"[{shape} {way}: {time.perf_counter() - began:.0f} s]", flush=True)
    return {"shape": shape, "way": way, **json.loads(done.stdout.splitlines()[-1])}


def table(results: list[dict[str, Any]]) -> None:
    """Training by shape, then generation."""
    print("\n| shape | products | tokens/s | MFU of the bf16 peak | GiB | last loss | mean of the last 4 |")
    print("|---|---|---|---|---|---|---|")
    for each in results:
        print(
            f"| {each['shape']} | {each['way']} | {each['tokens_per_s']:,.0f} | {each['mfu']:.1%} | {each['gib']:.1f} "
            f"| {each['losses'][-1]:.4f} | {np.mean(each['losses'][-4:]):.4f} |"
        )
    print("\n| engine | learner | lanes | decode | tokens/s | gap/mean | largest | mean ratio | k3 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in (row for each in results for row in each["generation"]):
        found = row["gap"]
        print(
            f"| {row['engine']} | {row['learner']} | {row['lanes']} | {row['decode']} | {row['tokens_per_s']:,.0f} "
            f"| {found['mean']:.2e} | {found['largest']:.2e} | {found['ratio']:.5f} | {found['kl_k3']:.2e} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="on CPU, tiny, with emulated products")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--lanes", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=190.0, help="no further shape begins after this time")
    parser.add_argument("--case", choices=WAYS, help="one process of the benchmark")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.7b")
    arguments = parser.parse_args()
    if arguments.rehearse:
        fp8.require_fp8 = lambda device, key: None  # type: ignore[assignment]
        for module in ("podium.engine.sharding", "podium.rollout.native.engine_weights"):
            sys.modules[module].require_fp8 = fp8.require_fp8  # type: ignore[attr-defined]
    if arguments.case is not None:
        print(json.dumps(case(arguments)))
        return 0
    if arguments.rehearse:
        arguments.tokens, arguments.steps, arguments.warmup, arguments.longest = 512, 20, 10, 128
        arguments.new_tokens, arguments.lanes = 12, [4, 8]
    shapes = ["tiny"] if arguments.rehearse else ["1.7b", "8b-8-layers"]
    began, results, failed = time.perf_counter(), [], 0
    for shape in shapes:
        for way in WAYS:
            if shape != shapes[0] and time.perf_counter() - began > arguments.seconds:
                print(f"left out for lack of time: {shape} {way}")
                continue
            lanes = [] if shape != shapes[0] else arguments.lanes if way == "bf16" else arguments.lanes[:1]
            found = run_case(shape, way, lanes, arguments)
            failed += found is None
            results += [] if found is None else [found]
    table(results)
    print("\n" + json.dumps(results))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
