# SPDX-License-Identifier: Apache-2.0
"""Routers of a mixture of experts: records which experts each token goes to, replays such a record, sums statistics
and adds the gradient of the load-balancing loss.

What the routers of one forward do beside routing arrives with its `packing`, as document boundaries do. Layers do not
hand that on to their routers, so it is set in these before the forward, and stays until the backward pass is over: a
layer that is recomputed there does the same again."""

# T packed tokens · L layers with a router · E experts · K experts of a token

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from podium.algorithms.router_statistics import NUM_OTHER_COLUMNS
from podium.data.routed_experts import RouterShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Gates = Callable[[Any, Tensor, Tensor], Tensor]
"""Router, logits [T, E], experts [T, K] -> the weights of these experts, as the model computes them."""


def _softmax_gates(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Qwen-MoE, OLMoE: probabilities over all experts, normalised over the chosen ones if the config says so."""
    gates_TK = torch.softmax(logits_TE, dim=-1, dtype=torch.float32).gather(1, experts_TK)
    if router.norm_topk_prob:
        gates_TK = gates_TK / gates_TK.sum(dim=-1, keepdim=True)
    return gates_TK.to(logits_TE.dtype)


def _mixtral_gates(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    gates_TK = torch.softmax(logits_TE.float(), dim=-1).gather(1, experts_TK)
    return gates_TK / gates_TK.sum(dim=-1, keepdim=True)


def _chosen_softmax_gates(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """GPT-OSS: softmax over the logits of the chosen experts alone."""
    return torch.softmax(logits_TE.gather(1, experts_TK), dim=1, dtype=logits_TE.dtype)


def _sigmoid_gates(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """DeepSeek-V3, GLM-4-MoE: independent scores. Groups and biases choose experts and do not weigh them."""
    gates_TK = logits_TE.sigmoid().gather(1, experts_TK)
    if router.norm_topk_prob:
        gates_TK = gates_TK / (gates_TK.sum(dim=-1, keepdim=True) + 1e-20)
    scale: float = router.routed_scaling_factor
    return gates_TK * scale


@dataclass(frozen=True, slots=True)
class _Family:
    gates: Gates
    is_sigmoid: bool = False


# By class: all of them return (logits [T, E], weights [T, K], experts [T, K]).
_FAMILIES = {
    "Qwen2MoeTopKRouter": _Family(_softmax_gates),
    "Qwen3MoeTopKRouter": _Family(_softmax_gates),
    "OlmoeTopKRouter": _Family(_softmax_gates),
    "MixtralTopKRouter": _Family(_mixtral_gates),
    "GptOssTopKRouter": _Family(_chosen_softmax_gates),
    "DeepseekV3TopkRouter": _Family(_sigmoid_gates, is_sigmoid=True),
    "Glm4MoeTopkRouter": _Family(_sigmoid_gates, is_sigmoid=True),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterSums:
    """Filled by one forward. A layer that is computed twice writes the same again."""

    sums_LC: Tensor  # counts of tokens [E], sums of probabilities [E], and three more: see RouterStatistics
    is_real_T: Tensor  # 1 for tokens that count, 0 for padding

    @classmethod
    def empty(cls, shape: RouterShape, is_real_T: Tensor) -> RouterSums:
        """Zeros, of the tokens of one forward."""
        columns = 2 * shape.num_experts + NUM_OTHER_COLUMNS
        return cls(
            sums_LC=torch.zeros(shape.num_layers, columns, dtype=torch.float32, device=is_real_T.device),
            is_real_T=is_real_T,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """What the routers of one forward do beside routing."""

    replayed_TLK: Tensor | None = None  # experts to choose; the dtype's largest value where the router chooses itself
    recorded_LTK: Tensor | None = None  # written
    sums: RouterSums | None = None  # written
    balance_LE: Tensor | None = None  # gradient of the load-balancing loss in each probability; needs `sums`

    def of_layer(self, layer: int) -> LayerRouting:
        """The part of one router."""
        replayed, recorded, sums, balance = self.replayed_TLK, self.recorded_LTK, self.sums, self.balance_LE
        return LayerRouting(
            replayed_TK=None if replayed is None else replayed[:, layer],
            recorded_TK=None if recorded is None else recorded[layer],
            sums_C=None if sums is None else sums.sums_LC[layer],
            is_real_T=None if sums is None else sums.is_real_T,
            balance_E=None if balance is None else balance[layer],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRouting:
    """One router's part of a Routing: without the number of its layer, so that layers share their compiled code."""

    replayed_TK: Tensor | None
    recorded_TK: Tensor | None
    sums_C: Tensor | None
    is_real_T: Tensor | None
    balance_E: Tensor | None


class Routers:
    """The routers of one model, in the order of its layers."""

    def __init__(self, modules: Sequence[nn.Module], shape: RouterShape) -> None:
        self._modules, self.shape = tuple(modules), shape

    def enter(self, routing: Routing | None) -> None:
        """Sets what the routers do beside routing, from now on: in a forward, and where layers are recomputed in the
        backward pass after it."""
        for layer, module in enumerate(self._modules):
            router: Any = module
            router.podium_routing = None if routing is None else routing.of_layer(layer)


def attach_routers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> tuple[Routers | None, str | None]:
    """Returns (the routers of a mixture of experts, None); or if these are not known (None, the reason); or for a dense
    model (None, None)."""
    found = [module for layer in layers for module in layer.modules() if type(module).__name__ in _FAMILIES]
    if not found:
        if not any(".experts." in name for name, _ in model.named_parameters()):
            return None, None
        return None, f"the routers of {type(model).__name__} are not known to Podium"
    sizes = {(int(router.num_experts), int(router.top_k)) for router in found}  # type: ignore[arg-type]
    if len(sizes) != 1:
        return None, f"the routers of {type(model).__name__} are of several sizes"
    num_experts, per_token = sizes.pop()
    for router in found:
        kind: Any = type(router)
        router.__class__ = _watched(kind)
    routers = Routers(found, RouterShape(num_layers=len(found), num_experts=num_experts, per_token=per_token))
    routers.enter(None)
    return routers, None


@functools.cache
def _watched(kind: Any) -> Any:
    """The same router with more to do. A class and no hook: hooks have numbers of their own, and every layer would be
    compiled for itself."""
    family = _FAMILIES[kind.__name__]

    class Watched(kind):  # type: ignore[misc]
        podium_routing: LayerRouting | None

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            routing = self.podium_routing
            return output if routing is None else _routed(self, family, routing, *output)

    Watched.__name__, Watched.__qualname__ = kind.__name__, kind.__qualname__
    return Watched


def _routed(
    router: nn.Module, family: _Family, routing: LayerRouting, logits_TE: Tensor, gates_TK: Tensor, experts_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    own_TK, replayed_TK = experts_TK, routing.replayed_TK
    if replayed_TK is not None:
        experts_TK = torch.where(_absent(replayed_TK), own_TK, replayed_TK.to(own_TK.dtype))
        gates_TK = family.gates(router, logits_TE, experts_TK)
    if routing.recorded_TK is not None:
        routing.recorded_TK.copy_(experts_TK)
    if routing.sums_C is not None and routing.is_real_T is not None:
        sums_C = _sums(logits_TE, experts_TK, own_TK, replayed_TK, routing.is_real_T, is_sigmoid=family.is_sigmoid)
        routing.sums_C.copy_(sums_C)
        if routing.balance_E is not None:
            gates_TK = _Balanced.apply(  # type: ignore[no-untyped-call]
                gates_TK, logits_TE, routing.balance_E, routing.is_real_T, family.is_sigmoid
            )
    return logits_TE, gates_TK, experts_TK


def _absent(experts: Tensor) -> Tensor:
    return experts == torch.iinfo(experts.dtype).max


def probabilities(logits_TE: Tensor, *, is_sigmoid: bool) -> Tensor:
    """The router's distribution over all experts in float32; scores of a sigmoid are divided by their sum."""
    if not is_sigmoid:
        return torch.softmax(logits_TE.float(), dim=-1)
    scores_TE = logits_TE.float().sigmoid()
    return scores_TE / scores_TE.sum(dim=-1, keepdim=True)


def _sums(
    logits_TE: Tensor,
    experts_TK: Tensor,
    own_TK: Tensor,
    replayed_TK: Tensor | None,
    is_real_T: Tensor,
    *,
    is_sigmoid: bool,
) -> Tensor:
    """One row of RouterSums; without gradient."""
    with torch.no_grad():
        p_TE = probabilities(logits_TE, is_sigmoid=is_sigmoid)
        counts_E = torch.zeros(p_TE.shape[1], dtype=torch.float32, device=p_TE.device)
        counts_E = counts_E.scatter_add(0, experts_TK.reshape(-1), is_real_T.repeat_interleave(experts_TK.shape[1]))
        entropy_T = -(p_TE * p_TE.clamp_min(torch.finfo(torch.float32).tiny).log()).sum(-1)
        differs = compared = torch.zeros((), dtype=torch.float32, device=p_TE.device)
        if replayed_TK is not None:
            is_replayed_TK = ~_absent(replayed_TK) & (is_real_T > 0)[:, None]
            is_own_TK = (experts_TK[:, :, None] == own_TK[:, None, :]).any(-1)
            differs, compared = (is_replayed_TK & ~is_own_TK).sum().float(), is_replayed_TK.sum().float()
        others = torch.stack([(entropy_T * is_real_T).sum(), differs, compared])
        return torch.cat([counts_E, is_real_T @ p_TE, others])


class _Balanced(torch.autograd.Function):
    """The weights of the experts as they are; backward adds the load-balancing loss's gradient to the logits'. That
    loss is a sum over tokens of probabilities times constants, so no other token or layer is needed for it."""

    @staticmethod
    def forward(
        ctx: Any, gates_TK: Tensor, logits_TE: Tensor, weights_E: Tensor, is_real_T: Tensor, is_sigmoid: bool
    ) -> Tensor:
        ctx.save_for_backward(logits_TE, weights_E, is_real_T)
        ctx.is_sigmoid = is_sigmoid
        return gates_TK.view_as(gates_TK)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor | None, ...]:
        logits_TE, weights_E, is_real_T = ctx.saved_tensors
        p_TE = probabilities(logits_TE, is_sigmoid=ctx.is_sigmoid)
        grad_TE = p_TE * (weights_E - (p_TE @ weights_E)[:, None]) * is_real_T[:, None]
        if ctx.is_sigmoid:  # d score / d logit = score · (1 − score), and p is score / their sum
            grad_TE = grad_TE * (1.0 - logits_TE.float().sigmoid())
        return grad_TK, grad_TE.to(logits_TE.dtype), None, None, None
