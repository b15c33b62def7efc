# SPDX-License-Identifier: Apache-2.0
"""Places a model on the mesh: compiled, checkpointed and sharded layer by layer, with weights read directly into
shards."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from podium.engine.checkpoint import CheckpointReader
from podium.engine.filling import Filling
from podium.engine.mesh import Mesh
from podium.engine.parameters import TrainedParameter
from podium.errors import ModelError
from podium.models.buffers import persistent_buffers, restore_buffers
from podium.models.causal_lm import PackedCausalLM, build, load_config, padded_parameters
from podium.models.context_plan import require_context_type
from podium.models.exact_products import make_products_exact
from podium.models.expert_axis import ExpertGroups
from podium.models.expert_parallel import divide_experts
from podium.models.expert_plan import KEY as EXPERTS_KEY
from podium.models.expert_plan import num_experts
from podium.models.fp8 import require_fp8, require_undivided, use_fp8
from podium.models.lora import HEAD, adapter_source, require_adapter_of, shapes_of_adapter
from podium.models.new_tokens import with_new_tokens
from podium.models.precision import set_dtypes
from podium.models.scalar import PackedScalarLM, build_scalar
from podium.models.tensor_parallel import divide_model
from podium.models.tensor_shards import Box, TensorShard
from podium.models.tensor_split import TensorSplit
from podium.models.weights import CheckpointWeights, MemoryWeights, WeightSource, fill
from podium.recipe import ModelSection

PackedModel = PackedCausalLM | PackedScalarLM
_HEAD_WEIGHT = f"{HEAD}.weight"
_FP8_KEY = "model.fp8"
_LOG = logging.getLogger(__name__)


def compute_dtype(section: ModelSection, device: torch.device) -> torch.dtype:
    """auto: bfloat16 on CUDA, float32 on CPU."""
    if section.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if section.dtype == "bfloat16" else torch.float32


def place(
    section: ModelSection,
    folder: Path,
    mesh: Mesh,
    *,
    seed: int,
    checkpoint: CheckpointReader | None = None,
    masters: bool = True,
) -> tuple[PackedCausalLM, list[TrainedParameter]]:
    """The model on this rank's device, sharded over the mesh, and the parameters that its checkpoints hold: all, or
    with model.lora the adapter alone, beside a base in its compute dtype. They have float32 masters. `checkpoint`: one
    of Podium's, to read the values from. Weights that it does not hold (the base of an adapter, frozen parameters in
    older ones) are still read from `folder`. `masters=False`: nothing is trained, so all weights exist once, in their
    compute dtype."""
    if section.fp8:
        require_fp8(mesh.device, _FP8_KEY)
    require_adapter_of(section, folder)
    config = load_config(folder, trust_remote_code=section.trust_remote_code)
    dtype = compute_dtype(section, mesh.device)
    model = build(section, config, device=torch.device("meta"), dtype=dtype)
    adapter_shapes = shapes_of_adapter(model.hf)
    everything = _spread(model, section, mesh, dtype, masters=masters)
    is_dense = not num_experts(config.get_text_config().to_dict())
    if masters and mesh.experts is not None and is_dense:  # `check` has not seen a model of the hub
        raise ModelError(
            f"{EXPERTS_KEY}: {mesh.experts.num_exchange} is for mixtures, and {section.path} has no experts. Remove it."
        )
    restore_buffers(model.hf)
    saved, padded = _saved(section, everything), padded_parameters(model)
    filling = Filling(model, everything)
    if checkpoint is not None:
        filling.from_checkpoint(checkpoint, saved, padded)
    if base := filling.undefined(adapter=False):
        if section.init == "random":
            filling.from_source(base, _random_weights(section, config, mesh, seed), padded_rows={})
            _zero_padding(everything, padded)
        else:
            source = with_new_tokens(CheckpointWeights(folder, model.hf, model.split), section, model.hf)
            filling.from_source(base, source, padded_rows=padded)
    if adapter := filling.undefined(adapter=True):
        assert section.lora is not None
        source = adapter_source(adapter_shapes, type(model.hf).__name__, section.lora, seed)
        filling.from_source(adapter, source, padded_rows={})
    filling.finish()
    return model, saved


def place_scalar(
    section: ModelSection,
    folder: Path,
    mesh: Mesh,
    *,
    labels: int | None,
    seed: int = 0,
    checkpoint: CheckpointReader | None = None,
    masters: bool = True,
) -> tuple[PackedScalarLM, list[TrainedParameter]]:
    """Like `place`, for a body with a scalar head, which is trained beside an adapter too. If neither checkpoint nor
    adapter has a head of this shape, it begins at zero: every value is 0 until it has learned."""
    if section.fp8:
        require_fp8(mesh.device, _FP8_KEY)
    require_adapter_of(section, folder)
    config = load_config(folder, trust_remote_code=section.trust_remote_code)
    dtype = compute_dtype(section, mesh.device)
    model = build_scalar(section, config, device=torch.device("meta"), dtype=dtype, labels=labels)
    adapter_shapes = shapes_of_adapter(model.hf)
    everything = _spread(model, section, mesh, dtype, masters=masters)
    restore_buffers(model.hf)
    saved = _saved(section, everything)
    filling = Filling(model, everything)
    if checkpoint is not None:
        filling.from_checkpoint(checkpoint, saved, {})
    sources: list[WeightSource] = []
    if adapter := filling.undefined(adapter=True):
        assert section.lora is not None
        sources.append(adapter_source(adapter_shapes, type(model.hf).__name__, section.lora, seed))
        filling.from_source(adapter, sources[0], padded_rows={})
    if base := filling.undefined(adapter=False):
        if section.init == "random":
            source = _drawn_scalar(section, config, labels, seed)
        else:
            source = with_new_tokens(CheckpointWeights(folder, model.hf, model.split), section, model.hf)
            sources.append(source)
        for name in [name for name in base if name == _HEAD_WEIGHT]:
            _fill_head(filling.piece(name), sources, folder, can_be_new=labels is not None)
            filling.done(name)
        filling.from_source([name for name in base if name != _HEAD_WEIGHT], source, padded_rows={})
    filling.finish()
    return model, saved


def place_empty(model: PackedModel, section: ModelSection, mesh: Mesh) -> list[TrainedParameter]:
    """Places a model that is built on the meta device as `place` does, to be trained, but for its values: they stay
    undefined, those of buffers too."""
    return _spread(model, section, mesh, compute_dtype(section, mesh.device), masters=True)


def _fill_head(head: TensorShard, sources: list[WeightSource], folder: Path, *, can_be_new: bool) -> None:
    """Fills the head from the first source that has one of this shape."""
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


def _saved(section: ModelSection, everything: list[TrainedParameter]) -> list[TrainedParameter]:
    """The content of a checkpoint: all parameters, including those that the architecture freezes; or with an adapter
    the trained ones."""
    return everything if section.lora is None else [each for each in everything if not each.is_frozen]


def _spread(
    model: PackedModel, section: ModelSection, mesh: Mesh, dtype: torch.dtype, *, masters: bool
) -> list[TrainedParameter]:
    """Compiles and shards, and allocates every parameter. Values are undefined. A single device keeps parameters in
    their compute dtype, so that forward, backward and generation read them without casting. Sharded
    parameters with masters are float32 themselves and cast as they are gathered. The frozen base of an adapter has no
    masters."""
    if mesh.device.type == "cpu":
        make_products_exact()
    if mesh.context is not None:
        require_context_type(model.hf.config.get_text_config().model_type)
        model.context = mesh.context
    if mesh.tensor is not None:
        divide_model(model, mesh.tensor)
    experts = _divided_experts(model, mesh)
    other_dtype = {name for name, parameter in model.hf.named_parameters() if parameter.dtype != dtype}
    with_masters = {
        name
        for name, parameter in model.hf.named_parameters()
        if masters and (section.lora is None or parameter.requires_grad)
    }
    if mesh.is_sharded:
        set_dtypes(model.hf, dict.fromkeys(with_masters, torch.float32))
    if section.fp8:
        require_undivided(mesh.tensor is not None, _FP8_KEY)
        model.fp8 = use_fp8(model.layers, _FP8_KEY, learner=True)
        if left_out := model.fp8.left_out:
            _LOG.warning(
                "%s: %d linear layers (%s, ...) stay as they are: their sizes are no multiples of 16.",
                _FP8_KEY,
                len(left_out),
                left_out[0],
            )
    _prepare_layers(model, section, mesh.device)
    if mesh.is_sharded:
        unsharded = {parameter for name, parameter in model.hf.named_parameters() if name in other_dtype}
        _shard(model, mesh, dtype, unsharded, experts)
    model.to_empty(device=mesh.device)
    model.hf.tie_weights()
    everything = [
        _held(name, parameter, mesh, model.split, masters=name in with_masters)
        for name, parameter in model.hf.named_parameters()
    ]
    if not masters:
        model.requires_grad_(False)
    return everything


def local_box(name: str, parameter: Tensor, split: TensorSplit | None = None) -> Box:
    """The part of the whole tensor that this rank holds: rows of its part on the tensor axis, which FSDP shards as
    torch.chunk does."""
    inside = Box.whole(parameter.shape)
    if isinstance(parameter, DTensor):
        axis = next(at for at, placement in enumerate(parameter.placements) if placement.is_shard())
        rows, ranks = parameter.shape[0], parameter.device_mesh.size(axis)
        each = -(-rows // ranks)
        start = min(parameter.device_mesh.get_local_rank(axis) * each, rows)
        stop = min(start + each, rows)
        inside = Box((start, *inside.starts[1:]), (stop, *inside.stops[1:]))
    return inside if split is None else split.box(name, inside, parameter.shape)


def whole_shape(name: str, parameter: Tensor, split: TensorSplit | None) -> tuple[int, ...]:
    """The shape of the parameter over all ranks."""
    return tuple(parameter.shape) if split is None else split.shape(name, parameter.shape)


def is_copy(name: str, parameter: Tensor, mesh: Mesh, split: TensorSplit | None) -> bool:
    """Whether another rank holds the same part, and is the one that counts and saves it."""
    is_first = mesh.replica == 0 if isinstance(parameter, DTensor) else mesh.token_rank == 0
    if split is None or split.tensor is None or name in split.divisions:
        return not is_first
    return not is_first or split.tensor.rank > 0


def reshard(model: nn.Module) -> None:
    """Frees gathered copies that FSDP leaves in the modules after a forward without backward, so that the shards
    count."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part, sharing storage with the parameter."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _held(
    name: str, parameter: nn.Parameter, mesh: Mesh, split: TensorSplit | None, *, masters: bool
) -> TrainedParameter:
    local = local_tensor(parameter)
    own = masters and local.dtype != torch.float32
    return TrainedParameter(
        name=name,
        parameter=parameter,
        master=torch.empty_like(local, dtype=torch.float32) if own else local,
        box=local_box(name, parameter, split),
        shape=whole_shape(name, parameter, split),
        is_frozen=not parameter.requires_grad,
        is_copy=is_copy(name, parameter, mesh, split),
        has_part_of_gradient=split is not None and name in split.summed,
    )


def _random_weights(section: ModelSection, config: object, mesh: Mesh, seed: int) -> WeightSource:
    """Random weights from the seed alone: every rank samples the same whole model and keeps its part."""
    with torch.random.fork_rng(devices=[mesh.device] if mesh.device.type == "cuda" else []):
        torch.manual_seed(seed)
        device = torch.device("cpu") if mesh.is_sharded else mesh.device
        plain = section.model_copy(update={"lora": None})
        model = build(plain, config, device=device, dtype=torch.float32)
    return MemoryWeights({**dict(model.hf.named_parameters()), **persistent_buffers(model.hf)})


def _drawn_scalar(section: ModelSection, config: object, labels: int | None, seed: int) -> WeightSource:
    """Like `_random_weights`, for a scalar model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = section.model_copy(update={"lora": None})
        model = build_scalar(plain, config, device=torch.device("cpu"), dtype=torch.float32, labels=labels)
    return MemoryWeights({**dict(model.hf.named_parameters()), **persistent_buffers(model.hf)})


def _zero_padding(everything: list[TrainedParameter], padded: dict[str, int]) -> None:
    for each in everything:
        if each.name in padded:
            real = Box.whole((padded[each.name], *each.shape[1:])).overlap(each.box)
            each.master[max(0, real.stops[0] - each.box.starts[0]) :] = 0


def _prepare_layers(model: PackedModel, section: ModelSection, device: torch.device) -> None:
    model.checkpoint_activations(section.activation_checkpointing, offload=section.offload_activations)
    if section.compile == "on" or (section.compile == "auto" and device.type == "cuda"):
        if isinstance(model, PackedCausalLM):
            model.head_spec = replace(model.head_spec, compiled=True)
        # Layers share their code; kinds of layers, gradient mode and token counts each want a variant of it, and over
        # the limit torch would go on uncompiled without a word.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for layer in model.layers:
            layer.compile()


def _divided_experts(model: PackedModel, mesh: Mesh) -> list[nn.Module]:
    """Divides the experts of a mixture, in place. Returns modules that FSDP shards apart: over ranks with the same
    experts, where these are not those of the rest."""
    if mesh.experts is not None:
        return divide_experts(model, mesh.experts)
    if mesh.tensor is not None:
        divide_experts(model, ExpertGroups(holders=mesh.tensor, tensor=mesh.tensor))
    return []


def _shard(
    model: PackedModel, mesh: Mesh, dtype: torch.dtype, unsharded: set[nn.Parameter], experts: list[nn.Module]
) -> None:
    """`unsharded` parameters compute in another dtype than the model (float32 routers and biases). FSDP would cast them
    with the rest of their layer, so every rank holds them whole, and the training step sums their gradients. `experts`:
    modules of which a rank has its own part, sharded over the ranks that have the same part."""
    # Inputs are not cast: FSDP looks into dataclasses, and would round the weights of tokens, what objectives hold
    # (log-probs, advantages) and the sums of routers. Gathered parameters give hidden states their dtype.
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in experts:
        assert not unsharded.intersection(module.parameters()), "experts compute in the model's dtype"
        fully_shard(module, mesh=mesh.expert_devices, mp_policy=policy)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh.devices, mp_policy=policy, ignored_params=unsharded)
    fully_shard(model, mesh=mesh.devices, mp_policy=policy, ignored_params=unsharded)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The step's global token count does the dividing: ranks hold unequal shares, a mean over ranks would
            # weigh them wrongly. Gloo has no pre-multiplied sum, hence the plain one.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
