# SPDX-License-Identifier: Apache-2.0
"""The planner's predictions beside what is measured on one device: step time by phase, and peak memory.

    python benchmarks/plan_gpu.py                                                  one GPU: SFT, GRPO; 0.6B, 1.7B
    python benchmarks/plan_gpu.py --device cpu --shapes tiny --steps 6 --warmup 2  a rehearsal

All predictions are made and printed before anything is measured. The workloads are those of sft_gpu.py and grpo.py,
each in a process of its own, the first `--warmup` steps left out, medians over the others. The peak of the memory is
what all processes hold of the device together, looked at 100 times a second; SFT has the peaks of
torch's allocator too: the rest of the device's peak, beyond what is reserved, is the context of CUDA and its libraries.
On CPU no memory is measured. A device that is not calibrated has the table's shares, which come from an H200.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import grpo_podium
import podium
import sft_gpu
from grpo import end
from grpo_task import PROMPTS, SAMPLES, SideResult, Task, make_task
from podium.controller.simulation.costs import LogNormal
from podium.observe import read_metrics
from podium.planning.choices import RecipeChoices
from podium.planning.devices import GIB, Device, device_named, found_device
from podium.planning.memory import memory_of
from podium.planning.model_shape import shape_of
from podium.planning.run_records import configuration_of, workload_of
from podium.planning.shape_costs import Episodes, first_tokens_s, training_step
from podium.recipe import OnPolicyRecipe

LIMIT_S = 240.0
_LOOK_S = 0.01
# Of the prompts and answers of grpo.py, and of the tokens of sft_gpu.py.
GRPO_SIZES = {"cuda": (64, 256, 256), "cpu": (8, 64, 64)}
SFT_TOKENS = {"cuda": 16_384, "cpu": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: its files are in `folder`."""

    program: str
    shape: str
    device: str
    steps: int
    warmup: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.program} {self.shape}"

    @property
    def task(self) -> Task:
        """Of GRPO."""
        shortest, longest, new_tokens = GRPO_SIZES[self.device]
        return Task(
            folder=str(self.folder / "task"), shape=self.shape, device=self.device, steps=self.steps,
            warmup=self.warmup, shortest=shortest, longest=longest, new_tokens=new_tokens,
        )  # fmt: skip

    def recipe(self) -> podium.Recipe:
        if self.program == "grpo":
            return grpo_podium.recipe_of(self.task, 1, {}, str(self.folder))
        return sft_gpu.recipe_of(
            self.folder, self.shape, steps=self.steps, tokens=SFT_TOKENS[self.device], device=self.device
        )

    def make_files(self) -> None:
        if self.program == "grpo":
            make_task(self.task)
            return
        sft_gpu.make_model(self.folder / "model", self.shape)
        words = min(20_000, int(sft_gpu.SHAPES[self.shape]["vocab_size"]) - 1)
        sft_gpu.make_data(self.folder / "train.jsonl", (self.steps + 36) * SFT_TOKENS[self.device], words)


def main() -> None:
    asked = parsed()
    if asked.one is not None:
        run_one(Case(**{**json.loads(asked.one), "folder": Path(json.loads(asked.one)["folder"])}), asked.out)
        return
    device = known_device(asked.device, asked.named)
    with tempfile.TemporaryDirectory() as scratch:
        cases = [
            Case(
                program=program, shape=shape, device=asked.device, steps=asked.steps, warmup=asked.warmup,
                folder=Path(scratch) / f"{program}-{shape}",
            )
            for program in asked.programs
            for shape in asked.shapes
        ]  # fmt: skip
        told: dict[str, dict[str, float]] = {}
        print(f"predictions, {device.name}{' as calibrated' if device.is_measured else ''}:")
        for case in cases:
            case.folder.mkdir()
            case.make_files()
            told[case.name] = predictions(case, device)
            parts = ", ".join(f"{name} {text(name, value)}" for name, value in told[case.name].items())
            print(f"  {case.name}: {parts}", flush=True)
        found: dict[str, dict[str, float]] = {}
        for case in cases:
            found[case.name] = measured(case)
            shutil.rmtree(case.folder)  # its last checkpoint has gigabytes
            for line in report(told, {case.name: found[case.name]}):
                print(line, flush=True)
            if asked.json is not None:
                asked.json.write_text(json.dumps({"predicted": told, "measured": found}, indent=1), encoding="utf-8")


def known_device(kind: str, name: str | None) -> Device:
    device = device_named(name) if name is not None else found_device("cuda" if kind == "cuda" else "cpu")
    if device is None:
        raise SystemExit("there is no GPU here that the planner knows; name one with --named H200")
    return device


# --- what the planner says ---


def predictions(case: Case, device: Device) -> dict[str, float]:
    """Seconds of the step and its phases, and bytes; without what a shape does not tell: the controller."""
    recipe = case.recipe()
    memory = memory_of(recipe, device)
    peak = {"peak bytes": float(memory.held_bytes)}
    if not isinstance(recipe, OnPolicyRecipe):
        context = memory.peak.of("CUDA context")
        peak |= {"allocated bytes": float(memory.peak.num_bytes - context)} if context else {}
        return {"step": sft_step_s(case, device), **peak}
    task, base, workload = case.task, configuration_of(recipe, kind=device.kind), workload_of(recipe)
    rows = [json.loads(line)["prompt"] for line in task.prompts.read_text(encoding="utf-8").splitlines()]
    episodes = Episodes(
        prompt_tokens=statistics.fmean(len(row.split()) for row in rows[task.warmup * PROMPTS :]),
        answer_tokens=LogNormal(median=task.new_tokens),
        samples_per_prompt=SAMPLES,
    )
    costs = RecipeChoices(recipe, device, episodes, base, workload).costs(base)
    lanes, shape = min(base.lanes, PROMPTS * SAMPLES), shape_of(recipe.model)
    latency_s = first_tokens_s(shape, device)
    rollout_s = latency_s + PROMPTS * SAMPLES / lanes * task.new_tokens * costs.generation.token_s(lanes)
    update_s = costs.update.update_s(task.generated_per_step, 1)
    moves_s = 2 * costs.switch_s - latency_s
    grading_s = costs.grading_s.median
    return {
        "rollout": rollout_s, "update": update_s, "publish and residency": moves_s, "grading": grading_s,
        "step": rollout_s + update_s + moves_s + grading_s, **peak,
    }  # fmt: skip


def sft_step_s(case: Case, device: Device) -> float:
    """A full step of documents as the data has them."""
    rows = (case.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    lengths = [float(1 + len(json.loads(row)["text"].split())) for row in rows[:2000]]
    longest = case.recipe().data.max_length or np.inf
    kept = [min(length, float(longest)) for length in lengths]
    step = training_step(shape_of(case.recipe().model), device, kept)
    constant_s = device.efficiency.update_s if device.is_measured else 0.0
    return step.token_s_sum * SFT_TOKENS[case.device] / sum(kept) + step.constant_s + constant_s


# --- what there is ---


def measured(case: Case) -> dict[str, float]:
    """In a process of its own."""
    out = case.folder / "measured.json"
    values = {
        "program": case.program, "shape": case.shape, "device": case.device, "steps": case.steps,
        "warmup": case.warmup, "folder": str(case.folder),
    }  # fmt: skip
    command = [sys.executable, __file__, "--one", json.dumps(values), "--out", str(out)]
    began_s = time.perf_counter()
    places = [str(Path(place).resolve()) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(places),
    }  # fmt: skip
    with (case.folder / "told.txt").open("w+", encoding="utf-8") as said, device_peak(case.device) as peak:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            code = process.wait(LIMIT_S)
        except BaseException:
            end(process)
            raise
        if code:
            said.seek(0)
            raise SystemExit(f"{case.name} ended with {code}:\n{said.read()[-4000:]}")
    print(f"{case.name} took {time.perf_counter() - began_s:.0f} s", flush=True)
    return {**json.loads(out.read_text(encoding="utf-8")), **peak}


def run_one(case: Case, out: Path) -> None:
    """The child: trains, and writes medians."""
    if case.program == "grpo":
        side: SideResult = grpo_podium.train(case.task, 1, {}, str(case.folder))
        phases = side.phases
        found = {
            "rollout": phases["time/rollout_s"], "update": phases["time/update_s"],
            "publish and residency": phases.get("time/publish_s", 0.0) + phases.get("time/residency_s", 0.0),
            "grading": phases.get("time/grade_s", 0.0), "controller": phases.get("time/other_s", 0.0),
            "step": statistics.median(side.step_s),
        }  # fmt: skip
    else:
        result = podium.train(case.recipe())
        lines = [each.values for each in read_metrics(result.folder / "metrics.jsonl") if "loss" in each.values]
        found = {"step": statistics.median(values["step_s"] for values in lines[case.warmup : -1])}
        if case.device == "cuda":
            import torch

            found["allocated bytes"] = float(torch.cuda.max_memory_allocated())
            found["reserved bytes"] = float(torch.cuda.max_memory_reserved())
    out.write_text(json.dumps(found), encoding="utf-8")


@contextmanager
def device_peak(kind: str) -> Iterator[dict[str, float]]:
    """Filled at the end: the most that all processes have held of the first GPU, beyond what was held before."""
    found: dict[str, float] = {}
    if kind != "cuda":
        yield found
        return
    import torch

    def used() -> int:
        free, whole = torch.cuda.mem_get_info(0)
        return whole - free

    before, most, stop = used(), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not stop.wait(_LOOK_S):
            most = max(most, used())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join(5.0)
        found["peak bytes"] = float(most - before)


# --- side by side ---


def report(told: Mapping[str, Mapping[str, float]], found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """One row for each figure; errors are relative to what was measured."""
    rows: list[Sequence[str]] = [("run", "figure", "measured", "predicted", "error")]
    for name, values in found.items():
        for figure, value in values.items():
            predicted = told[name].get(figure)
            error = "" if predicted is None or not value else f"{predicted / value - 1:+.1%}"
            rows.append(
                (name, figure, text(figure, value), "-" if predicted is None else text(figure, predicted), error)
            )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def text(figure: str, value: float) -> str:
    return f"{value / GIB:.2f} GiB" if figure.endswith("bytes") else f"{1e3 * value:.1f} ms"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--named", help="name of the device in the planner's table; default: what is found")
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "1.7b"])
    parser.add_argument("--programs", nargs="+", default=["sft", "grpo"], choices=["sft", "grpo"])
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args()
    if not 0 < found.warmup < found.steps:
        parser.error("--warmup must be at least 1 and below --steps")
    return found


if __name__ == "__main__":
    main()
