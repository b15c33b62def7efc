# SPDX-License-Identifier: Apache-2.0
"""Blocks of ring attention by torch's flash attention in bfloat16: outputs, log-sum-exp and gradients of the same
written out in float32."""

from __future__ import annotations

import pytest
import torch

from helpers.engines import relative_l2
from podium.models.attention_blocks import attend_block, block_gradients, has_flash
from podium.models.attention_spec import AttentionSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("window", [None, 100, 1000])
@pytest.mark.parametrize(("queries", "keys", "ahead"), [(512, 512, 0), (300, 512, 512), (512, 64, 64), (40, 512, 560)])
def test_flash_blocks_are_those_written_out(queries: int, keys: int, ahead: int, window: int | None) -> None:
    spec = AttentionSpec(window=window)
    if window is not None:  # as the ring cuts them: each query sees a key, and each key is seen
        queries = min(queries, window - 1 + keys - ahead)
        cut = max(0, ahead - window + 1)
        keys, ahead = keys - cut, ahead - cut
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = (6, queries, 64), (2, keys, 64), (2, keys, 64), (6, queries, 64)
    q, k, v, grad = (torch.randn(shape, generator=draw, device="cuda").bfloat16() for shape in shapes)
    assert has_flash(q, v, spec) == (window is None or queries <= keys)
    out, lse = attend_block(q, k, v, ahead, spec)
    wanted, wanted_lse = attend_block(q.float(), k.float(), v.float(), ahead, spec)
    assert relative_l2(out, wanted) < 1e-2
    assert relative_l2(lse, wanted_lse) < 1e-3
    found = block_gradients(q, k, v, out.bfloat16(), lse, grad, ahead, spec)
    exact = block_gradients(q.float(), k.float(), v.float(), wanted, wanted_lse, grad.float(), ahead, spec)
    for mine, other in zip(found, exact, strict=True):
        assert relative_l2(mine, other) < 2e-2
