# SPDX-License-Identifier: Apache-2.0
"""Compares Podium's packed forward with transformers on random tokens, within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from podium.data.documents import Document, PackedBatch, pack
from podium.errors import PodiumError, UnsupportedModelError
from podium.models.causal_lm import PackedCausalLM, longest_packable
from podium.models.cost import layer_windows
from podium.models.packing import to_device
from podium.models.scalar import PackedScalarLM

# Differences of log-probs (largest, mean) that are rounding in a model of a few layers. bfloat16 keeps 8 bits, so two
# correct computations differ by some hundredths.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
MEAN_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
# Deep models amplify rounding. Their limit is this many times the difference of two plain forwards: packed and plain
# forward differ in more kernels than those. Attention to other documents is 20 times the floor and more.
_TIMES_THE_FLOOR = 3.0
# No limit is above these: a wrong mask could hide below it.
_HIGHEST, _HIGHEST_MEAN = 4.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Log-probs of all tokens of the vocabulary, Podium against transformers. The floor is the difference of two plain
    forwards of transformers, which are equal but for rounding."""

    architecture: str
    largest: float
    mean: float
    dtype: torch.dtype
    floor_largest: float
    floor_mean: float

    config_only: str | None = None  # folder without *.safetensors: only its config was used, with random weights

    @property
    def limit(self) -> float:
        """Largest difference that is rounding."""
        return max(TOLERANCE[self.dtype], min(_TIMES_THE_FLOOR * self.floor_largest, _HIGHEST))

    @property
    def mean_limit(self) -> float:
        """Mean difference that is rounding."""
        return max(MEAN_TOLERANCE[self.dtype], min(_TIMES_THE_FLOOR * self.floor_mean, _HIGHEST_MEAN))

    @property
    def has_random_weights(self) -> bool:
        """Whether random weights were compared, because the folder has none that Podium reads."""
        return self.config_only is not None

    @property
    def agrees(self) -> bool:
        """Whether both differences are rounding."""
        return self.largest <= self.limit and self.mean <= self.mean_limit

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "DIFFERS"
        if self.has_random_weights:
            verdict += f" (random weights: {self.config_only} has no *.safetensors)"
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.architecture} {verdict}: log-probs differ by {self.largest:.2e} at most and {self.mean:.2e} on "
            f"average (allowed {self.limit:.2g} and {self.mean_limit:.2g} in {kind}; two plain forwards differ by "
            f"{self.floor_largest:.2e} and {self.floor_mean:.2e})"
        )


def random_batch(vocab_size: int, lengths: tuple[int, ...] = (7, 12, 12, 40), seed: int = 0) -> PackedBatch:
    """Documents of random tokens, all trained: short ones, two of one length, one longer than small windows."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        trained = np.ones(length + 1, np.bool_)
        trained[0] = False
        documents.append(Document(tokens=rng.integers(0, vocab_size, length + 1).astype(np.int32), trained=trained))
    return pack(documents)


def compare(name: str, ours: Tensor, theirs: Tensor, padded: Tensor, dtype: torch.dtype) -> Comparison:
    """Distance between the log-probs of both sides, from their logits over the real vocabulary. `padded`: the plain
    side again, computed in another way."""
    largest, mean = _distance(ours, theirs)
    floor_largest, floor_mean = _distance(padded, theirs)
    return Comparison(
        architecture=name, largest=largest, mean=mean, dtype=dtype, floor_largest=floor_largest, floor_mean=floor_mean
    )


def _distance(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Largest and mean difference of log-probs; infinite if one is not finite."""
    gap = (torch.log_softmax(one.float(), -1) - torch.log_softmax(other.float(), -1)).abs()
    if not bool(torch.isfinite(gap).all()):
        return math.inf, math.inf
    return float(gap.max()), float(gap.mean())


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """A context in which an error of the model's own code means that Podium cannot run this architecture. (Running out
    of memory does not, and among several ranks neither does a RuntimeError: it may be a lost rank.)"""
    try:
        yield
    except (PodiumError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and dist.is_initialized():
            raise
        reason = (str(error) or "no message").splitlines()[0]
        raise UnsupportedModelError(
            f"{name} fails on packed documents ({type(error).__name__}: {reason}), so it is not supported. Its "
            "attention or layers want what Podium does not give them: a mask, a cache, or other inputs than tokens."
        ) from error


@torch.no_grad()
def self_check(
    model: PackedCausalLM | PackedScalarLM, device: torch.device, dtype: torch.dtype, *, max_length: int | None = None
) -> Comparison:
    """Compares the packed forward with one document at a time through transformers' own attention and head, on the
    weights to be trained. For a model that scores, only the body is compared, because its head is still zero. Raises
    UnsupportedModelError if they differ, or if documents of `max_length` would. Collective."""
    batch = to_device(random_batch(model.vocab_size), device)
    windows: list[int | None] = []
    batch = replace(batch, packing=replace(batch.packing, windows=windows))
    model.eval()
    # Compiling for these few tokens would take longer than the check.
    # Rounding to fp8 would amplify differences, and is not what is checked.
    products = nullcontext() if model.fp8 is None else model.fp8.computing("plain")
    with torch.compiler.set_stance("force_eager"), products, refusing(type(model.hf).__name__):
        ours = model(batch, None, kind="scores")
        theirs = model(batch, None, kind="plain")
        padded = model(batch, None, kind="padded")
    model.train()
    comparison = compare(type(model.hf).__name__, ours, theirs, padded, dtype)
    if not comparison.agrees:
        raise UnsupportedModelError(
            f"{comparison}. Packed documents would be trained wrongly with this architecture, so it is not supported. "
            "Layers that mix tokens outside of attention (linear attention, state space) are the usual reason."
        )
    _check_reach(model, windows, max_length or int(model.hf.config.get_text_config().max_position_embeddings))
    return comparison


def _check_reach(model: PackedCausalLM | PackedScalarLM, windows: list[int | None], max_length: int) -> None:
    """Checks problems that only show in documents longer than those of the check: windows that attention does not
    receive, and rotary embeddings that follow the longest document of a pack."""
    config, name = model.hf.config.get_text_config(), type(model.hf).__name__
    narrow = [window for window in layer_windows(config) if window is not None and window < max_length]
    chunk = getattr(config, "attention_chunk_size", None)
    if (narrow and not any(windows)) or (chunk is not None and chunk < max_length):
        reach = chunk or narrow[0]
        raise UnsupportedModelError(
            f"{name} limits attention to {reach} tokens in a way that its attention does not receive, so documents "
            f"of up to {max_length} tokens would be trained wrongly. Set data.max_length to {reach} or less."
        )
    limit = longest_packable(config)
    if limit is not None and max_length > limit:
        raise UnsupportedModelError(
            f"{name} changes its rotary embedding beyond {limit} positions by the longest document of a pack, so "
            f"documents of up to {max_length} tokens would change each other. Set data.max_length to {limit} or less."
        )
