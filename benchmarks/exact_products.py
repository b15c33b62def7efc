# SPDX-License-Identifier: Apache-2.0
"""What MKL's strict mode costs on an x86 CPU: tokens per second of the native engine, and updates, with it and without.

    python benchmarks/exact_products.py                  a model of 0.9M and one of 29M parameters, one thread

Each turn is two processes, one with the environment's MKL_CBWR=AUTO and one with AUTO,STRICT, one after the other.
Times are processor time, so that other programs on the machine change them little."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from podium.algorithms.dense import token_cross_entropy
from podium.data.trajectories import TrajectoryId
from podium.engine.mesh import Mesh, join
from podium.engine.optimizer import AdamW
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.models.causal_lm import PackedCausalLM
from podium.models.verify import random_batch
from podium.recipe import ModelSection, OptimizerSection, PlacementSection, RolloutSection
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Request, Sampling
from rollout_task import SHAPES, make_model

SHAPES["29m"] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
_LANES = (1, 4, 16, 64)
_PROMPT, _NEW = 32, 24
_REPEATS = 3


def measured(shape: str) -> dict[str, float]:
    """Processor seconds, by what was done: the best of some repetitions in this process."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(shape, Path(name))
        mesh = join(PlacementSection.model_validate({"device": "cpu"}), rank=0, world=1, local_rank=0)
        model, trained = place(ModelSection(path=str(folder), init="random"), folder, mesh, seed=0)
    times = {f"{lanes} sequences": _decode_s(model, mesh, lanes) for lanes in _LANES}
    engine = TrainEngine(model, trained, AdamW(trained, OptimizerSection(lr=1e-6)), mesh, 1.0)
    batch = random_batch(model.vocab_size, lengths=(64,) * 16)

    def update() -> None:
        engine.train_step([batch], token_cross_entropy, normalizer=1.0, lr=1e-6).resolve()

    return {**times, "an update of 1,024 tokens": _best_s(update)}


def _decode_s(model: PackedCausalLM, mesh: Mesh, lanes: int) -> float:
    engine = NativeEngine(model, mesh.device, RolloutSection(max_length=128, max_running=lanes))
    turn = 0

    def run() -> None:
        nonlocal turn
        turn += 1
        engine.submit(
            [
                Request(
                    id=TrajectoryId(lane, 0, 0, turn),
                    prompt=((np.arange(_PROMPT) + lane + turn) % 500 + 3).astype(np.int32),
                    sampling=Sampling(max_new_tokens=_NEW),
                    seed=turn,
                )
                for lane in range(lanes)
            ]
        )
        assert sum(each.num_tokens for each in engine.results(deadline_s=300.0)) == lanes * _NEW

    return _best_s(run)


def _best_s(work: Callable[[], None]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        began_s = time.process_time()
        work()
        times.append(time.process_time() - began_s)
    return min(times)


def in_process(shape: str, mode: str) -> dict[str, float]:
    """What `measured` finds in a process with this mode of MKL."""
    command = [sys.executable, __file__, "--measure", shape]
    ended = subprocess.run(
        command, env={**os.environ, "MKL_CBWR": mode}, stdout=subprocess.PIPE, text=True, timeout=900, check=True
    )
    times: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--measure", metavar="SHAPE", help="used by the script itself")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(options.measure)))
        return
    if not torch.backends.mkl.is_available():
        sys.exit(f"torch does not multiply with MKL on {platform.machine()}: there is nothing to compare.")
    print("| model | work | strict / plain processor time |\n|---|---|---|")
    for shape, size in (("tiny", "0.9M"), ("29m", "29M")):
        turns = [(in_process(shape, "AUTO"), in_process(shape, "AUTO,STRICT")) for _ in range(options.turns)]
        for work in turns[0][0]:
            ratios = [strict[work] / plain[work] for plain, strict in turns]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"| {size} | {work} | {statistics.median(ratios):.2f} ({spread}) |", flush=True)


if __name__ == "__main__":
    main()
