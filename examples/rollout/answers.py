# SPDX-License-Identifier: Apache-2.0
"""The rollout protocol by one example: the native engine on a learner's own modules, and an update in flight.

    python examples/rollout/answers.py

The model is tiny and its weights are random, so the tokens have no meaning. Everything else is real.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.engine.mesh import join
from podium.engine.scoring import score
from podium.engine.sharding import place
from podium.recipe import ModelSection, PlacementSection, RolloutSection
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Completion, Request, Sampling
from podium.weights.canary import GapLimits, LogprobGap, choose_canaries
from podium.weights.published import PublishedWeights


def main() -> None:
    """Runs the example in a temporary folder."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder))


def run(folder: Path) -> None:
    """Four samples of each of two prompts; the weights change after the first answer."""
    write_config(folder)

    # A learner on one device, as a run builds it, and an engine that generates with the same modules.
    mesh = join(PlacementSection(device="cpu"), rank=0, world=1, local_rank=0)
    model, trained = place(ModelSection(path=str(folder), init="random"), folder, mesh, seed=0)
    engine = NativeEngine(model, mesh.device, RolloutSection(max_length=64, max_running=8), version=1)
    weights = PublishedWeights(model, trained, mesh, torch.float32)

    prompts = [np.arange(20, dtype=np.int32), np.arange(100, 107, dtype=np.int32)]
    engine.submit(
        [
            Request(
                id=TrajectoryId(prompt_index, sample),
                prompt=prompt,
                sampling=Sampling(max_new_tokens=4 + 2 * sample, temperature=0.8),
                seed=17,
            )
            for prompt_index, prompt in enumerate(prompts)
            for sample in range(4)
        ]
    )

    answers = []
    for answer in engine.results(deadline_s=60.0):  # as they finish; this thread does the work
        answers.append(answer)
        print(f"{answer.id}: {answer.num_tokens} tokens, {answer.finish}, versions {answer.versions_L.tolist()}")
        if len(answers) == 1:
            with torch.no_grad():  # what an optimizer step does: other values in the same tensors
                for each in trained:
                    each.parameter.mul_(1.5)
            engine.install(weights.describe(2), None)  # None: nothing travels; the fingerprints are compared

    load = engine.load()
    print(f"prompt tokens: {load.prefilled_tokens} computed, {load.reused_tokens} found in the cache")

    # The learner scores the sampled tokens: answers of the current weights agree, those of earlier ones do not.
    block = as_block(answers)
    learner = score(model, mesh, block, temperature=0.8)
    print(f"mean gap with answers of both versions: {LogprobGap.between(block, learner).mean:.2f}")
    engine.submit([Request(id=TrajectoryId(2, 0), prompt=prompts[0], sampling=Sampling(max_new_tokens=20), seed=17)])
    fresh = as_block(list(engine.results(deadline_s=60.0)))
    canaries = fresh.take(choose_canaries(fresh, engine.version, count=4))
    gap = LogprobGap.between(canaries, score(model, mesh, canaries))
    print(f"canary of {gap.count} tokens: {'DIFFERS' if gap.exceeds(GapLimits.of('float32')) else 'no alarm'}")
    engine.close()


def write_config(folder: Path) -> None:
    """A model folder without weights: they are sampled from the seed."""
    config = transformers.Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    config.save_pretrained(folder)


def as_block(answers: list[Completion]) -> TrajectoryBlock:
    """Prompts and answers as packed trajectories. Tokens of a prompt have no version."""
    answers = sorted(answers, key=lambda each: each.id)
    lengths = [len(each.prompt) + each.num_tokens for each in answers]
    return TrajectoryBlock(
        ids=TrajectoryIds.of([each.id for each in answers]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens_T=np.concatenate([part for each in answers for part in (each.prompt, each.tokens_L)]),
        loss_mask_T=np.concatenate([np.arange(n) >= len(e.prompt) for e, n in zip(answers, lengths, strict=True)]),
        behavior_logprobs_T=np.concatenate(
            [part for each in answers for part in (np.zeros(len(each.prompt), np.float32), each.logprobs_L)]
        ),
        versions_T=np.concatenate(
            [part for each in answers for part in (np.full(len(each.prompt), -1, np.int32), each.versions_L)]
        ),
    )


if __name__ == "__main__":
    main()
