# SPDX-License-Identifier: Apache-2.0
"""Which models share prefixes of documents, and what that costs them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from podium.data.prefixes import PrefixCost
from podium.models.cost import has_experts, model_cost
from podium.models.training_mode import TrainedModule

# What a layer does beside matrix products takes a core about as long as so many of their operations: calls for each
# segment that others continue, and merging of each number of a query that continues it.
_PER_SEGMENT = 1e7
_PER_NUMBER = 400.0
# Found once for each model: programs ask for every micro-batch.
_COSTS: WeakKeyDictionary[TrainedModule, PrefixCost | None] = WeakKeyDictionary()
# Architectures in which tokens meet in attention alone and stand where their positions say. They were compared
# (tests/unit/models/test_prefixes_of_all_architectures.py); some others pack well and number tokens by their place.
COMPARED = frozenset(
    [
        "apertus", "arcee", "cohere", "cohere2", "cwm", "diffllama", "ernie4_5", "exaone4", "gemma", "gemma2",
        "gemma3_text", "gemma3n_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "granite",
        "granite_swa", "helium", "hunyuan_v1_dense", "hyperclovax", "jais2", "llama", "minicpm3", "ministral",
        "ministral3", "mistral", "nanochat", "olmo", "olmo2", "olmo3", "opt", "persimmon", "phi3", "qwen2",
        "qwen3", "seed_oss", "smollm3", "starcoder2", "vaultgemma",
    ]
)  # fmt: skip


def prefix_cost(model: TrainedModule, device: torch.device) -> PrefixCost | None:
    """What sharing costs this model. None: its documents never share prefixes.

    Not on CUDA, where attention has no kernel for it yet. Not over a tensor or context axis, whose ranks divide the
    tokens or the heads of whole documents. Not in a mixture, whose routers count tokens and replay experts. Not with
    dropout, which is another in each document. Not in architectures that were not compared, or of a checkpoint's own
    code."""
    is_divided = model.context is not None or model.split is not None
    if device.type != "cpu" or is_divided:
        return None
    if model not in _COSTS:
        _COSTS[model] = _cost_of(model)
    return _COSTS[model]


def _cost_of(model: TrainedModule) -> PrefixCost | None:
    is_own = any(each.__module__.startswith("transformers.models.") for each in type(model.hf).__mro__)
    if not is_own or model.hf.config.model_type not in COMPARED or has_experts(model.hf) or model.drops:
        return None
    cost, config = model_cost(model.hf), model.hf.config.get_text_config()
    layers = len(cost.windows)
    is_plain = getattr(config, "attn_logit_softcapping", None) is None and not any(cost.windows)
    return PrefixCost(
        sequence=cost.forward,
        per_segment=_PER_SEGMENT * layers,
        per_query=_PER_NUMBER * cost.attention_width * layers,
        training=cost.training_ratio,
        copies_keys=not is_plain,
    )
