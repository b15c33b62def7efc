# SPDX-License-Identifier: Apache-2.0
"""What engines are asked and judged by: requests, transformers' own forward pass, and weights to install."""

# L new tokens · V vocabulary

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from podium.data.trajectories import TrajectoryId
from podium.rollout.engine import RolloutEngine
from podium.rollout.requests import Completion, Request, Sampling
from podium.weights.fingerprints import fingerprint
from podium.weights.versions import TensorSpec, WeightVersion

DEADLINE_S = 60.0
PROMPT = (5, 17, 30, 8, 21)


def ask(
    draw: int, prompt: Sequence[int] = PROMPT, *, new: int = 8, sample: int = 0, seed: int = 0, **how: Any
) -> Request:
    """A request for `new` tokens."""
    sampling = Sampling(max_new_tokens=new, **how)
    return Request(id=TrajectoryId(draw, sample), prompt=np.array(prompt, np.int32), sampling=sampling, seed=seed)


def answers(engine: RolloutEngine, requests: Sequence[Request]) -> dict[TrajectoryId, Completion]:
    """All of them, each exactly once."""
    engine.submit(requests)
    return collected(engine.results(deadline_s=DEADLINE_S))


def collected(results: Iterable[Completion]) -> dict[TrajectoryId, Completion]:
    found: dict[TrajectoryId, Completion] = {}
    for completion in results:
        assert completion.id not in found, f"{completion.id} came twice"
        found[completion.id] = completion
    return found


def answer(engine: RolloutEngine, request: Request) -> Completion:
    return answers(engine, [request])[request.id]


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Runs in another thread; `result` with a timeout raises what it raised."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work)
    finally:
        pool.shutdown(wait=False)


def wait_for_tokens(engine: RolloutEngine, count: int) -> None:
    """Until the engine has drawn so many in all. `load` waits for its turn, so this goes step by step."""
    until = time.monotonic() + DEADLINE_S
    while engine.load().generated_tokens < count:
        assert time.monotonic() < until, f"{count} tokens were not drawn in time"


class Judge:
    """The model of a folder as transformers computes it, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def logits_LV(self, prompt: Sequence[int], tokens_L: Sequence[int]) -> Tensor:
        """Those that each token of the answer was drawn from."""
        sequence = torch.tensor([[*map(int, prompt), *map(int, tokens_L)]])
        return self.model(sequence).logits[0, len(prompt) - 1 : -1].float()

    def logprobs_L(self, completion: Completion, *, temperature: float = 1.0) -> np.ndarray:
        logits_LV = self.logits_LV(completion.prompt.tolist(), completion.tokens_L.tolist())
        return of_tokens((logits_LV / temperature).log_softmax(-1), completion.tokens_L)

    def sampled_logprobs_L(self, completion: Completion, sampling: Sampling) -> np.ndarray:
        """Those of the distribution that the tokens were sampled from, by transformers' own processors."""
        tokens = [*completion.prompt.tolist(), *completion.tokens_L.tolist()]
        logits_LV = self.logits_LV(completion.prompt.tolist(), completion.tokens_L.tolist())
        for new, logits_V in enumerate(logits_LV):
            past = torch.tensor([tokens[: len(completion.prompt) + new]])
            logits_V[:] = _processed(logits_V[None].clone(), past, sampling, new)[0]
        return of_tokens(logits_LV.log_softmax(-1), completion.tokens_L)

    def has_greedy(self, completion: Completion) -> bool:
        """Whether each token is the likeliest after those before it: the answer is then the greedy one."""
        tokens = completion.tokens_L.tolist()
        return bool(self.logits_LV(completion.prompt.tolist(), tokens).argmax(-1).tolist() == tokens)

    def greedy(self, prompt: Sequence[int], new: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(new):
            tokens.append(int(self.logits_LV(prompt, [*tokens, 0])[-1].argmax()))
        return tokens


def _processed(logits_1V: Tensor, past: Tensor, sampling: Sampling, new: int) -> Tensor:
    for token, bias in sampling.logit_bias.items():
        logits_1V[:, token] += bias
    forbidden = set(sampling.stop_tokens if new < sampling.min_new_tokens else ())
    if sampling.allowed_tokens is not None:
        forbidden |= set(range(logits_1V.shape[1])) - sampling.allowed_tokens
    logits_1V[:, sorted(forbidden)] = -torch.inf
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
            TemperatureLogitsWarper(sampling.temperature),
            TopKLogitsWarper(sampling.top_k or logits_1V.shape[1]),
            TopPLogitsWarper(sampling.top_p),
            MinPLogitsWarper(sampling.min_p),
        ]
    )
    return processors(past, logits_1V)


def of_tokens(table_LV: Tensor, tokens_L: Iterable[int]) -> np.ndarray:
    index = torch.tensor(list(map(int, tokens_L)))
    return table_LV[torch.arange(len(index)), index].numpy()


@dataclass(frozen=True, eq=False)
class Weights:
    """Tensors as a delivery. `sent` replaces some on the way; `stop_after` ends it early."""

    tensors_by_name: Mapping[str, Tensor]
    sent: Mapping[str, Tensor] = field(default_factory=dict)
    stop_after: int | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, model: torch.nn.Module) -> Weights:
        return cls({name: parameter.detach() for name, parameter in model.named_parameters()})

    @classmethod
    def of_engine(cls, engine: Any) -> Weights:
        """The weights in place in a native engine, without padding rows."""
        size = engine._model.vocab_size
        return cls(
            {
                name: (each[:size] if "embed" in name or "lm_head" in name else each).detach().clone()
                for name, each in engine._model.hf.named_parameters()
            }
        )

    def version(self, number: int) -> WeightVersion:
        specs = [
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.tensors_by_name.items()
        ]
        fingerprints = tuple(fingerprint(tensor) for tensor in self.tensors_by_name.values())
        return WeightVersion(number=number, manifest=tuple(specs), fingerprints=fingerprints)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """One buffer for all, overwritten for each, as the contract allows."""
        buffer = torch.empty(max(tensor.numel() for tensor in self.tensors_by_name.values()) * 2)
        for number, (name, tensor) in enumerate(self.tensors_by_name.items()):
            if number == self.stop_after:
                if self.error is not None:
                    raise self.error
                return
            value = self.sent.get(name, tensor)
            yield name, buffer[: value.numel()].view(value.shape).copy_(value)
        buffer.fill_(torch.nan)
