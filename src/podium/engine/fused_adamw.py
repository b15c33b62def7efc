# SPDX-License-Identifier: Apache-2.0
"""AdamW in one pass over memory (CUDA): gradient in any dtype, float32 master and moments, and the compute-dtype copy.

Torch's fused kernel wants the gradient in the master's dtype and leaves the copy to a second pass: 40 bytes of traffic
for each parameter where this one moves 28.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    master, gradient, first, second, copy, scalars, lr, beta1, beta2, eps, weight_decay, numel,
    HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    clip, skip = tl.load(scalars), tl.load(scalars + 1)
    correction1, correction2 = tl.load(scalars + 2), tl.load(scalars + 3)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # A skipped step stores nothing, so that not even a NaN is written.
    live = (at < numel) & (skip == 0)
    g = tl.load(gradient + at, mask=live).to(tl.float32) * clip
    p = tl.load(master + at, mask=live) * (1.0 - lr * weight_decay)
    m = tl.load(first + at, mask=live)
    v = tl.load(second + at, mask=live)
    m += (g - m) * (1.0 - beta1)
    v = v * beta2 + g * g * (1.0 - beta2)
    p -= lr / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
    tl.store(master + at, p, mask=live)
    tl.store(first + at, m, mask=live)
    tl.store(second + at, v, mask=live)
    if HAS_COPY:
        tl.store(copy + at, p.to(copy.dtype.element_ty), mask=live)


def update(
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    copy: Tensor | None,
    scalars: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Updates one tensor in place. `scalars` on the device: clip factor, skip flag, and the two bias corrections."""
    numel, target = master.numel(), master if copy is None else copy
    _update[(triton.cdiv(numel, _BLOCK),)](
        master, gradient.contiguous(), first, second, target, scalars, lr, *betas, eps, weight_decay, numel,
        HAS_COPY=copy is not None, BLOCK=_BLOCK,
    )  # fmt: skip


def scalars_for(clip: Tensor, skip: Tensor, count: Tensor, betas: tuple[float, float]) -> Tensor:
    """The scalars that the kernel reads on the device; `count` is the number of updates including this one."""
    return torch.stack([clip, skip, 1.0 - betas[0] ** count, 1.0 - betas[1] ** count]).float()
