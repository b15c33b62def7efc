# SPDX-License-Identifier: Apache-2.0
"""`placement.policy: auto`: chooses the axes of a program on fixed data. The same recipe on the same devices gets the
same axes. Torch-free.

Memory comes first: the smallest tensor axis with which the run fits. Of the shapes that fit with it, the one whose
collectives and optimizer take the least time, by the device's datasheet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from podium.errors import PodiumError
from podium.models.folder import read_config
from podium.models.tensor_plan import possible_sizes, unsupported_type
from podium.planning.devices import Device, found_device
from podium.planning.fixed_data_plans import FixedDataStep, fixed_data_step, placed
from podium.planning.memory import TOLERANCE, gib
from podium.planning.plan_report import seconds_text
from podium.recipe import DistillRecipe, DpoRecipe, SpmdRecipe
from podium.recipe.policy_mesh import MeshSizes, section_of, shapes_of

KEY = "placement.policy: auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshChoice:
    """The chosen axes, and a sentence that says why."""

    sizes: MeshSizes
    text: str


def choose_mesh(recipe: SpmdRecipe, device: Device) -> MeshChoice:
    """The axes for a recipe's devices. If nothing fits, those that take the least memory: what refuses a run that
    cannot fit then says so."""
    shapes = list(_possible(recipe, device))
    if len(shapes) == 1:
        return MeshChoice(sizes=shapes[0], text=f"{KEY} is {shapes[0]}: there is no other shape")
    by_tensor: dict[int, list[FixedDataStep]] = {}
    for shape in shapes:
        by_tensor.setdefault(shape.tensor, []).append(_step(recipe, device, shape))
    for steps in (by_tensor[tensor] for tensor in sorted(by_tensor)):
        fitting = [each for each in steps if each.memory.share <= 1 - TOLERANCE]
        if fitting:
            best = min(fitting, key=lambda each: (_beside_tokens_s(each), -each.sizes.shard))
            return MeshChoice(sizes=best.sizes, text=_reason(best, fitting, shapes))
    least = min(
        (each for steps in by_tensor.values() for each in steps),
        key=lambda each: (each.memory.peak.num_bytes, each.sizes.tensor, -each.sizes.shard),
    )
    return MeshChoice(
        sizes=least.sizes,
        text=f"{KEY} is {least.sizes}: none of {len(shapes)} shapes fits {gib(device.memory_bytes)} with a margin of "
        f"{TOLERANCE:.0%}, and this one takes the least, {gib(least.memory.peak.num_bytes)}",
    )


def with_chosen_mesh(recipe: SpmdRecipe, *, world: int | None = None) -> tuple[SpmdRecipe, str]:
    """The recipe with axes in place of `auto`, and what was chosen. `world`: ranks that torchrun has started, perhaps
    on several machines."""
    assert recipe.placement.policy == "auto"
    devices = world or recipe.placement.devices
    choice = _everything_shards(devices, "the run may have devices of other machines, which are not known here")
    device = found_device(recipe.placement.device)
    is_here = recipe.placement.launcher != "ray" and (world is None or (device is not None and device.kind == "cuda"))
    if is_here and device is None:
        choice = _everything_shards(devices, "the planner does not know this machine's GPU")
    elif is_here and device is not None:
        try:
            choice = choose_mesh(placed(recipe, devices, "auto"), device)
        except PodiumError as error:  # an architecture that the planner does not know
            choice = _everything_shards(devices, str(error))
    return placed(recipe, devices, section_of(choice.sizes)), choice.text


def _everything_shards(devices: int, reason: str) -> MeshChoice:
    sizes = MeshSizes(shard=devices)
    return MeshChoice(sizes=sizes, text=f"{KEY} is {sizes}: {reason}")


def _possible(recipe: SpmdRecipe, device: Device) -> Iterator[MeshSizes]:
    """Shapes that divide all models of the recipe. A tensor group stays inside of one machine, and computes no products
    in fp8."""
    devices, rows = recipe.placement.devices, recipe.model.pad_vocab_to
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
        if shape.tensor in allowed and is_plain:
            yield shape


def _models(recipe: SpmdRecipe) -> Iterator[str]:
    yield recipe.model.path
    if isinstance(recipe, DpoRecipe) and recipe.reference_model is not None:
        yield recipe.reference_model
    if isinstance(recipe, DistillRecipe):
        yield from (teacher.path for teacher in recipe.teachers)


def _step(recipe: SpmdRecipe, device: Device, shape: MeshSizes) -> FixedDataStep:
    return fixed_data_step(placed(recipe, shape.devices, section_of(shape)), device)


def _beside_tokens_s(step: FixedDataStep) -> float:
    """Collectives, hidden or not, and the optimizer."""
    return step.moved_s + step.parts["optimizer"]


def _reason(best: FixedDataStep, fitting: list[FixedDataStep], shapes: list[MeshSizes]) -> str:
    peak, whole = best.memory.peak.num_bytes, best.memory.device.memory_bytes
    smallest = "" if best.sizes.tensor == 1 else f" With a tensor axis below {best.sizes.tensor} nothing fits."
    return (
        f"{KEY} is {best.sizes}: it takes {gib(peak)} of {gib(whole)}, and of the {len(fitting)} shapes with this "
        f"tensor axis that fit (of {len(shapes)}), its collectives and optimizer take the least, "
        f"{seconds_text(_beside_tokens_s(best))} a step.{smallest}"
    )
