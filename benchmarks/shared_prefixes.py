# SPDX-License-Identifier: Apache-2.0
"""What it saves to compute shared prefixes once: forward and backward of groups of answers, on one CPU thread.

    python benchmarks/shared_prefixes.py                    a table by group size and prompt:answer ratio
    python benchmarks/shared_prefixes.py --pairs            chosen and rejected answers to one prompt
    python benchmarks/shared_prefixes.py --turns-of-agents  groups whose episodes part at a random turn
    python benchmarks/shared_prefixes.py --small            a model for which short prompts do not pay

A random-init Qwen3 in float32 computes the gradient of the cross-entropy of the answers, all groups in one micro-batch.
Both sides are one engine in one process, in turns: with the cost of sharing that its model has, and without sharing.
Answers have log-normal lengths around `--answer`. Times are processor time, so that other programs on the machine
change them little; the table has the median over turns of (without / with), and their range. "Off" means that sharing
does not pay by the engine's own decision. Ends with status 1 if a gradient differs by more than 1e-5 (relative L2)."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, PackedBatch, pack
from podium.data.prefixes import PrefixCost
from podium.engine.mesh import Mesh
from podium.engine.optimizer import AdamW
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.recipe import ModelSection, OptimizerSection

_TOLERANCE = 1e-5
_VOCABULARY = 4096


def main() -> None:
    """Measures every cell of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--groups", type=int, default=1, help="prompts in a micro-batch")
    parser.add_argument("--answer", type=int, default=64, help="median tokens of an answer")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 1, 4, 16])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--turns-of-agents", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    sizes = [2] if arguments.pairs else arguments.sizes
    with tempfile.TemporaryDirectory() as folder:
        engine = made(Path(folder), small=arguments.small)
        millions = engine.model.num_parameters() / 1e6
        print(f"{millions:.1f}M parameters, {arguments.groups} prompts, {arguments.turns} turns\n")
        print("| prompt:answer | " + " | ".join(f"{size} answers" for size in sizes) + " |")
        print("|---|" + "---|" * len(sizes))
        worst = 0.0
        for ratio in arguments.ratios:
            cells = []
            for size in sizes:
                prompt = max(1, round(ratio * arguments.answer))
                draw = np.random.default_rng([size, prompt])
                documents = [
                    document
                    for _ in range(arguments.groups)
                    for document in group(draw, prompt, size, arguments.answer, agents=arguments.turns_of_agents)
                ]
                text, apart = cell(engine, documents, arguments.turns)
                cells.append(text)
                worst = max(worst, apart)
            print(f"| {ratio:g}:1 | " + " | ".join(cells) + " |", flush=True)
    print(f"\ngradients differ by {worst:.1e} at most")
    if worst > _TOLERANCE:
        sys.exit(1)


def made(folder: Path, *, small: bool) -> TrainEngine:
    """The model as a learner places it."""
    width, layers = (64, 2) if small else (256, 4)
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": _VOCABULARY, "hidden_size": width,
        "intermediate_size": 3 * width, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": width // 8, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    section, optimizer = ModelSection(path=str(folder), init="random"), OptimizerSection(lr=1e-3)
    mesh = Mesh(rank=0, world=1, device=torch.device("cpu"), devices=None)
    model, trained = place(section, folder, mesh, seed=0)
    return TrainEngine(model, trained, AdamW(trained, optimizer), mesh, 1.0)


def group(draw: np.random.Generator, prompt: int, size: int, answer: int, *, agents: bool) -> list[Document]:
    """Answers to one prompt. Those of agents are four turns of answer and observation, and each parts from the one
    before it at a random turn."""
    first = draw.integers(0, _VOCABULARY, prompt)
    documents, before = [], [first]
    for _ in range(size):
        if agents:
            kept = before[: int(draw.integers(1, len(before) + 1))]
            turns = [*kept, *(draw.integers(0, _VOCABULARY, max(2, answer // 4)) for _ in range(9 - len(kept)))]
            before = turns[:8]
            masks = [np.full(len(turn), at % 2 == 1) for at, turn in enumerate(turns[:8])]
            tokens, trained = np.concatenate(turns[:8]), np.concatenate(masks)
        else:
            length = max(2, round(float(draw.lognormal(np.log(answer), 0.4))))
            tokens = np.concatenate([first, draw.integers(0, _VOCABULARY, length)])
            trained = np.arange(len(tokens)) >= prompt
        documents.append(Document(tokens=tokens.astype(np.int32), trained=trained))
    return sorted(documents, key=lambda each: each.num_inputs)


def cell(engine: TrainEngine, documents: Sequence[Document], turns: int) -> tuple[str, float]:
    """A cell of the table, and how far the gradients of both sides are apart."""
    batch, cost = pack(documents), engine.prefixes
    assert cost is not None
    tree = cost.share(batch.tokens_T, batch.offsets)
    if tree is None:
        return "off", 0.0
    sides: tuple[PrefixCost | None, ...] = (None, cost)
    gradients = [gradient(engine, batch, side)[1] for side in sides]  # and a warm-up
    apart = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    ratios = []
    for turn in range(turns):
        seconds = {side: gradient(engine, batch, side)[0] for side in (sides if turn % 2 else sides[::-1])}
        ratios.append(seconds[None] / seconds[cost])
    engine.prefixes = cost
    saved = 1 - tree.num_tokens / batch.num_tokens
    return f"{statistics.median(ratios):.2f}× ({min(ratios):.2f}-{max(ratios):.2f}), {saved:.0%} fewer tokens", apart


def gradient(engine: TrainEngine, batch: PackedBatch, cost: PrefixCost | None) -> tuple[float, Tensor]:
    """Processor time of a forward and backward, and the whole gradient."""
    engine.prefixes = cost
    began = time.process_time()
    _, gradients = engine.gradients([batch], token_cross_entropy, normalizer=batch.num_trained)
    seconds = time.process_time() - began
    return seconds, torch.cat([each.flatten() for each in gradients.values()])


if __name__ == "__main__":
    main()
