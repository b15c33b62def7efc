# SPDX-License-Identifier: Apache-2.0
"""One rank of many, alone: torch's fake process group, whose collectives return at once, and fake tensors, which have a
shape and no memory. Placing, training step and optimizer state are the engine's own."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from podium.algorithms.dense import token_cross_entropy
from podium.dry_run.counting import CollectiveCounter
from podium.engine.mesh import Mesh, with_axes
from podium.engine.optimizer import AdamW, Gradients
from podium.engine.parameters import TrainedParameter
from podium.engine.sharding import PackedModel, compute_dtype, local_tensor, place_empty
from podium.engine.train_step import ObjectiveBatch, TrainEngine
from podium.errors import LaunchError, RecipeError
from podium.models.causal_lm import build, load_config
from podium.models.expert_axis import ExpertAxis, ExpertGroups
from podium.models.expert_plan import num_experts
from podium.models.head import TokenObjective
from podium.models.scalar import PackedScalarLM, build_scalar
from podium.models.verify import random_batch
from podium.planning.collectives import Collective, added_up
from podium.planning.devices import Device
from podium.planning.dry_run_report import DryRun, RankMemory
from podium.planning.fixed_data_plans import StepSplit, split_of
from podium.planning.memory import compute_itemsize, mesh_sizes
from podium.planning.rings import counted_rank
from podium.recipe import RewardModelRecipe, SpmdRecipe
from podium.recipe.policy_mesh import MeshSizes

_TIMEOUT_S = 60.0
# Models of so many layers stand for deeper ones.
_FEW_LAYERS = (2, 3)
_MOST_LAYERS = 5


def dry_run(recipe: SpmdRecipe, device: Device) -> DryRun:
    """One training step of a recipe on its mesh of such devices: what the first and the last rank hold, and the
    collectives of the first, or where keys travel around a context axis, of the one that sends most. Where all layers
    are alike, models of two and of three layers tell what each adds."""
    started_s = time.monotonic()
    transformers.logging.set_verbosity_error()
    sizes, itemsize = mesh_sizes(recipe, device), compute_itemsize(recipe.model, device)
    split = split_of(recipe, device, sizes)
    model = DryModel(recipe, itemsize)
    if sizes.tensor > 1 and num_experts(model.config.get_text_config().to_dict()):
        raise RecipeError(
            f"placement.policy.tensor: {sizes.tensor} cannot be counted in a dry run of a mixture: how many tokens a "
            "rank's experts get is known only when they are routed. Count it with tensor: 1, or remove --dry-run."
        )
    counted = counted_rank(sizes.context) * sizes.tensor if model.has_ring(sizes) else 0
    first, collectives = model.count(counted, sizes, split)
    ranks = [first if counted == 0 else model.count(0, sizes, None)[0]]
    if sizes.devices > 1:
        ranks.append(model.count(sizes.devices - 1, sizes, None)[0])
    return DryRun(
        recipe=recipe, device=device, sizes=sizes, split=split, ranks=tuple(ranks), collectives=collectives,
        counted_rank=counted, seconds=time.monotonic() - started_s,
    )  # fmt: skip


class DryModel:
    """The model of a recipe, with all its layers or with some."""

    def __init__(self, recipe: SpmdRecipe, itemsize: int) -> None:
        self._recipe = recipe
        section = recipe.model
        # In the dtype of the device that is planned for, and not compiled.
        dtype = "bfloat16" if itemsize == 2 else "float32"
        self.section = section.model_copy(update={"dtype": dtype, "compile": "off"})
        folder = Path(section.path).expanduser()
        self.config = load_config(folder, trust_remote_code=section.trust_remote_code)
        self._labels = 1 if isinstance(recipe, RewardModelRecipe) else None
        self._text = self.config.get_text_config()
        self._num_layers = int(self._text.num_hidden_layers)

    def has_ring(self, sizes: MeshSizes) -> bool:
        """Whether keys travel around the context axis, because it does not divide the heads."""
        return bool(self._text.num_attention_heads // sizes.tensor % sizes.context)

    def count(self, rank: int, sizes: MeshSizes, split: StepSplit | None) -> tuple[RankMemory, tuple[Collective, ...]]:
        """What a rank holds and, with `split`, the collectives of its step."""
        differ = self.has_ring(sizes) and self._has_windows  # messages reach as far as windows do
        if self._num_layers <= _MOST_LAYERS or differ or not self._has_equal_layers:
            return self.counted(self.config, rank, sizes, split)
        few, more = (self.counted(cut(self.config, layers), rank, sizes, split) for layers in _FEW_LAYERS)
        return extrapolated(few, more, self._num_layers - _FEW_LAYERS[0])

    def counted(
        self, config: Any, rank: int, sizes: MeshSizes, split: StepSplit | None
    ) -> tuple[RankMemory, tuple[Collective, ...]]:
        """The same, of a model with this config."""
        recipe = self._recipe
        with fake_mesh(rank, sizes) as mesh, fake_tensors(self.built(config)) as model:
            everything = place_empty(model, self.section, mesh)
            optimizer = _NotedGradients(everything, recipe.optimizer)
            if split is None:
                return _memory(rank, model, everything, optimizer), ()
            engine = TrainEngine(
                model, everything, optimizer, mesh, recipe.optimizer.clip_norm,
                router_aux_loss_coef=recipe.model.router_aux_loss_coef,
            )  # fmt: skip
            with CollectiveCounter(mesh, sizes) as counter:
                batches = _CountedBatches(engine, split, counter)
                engine.objective_step(batches, normalizer=1.0, lr=0.0)
            return _memory(rank, model, everything, optimizer), added_up(batches.of_step(split.micro_batches))

    def built(self, config: Any) -> PackedModel:
        """On the meta device."""
        section, meta = self.section, torch.device("meta")
        dtype = compute_dtype(section, torch.device("cpu"))
        model: PackedModel
        if self._labels is None:
            model = build(section, config, device=meta, dtype=dtype)
        else:
            model = build_scalar(section, config, device=meta, dtype=dtype, labels=self._labels)
        if dtype == torch.float32 and any(each.dim() > 2 for each in model.hf.parameters()):
            # On tensors without memory grouped products are defined for bfloat16 alone.
            model.hf.set_experts_implementation("batched_mm")
        return model

    @property
    def _has_windows(self) -> bool:
        """Whether some layers may slide and others not."""
        return len(set(getattr(self._text, "layer_types", None) or ())) > 1

    @functools.cached_property
    def _has_equal_layers(self) -> bool:
        """Whether all layers have parameters of the same names and shapes."""
        layers = self.built(self.config).layers
        shapes = {tuple((name, each.shape) for name, each in layer.named_parameters()) for layer in layers}
        return len(shapes) == 1


def cut(config: Any, layers: int) -> Any:
    """The config of the model's first layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return config


def extrapolated(
    few: tuple[RankMemory, tuple[Collective, ...]], more: tuple[RankMemory, tuple[Collective, ...]], times: int
) -> tuple[RankMemory, tuple[Collective, ...]]:
    """`few` plus so many times what `more`, of a model with one more layer, has beyond it."""
    held, added = asdict(few[0]), asdict(more[0])
    memory = RankMemory(**{name: value + times * (added[name] - value) for name, value in held.items()})
    less = {(each.kind, each.axis, each.ranks): each for each in few[1]}
    found = []
    for each in more[1]:
        before = less.get((each.kind, each.axis, each.ranks))
        calls, size = (0, 0) if before is None else (before.calls, before.num_bytes)
        found.append(
            replace(each, calls=calls + times * (each.calls - calls), num_bytes=size + times * (each.num_bytes - size))
        )
    return memory, tuple(found)


@contextmanager
def fake_mesh(rank: int, sizes: MeshSizes) -> Iterator[Mesh]:
    """The mesh as this rank has it, without other ranks. Only one process group of a process can be the default."""
    if dist.is_initialized():
        raise LaunchError("a dry run needs a process without a process group: run it on its own.")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes.devices)
    try:
        devices = init_device_mesh("cpu", (sizes.devices,), mesh_dim_names=("shard",))
        mesh = Mesh(rank=rank, world=sizes.devices, device=torch.device("cpu"), devices=devices)
        mesh = with_axes(mesh, sizes, timeout_s=_TIMEOUT_S)
        yield mesh if mesh.experts is None else replace(mesh, experts=_balanced(mesh.experts))
    finally:
        dist.destroy_process_group()
        # What DTensor has looked up leads to this mesh, and the next rank may have one with the same shape.
        _clear_sharding_prop_cache()


def _balanced(groups: ExpertGroups) -> ExpertGroups:
    assert groups.exchange is not None
    return replace(groups, exchange=_BalancedExperts.like(groups.exchange))


class _BalancedExperts(ExpertAxis):
    """An axis over which routers send as many tokens to each rank. Without values, nobody knows where they go."""

    @classmethod
    def like(cls, axis: ExpertAxis) -> _BalancedExperts:
        """The same place."""
        return cls(group=axis.group, rank=axis.rank, size=axis.size)

    def by_rank(self, sent_GC: Tensor, got_GC: Tensor, num_sent: int) -> tuple[list[int], list[int]]:
        """All ranks send alike; those that remain go to the first ranks."""
        each, left = divmod(num_sent, self.size)
        sent = [each + (rank < left) for rank in range(self.size)]
        return sent, [sent[self.rank]] * self.size


@contextmanager
def fake_tensors(model: PackedModel) -> Iterator[PackedModel]:
    """A context in which tensors have no memory, and the model with such parameters and buffers."""
    # Boundaries of documents and the like are made of real arrays.
    with FakeTensorMode(allow_non_fake_inputs=True):
        known: dict[int, nn.Parameter] = {}  # tied ones stay one
        for module in model.modules():
            for name, each in module._parameters.items():
                if each is not None:
                    if id(each) not in known:
                        known[id(each)] = nn.Parameter(torch.empty_like(each), requires_grad=each.requires_grad)
                    module._parameters[name] = known[id(each)]
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else torch.empty_like(buffer)
        yield model


class _NotedGradients(AdamW):
    """Moments as they are; instead of an update, notes the gradients."""

    gradient_bytes: int | None = None

    def step(self, gradients: Gradients, *, lr: float, clip: Tensor, skip: Tensor) -> None:
        """Sums up the bytes of the gradients."""
        self.gradient_bytes = sum(_bytes_of(each) for each in gradients.values())


class _CountedBatches:
    """One micro-batch, which notes where in the count its forward begins and its backward ends. With a load-balancing
    loss the step goes through its micro-batches twice."""

    def __init__(self, engine: TrainEngine, split: StepSplit, counter: CollectiveCounter) -> None:
        self._engine, self._counter = engine, counter
        self._lengths = (split.length,) * max(1, round(split.tokens / split.length))
        self._bounds: list[int] = [0]  # of what is between and in micro-batches, in turns

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[ObjectiveBatch]:
        model = self._engine.model
        objective: Any = TokenObjective(token_cross_entropy)
        if isinstance(model, PackedScalarLM):
            objective = torch.square
        self._bounds.append(self._counter.num_noted)
        yield ObjectiveBatch(packed=random_batch(model.vocab_size, self._lengths), objective=objective)
        self._bounds.append(self._counter.num_noted)

    def of_step(self, micro_batches: int) -> Iterator[Collective]:
        """The collectives of a step of so many micro-batches, which are all like this one."""
        bounds = [*self._bounds, self._counter.num_noted]
        for at, (start, stop) in enumerate(itertools.pairwise(bounds)):
            for each in self._counter.between(start, stop):
                yield each.times(micro_batches) if at % 2 else each


def _memory(
    rank: int, model: PackedModel, everything: list[TrainedParameter], optimizer: _NotedGradients
) -> RankMemory:
    """By the engine's own list of what this rank holds. A master that is no parameter counts as one."""
    parameters = sum(_bytes_of(each.parameter) for each in everything)
    masters = sum(_bytes_of(each.master) for each in everything if each.has_own_master)
    moments = sum(_bytes_of(each) for each in (*optimizer.first_moments, *optimizer.second_moments))
    gradients = optimizer.gradient_bytes
    if gradients is None:
        gradients = sum(_bytes_of(each.master) for each in optimizer.trained)
    return RankMemory(
        rank=rank,
        model_parameters=model.num_parameters(),
        held_parameters=sum(each.master.numel() for each in everything),
        parameter_bytes=parameters + masters,
        gradient_bytes=gradients,
        optimizer_bytes=moments,
    )


def _bytes_of(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()
