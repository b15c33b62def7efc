# SPDX-License-Identifier: Apache-2.0
"""Loads the model of an engine from its folder, without training state: the whole of it, or one rank's part."""

from __future__ import annotations

from pathlib import Path

import torch

from podium.engine.mesh import Mesh
from podium.engine.sharding import compute_dtype, place
from podium.models.causal_lm import PackedCausalLM
from podium.models.cpu_settings import CpuSettings
from podium.models.device import choose_cpu_settings
from podium.models.packing import to_device
from podium.models.verify import random_batch, self_check
from podium.recipe import ModelSection


def load_for_engine(
    section: ModelSection, folder: Path, mesh: Mesh, *, max_length: int | None, cpu: CpuSettings | None
) -> tuple[PackedCausalLM, CpuSettings | None]:
    """The model on this rank's device, compared with transformers, and the CPU settings in effect. `cpu`: settings
    measured before, which are reused. Collective over a tensor axis."""
    torch.set_num_threads(1)
    model, _ = place(section, folder, mesh, seed=0, masters=False)  # masters are twice as large as bfloat16 weights
    self_check(model, mesh.device, compute_dtype(section, mesh.device), max_length=max_length)
    if mesh.device.type != "cpu":
        return model, None
    cpu = cpu or _measured(model, mesh)
    cpu.apply()
    return model, cpu


@torch.no_grad()
def _measured(model: PackedCausalLM, mesh: Mesh) -> CpuSettings:
    model.eval()
    batch = to_device(random_batch(model.vocab_size, lengths=(16,) * 8 + (128,)), mesh.device)
    ranks = 1 if mesh.tensor is None else mesh.tensor.size
    return choose_cpu_settings(lambda: model(batch, None, kind="scores"), ranks=ranks)
