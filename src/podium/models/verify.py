# SPDX-License-Identifier: Apache-2.0
"""Is Podium's packed forward the model that transformers means? Compared on random tokens, within a tolerance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from podium.data.documents import Document, PackedBatch, pack
from podium.errors import UnsupportedModelError
from podium.models.causal_lm import PackedCausalLM
from podium.models.packing import to_device

# Largest difference of a log-prob. bfloat16 keeps 8 bits, so two right ways of computing differ by some hundredths.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
MEAN_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Log-probs of all tokens of the vocabulary, Podium against transformers."""

    architecture: str
    largest: float
    mean: float
    dtype: torch.dtype

    @property
    def agrees(self) -> bool:
        return self.largest <= TOLERANCE[self.dtype] and self.mean <= MEAN_TOLERANCE[self.dtype]

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "DIFFERS"
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.architecture} {verdict}: log-probs differ by {self.largest:.2e} at most and {self.mean:.2e} on "
            f"average (allowed {TOLERANCE[self.dtype]:g} and {MEAN_TOLERANCE[self.dtype]:g} in {kind})"
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


def compare(name: str, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> Comparison:
    """Logits of both sides over the real vocabulary -> how far apart their log-probs are."""
    gap = (torch.log_softmax(ours.float(), -1) - torch.log_softmax(theirs.float(), -1)).abs()
    largest = float(gap.max()) if bool(torch.isfinite(gap).all()) else float("inf")
    return Comparison(architecture=name, largest=largest, mean=float(gap.mean()), dtype=dtype)


@torch.no_grad()
def self_check(model: PackedCausalLM, device: torch.device, dtype: torch.dtype) -> Comparison:
    """Packed against document by document through transformers' own attention and head, on the weights about to be
    trained. Raises UnsupportedModelError when they differ. Collective."""
    batch = to_device(random_batch(model.vocab_size), device)
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # compiling for these few tokens would take longer than the check
        ours = model(batch, None, kind="scores")
        theirs = model(batch, None, kind="plain")
    model.train()
    found = compare(type(model.hf).__name__, ours, theirs, dtype)
    if not found.agrees:
        raise UnsupportedModelError(
            f"{found}. Packed documents would be trained wrongly with this architecture, so it is not supported. "
            "Layers that mix tokens outside of attention (linear attention, state space) are the usual reason."
        )
    return found
