# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of the native engine with and without speculation from history, in one run.

    python benchmarks/speculation.py                       three epochs of the same prompts, and the tail, on CPU

The model is a Qwen3 that learns a random Markov chain first: each token has three successors, the likeliest with
probability `--likeliest`. So answers to a prompt agree in parts, as those of a trained model do. `--init random` skips
that: its samples agree nowhere, and at temperature 0 everywhere.

Epochs: the same prompts, `--samples` each, log-normal lengths, other random numbers in every epoch, and weights that
change by `--noise` (relative) in between. Tail: so many sequences of one length with a history of two epochs. Both
engines work on the same tensors, in turns. On CPU the run ends with status 1 if a token or a log-prob differs in a bit;
times are processor time there, so that other programs on the machine change them little."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, pack
from podium.data.trajectories import TrajectoryId
from podium.engine.mesh import join
from podium.engine.optimizer import AdamW
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.recipe import ModelSection, OptimizerSection, PlacementSection, RolloutSection
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Completion, Request, Sampling
from podium.weights.published import PublishedWeights
from rollout_task import make_model, workload

_CHAIN = 400  # tokens of the Markov chain
_SUCCESSORS = 3


class Chain:
    """A random Markov chain over tokens."""

    def __init__(self, likeliest: float) -> None:
        self._draw = np.random.default_rng(0)
        self._next = self._draw.integers(3, _CHAIN, (_CHAIN, _SUCCESSORS))
        self._chances = [likeliest, *[(1 - likeliest) / (_SUCCESSORS - 1)] * (_SUCCESSORS - 1)]

    def walk(self, length: int) -> np.ndarray:
        """A random sequence."""
        choices = self._draw.choice(_SUCCESSORS, length, p=self._chances)
        tokens = np.empty(length, np.int32)
        tokens[0] = self._draw.integers(3, _CHAIN)
        for at in range(1, length):
            tokens[at] = self._next[tokens[at - 1], choices[at]]
        return tokens


class Bench:
    """One model, an engine without speculation and one with it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        mesh = join(PlacementSection.model_validate({"device": "cpu"}), rank=0, world=1, local_rank=0)
        self.device, self.mesh = mesh.device, mesh
        self.chain = Chain(arguments.likeliest)
        make_model(arguments.shape, folder)
        self.model, self.trained = place(ModelSection(path=str(folder), init="random"), folder, mesh, seed=0)
        if arguments.init == "chain":
            self._learn()
        self.version, self.different = 0, 0
        self.weights = PublishedWeights(self.model, self.trained, mesh, self.model.head_weight.dtype)
        self.engines: dict[str, NativeEngine] = {}
        self.restart(arguments.running)

    def restart(self, running: int) -> None:
        """New engines, without a history."""
        for engine in self.engines.values():
            engine.close()
        for name, tokens in (("off", 0), ("on", self.arguments.tokens)):
            section = RolloutSection.model_validate(
                {"max_length": 640, "max_running": running, "memory_gib": 0.5, "speculation": {"tokens": tokens}}
            )
            self.engines[name] = NativeEngine(self.model, self.device, section, version=self.version)

    def _learn(self) -> None:
        engine = TrainEngine(self.model, self.trained, AdamW(self.trained, OptimizerSection(lr=3e-3)), self.mesh, 1.0)
        for _ in range(self.arguments.learning_steps):
            trained = np.ones(65, np.bool_)
            trained[0] = False
            batch = pack([Document(tokens=self.chain.walk(65), trained=trained) for _ in range(8)])
            engine.train_step([batch], token_cross_entropy, lr=3e-3, normalizer=8.0 * 64)

    @torch.no_grad()
    def change_weights(self) -> None:
        """As an update does, in place; both engines take the new version."""
        torch.manual_seed(self.version)
        for each in self.trained:
            parameter = each.parameter
            parameter.add_(torch.randn_like(parameter) * parameter.std() * self.arguments.noise)
        self.version += 1
        for engine in self.engines.values():
            engine.adopt(self.weights.describe(self.version))

    def run(self, name: str, requests: Sequence[Request]) -> tuple[float, list[Completion]]:
        """Seconds and answers."""
        engine = self.engines[name]
        began = time.process_time()
        engine.submit(requests)
        answers = list(engine.results(deadline_s=60.0))
        return time.process_time() - began, sorted(answers, key=lambda answer: answer.id)

    def both(self, requests: Sequence[Request]) -> dict[str, float]:
        """Tokens per second of both engines, and what was proposed and accepted."""
        before = self.engines["on"].load()
        seconds, answers = {}, {}
        for name in self.engines:
            seconds[name], answers[name] = self.run(name, requests)
        after = self.engines["on"].load()
        for one, other in zip(answers["off"], answers["on"], strict=True):
            same = np.array_equal(one.tokens_L, other.tokens_L)
            self.different += not (same and one.logprobs_L.tobytes() == other.logprobs_L.tobytes())
        tokens = sum(each.num_tokens for each in answers["on"])
        proposed = after.proposed_tokens - before.proposed_tokens
        return {
            **{name: sum(each.num_tokens for each in answers[name]) / seconds[name] for name in seconds},
            "proposed": proposed,
            "rate": (after.accepted_tokens - before.accepted_tokens) / max(1, proposed),
            "per_step": tokens / max(1, after.lane_steps - before.lane_steps),
        }

    def requests(self, prompts: Sequence[np.ndarray], answers_NS: np.ndarray, seed: int) -> list[Request]:
        return [
            Request(
                id=TrajectoryId(number, sample),
                prompt=prompt,
                sampling=Sampling(max_new_tokens=int(new), temperature=self.arguments.temperature),
                seed=seed,
            )
            for number, prompt in enumerate(prompts)
            for sample, new in enumerate(answers_NS[number])
        ]


def epochs(bench: Bench) -> None:
    """Three epochs of the same prompts."""
    arguments = bench.arguments
    shape = {"shortest": 16, "longest": 128, "most_new": 384, "mean": 96.0, "vocabulary": _CHAIN}
    work = workload(prompts=arguments.prompts, samples=arguments.samples, **shape)
    prompts = [bench.chain.walk(len(prompt)) for prompt in work.prompts]
    rows: dict[int, list[dict[str, float]]] = {1: [], 2: [], 3: []}
    for turn in range(1, arguments.turns + 1):
        bench.restart(arguments.running)
        for epoch, row in rows.items():
            found = bench.both(bench.requests(prompts, work.answers_NS, seed=10 * turn + epoch))
            row.append(found)
            bench.change_weights()
    print(f"\n{arguments.prompts} prompts x {arguments.samples}, {work.num_tokens} tokens, longest "
          f"{work.answers_NS.max()}, at most {arguments.running} at a time\n")  # fmt: skip
    table("epoch", rows)


def tail(bench: Bench) -> None:
    """So many lanes, with a history."""
    arguments, rows = bench.arguments, dict[int, list[dict[str, float]]]()
    new = arguments.new
    for lanes in arguments.lanes:
        bench.restart(max(arguments.lanes))
        prompts = [bench.chain.walk(32) for _ in range(max(1, lanes // 8))]
        answers_NS = np.full((len(prompts), max(1, lanes // len(prompts))), new)
        for seed in (1, 2):
            bench.both(bench.requests(prompts, answers_NS, seed=seed))
        found = [bench.both(bench.requests(prompts, answers_NS, seed=3 + turn)) for turn in range(arguments.turns)]
        rows[lanes] = found
    print(f"\n{new} tokens of each sequence, prompts of 32 tokens, at most 8 samples of a prompt\n")
    table("sequences", rows)


def table(name: str, rows: dict[int, list[dict[str, float]]]) -> None:
    print(f"| {name} | tokens/s off | on | on / off | proposed | accepted of these | tokens per sequence and step |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for key, found in rows.items():
        median = {each: statistics.median(one[each] for one in found) for each in found[0]}
        ratios = sorted(one["on"] / one["off"] for one in found)
        print(
            f"| {key} | {median['off']:.0f} | {median['on']:.0f} | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to "
            f"{ratios[-1]:.2f}) | {median['proposed']:.0f} | {median['rate']:.0%} | {median['per_step']:.2f} |"
        )
    print(json.dumps({name: rows}), file=sys.stderr)


def main() -> None:
    """Measures both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--init", choices=("chain", "random"), default="chain")
    parser.add_argument("--likeliest", type=float, default=0.9)
    parser.add_argument("--learning-steps", type=int, default=200)
    parser.add_argument("--noise", type=float, default=0.01)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", choices=("epochs", "tail"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments, Path(folder))
        print(f"{platform.machine()}, torch {torch.__version__}, {bench.model.num_parameters() / 1e6:.1f}M parameters, "
              f"temperature {arguments.temperature}, at most {arguments.tokens} proposals, medians of "
              f"{arguments.turns} turns")  # fmt: skip
        if arguments.only != "tail":
            epochs(bench)
        if arguments.only != "epochs":
            tail(bench)
    if bench.different:
        print(f"\n{bench.different} answers differ in a token or in the last bits of a log-prob")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
