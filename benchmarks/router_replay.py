# SPDX-License-Identifier: Apache-2.0
"""What router replay does to the gap between the log-probs of engine and learner, on a small mixture of experts.

    .venv/bin/python benchmarks/router_replay.py

A small Qwen3-MoE is trained for some steps on random sums, so that its routers are not those of a fresh model. Then an
engine answers prompts, and the learner scores the answers in float32 with the routers' own choices and with those that
the engine recorded. The engine's weights are the learner's as they are (float32), rounded to bfloat16 (the values that
a bfloat16 engine holds), computed with in bfloat16, or those before the learner's last update. Prints a table."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers

from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, pack
from podium.data.routed_experts import Experts
from podium.data.trajectories import TrajectoryBlock, TrajectoryId
from podium.engine.mesh import Mesh
from podium.engine.optimizer import AdamW
from podium.engine.scoring import score
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.models.causal_lm import PackedCausalLM
from podium.recipe import ModelSection, OptimizerSection, RolloutSection
from podium.roles.blocks import block_of
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Request, Sampling
from podium.weights.canary import LogprobGap

VOCABULARY = 16  # ten digits, plus, equals, and some that do not occur
PLUS, EQUALS = 10, 11
LR = 2e-3


def main() -> None:
    """Trains, answers, scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--per-token", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # it has no bfloat16 on some CPUs, and warns
    mesh = Mesh(rank=0, world=1, device=torch.device("cpu"), devices=None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        transformers.Qwen3MoeConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, head_dim=16,
            num_hidden_layers=arguments.layers, num_attention_heads=4, num_key_value_heads=2,
            num_experts=arguments.experts, num_experts_per_tok=arguments.per_token, norm_topk_prob=True,
            decoder_sparse_step=1, max_position_embeddings=128,
        ).save_pretrained(folder)  # fmt: skip
        section = ModelSection(path=name, init="random")
        learner, trained = place(section, folder, mesh, seed=0)
        engine = TrainEngine(learner, trained, AdamW(trained, OptimizerSection(lr=LR)), mesh, 1.0)
        documents = sums(0)
        train(engine, documents, arguments.steps)
        older = [parameter.detach().clone() for parameter in learner.hf.parameters()]
        train(engine, documents, 1)
        newest = list(learner.hf.parameters())
        rounded = [parameter.detach().bfloat16() for parameter in newest]
        print("| engine | other experts | gap/mean without | with replay | gap/max without | with replay |")
        print("|---|---|---|---|---|---|")
        ways = {"float32": newest, "rounded to bfloat16": rounded, "bfloat16": rounded, "one update older": older}
        for way, weights in ways.items():
            dtype = "bfloat16" if way == "bfloat16" else "float32"
            sampler, _ = place(section.model_copy(update={"dtype": dtype}), folder, mesh, seed=0)
            with torch.no_grad():
                for mine, theirs in zip(sampler.hf.parameters(), weights, strict=True):
                    mine.copy_(theirs)
            block = answered(sampler, mesh, arguments.episodes)
            free, replayed = (
                LogprobGap.between(block, score(learner, mesh, block, replays=replays)) for replays in (False, True)
            )
            print(
                f"| {way} | {mismatch(learner, mesh, block):.2%} | {free.mean:.2e} | {replayed.mean:.2e} | "
                f"{free.largest:.2e} | {replayed.largest:.2e} |",
                flush=True,
            )


def sums(seed: int) -> Iterator[Document]:
    """Digits of a sum: 123+45=168."""
    draw = np.random.default_rng(seed)
    while True:
        left, right = draw.integers(0, 1000, 2).tolist()
        tokens = [*map(int, str(left)), PLUS, *map(int, str(right)), EQUALS, *map(int, str(left + right))]
        trained = np.arange(len(tokens)) > 0
        yield Document(tokens=np.array(tokens, np.int32), trained=trained)


def train(engine: TrainEngine, documents: Iterator[Document], steps: int) -> None:
    """Cross-entropy on sums."""
    for _ in range(steps):
        batch = pack([next(documents) for _ in range(64)])
        report = engine.train_step([batch], token_cross_entropy, normalizer=batch.num_trained, lr=LR).resolve()
    assert report.routers is not None
    print(f"loss {report.loss:.3f} after {steps} steps, {report.routers.metrics()}\n")


def answered(sampler: PackedCausalLM, mesh: Mesh, episodes: int) -> TrajectoryBlock:
    """Answers to sums, of 24 tokens each: what follows a sum is the next one."""
    engine, documents = NativeEngine(sampler, mesh.device, RolloutSection(), records_experts=True), sums(1)
    engine.submit(
        [
            Request(
                id=TrajectoryId(number, 0), prompt=next(documents).tokens[:5],
                sampling=Sampling(max_new_tokens=24, temperature=1.0),
            )
            for number in range(episodes)
        ]
    )  # fmt: skip
    block, _ = block_of(list(engine.results(deadline_s=600)))
    engine.close()
    return block


def mismatch(learner: PackedCausalLM, mesh: Mesh, block: TrajectoryBlock) -> float:
    """Share of the engine's choices that the learner's routers would not make."""
    engine = NativeEngine(learner, mesh.device, RolloutSection(), records_experts=True)
    prompts = [block.tokens_T[begin:end] for begin, end in zip(block.offsets[:-1], block.offsets[1:], strict=True)]
    engine.submit(
        [
            Request(id=TrajectoryId(number, 0), prompt=prompt.copy(), sampling=Sampling(max_new_tokens=1))
            for number, prompt in enumerate(prompts)
        ]
    )
    own: list[Experts | None] = [each.experts for each in sorted(engine.results(deadline_s=600), key=lambda c: c.id)]
    engine.close()
    assert block.experts_TLK is not None
    differ = total = 0
    for begin, prompt, choices in zip(block.offsets[:-1].tolist(), prompts, own, strict=True):
        assert choices is not None
        fed = len(prompt) - 1  # the engine has not fed the last token
        theirs = block.experts_TLK[begin : begin + fed]
        differ += int((~(theirs[..., :, None] == choices[:fed, ..., None, :]).any(-1)).sum())
        total += theirs.size
    return differ / total


if __name__ == "__main__":
    main()
