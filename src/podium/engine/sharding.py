# SPDX-License-Identifier: Apache-2.0
"""Placing a model on the mesh: compiled, checkpointed and sharded layer by layer, weights read straight into shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from podium.engine.mesh import Mesh
from podium.engine.parameters import TrainedParameter
from podium.errors import ModelError
from podium.models.causal_lm import (
    PackedCausalLM,
    build,
    load_config,
    padded_parameters,
    persistent_buffers,
    restore_buffers,
)
from podium.models.lora import adapter_source, require_adapter_of, widen
from podium.models.new_tokens import with_new_tokens
from podium.models.scalar import PackedScalarLM, build_scalar
from podium.models.weights import (
    Box,
    CheckpointWeights,
    MemoryWeights,
    Piece,
    WeightSource,
    base_name,
    fill,
    is_adapter,
)
from podium.recipe import ModelSection

PackedModel = PackedCausalLM | PackedScalarLM


def compute_dtype(section: ModelSection, device: torch.device) -> torch.dtype:
    """auto: bfloat16 on CUDA, float32 on CPU."""
    if section.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if section.dtype == "bfloat16" else torch.float32


def place(
    section: ModelSection, folder: Path, mesh: Mesh, *, seed: int, weights: bool = True, masters: bool = True
) -> tuple[PackedCausalLM, list[TrainedParameter]]:
    """The model on this rank's device, sharded over the mesh, with float32 masters of what it trains: everything, or
    with model.lora the adapter alone, beside a base in the dtype that it computes in.

    `weights=False` leaves the trained values undefined, for a checkpoint to fill; a frozen base, which is in no
    checkpoint of Podium's, is read all the same. `masters=False`: nothing is trained, so all weights exist once, in the
    dtype that they compute in.
    """
    require_adapter_of(section, folder)
    config = load_config(folder, trust_remote_code=section.trust_remote_code)
    dtype = compute_dtype(section, mesh.device)
    model = build(section, config, device=torch.device("meta"), dtype=_held_dtype(section, dtype, mesh, masters))
    held = _spread(model, section, mesh, dtype, masters=masters)
    trained = held.trained
    base = held.everything if section.lora is None else held.frozen
    if weights or section.lora is not None:
        padded = padded_parameters(model)
        if section.init == "random":
            fill(_pieces(model, base), _drawn(section, config, mesh, seed), padded_rows={})
            _zero_padding(base, padded)
        else:
            source = with_new_tokens(CheckpointWeights(folder, model.hf), section, model.hf)
            fill(_pieces(model, base), source, padded_rows=padded)
    if weights and section.lora is not None:
        fill(_adapter_pieces(trained), adapter_source(model.hf, section.lora, seed), padded_rows={})
    for each in trained if weights else []:
        each.publish()
    return model, trained


def place_scalar(
    section: ModelSection,
    folder: Path,
    mesh: Mesh,
    *,
    labels: int | None,
    seed: int = 0,
    weights: bool = True,
    masters: bool = True,
) -> tuple[PackedScalarLM, list[TrainedParameter]]:
    """The same for a body with a scalar head, which is trained beside an adapter too. A head that neither checkpoint
    nor adapter has, or not of this shape, begins at zero: every value is 0 until it has learned."""
    require_adapter_of(section, folder)
    config = load_config(folder, trust_remote_code=section.trust_remote_code)
    dtype = compute_dtype(section, mesh.device)
    kept = _held_dtype(section, dtype, mesh, masters)
    model = build_scalar(section, config, device=torch.device("meta"), dtype=kept, labels=labels)
    held = _spread(model, section, mesh, dtype, masters=masters)
    if weights or section.lora is not None:
        source: WeightSource = (
            _drawn_scalar(section, config, labels, seed)
            if section.init == "random"
            else with_new_tokens(CheckpointWeights(folder, model.hf), section, model.hf)
        )
        pieces = list(_pieces(model, held.everything if weights else held.frozen))
        sources = [source] if section.init != "random" else []
        if section.lora is not None and weights:
            sources.insert(0, adapter_source(model.hf, section.lora, seed))
            fill(_adapter_pieces(held.trained), sources[0], padded_rows={})
        for piece in pieces:
            if piece.name == "score.weight":
                _fill_head(piece, sources, folder, can_be_new=labels is not None)
        fill([piece for piece in pieces if piece.name != "score.weight"], source, padded_rows={})
    for each in held.trained if weights else []:
        each.publish()
    return model, held.trained


def _fill_head(head: Piece, sources: list[WeightSource], folder: Path, *, can_be_new: bool) -> None:
    """From the first that has one of this shape."""
    for source in sources:
        if source.shapes().get(head.name) == head.shape:
            fill([head], source, padded_rows={})
            return
    if not can_be_new:
        raise ModelError(
            f"{folder} has no head `score.weight` of shape {list(head.shape)}, so it cannot score anything. "
            "Give a sequence-classification checkpoint; a language model alone is none."
        )
    head.local.zero_()


def _held_dtype(section: ModelSection, dtype: torch.dtype, mesh: Mesh, masters: bool) -> torch.dtype:
    """Sharded parameters that are trained are float32 and cast as they are gathered; a single device keeps the cast
    copy itself, so that forward, backward and generation read compute-dtype weights without casting them again. So is
    a frozen base (its adapter is widened after)."""
    return dtype if mesh.world == 1 or not masters or section.lora is not None else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """All parameters of a model, and those of them that training changes."""

    everything: list[TrainedParameter]
    trained: list[TrainedParameter]

    @property
    def frozen(self) -> list[TrainedParameter]:
        chosen = {id(each) for each in self.trained}
        return [each for each in self.everything if id(each) not in chosen]


def _spread(model: PackedModel, section: ModelSection, mesh: Mesh, dtype: torch.dtype, *, masters: bool) -> _Held:
    """Compiles and shards, and gives every parameter memory; values are undefined."""
    if section.lora is not None and masters and mesh.world > 1:
        widen(model.hf)
    _prepare_layers(model, section, mesh.device)
    if mesh.devices is not None:
        _shard(model, mesh, dtype)
    model.to_empty(device=mesh.device)
    model.hf.tie_weights()
    restore_buffers(model.hf)
    everything = [
        _trained(name, parameter, masters=masters and parameter.requires_grad)
        for name, parameter in model.hf.named_parameters()
    ]
    trained = [each for each in everything if each.parameter.requires_grad]
    if not masters:
        model.requires_grad_(False)
    return _Held(everything=everything, trained=trained)


def local_box(parameter: Tensor) -> Box:
    """Which part of the whole tensor this rank holds (FSDP shards rows as torch.chunk does)."""
    if not isinstance(parameter, DTensor):
        return Box.whole(parameter.shape)
    mesh = parameter.device_mesh
    rows, each = parameter.shape[0], -(-parameter.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * each, rows)
    stop = min(start + each, rows)
    rest = tuple(parameter.shape[1:])
    return Box((start, *(0 for _ in rest)), (stop, *rest))


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part, sharing storage with the parameter."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _trained(name: str, parameter: nn.Parameter, *, masters: bool) -> TrainedParameter:
    local = local_tensor(parameter)
    own = masters and local.dtype != torch.float32
    master = torch.empty_like(local, dtype=torch.float32) if own else local
    return TrainedParameter(
        name=name, parameter=parameter, master=master, box=local_box(parameter), shape=tuple(parameter.shape)
    )


def _pieces(model: PackedModel, held: list[TrainedParameter]) -> Iterator[Piece]:
    """What a checkpoint of the base has, under its names there."""
    for each in held:
        if not is_adapter(each.name):
            yield Piece(name=base_name(each.name), local=each.master, box=each.box, shape=each.shape)
    for name, buffer in persistent_buffers(model.hf).items():
        yield Piece(name=base_name(name), local=buffer, box=Box.whole(buffer.shape), shape=tuple(buffer.shape))


def _adapter_pieces(trained: list[TrainedParameter]) -> list[Piece]:
    return [
        Piece(name=each.name, local=each.master, box=each.box, shape=each.shape)
        for each in trained
        if is_adapter(each.name)
    ]


def _drawn(section: ModelSection, config: object, mesh: Mesh, seed: int) -> WeightSource:
    """Random weights from the seed alone: every rank draws the same whole model and keeps its part."""
    with torch.random.fork_rng(devices=[mesh.device] if mesh.device.type == "cuda" else []):
        torch.manual_seed(seed)
        device = mesh.device if mesh.world == 1 else torch.device("cpu")
        plain = section.model_copy(update={"lora": None})
        model = build(plain, config, device=device, dtype=torch.float32)
    return MemoryWeights({**dict(model.hf.named_parameters()), **persistent_buffers(model.hf)})


def _drawn_scalar(section: ModelSection, config: object, labels: int | None, seed: int) -> WeightSource:
    """The same for a scalar model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = section.model_copy(update={"lora": None})
        model = build_scalar(plain, config, device=torch.device("cpu"), dtype=torch.float32, labels=labels)
    return MemoryWeights({**dict(model.hf.named_parameters()), **persistent_buffers(model.hf)})


def _zero_padding(trained: list[TrainedParameter], padded: dict[str, int]) -> None:
    for each in trained:
        if each.name in padded:
            real = Box.whole((padded[each.name], *each.shape[1:])).overlap(each.box)
            each.master[max(0, real.stops[0] - each.box.starts[0]) :] = 0


def _prepare_layers(model: PackedModel, section: ModelSection, device: torch.device) -> None:
    if section.activation_checkpointing == "layers":
        model.checkpoint_activations()
    if section.compile == "on" or (section.compile == "auto" and device.type == "cuda"):
        if isinstance(model, PackedCausalLM):
            model.head_spec = replace(model.head_spec, compiled=True)
        # Layers share their code; kinds of layers, gradient mode and token counts each want a variant of it, and over
        # the limit torch would go on uncompiled without a word.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for layer in model.layers:
            layer.compile()


def _shard(model: PackedModel, mesh: Mesh, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh.devices, mp_policy=policy)
    fully_shard(model, mesh=mesh.devices, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The step's global token count does the dividing: ranks hold unequal shares, a mean over ranks would
            # weigh them wrongly. Gloo has no pre-multiplied sum, hence the plain one.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
