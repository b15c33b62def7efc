# SPDX-License-Identifier: Apache-2.0
"""Decoding of a mixture of experts: transformers' grouped products beside the fused kernels, in one run.

    python benchmarks/moe_decode.py                                     one GPU, the width of Qwen3-30B-A3B, 8 layers
    python benchmarks/moe_decode.py --device cpu --shape tiny           a rehearsal (no kernels without Triton)

First the experts of one layer: every set of tiles is compared with plain torch over odd shapes and routings, then timed
in a CUDA graph beside the grouped products. Then whole engines, with the grouped products and with the fastest tiles
that are right: time of a decode step at several numbers of lanes, a rollout of 8 prompts x 8 samples x 256 tokens with
recorded experts, the gap to the learner's log-probs, and the kernels that take the time. Every case is a process of its
own, so that one that fails hides no other. They compile at the same time and are timed one by one. Exits with 1 if a
case fails.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LIMIT_S = 200.0
NEW_TOKENS = (32, 160)  # a decode step is the difference of two rollouts, divided by that of their lengths
OLD = "grouped"


@dataclass(frozen=True, kw_only=True)
class Shape:
    hidden: int
    expert: int
    experts: int
    per_token: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    lanes: tuple[int, ...]
    prompt: int
    answer: int


SHAPES = {
    "30b-a3b": Shape(
        hidden=2048, expert=768, experts=128, per_token=8, layers=8, heads=32, kv_heads=4, head=128, vocabulary=151936,
        lanes=(8, 64, 256), prompt=128, answer=256,
    ),
    "tiny": Shape(
        hidden=64, expert=32, experts=8, per_token=2, layers=2, heads=2, kv_heads=2, head=32, vocabulary=512,
        lanes=(2, 4), prompt=8, answer=16,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: str  # layer or engine
    path: str  # OLD, or the name of tiles
    shape: str
    device: str
    lock: str

    @property
    def sizes(self) -> Shape:
        return SHAPES[self.shape]

    @contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        """Cases are timed alone; they compile and compare together."""
        with open(self.lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield


# --- the experts of one layer ---


def run_layer(case: Case) -> dict[str, Any]:
    import torch

    on_gpu = case.device == "cuda"
    compute = layer_function(case)
    torch.manual_seed(0)
    with case.turn(alone=False):
        checked = compared(case, compute)
        # As in a layer: the sizes of the model, and routers that prefer nobody.
        inputs = {tokens: layer_inputs(case, tokens, "even") for tokens in case.sizes.lanes}
        captured = {tokens: prepared(compute, each, on_gpu) for tokens, each in inputs.items()}
    times = {}
    with case.turn(alone=True):
        for tokens, run in captured.items():
            times[tokens] = 1e6 * seconds_of(run, 30 if on_gpu else 2, on_gpu)
        bandwidth = copy_bandwidth() if on_gpu else None
    bound = None
    if bandwidth:
        touched = {tokens: int(each[1].unique().numel()) for tokens, each in inputs.items()}
        sizes = case.sizes
        one = 3 * sizes.hidden * sizes.expert * 2
        bound = {tokens: 1e6 * count * one / bandwidth for tokens, count in touched.items()}
    return {"checked": len(checked), "worst": max(checked, default=None), "us": times, "bound_us": bound}


def layer_function(case: Case) -> Callable[..., Any]:
    import torch

    from podium.rollout.native.fused_experts import plain_experts

    if case.path == OLD:
        from transformers.integrations.moe import grouped_mm_experts_forward

        class Experts(torch.nn.Module):  # what the forward reads
            has_gate, has_bias, has_post_expert_norm, is_transposed, is_concatenated = True, False, False, False, True
            _is_expert_parallel = False

            def _apply_gate(self, gate_up: Any) -> Any:
                gate, up = gate_up.chunk(2, dim=-1)
                return torch.nn.functional.silu(gate) * up

        def grouped(hidden: Any, experts: Any, gates: Any, gate_up: Any, down: Any) -> Any:
            module = Experts()
            module.num_experts, module.gate_up_proj, module.down_proj = len(down), gate_up, down
            return grouped_mm_experts_forward(module, hidden, experts, gates)

        return grouped
    if find_spec("triton") is None:
        return plain_experts
    from podium.rollout.native.expert_kernels import TILES, experts_with

    return lambda *tensors: experts_with(TILES[case.path], *tensors)


def layer_inputs(
    case: Case, tokens: int, routing: str, *, per_token: int | None = None, small: tuple[int, int, int] | None = None
) -> tuple[Any, ...]:
    """`small`: other sizes (experts, hidden, expert)."""
    import torch

    sizes, device = case.sizes, case.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # Triton's interpreter has no bfloat16
    count, hidden, width = small or (sizes.experts, sizes.hidden, sizes.expert)
    per_token = per_token or sizes.per_token
    if routing == "one":  # all tokens to the same experts, the last ones
        experts = torch.arange(count - per_token, count).expand(tokens, per_token)
    else:  # even: all experts; few: a quarter of them, so that nobody chose the others
        among = count if routing == "even" else max(per_token, count // 4)
        experts = torch.rand(tokens, among).argsort(dim=1)[:, :per_token]
    gates = torch.rand(tokens, per_token)
    gates = (gates / gates.sum(dim=1, keepdim=True)).to(dtype)

    def drawn(*size: int, scale: float = 1.0) -> Any:
        return torch.randn(*size, device=device, dtype=dtype) * scale

    return (
        drawn(tokens, hidden),
        experts.to(device).contiguous(),
        gates.to(device),
        drawn(count, 2 * width, hidden, scale=hidden**-0.5),
        drawn(count, hidden, width, scale=width**-0.5),
    )


def compared(case: Case, compute: Callable[..., Any]) -> list[float]:
    """Errors of all combinations, over the largest value. Raises an error for the first that is too large."""
    from podium.rollout.native.fused_experts import plain_experts

    errors = []
    widths = {None, (24, 208, 72)} if case.device == "cuda" else {(6, 48, 40)}
    for small in widths:
        for tokens in (1, 3, 17, 64, 256) if case.device == "cuda" else (1, 17):
            for per_token in (1, 2, 8) if small is not None and case.device == "cuda" else (case.sizes.per_token,):
                for routing in ("even", "few", "one"):
                    tensors = layer_inputs(case, tokens, routing, per_token=per_token, small=small)
                    poison(case.device)
                    found = compute(*tensors).float()  # first: else it could find the right answer in freed memory
                    wanted = plain_experts(*tensors).float()
                    error = float((wanted - found).abs().max() / wanted.abs().max())
                    where = f"{tokens} tokens, {per_token} experts each, {routing}, sizes {small or 'of the model'}"
                    if not error < 0.02:  # a rounding of bfloat16 is 0.004, in a few places
                        raise AssertionError(f"{where}: the kernels are {error:.3g} of the largest value off")
                    errors.append(error)
    return errors


def poison(device: str) -> None:
    """Memory that is allocated next holds NaN, so that what a kernel does not write is noticed."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        small = [torch.full((1 << 18,), float("nan"), device=device) for _ in range(64)]
        large = torch.full((1 << 28,), float("nan"), device=device)
        del small, large


def prepared(compute: Callable[..., Any], tensors: tuple[Any, ...], on_gpu: bool) -> Callable[[], object]:
    import torch

    if not on_gpu:
        return lambda: compute(*tensors)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compute(*tensors)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        compute(*tensors)
    return graph.replay


def seconds_of(run: Callable[[], object], repeats: int, on_gpu: bool) -> float:
    import torch

    best = float("inf")
    for _ in range(3):
        run()
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / repeats)
    return best


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy on the device."""
    import torch

    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), 5, True)


# --- whole engines ---


def run_engine(case: Case) -> dict[str, Any]:
    import torch

    from podium.engine.mesh import join
    from podium.recipe import PlacementSection, RolloutSection
    from podium.rollout.native.engine import NativeEngine

    sizes, on_gpu = case.sizes, case.device == "cuda"
    choose_path(case)
    mesh = join(PlacementSection.model_validate({"device": case.device}), rank=0, world=1, local_rank=0)
    with case.turn(alone=False), torch.no_grad():
        model = built(case)
        section = RolloutSection.model_validate(
            {
                "max_length": sizes.prompt + sizes.answer,
                "max_running": max(sizes.lanes),
                "memory_gib": 12 if on_gpu else 0.1,
            }
        )
        engine = NativeEngine(model, mesh.device, section, records_experts=True)
        if on_gpu and (find_spec("triton") is None or bool(engine._runner._experts) != (case.path != OLD)):
            raise AssertionError("the engine is not on the path that is to be measured")
        runs = Rollouts(engine, sizes)
        for lanes in sizes.lanes:  # compiles and captures
            runs.run(lanes, 1, sizes.answer)
    found: dict[str, Any] = {"steps_ms": {}, "tokens_per_s": {}, "bound_ms": {}}
    with case.turn(alone=True), torch.no_grad():
        for lanes in sizes.lanes:
            short, long = (new if on_gpu else new // 16 for new in NEW_TOKENS)
            step = (runs.best(lanes, long) - runs.best(lanes, short)) / (long - short)
            found["steps_ms"][lanes], found["tokens_per_s"][lanes] = 1e3 * step, lanes / step
        turns = [runs.run(8, 8, sizes.answer)[0] for _ in range(4)][1:]
        found["rollout_s"], found["rollouts_s"] = statistics.median(turns), turns
        if on_gpu:
            bandwidth = copy_bandwidth()
            found["bound_ms"] = {lanes: 1e3 * step_bytes(model, sizes, lanes) / bandwidth for lanes in sizes.lanes}
            found["bandwidth_tb_s"] = bandwidth / 1e12
            found["kernels"] = attempt(lambda: kernels_of(lambda: runs.run(64, 1, 64), 63), found)
        found["gaps"] = attempt(lambda: gaps(model, mesh, runs.run(8, 8, sizes.answer)[1]), found)
    engine.close()
    return found


def attempt(run: Callable[[], Any], found: dict[str, Any]) -> Any:
    """Its result; or None, and the error beside what else was found."""
    try:
        return run()
    except Exception:
        found["problem"] = traceback.format_exc()[-2000:]
        return None


def choose_path(case: Case) -> None:
    if case.device != "cuda":
        return
    from podium.rollout.native import expert_kernels, graphs

    if case.path == OLD:
        graphs.fusible_experts = lambda model: []
    else:
        expert_kernels.DEFAULT_TILES = expert_kernels.TILES[case.path]


def built(case: Case) -> Any:
    """The model as a learner on one device holds it, without masters. The weights are drawn on the device."""
    import torch
    import transformers

    from podium.models.causal_lm import build
    from podium.recipe import ModelSection

    sizes = case.sizes
    config = transformers.Qwen3MoeConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=3 * sizes.hidden,
        moe_intermediate_size=sizes.expert, num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads, head_dim=sizes.head, num_experts=sizes.experts,
        num_experts_per_tok=sizes.per_token, norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=4096,
        tie_word_embeddings=False,
    )  # fmt: skip
    on_gpu = case.device == "cuda"
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = build(ModelSection(path="made", init="random"), config, device=torch.device(case.device), dtype=dtype)
    if on_gpu:
        torch._dynamo.config.recompile_limit = 64
        for layer in model.layers:
            layer.compile()
    return model


class Rollouts:
    """Rollouts on one engine; every one has prompts of its own, and all answers are of the same length."""

    def __init__(self, engine: Any, sizes: Shape) -> None:
        self._engine, self._sizes, self._turn = engine, sizes, 0

    def run(self, prompts: int, samples: int, new: int) -> tuple[float, list[Any]]:
        import numpy as np

        from podium.data.trajectories import TrajectoryId
        from podium.rollout.requests import Request, Sampling

        self._turn += 1
        draw = np.random.default_rng(self._turn)
        sizes = self._sizes
        asked = [draw.integers(3, sizes.vocabulary, sizes.prompt).astype(np.int32) for _ in range(prompts)]
        requests = [
            Request(
                id=TrajectoryId(number, sample, 0, self._turn), prompt=prompt, seed=self._turn,
                sampling=Sampling(max_new_tokens=new),
            )
            for number, prompt in enumerate(asked)
            for sample in range(samples)
        ]  # fmt: skip
        began = time.perf_counter()
        self._engine.submit(requests)
        found = list(self._engine.results(deadline_s=100.0))
        taken = time.perf_counter() - began
        if sum(each.num_tokens for each in found) != prompts * samples * new:
            raise AssertionError(f"answers of other lengths than {new}: {[each.num_tokens for each in found][:8]}")
        return taken, found

    def best(self, prompts: int, new: int) -> float:
        return min(self.run(prompts, 1, new)[0] for _ in range(3))


def step_bytes(model: Any, sizes: Shape, lanes: int) -> float:
    """What a decode step reads at least: the experts that evenly routed tokens touch, all other weights but the
    embedding, keys and values."""
    weights = {name: each.numel() for name, each in model.hf.named_parameters()}
    experts = sum(count for name, count in weights.items() if ".experts." in name)
    others = sum(count for name, count in weights.items() if ".experts." not in name and "embed_tokens" not in name)
    touched = 1.0 - (1.0 - sizes.per_token / sizes.experts) ** lanes
    context = sizes.prompt + sum(NEW_TOKENS) / 2
    cache = 2 * sizes.layers * sizes.kv_heads * sizes.head * context * lanes
    return 2.0 * (touched * experts + others + cache)


def kernels_of(run: Callable[[], object], steps: int) -> list[tuple[str, float]]:
    """The kernels that take most of the device's time, in microseconds of a decode step; first their sum."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    times = [(each.key[:90], each.self_device_time_total / steps) for each in profile.key_averages()]
    times.sort(key=lambda each: -each[1])
    return [("all", sum(time_us for _, time_us in times)), *times[:14]]


def gaps(model: Any, mesh: Any, answers: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """Mean and largest gap to the learner's log-probs, without and with replayed experts."""
    import torch

    from podium.engine.scoring import score
    from podium.roles.blocks import block_of
    from podium.weights.canary import LogprobGap

    block, _ = block_of(sorted(answers, key=lambda each: each.id))
    found = {}
    with torch.compiler.set_stance("force_eager"):
        for name, replays in (("own", False), ("replayed", True)):
            gap = LogprobGap.between(block, score(model, mesh, block, replays=replays))
            found[name] = (gap.mean, gap.largest)
    return found


# --- all cases ---


def main() -> None:
    asked = parsed()
    if asked.one is not None:
        case = Case(**json.loads(asked.one))
        found = run_layer(case) if case.kind == "layer" else run_engine(case)
        asked.out.write_text(json.dumps(found), encoding="utf-8")
        return
    began = time.perf_counter()
    names = asked.tiles or tile_names()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)

        def cases(kind: str, paths: Sequence[str]) -> list[Case]:
            fixed = {"shape": asked.shape, "device": asked.device, "lock": str(folder / "lock")}
            return [Case(kind=kind, path=path, **fixed) for path in paths]

        layers = {} if asked.engines_only else run_all(cases("layer", [OLD, *names]), folder)
        print_layers(layers, SHAPES[asked.shape])
        busiest = str(sorted(SHAPES[asked.shape].lanes)[-2])
        right = {name: layers[name]["us"][busiest] for name in names if "us" in layers.get(name, {})}
        best = min(right, key=lambda name: right[name]) if right else names[0]
        print(f"tiles of the engine: {best}\n", flush=True)
        engines = {} if asked.layers_only else run_all(cases("engine", [OLD, best]), folder)
    print_engines(engines, SHAPES[asked.shape])
    everything = {"case": asked.shape, "device": asked.device, "tiles": best, "layers": layers, "engines": engines}
    print("JSON " + json.dumps(everything))
    print(f"{time.perf_counter() - began:.0f} s in all")
    failed = [f"{kind} {name}" for kind, found in (("layer", layers), ("engine", engines)) for name in found
              if "error" in found[name] or "problem" in found[name]]  # fmt: skip
    if failed:
        sys.exit(f"FAILED: {', '.join(failed)}")


def tile_names() -> list[str]:
    if find_spec("triton") is None:
        return ["plain torch"]
    from podium.rollout.native.expert_kernels import TILES

    return list(TILES)


def run_all(cases: Sequence[Case], folder: Path) -> dict[str, dict[str, Any]]:
    """Runs the cases in processes of their own, at the same time: their results, or the ends of their errors."""
    running = []
    for case in cases:
        out = folder / f"{case.kind}-{case.path}.json".replace(" ", "-")
        log = out.with_suffix(".log")
        command = [sys.executable, __file__, "--one", json.dumps(asdict(case)), "--out", str(out)]
        with log.open("w") as file:
            running.append((case, out, log, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)))
    deadline, found = time.monotonic() + LIMIT_S, {}
    for case, out, log, process in running:
        try:
            code: int | str = process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = f"no end within {LIMIT_S:.0f} s"
        if code == 0 and out.exists():
            found[case.path] = json.loads(out.read_text(encoding="utf-8"))
            continue
        text = log.read_text(encoding="utf-8", errors="replace")
        found[case.path] = {"error": f"{code}: {text.strip().splitlines()[-1:]}"}
        print(f"--- {case.kind} {case.path} FAILED ({code}):\n{text[-4000:]}\n---", flush=True)
    return found


def print_layers(found: dict[str, dict[str, Any]], sizes: Shape) -> None:
    print("experts of one layer, microseconds (share of the bound)")
    print("| path | compared | worst error |" + "".join(f" {lanes} tokens |" for lanes in sizes.lanes))
    print("|---|---|---|" + "---|" * len(sizes.lanes))
    for name, each in found.items():
        if "error" in each:
            print(f"| {name} | {each['error'][:150]} |")
            continue
        cells = []
        for lanes in map(str, sizes.lanes):
            bound = f" ({each['bound_us'][lanes] / each['us'][lanes]:.0%})" if each["bound_us"] else ""
            cells.append(f" {each['us'][lanes]:.0f}{bound} |")
        worst = "" if each["worst"] is None else f"{each['worst']:.4f}"
        print(f"| {name} | {each['checked']} | {worst} |" + "".join(cells))
    print(flush=True)


def print_engines(found: dict[str, dict[str, Any]], sizes: Shape) -> None:
    print("engine")
    print("| path | lanes | decode step, ms | tokens/s | share of the bound |")
    print("|---|---|---|---|---|")
    for name, each in found.items():
        for lanes in map(str, sizes.lanes) if "error" not in each else ():
            step, bound = each["steps_ms"][lanes], each["bound_ms"].get(lanes)
            share = "" if bound is None else f"{bound / step:.0%} of {bound:.2f} ms"
            print(f"| {name} | {lanes} | {step:.2f} | {each['tokens_per_s'][lanes]:,.0f} | {share} |")
    for name, each in found.items():
        if "error" in each:
            print(f"{name}: {each['error']}")
            continue
        gap = ", ".join(f"{kind} {mean:.5f}, at most {most:.4f}" for kind, (mean, most) in (each["gaps"] or {}).items())
        print(f"{name}: rollout of 8 x 8 x {sizes.answer} {each['rollout_s']:.2f} s; gap to the learner: {gap}")
        for kernel, time_us in each.get("kernels") or ():
            print(f"    {time_us:9.1f} us  {kernel}")
        if "problem" in each:
            print(each["problem"])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="30b-a3b")
    parser.add_argument("--tiles", nargs="*", help="names of tiles; default: all")
    parser.add_argument("--engines-only", action="store_true", help="leave the single layer out")
    parser.add_argument("--layers-only", action="store_true", help="leave whole engines out")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
