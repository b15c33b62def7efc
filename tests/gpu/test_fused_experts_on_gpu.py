# SPDX-License-Identifier: Apache-2.0
"""The kernels for the experts of decode steps on one CUDA device: right for odd shapes and routings, also in a graph
whose routing changes between replays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from podium.rollout.native.fused_experts import decode_experts, plain_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def inputs(
    tokens: int, per_token: int, routing: str, *, experts: int = 24, hidden: int = 208, width: int = 72
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    if routing == "one":
        chosen = torch.arange(experts - per_token, experts).expand(tokens, per_token)
    else:
        among = experts if routing == "even" else max(per_token, experts // 4)
        chosen = torch.rand(tokens, among).argsort(dim=1)[:, :per_token]
    drawn = (
        torch.randn(tokens, hidden),
        torch.rand(tokens, per_token),
        torch.randn(experts, 2 * width, hidden) * hidden**-0.5,
        torch.randn(experts, hidden, width) * width**-0.5,
    )
    state, gates, gate_up, down = (each.to("cuda", torch.bfloat16) for each in drawn)
    return state, chosen.cuda(), gates, gate_up, down


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


@pytest.mark.parametrize("routing", ["even", "few", "one"])
@pytest.mark.parametrize("per_token", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 3, 17, 64, 256])
def test_kernels_compute_what_plain_torch_does(tokens: int, per_token: int, routing: str) -> None:
    """Memory that the kernels are given holds NaN: freed memory of another computation could hold the right answer."""
    tensors = inputs(tokens, per_token, routing)
    poison = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(64)]
    del poison
    found = decode_experts(*tensors)
    assert error(found, plain_experts(*tensors)) < 0.02


def test_a_captured_graph_follows_other_experts() -> None:
    state, chosen, gates, gate_up, down = inputs(64, 8, "even")
    decode_experts(state, chosen, gates, gate_up, down)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_experts(state, chosen, gates, gate_up, down)
    for routing in ("one", "few", "even"):
        chosen.copy_(inputs(64, 8, routing)[1])
        graph.replay()
        assert error(out, plain_experts(state, chosen, gates, gate_up, down)) < 0.02
