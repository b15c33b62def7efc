# SPDX-License-Identifier: Apache-2.0
"""Parameters and buffers that transformers keeps in float32, whatever dtype a model is loaded in."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation


def keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """What `from_pretrained(dtype=...)` loads in float32 (`_keep_in_fp32_modules_strict`; in float16 also
    `_keep_in_fp32_modules`) becomes float32 in a model that `from_config` has built in `dtype`. Call it before adapters
    are injected: they change the names."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, keys, _ = build_glob_alternation(list(plan))
    wanted: dict[str, torch.dtype] = {}
    for name in model.state_dict():
        match = pattern.search(name)
        if match is not None and match.lastgroup is not None:
            wanted[name] = plan[keys[match.lastgroup]]
    set_dtypes(model, wanted)


def state_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Dtypes of every parameter and every buffer that a checkpoint holds."""
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def set_dtypes(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Casts parameters (in place: tied ones stay one) and buffers, by name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in dtypes:
            parameter.data = parameter.data.to(dtypes[name])
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if name in dtypes and buffer.dtype != dtypes[name]:
            owner, _, leaf = name.rpartition(".")
            _set_buffer(model.get_submodule(owner), leaf, buffer.to(dtypes[name]))


def _set_buffer(module: nn.Module, name: str, values: Tensor) -> None:
    module._buffers[name] = values
