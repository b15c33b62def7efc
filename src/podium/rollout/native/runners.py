# SPDX-License-Identifier: Apache-2.0
"""Selects the runner that computes the engine's steps."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

import torch
from torch import nn

from podium.data.routed_experts import RouterShape
from podium.models.causal_lm import PackedCausalLM
from podium.rollout.native.cache import KVCache
from podium.rollout.native.forward import ModelForward
from podium.rollout.native.rows import RowTable
from podium.rollout.native.runner import EagerRunner, Runner, SamplingTable
from podium.rollout.native.tensor_group import LeadingForward, TensorLeader


def make_runner(
    model: PackedCausalLM,
    modules: Sequence[nn.Module],
    cache: KVCache,
    rows: RowTable,
    samples: SamplingTable,
    device: torch.device,
    *,
    slots: bool,
    decode: Literal["auto", "compiled", "captured", "eager"],
    recorded: RouterShape | None = None,
    group: TensorLeader | None = None,
) -> Runner:
    """The fastest runner for the device. `recorded`: sizes of the routers whose choices are recorded. `group`: ranks
    that follow; they run every step without graphs."""
    if group is None and decode != "eager" and device.type == "cuda" and find_spec("triton") is not None:
        from podium.rollout.native.graphs import GraphRunner  # imports triton

        return GraphRunner(
            model, modules, cache, rows, samples, device, compiled=decode != "captured", recorded=recorded
        )
    if group is not None:
        forward: ModelForward = LeadingForward(model, modules, cache, device, group=group, recorded=recorded)
    else:
        forward = ModelForward(model, modules, cache, device, recorded=recorded)
    return EagerRunner(forward, cache, rows, samples, slots=slots)
