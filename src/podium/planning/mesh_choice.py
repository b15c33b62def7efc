# SPDX-License-Identifier: Apache-2.0
"""`placement.policy: auto`: chooses the axes of the devices that train. The same recipe on the same devices gets the
same axes. Torch-free.

Memory comes first: the smallest tensor axis with which the run fits. Of the shapes that fit with it, those whose KV
cache holds most of the sequences that run at a time, and of them the one whose collectives and optimizer take the least
time, by the device's datasheet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from podium.errors import PodiumError
from podium.models.folder import read_config
from podium.models.tensor_plan import possible_sizes, unsupported_type
from podium.planning.devices import Device, found_device
from podium.planning.memory import TOLERANCE, MemoryPlan, PhaseMemory, gib, memory_of
from podium.planning.model_shape import shape_of
from podium.planning.plan_report import seconds_text
from podium.planning.shape_costs import USUAL_PROMPT, training_step
from podium.recipe import DistillRecipe, DpoRecipe, OnPolicyRecipe, Recipe, SpmdRecipe
from podium.recipe.generator_mesh import generator_rules
from podium.recipe.policy_mesh import MeshSizes, section_of, shapes_of
from podium.recipe.resolving import with_max_length
from podium.roles.interfaces import MICRO_BATCH

KEY = "placement.policy: auto"
RecipeT = TypeVar("RecipeT", bound=Recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshChoice:
    """The chosen axes, and a sentence that says why."""

    sizes: MeshSizes
    text: str
    misfits: int = 0  # shapes that were looked at where none fits, even without a margin


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """What one shape needs."""

    sizes: MeshSizes
    memory: MemoryPlan
    beside_tokens_s: float  # of a step: collectives, hidden or not, and the optimizer
    running: int = 0  # sequences of a generator that its KV cache holds
    wanted: int = 0  # sequences that it would run at a time

    @property
    def trains(self) -> PhaseMemory:
        """The largest phase but generation alone, whose KV cache takes a share of what there is."""
        return max((each for each in self.memory.phases if each.phase != "rollout"), key=lambda each: each.num_bytes)


def choose_mesh(recipe: Recipe, device: Device) -> MeshChoice:
    """The axes for a recipe's devices that train. If nothing fits, those that take the least memory: what refuses a run
    that cannot fit then says so."""
    recipe = with_max_length(recipe, read_config(Path(recipe.model.path).expanduser(), "model.path"))
    shapes = list(_possible(recipe, device))
    by_tensor: dict[int, list[MeshSizes]] = {}
    for shape in shapes:
        by_tensor.setdefault(shape.tensor, []).append(shape)
    seen: list[_Looked] = []
    for tensor in sorted(by_tensor):
        looked = [_look(recipe, device, shape) for shape in by_tensor[tensor]]
        fitting = [each for each in looked if each.memory.fits and (each.running > 0 or not each.wanted)]
        seen += looked
        if fitting:
            best = min(fitting, key=lambda each: (-each.running, each.beside_tokens_s, -each.sizes.shard))
            if len(shapes) == 1:
                return MeshChoice(sizes=best.sizes, text=f"{KEY} is {best.sizes}: there is no other shape")
            return MeshChoice(sizes=best.sizes, text=_reason(best, fitting, shapes))
    least = min(seen, key=lambda each: (each.memory.peak.num_bytes, each.sizes.tensor, -each.sizes.shard))
    counted = (
        "there is no other shape, and it does not fit" if len(shapes) == 1 else f"none of {len(shapes)} shapes fits"
    )
    return MeshChoice(
        sizes=least.sizes,
        text=f"{KEY} is {least.sizes}: {counted} {gib(device.memory_bytes)} with a margin of "
        f"{TOLERANCE:.0%}, and this one takes the least, {gib(least.memory.peak.num_bytes)}",
        misfits=len(shapes) if least.memory.cannot_fit else 0,
    )


def with_chosen_mesh(
    recipe: RecipeT, *, world: int | None = None, device: Device | None = None
) -> tuple[RecipeT, MeshChoice]:
    """The recipe with axes in place of `auto`, and what was chosen. `world`: ranks that torchrun has started, perhaps
    on several machines. `device`: that of the run; default: what this machine has."""
    assert recipe.placement.policy == "auto"
    devices = world or recipe.placement.training_devices
    found = _device_of(recipe, world) if device is None else device
    if isinstance(found, str):
        choice = _everything_shards(devices, found)
    else:
        try:
            choice = choose_mesh(recipe if world is None else _with_devices(recipe, world), found)
        except PodiumError as error:  # an architecture that the planner does not know
            choice = _everything_shards(devices, str(error))
        if device is None and _joins_a_cluster(recipe):
            choice = replace(choice, text=f"{choice.text} Nodes of the Ray cluster are taken to be like this machine.")
    return with_sizes(recipe if world is None else _with_devices(recipe, world), choice.sizes), choice


def _device_of(recipe: Recipe, world: int | None) -> Device | str:
    """The device of the run, as far as this machine tells; or why it is not known."""
    found = found_device(recipe.placement.device)
    elsewhere = "the run may have devices of other machines, which are not known here"
    if isinstance(recipe, SpmdRecipe):
        is_here = recipe.placement.launcher != "ray" and (
            world is None or (found is not None and found.kind == "cuda")
        )  # fmt: skip
        if not is_here:
            return elsewhere
    elif _joins_a_cluster(recipe) and (found is None or (found.kind == "cpu" and recipe.placement.device != "cpu")):
        return elsewhere
    return "the planner does not know this machine's GPU" if found is None else found


def _joins_a_cluster(recipe: Recipe) -> bool:
    """Whether an on-policy run joins a Ray cluster that is there already."""
    if not isinstance(recipe, OnPolicyRecipe) or recipe.placement.launcher == "inline":
        return False
    from podium.cluster import RayCluster

    return RayCluster().running_address is not None


def _everything_shards(devices: int, reason: str) -> MeshChoice:
    sizes = MeshSizes(shard=devices)
    return MeshChoice(sizes=sizes, text=f"{KEY} is {sizes}: {reason}")


def _with_devices(recipe: RecipeT, devices: int) -> RecipeT:
    placement = recipe.placement.model_copy(update={"devices": devices})
    return recipe.model_copy(update={"placement": placement})


def with_sizes(recipe: RecipeT, sizes: MeshSizes) -> RecipeT:
    """The recipe with these axes."""
    placement = recipe.placement.model_copy(update={"policy": section_of(sizes)})
    return recipe.model_copy(update={"placement": placement})


def _possible(recipe: Recipe, device: Device) -> Iterator[MeshSizes]:
    """Shapes that divide all models of the recipe, and that its generators allow. A tensor group stays inside of one
    machine, and computes no products in fp8."""
    devices, rows = recipe.placement.training_devices, recipe.model.pad_vocab_to
    allowed = frozenset(size for size in range(1, min(devices, device.per_machine) + 1) if rows % size == 0)
    if recipe.model.fp8:
        allowed &= {1}
    for path in _models(recipe):
        config = read_config(Path(path).expanduser(), "model.path")
        config = config.get("text_config") or config
        is_divided = unsupported_type(str(config.get("model_type"))) is None
        allowed &= possible_sizes(config, devices) if is_divided else frozenset({1})
    for shape in shapes_of(devices):
        is_plain = shape.devices == shape.data_ranks * shape.tensor  # no axis that `auto` does not know
        if shape.tensor in allowed and is_plain and _suits_generators(recipe, shape):
            yield shape


def _suits_generators(recipe: Recipe, shape: MeshSizes) -> bool:
    if not isinstance(recipe, OnPolicyRecipe) or shape.tensor == 1:
        return True
    return not list(generator_rules(with_sizes(recipe, shape)))


def _models(recipe: Recipe) -> Iterator[str]:
    """Paths of all that is divided over the axes. Judges are whole on every device."""
    yield recipe.model.path
    if isinstance(recipe, DpoRecipe) and recipe.reference_model is not None:
        yield recipe.reference_model
    if isinstance(recipe, DistillRecipe):
        yield from (teacher.path for teacher in recipe.teachers)
    if isinstance(recipe, OnPolicyRecipe):
        yield from (teacher.path for teacher in recipe.teacher_sections)
        yield from recipe.reward_models.values()
        critic, kl = recipe.critic_section, recipe.full_algorithm.kl
        yield from (each for each in (critic and critic.path, kl and kl.reference) if each)


def _look(recipe: Recipe, device: Device, shape: MeshSizes) -> _Looked:
    if isinstance(recipe, OnPolicyRecipe):
        return _look_at_update(with_sizes(recipe, shape), device, shape)
    assert isinstance(recipe, SpmdRecipe)
    from podium.planning.fixed_data_plans import fixed_data_step, placed  # which an on-policy check need not import

    step = fixed_data_step(placed(recipe, shape.devices, section_of(shape)), device)
    return _Looked(sizes=shape, memory=step.memory, beside_tokens_s=step.moved_s + step.parts["optimizer"])


def _look_at_update(recipe: OnPolicyRecipe, device: Device, shape: MeshSizes) -> _Looked:
    """Of a policy. Its episodes are a usual prompt and the longest answer; with an environment they are as long as they
    may be."""
    rollout, placement, algorithm = recipe.rollout, recipe.placement, recipe.full_algorithm
    memory = memory_of(recipe, device)
    assert recipe.data.max_length is not None, "was looked up"
    usual = USUAL_PROMPT + rollout.max_new_tokens if recipe.environment is None else recipe.data.max_length
    length = min(usual, recipe.data.max_length)
    episodes = rollout.prompts_per_step * rollout.samples_per_prompt
    of_rank = max(1.0, episodes * length / algorithm.mini_batches / shape.data_ranks)
    passes = math.ceil(of_rank / (recipe.micro_batch_tokens or MICRO_BATCH[device.kind]))
    step = training_step(
        shape_of(recipe.model), device, [length] * max(1, round(of_rank / length)), mesh=shape, passes=passes,
        checkpointing=recipe.model.activation_checkpointing,
    )  # fmt: skip
    generating = placement.devices if placement.layout != "split" else placement.devices - shape.devices
    generators = max(1, generating // placement.generator_tensor)
    wanted = min(rollout.running_on(device.kind), math.ceil(episodes * (1 + rollout.staleness) / generators))
    held = 0 if memory.engine is None else memory.engine.sequences_of(length)
    return _Looked(
        sizes=shape, memory=memory, running=min(held, wanted), wanted=wanted,
        beside_tokens_s=algorithm.epochs * algorithm.mini_batches * (step.moved_s + step.optimizer_s),
    )  # fmt: skip


def _reason(best: _Looked, fitting: list[_Looked], shapes: list[MeshSizes]) -> str:
    trains, whole = best.trains, gib(best.memory.device.memory_bytes)
    what = "it" if len(best.memory.phases) == 1 else f"its {trains.phase} ({trains.place})"
    others = [each for each in fitting if each.running == best.running]
    cache = ""
    if len(others) < len(fitting):
        cache = f" and hold {best.running} of {best.wanted} running sequences in the KV cache"
    smallest = "" if best.sizes.tensor == 1 else f" With a tensor axis below {best.sizes.tensor} nothing fits."
    takes = f"{KEY} is {best.sizes}: {what} takes {gib(trains.num_bytes)} of {whole}"
    if len(others) == 1:
        fits = "fits" if not cache else f"fits{cache.replace('hold', 'holds', 1)}"
        return f"{takes}, and it is the only shape with this tensor axis that {fits} (of {len(shapes)}).{smallest}"
    return (
        f"{takes}, and of the {len(others)} shapes with this tensor axis that fit{cache} (of {len(shapes)}), its "
        f"collectives and optimizer take the least, {seconds_text(best.beside_tokens_s)} a step.{smallest}"
    )
