# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters through peft, injected in place into the Hugging Face module tree: y = Wx + s·B(A(x))."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from podium.errors import ModelError
from podium.models.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, require_base, require_peft, write_base
from podium.models.folder import local_folder
from podium.models.tensor_shards import Box
from podium.models.weights import MemoryWeights, WeightSource, is_adapter
from podium.recipe import ModelSection
from podium.recipe.schema import LoraSection

KEY = "model.lora.adapter"
# The head of a scalar model: trained whole beside the adapter, and saved with it.
HEAD = "score"
_ADAPTER = "default"
_SAVED_PREFIX = "base_model.model."
# Features of peft that Podium does not train: an adapter that needs one of them is refused.
_OTHER_KINDS = (
    "use_dora", "lora_bias", "use_qalora", "use_bdlora", "target_parameters", "trainable_token_indices",
    "layer_replication", "alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config", "kasa_config",
)  # fmt: skip
# Layers of a mixture's experts, as checkpoints name them. Transformers holds all experts in one tensor, and peft takes
# these names for that tensor, also where shared experts have layers of the same names.
_EXPERT_LAYERS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
# Initialisations that do not change the base. (Others, such as pissa, do.)
_PLAIN_BEGINNINGS = (True, False, "gaussian", "orthogonal")


def inject(model: PreTrainedModel, section: LoraSection, *, is_scalar: bool = False) -> None:
    """Injects adapters into the model in place and freezes everything else, except the head of a scalar model. On the
    meta device nothing is allocated; elsewhere the adapter is sampled from the current torch seed."""
    peft = _peft()
    config = _config(peft, model, section, is_scalar=is_scalar)
    weight = model.get_input_embeddings().weight
    try:
        peft.inject_adapter_in_model(config, model, _ADAPTER, low_cpu_mem_usage=weight.is_meta)
    except ValueError as error:
        key = "model.lora.targets" if section.adapter is None else KEY
        raise ModelError(f"{key}: peft cannot adapt {type(model).__name__} ({str(error).splitlines()[0]}).") from error
    _require_linear(peft, model, section)
    _cast_adapter(model, weight.dtype)
    if is_scalar:
        model.get_submodule(HEAD).requires_grad_(True)


def has_adapter(model: nn.Module) -> bool:
    """Whether the model has a low-rank adapter."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """peft's layers that compute y = Wx + s·B(A(x)), with the names of the linear layers that they stand for."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict):
            yield name, module


def merged_weight(layer: Any) -> Tensor:
    """W + s·BA of one adapted layer, in float32. The layer does not change."""
    merged: Tensor = layer.get_base_layer().weight.detach().to(torch.float32, copy=True)
    outer, inner = layer.lora_B[_ADAPTER].weight.detach().float(), layer.lora_A[_ADAPTER].weight.detach().float()
    return merged.addmm_(outer, inner, alpha=layer.scaling[_ADAPTER])


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """A context in which the model computes as its base. It does not touch parameters and their gradients, so it is
    safe for sharded models. It must not be entered between a forward and its backward."""
    layers = [layer for _, layer in adapted_layers(model)]
    if not layers:
        raise ModelError("there is no adapter to switch off: the model was built without model.lora.")
    before = [layer._disable_adapters for layer in layers]
    # The public switch also changes requires_grad, which sharding has already read.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was_off in zip(layers, before, strict=True):
            layer._disable_adapters = was_off


def merge(model: PreTrainedModel) -> None:
    """W becomes W + s·BA, and the adapter is removed: a plain model again."""
    for name, layer in list(adapted_layers(model)):
        layer.merge()
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer.get_base_layer())
    del model.peft_config


class InitialAdapter:
    """The initial values of an adapter: A uniform like a linear layer's weights, B zero. Sampled from the seed and the
    tensor's name, so that every sharding holds parts of the same whole."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._shapes, self._seed = shapes, seed

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each adapter tensor."""
        return self._shapes

    def read(self, name: str, box: Box) -> Tensor:
        """A part of one initial tensor."""
        shape = self._shapes[name]
        if ".lora_B." in name:
            return torch.zeros(box.shape)
        key = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        draw = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
        bound = 1.0 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=draw)[box.slices()]


def shapes_of_adapter(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """The shape of each adapter tensor of a model that is not divided over ranks yet."""
    return {name: tuple(each.shape) for name, each in model.named_parameters() if is_adapter(name)}


def adapter_source(
    wanted: Mapping[str, tuple[int, ...]], architecture: str, section: LoraSection, seed: int
) -> WeightSource:
    """The source of the adapter's values: a folder, or the seed. Names and shapes of a folder are compared with the
    model's (`wanted`), in both directions."""
    if section.adapter is None:
        return InitialAdapter(wanted, seed)
    folder = local_folder(section.adapter, KEY)
    saved = {_name_inside(name): tensor for name, tensor in _saved_tensors(folder).items()}
    for name, tensor in saved.items():
        if name.startswith(f"{HEAD}."):
            continue
        if name not in wanted:
            raise _foreign(folder, f"it has {name}, and {architecture} of model.path has no such layer")
        if tuple(tensor.shape) != wanted[name]:
            raise _foreign(folder, f"{name} is {list(tensor.shape)} in it and {list(wanted[name])} in model.path")
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise _foreign(folder, f"it has nothing for {missing[0]} ({len(missing)} tensors are missing)")
    return MemoryWeights(saved)


def require_adapter_of(section: ModelSection, base: Path) -> None:
    """Checks that the adapter to continue from belongs to this base, by the record in its folder."""
    if section.lora is not None and section.lora.adapter is not None:
        require_base(local_folder(section.lora.adapter, KEY), base, section.path, KEY)


def save_adapter(model: PreTrainedModel, out: Path, *, base: Path, base_path: str) -> None:
    """Writes adapter_config.json and adapter_model.safetensors for peft, and the identity of their base."""
    is_scalar = hasattr(model, HEAD)
    config = model.peft_config[_ADAPTER]
    config.base_model_name_or_path = str(base.resolve()) if Path(base_path).is_dir() else base_path
    config.inference_mode = True
    config.modules_to_save = [HEAD] if is_scalar else None
    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(out))
    trained = {name: each for name, each in model.named_parameters() if is_adapter(name) or name.startswith(f"{HEAD}.")}
    tensors = {_saved_name(name): each.detach().contiguous() for name, each in trained.items()}
    save_file(tensors, out / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    write_base(out, base, base_path)


def _config(peft: Any, model: PreTrainedModel, section: LoraSection, *, is_scalar: bool) -> Any:
    task = "SEQ_CLS" if is_scalar else "CAUSAL_LM"
    if section.adapter is None:
        return peft.LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha if section.alpha % 1 else int(section.alpha),
            lora_dropout=section.dropout,
            target_modules=_targets(model, section),
            use_rslora=section.rank_stabilized,
            task_type=task,
        )
    folder = local_folder(section.adapter, KEY)
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # from_pretrained raises errors of any type
        raise ModelError(
            f"{KEY}: peft cannot read {folder / ADAPTER_CONFIG} ({type(error).__name__}: {error}). Save the adapter "
            "again, with a version of peft that is not newer than this one."
        ) from error
    _require_plain(peft, config, folder, is_scalar=is_scalar)
    config.lora_dropout, config.inference_mode, config.task_type = section.dropout, False, task
    config.modules_to_save, config.init_lora_weights = None, True
    return config


def _require_plain(peft: Any, config: Any, folder: Path, *, is_scalar: bool) -> None:
    if not isinstance(config, peft.LoraConfig):
        raise ModelError(f"{KEY}: {folder} is a {config.peft_type} adapter; Podium trains LoRA only.")
    for name, least in (("r", 1), ("lora_alpha", 0)):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least or value == 0:
            raise ModelError(f"{KEY}: {folder / ADAPTER_CONFIG} has {name} {value!r}, and it must be above 0.")
    used = [name for name in _OTHER_KINDS if getattr(config, name, None)]
    used += [f"bias: {config.bias}"] if config.bias != "none" else []
    if config.init_lora_weights not in _PLAIN_BEGINNINGS:
        used.append(f"init_lora_weights: {config.init_lora_weights}")
    if used:
        raise ModelError(f"{KEY}: {folder} uses {', '.join(used)}, which Podium does not train. Use plain LoRA.")
    beside = set(config.modules_to_save or ()) - ({HEAD, "classifier"} if is_scalar else set())
    if beside:
        raise ModelError(
            f"{KEY}: {folder} also holds whole layers ({', '.join(sorted(beside))}), which this model does not have as "
            "trained ones. An adapter of a reward model does not fit a language model, nor the other way round."
        )


def _targets(model: PreTrainedModel, section: LoraSection) -> list[str]:
    """The layer names for peft: those of the recipe, or all linear layers of the body."""
    ends = [model.get_output_embeddings(), getattr(model, HEAD, None)]
    linear = [(name, each) for name, each in model.named_modules() if _is_linear(each)]
    names = [name for name, each in linear if not any(each is end for end in ends)]
    known = {name.rpartition(".")[2] for name in names}
    if any(".experts." in name and each.dim() == 3 for name, each in model.named_parameters()):
        known -= _EXPERT_LAYERS
    if isinstance(section.targets, str):
        return sorted(known)
    for target in section.targets:
        if target not in known and not any(name == target or name.endswith(f".{target}") for name in names):
            raise ModelError(
                f"model.lora.targets: {type(model).__name__} has no linear layer named {target} in its body. It has: "
                f"{', '.join(sorted(known))}."
            )
    return list(section.targets)


def _is_linear(module: nn.Module) -> bool:
    """Whether this is an ordinary linear layer: some routers are named like one and choose experts as well."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _require_linear(peft: Any, model: PreTrainedModel, section: LoraSection) -> None:
    """Allows only linear layers of the body: only the head's weight is read, so an adapter there would have no
    effect."""
    key = "model.lora.targets" if section.adapter is None else KEY
    ends = [model.get_input_embeddings(), model.get_output_embeddings(), getattr(model, HEAD, None)]
    for name, module in adapted_layers(model):
        if (
            not isinstance(module, peft.tuners.lora.Linear)
            or not _is_linear(module.get_base_layer())
            or any(module is end for end in ends)
        ):
            raise ModelError(
                f"{key}: {name} is an embedding, a head, a router or the experts of a mixture, and Podium adapts "
                "the other linear layers of the body only. Leave it out."
            )


def _cast_adapter(model: PreTrainedModel, dtype: torch.dtype) -> None:
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)


def _saved_tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / ADAPTER_WEIGHTS
    try:
        return load_file(file)
    except Exception as error:
        raise ModelError(
            f"{KEY}: {file} cannot be read ({type(error).__name__}: {error}). It is missing or damaged: save the "
            "adapter again as safetensors."
        ) from error


def _saved_name(name: str) -> str:
    return _SAVED_PREFIX + name.replace(f".{_ADAPTER}.", ".")


def _name_inside(name: str) -> str:
    inside = name.removeprefix(_SAVED_PREFIX)
    for part in (".lora_A.", ".lora_B."):
        inside = inside.replace(part, f"{part}{_ADAPTER}.")
    return inside


def _foreign(folder: Path, what: str) -> ModelError:
    return ModelError(
        f"{KEY}: {folder} is an adapter of another base: {what}. Set model.path to the base that it was trained on."
    )


def _peft() -> Any:
    require_peft()
    import peft

    return peft
