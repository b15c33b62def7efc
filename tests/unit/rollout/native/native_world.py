# SPDX-License-Identifier: Apache-2.0
"""Tiny learners, native engines on their modules, requests, and the learner's own log-probs to compare with."""

# L new tokens

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from helpers.engines import one_rank
from helpers.tiny import VOCABULARY
from podium.data.documents import Document, pack
from podium.data.trajectories import TrajectoryId
from podium.engine.parameters import TrainedParameter
from podium.engine.sharding import place
from podium.models.causal_lm import PackedCausalLM
from podium.models.packing import to_device
from podium.recipe import ModelSection, RolloutSection
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Completion, Request, Sampling
from podium.weights.published import PublishedWeights
from podium.weights.versions import WeightVersion

CPU = torch.device("cpu")
DEADLINE_S = 30.0


@dataclass(frozen=True, eq=False)
class Learner:
    """A model as a run on one rank holds it."""

    model: PackedCausalLM
    trained: Sequence[TrainedParameter]

    @classmethod
    def of(cls, folder: Path) -> Learner:
        model, trained = place(ModelSection(path=str(folder)), folder, one_rank(), seed=0)
        return cls(model, trained)

    def engine(self, *, version: int = 0, decode: Any = None, **section: Any) -> NativeEngine:
        return NativeEngine(self.model, CPU, RolloutSection(**section), version=version, decode=decode)

    def describe(self, number: int) -> WeightVersion:
        return PublishedWeights(self.model, self.trained, one_rank(), torch.float32).describe(number)

    @torch.no_grad()
    def change(self, factor: float) -> None:
        """As an update does: in place, under the engine's feet."""
        for each in self.trained:
            each.parameter.mul_(factor)

    @torch.no_grad()
    def logprobs_L(self, completion: Completion, *, temperature: float = 1.0) -> NDArray[np.float32]:
        """Of the answer, in one packed forward."""
        tokens = np.concatenate([completion.prompt, completion.tokens_L]).astype(np.int32)
        trained = np.arange(len(tokens)) >= len(completion.prompt)
        batch = to_device(pack([Document(tokens=tokens, trained=trained)]), CPU)
        found: NDArray[np.float32] = self.model(batch, None, "logprobs", temperature).numpy()
        return found

    def gap(self, completion: Completion, *, temperature: float = 1.0) -> float:
        """Largest difference between the engine's log-probs and the learner's."""
        return float(np.abs(completion.logprobs_L - self.logprobs_L(completion, temperature=temperature)).max())


def prompt_of(length: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng((length, seed)).integers(0, VOCABULARY, length).astype(np.int32)


def ask(draw: int, prompt: Any = 5, *, new: int = 8, sample: int = 0, **how: Any) -> Request:
    """A request for `new` tokens after a prompt of so many random ones, or these."""
    tokens = prompt_of(prompt, draw) if isinstance(prompt, int) else np.asarray(prompt, np.int32)
    return Request(id=TrajectoryId(draw, sample), prompt=tokens, sampling=Sampling(max_new_tokens=new, **how))


def sequences(engine: NativeEngine, requests: Iterable[Request]) -> dict[TrajectoryId, Completion]:
    """All of them, each once."""
    requests = list(requests)
    engine.submit(requests)
    found = list(engine.results(deadline_s=DEADLINE_S))
    assert sorted(each.id for each in found) == sorted(each.id for each in requests)
    return {each.id: each for each in found}


def sequence(engine: NativeEngine, request: Request) -> Completion:
    return sequences(engine, [request])[request.id]


def assert_same(found: Completion, wanted: Completion, *, atol: float = 1e-4) -> None:
    assert (found.finish, found.tokens_L.tolist()) == (wanted.finish, wanted.tokens_L.tolist())
    np.testing.assert_allclose(found.logprobs_L, wanted.logprobs_L, atol=atol, rtol=0)


def cache_gib(learner: Learner, tokens: int, *, block_size: int) -> float:
    """A budget that holds so many tokens in pages, and the page that is the engine's own."""
    capacity = learner.engine().capacity  # in slots, which are all given out
    return (tokens + block_size) * (capacity.cache_bytes // capacity.cache_tokens) / 2**30
