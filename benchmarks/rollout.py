# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of the native engine beside `model.generate` in padded batches, transformers' continuous batching
and vLLM in-process, on one model, one workload, in one run.

    .venv/bin/python benchmarks/rollout.py                       64 mixed prompts on CPU
    .venv/bin/python benchmarks/rollout.py --samples 8           the same with 8 samples each
    python benchmarks/rollout.py --shape 0.6b --device cuda      32 prompts x 8 samples on a GPU

Every engine draws exactly the same number of tokens, `--turns` times, in turns; native runs once before (it compiles
and captures), the peers warm up with answers of at most 8 tokens. vLLM runs in an environment and process of its own
(`make install-vllm`) and is left out without it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from podium.data.trajectories import TrajectoryId
from podium.engine.mesh import join
from podium.engine.sharding import place
from podium.recipe import ModelSection, PlacementSection, RolloutSection
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Request, Sampling
from rollout_task import Workload, make_model, workload

HERE = Path(__file__).parent
VLLM = HERE.parent / ".venv-vllm" / "bin" / "python"


class Native:
    """Podium's engine on the model as a learner holds it."""

    def __init__(self, folder: Path, device: str, work: Workload, running: int) -> None:
        mesh = join(PlacementSection.model_validate({"device": device}), rank=0, world=1, local_rank=0)
        self.model, _ = place(ModelSection(path=str(folder), init="random"), folder, mesh, seed=0)
        longest = max(len(prompt) for prompt in work.prompts) + int(work.answers_NS.max())
        # The peers need memory too: their caches are copied as they grow.
        memory = 40.0 if device == "cuda" else None
        section = RolloutSection(max_length=longest, max_running=running, memory_gib=memory)
        self.engine = NativeEngine(self.model, mesh.device, section)
        self.work, self._turn = work, 0

    def requests(self, rows: list[tuple[int, int, list[int], int]]) -> list[Request]:
        """Other prompts of the same lengths every time: nothing is left over from the turn before."""
        self._turn += 1
        shift, vocabulary = 7 * self._turn, 509
        return [
            Request(
                id=TrajectoryId(number, sample, 0, self._turn),
                prompt=((np.array(prompt) - 3 + shift) % vocabulary + 3).astype(np.int32),
                sampling=Sampling(max_new_tokens=new),
                seed=self._turn,
            )
            for number, sample, prompt, new in rows
        ]

    def run(self) -> int:
        self.engine.submit(self.requests(self.work.rows()))
        return sum(each.num_tokens for each in self.engine.results(deadline_s=60.0))


class Padded:
    """`generate` on left-padded batches of at most `rows`; each row ends where its answer does, the batch with its
    last row."""

    def __init__(self, model: Any, work: Workload, rows: int) -> None:
        self.model, self.work, self.rows = model, work, rows

    def run(self) -> int:
        rows = self.work.rows()
        for at in range(0, len(rows), self.rows):
            self._batch(rows[at : at + self.rows])
        return self.work.num_tokens

    @torch.inference_mode()
    def _batch(self, rows: list[tuple[int, int, list[int], int]]) -> None:
        width = max(len(prompt) for _, _, prompt, _ in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for at, (_, _, prompt, _) in enumerate(rows):
            ids[at, width - len(prompt) :] = torch.tensor(prompt)
            mask[at, width - len(prompt) :] = 1
        device = self.model.device
        self.model.generate(
            input_ids=ids.to(device), attention_mask=mask.to(device), do_sample=True, top_k=0,
            max_new_tokens=max(new for *_, new in rows), pad_token_id=0,
        )  # fmt: skip


class Continuous:
    """transformers' own continuous batching."""

    def __init__(self, model: Any, work: Workload) -> None:
        self.model, self.work = model, work

    def run(self) -> int:
        config = transformers.GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=int(self.work.answers_NS.max()), eos_token_id=-1, pad_token_id=0
        )
        drawn = 0
        with self.model.continuous_batching_context_manager(generation_config=config, timeout=30) as manager:
            rows = self.work.rows()
            for _, _, prompt, new in rows:
                manager.add_request(prompt, max_new_tokens=new)
            for _ in rows:
                drawn += len(manager.get_result(timeout=120).generated_tokens)
        return drawn


def vllm_figures(folder: Path, sizes: dict[str, Any], arguments: Any) -> list[float]:
    """Seconds of each turn, from a process of vLLM's environment."""
    same = {name: getattr(arguments, name) for name in ("turns", "running", "threads", "onednn")}
    task = json.dumps({"folder": str(folder), "work": sizes, **same})
    command = [str(VLLM), str(HERE / "rollout_vllm.py"), task]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode != 0:
        raise SystemExit(f"rollout_vllm.py ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def timed(run: Callable[[], int], wanted: int) -> float:
    began = time.perf_counter()
    drawn = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    taken = time.perf_counter() - began
    if drawn != wanted:
        raise SystemExit(f"{drawn} tokens were drawn and {wanted} wanted")
    return taken


def full_batch(native: Native, rows: int, prompt: int, new: int) -> dict[str, float]:
    """Time of a decode step while all lanes are busy, and what share of the memory bandwidth it uses."""
    draw = np.random.default_rng(1)
    vocabulary = native.model.vocab_size
    work = [(number, 0, draw.integers(3, vocabulary, prompt).tolist(), new) for number in range(rows)]
    native.engine.submit(native.requests(work))
    seen: list[tuple[float, int]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            load = native.engine.load()
            if load.running == rows and load.waiting == 0:
                seen.append((time.perf_counter(), load.generated_tokens))

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = native.engine.load().generated_tokens
    for _ in native.engine.results(deadline_s=60.0):
        pass
    done.set()
    watcher.join()
    # The middle half: neither prefill nor the end.
    part = seen[len(seen) // 4 : -(len(seen) // 4) or None]
    (first_s, first), (last_s, last) = part[0], part[-1]
    step_s = (last_s - first_s) / ((last - first) / rows)
    context = prompt + ((first + last) / 2 - before) / rows
    model, config = native.model, native.model.hf.config
    weights = sum(parameter.numel() for parameter in model.parameters()) * model.head_weight.element_size()
    token = (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.head_weight.element_size()
    )
    moved = weights + rows * context * token
    return {"step_ms": 1e3 * step_s, "tokens_per_s": rows / step_s, "context": context, "moved_gb": moved / 1e9,
            "roofline": moved / copy_bandwidth() / step_s}  # fmt: skip


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy on the device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / 5)
    return 2 * source.numel() / best


def main() -> None:
    arguments = parsed()
    cuda = arguments.device == "cuda"
    torch.set_num_threads(arguments.threads)
    torch.backends.mkldnn.set_flags(arguments.onednn)
    transformers.logging.set_verbosity_error()
    if cuda:
        torch.set_default_device("cpu")
    sizes = (
        {"prompts": 32, "shortest": 64, "longest": 256, "most_new": 1024, "mean": 333.0}
        if cuda
        else {"prompts": 64, "shortest": 8, "longest": 256, "most_new": 128, "mean": 48.0}
    )
    sizes = {**sizes, "samples": arguments.samples, "vocabulary": 512}
    work = workload(**sizes)
    folder = make_model(arguments.shape, Path(tempfile.mkdtemp()))
    native = Native(folder, arguments.device, work, arguments.running)
    sides: dict[str, Callable[[], int]] = {"native": native.run}
    warm_ups: list[Callable[[], int]] = []
    names = [name for name in arguments.peers.split(",") if name]
    if names:
        # The peers hold the same weights in a module of their own.
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device(arguments.device):
            peer = transformers.AutoModelForCausalLM.from_config(config, dtype=native.model.head_weight.dtype).eval()
        short = replace(work, answers_NS=np.minimum(work.answers_NS, 8))
        if "padded" in names:
            sides["padded"] = Padded(peer, work, arguments.rows).run
            warm_ups.append(Padded(peer, short, arguments.rows).run)
        if "continuous" in names:
            sides["continuous"] = Continuous(peer, work).run
            warm_ups.append(Continuous(peer, short).run)
    times: dict[str, list[float]] = {name: [] for name in sides}
    taken = timed(native.run, work.num_tokens)
    print(f"native, first time (compiling, capturing): {taken:.1f} s", flush=True)
    for warm in warm_ups:
        warm()
    for _ in range(arguments.turns):
        for name, run in sides.items():
            times[name].append(timed(run, work.num_tokens))
            print(f"{name}: {times[name][-1]:.2f} s", flush=True)
    if "vllm" in names and VLLM.exists():
        with tempfile.TemporaryDirectory() as saved:
            peer.save_pretrained(saved)
            times["vllm"] = vllm_figures(Path(saved), sizes, arguments)
    report(arguments, work, times, native, cuda)


def report(arguments: Any, work: Workload, times: dict[str, list[float]], native: Native, cuda: bool) -> None:
    print(f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}, shape "
          f"{arguments.shape}, {len(work.prompts)} prompts x {work.answers_NS.shape[1]}, {work.num_tokens} tokens, "
          f"longest {work.answers_NS.max()}, medians of {arguments.turns}")  # fmt: skip
    base = statistics.median(times["padded"]) if "padded" in times else None
    for name, each in times.items():
        middle = statistics.median(each)
        ratio = f"  {base / middle:.2f}x padded" if base else ""
        print(f"  {name:<11} {work.num_tokens / middle:9.0f} tokens/s  {middle:7.2f} s{ratio}")
    load, capacity = native.engine.load(), native.engine.capacity
    print(f"  native: {load.prefilled_tokens} tokens prefilled, {load.reused_tokens} reused, {load.preemptions} "
          f"pre-emptions, cache of {capacity.cache_bytes / 2**30:.2f} GiB")  # fmt: skip
    found: dict[str, Any] = {"times": times, "tokens": work.num_tokens}
    if cuda:
        for rows in (256, 64):
            found[f"full_{rows}"] = figures = full_batch(native, rows, 160, 540)
            print(f"  full batch of {rows}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items()))
    print(json.dumps(found))


def parsed() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--samples", type=int, default=None)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--onednn", action="store_true", help="CPU: leave oneDNN on for all")
    parser.add_argument("--rows", type=int, default=None, help="rows of a padded batch; default: all")
    parser.add_argument("--running", type=int, default=None, help="answers that the native engine draws at once")
    parser.add_argument("--peers", default="padded,continuous,vllm")
    found = parser.parse_args()
    found.samples = found.samples or (8 if found.device == "cuda" else 1)
    found.rows = found.rows or (256 if found.device == "cuda" else 64)
    found.running = found.running or (256 if found.device == "cuda" else 64)
    return found


if __name__ == "__main__":
    main()
