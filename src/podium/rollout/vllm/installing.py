# SPDX-License-Identifier: Apache-2.0
"""Installs new weights into a running vLLM: in parts, each verified on arrival, before vLLM repacks them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from podium.errors import PodiumError, RolloutError
from podium.rollout.vllm import compat
from podium.weights.receiving import Verified

if TYPE_CHECKING:
    from podium.weights.transports import Delivery
    from podium.weights.versions import WeightVersion

_PART_BYTES = 32 * 2**20


def load_weights(engine: Any, version: WeightVersion, delivery: Delivery, folder: str) -> None:
    """Loads weights into all workers of `engine`. When this raises, the model holds a mix of both versions."""
    # Workers in other processes get copies over shared memory, which only works for host tensors.
    to_host = compat.world_size(engine) > 1
    engine.collective_rpc("podium_begin_weights")
    try:
        with contextlib.closing(Verified(delivery, version).tensors()) as arriving:  # type: ignore[type-var]
            for part in _parts(_as_in_checkpoint(arriving, version, Path(folder)), to_host=to_host):
                engine.collective_rpc("podium_take_weights", args=(part,))
    except BaseException as error:
        with contextlib.suppress(Exception):  # layers are restored, so that the next attempt can begin
            engine.collective_rpc("podium_finish_weights")
        if isinstance(error, PodiumError) or not isinstance(error, Exception):
            raise
        raise RolloutError(
            f"vLLM did not take the weights of version {version.number} ({type(error).__name__}: {error}). Their names "
            "or shapes are not those of the model in its folder. Build both from the same folder."
        ) from error
    missing = {name for names in engine.collective_rpc("podium_finish_weights") for name in names}
    if missing:
        raise RolloutError(
            f"version {version.number} has no weights for {', '.join(sorted(missing)[:5])} "
            f"({len(missing)} parameters of vLLM's model), which would keep older ones. Publish the whole model."
        )


def _as_in_checkpoint(
    arriving: Iterator[tuple[str, Tensor]], version: WeightVersion, folder: Path
) -> Iterator[tuple[str, Tensor]]:
    """vLLM expects the names and layouts of checkpoints; transformers keeps some tensors (fused experts)
    differently."""
    known: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            known.update(opened.keys())
    if all(spec.name in known for spec in version.manifest):
        return arriving
    from podium.weights.names import checkpoint_tensors

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return checkpoint_tensors(model, arriving)


def _parts(arriving: Iterator[tuple[str, Tensor]], *, to_host: bool) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields copies: a tensor is freed when the next one is requested, and vLLM keeps them until their layer is
    complete."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in arriving:
        part.append((name, tensor.to("cpu", copy=True) if to_host else tensor.clone()))
        size += tensor.nbytes
        if size >= _PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
