# SPDX-License-Identifier: Apache-2.0
"""Outputs of transformers' own forward, computed in two ways that are equal but for rounding.

Podium's packed forward is compared with one of them. The distance between the two is that comparison's noise floor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from podium.models.packing import TokenBatch

PlainKind = Literal["plain", "padded"]
"""`plain`: one document at a time with eager attention. `padded`: all in one batch, padded on the right, with torch's
fused attention where the model supports it."""


def plain_outputs(hf: PreTrainedModel, batch: TokenBatch, run: Callable[[Tensor], Tensor], kind: PlainKind) -> Tensor:
    """The outputs at all positions of the documents, in order. `run`: token ids [D, L] -> outputs [D, L, X]."""
    bounds = list(pairwise(batch.packing.boundaries.tolist()))
    before = hf.config._attn_implementation
    try:
        if kind == "plain":
            hf.set_attn_implementation("eager")
            return torch.cat([run(batch.tokens_T[None, start:stop])[0] for start, stop in bounds])
        _set_fused_attention(hf)
        longest = max(stop - start for start, stop in bounds)
        tokens_DL = batch.tokens_T.new_zeros((len(bounds), longest))
        for row, (start, stop) in enumerate(bounds):
            tokens_DL[row, : stop - start] = batch.tokens_T[start:stop]
        # No mask: in causal attention nothing on the left sees the padding on the right.
        outputs_DL = run(tokens_DL)
        return torch.cat([outputs_DL[row, : stop - start] for row, (start, stop) in enumerate(bounds)])
    finally:
        hf.set_attn_implementation(before)


def _set_fused_attention(hf: PreTrainedModel) -> None:
    """torch's attention; eager where the model does not have it, or has it without its soft cap."""
    caps = getattr(hf.config.get_text_config(), "attn_logit_softcapping", None) is not None
    try:
        hf.set_attn_implementation("eager" if caps else "sdpa")
    except ValueError:
        hf.set_attn_implementation("eager")
