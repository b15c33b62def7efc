# SPDX-License-Identifier: Apache-2.0
"""Plans of programs on fixed data: memory, step time, and the micro-batch for each number of devices. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from podium.errors import RunFolderError
from podium.planning.devices import Device
from podium.planning.memory import TOLERANCE, MemoryPlan, gib, memory_of, mesh_sizes, refusal
from podium.planning.model_shape import shape_of
from podium.planning.plan_report import (
    Plan,
    device_notes,
    listed,
    memory_values,
    number_of_devices,
    seconds_text,
)
from podium.planning.run_costs import fit_line
from podium.planning.shape_costs import StepTime, training_step
from podium.recipe import SpmdRecipe
from podium.recipe.policy_mesh import MeshSizes, PolicyMeshSection, nearest, section_of
from podium.roles.interfaces import MICRO_BATCH

if TYPE_CHECKING:
    from podium.planning.mesh_choice import MeshChoice

# A step that is shorter takes as long as starting its kernels.
_SMALL_STEP_S = 0.02
# A run needs so many steps, without the first.
_FEWEST_STEPS = 3
# Micro-batches that are looked at: powers of two times the recipe's own.
_SMALLER, _LARGER = 4, 3
# A larger micro-batch has to gain so much.
_LEAST_GAIN = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """How ranks go through the tokens of a step, with documents as long as they may be."""

    step_tokens: int  # of all ranks
    micro_batches: int  # of a rank
    tokens: float  # of a micro-batch
    length: int  # of a document


def split_of(recipe: SpmdRecipe, device: Device, sizes: MeshSizes) -> StepSplit:
    """Of a recipe on its mesh: ranks that get different data have equal parts of it."""
    longest = recipe.data.max_length or shape_of(recipe.model).context
    rows = recipe.rows_per_step
    tokens = recipe.tokens_per_step if rows is None else rows * recipe.documents_per_row * longest
    of_rank = max(1.0, tokens / sizes.data_ranks)
    micro_batch = recipe.micro_batch_tokens or MICRO_BATCH[device.kind] * sizes.context
    micro_batches = math.ceil(of_rank / micro_batch)
    return StepSplit(
        step_tokens=tokens, micro_batches=micro_batches, tokens=of_rank / micro_batches,
        length=max(1, int(min(longest, of_rank / micro_batches))),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDataStep:
    """One step of a recipe on so many devices."""

    devices: int
    sizes: MeshSizes
    micro_batch: int | None  # None: the default
    passes: int
    tokens: float  # of all devices
    length: float  # of a document
    parts: Mapping[str, float]
    moved_s: float  # of collectives, hidden or not
    memory: MemoryPlan

    @property
    def step_s(self) -> float:
        """All of it."""
        return sum(self.parts.values())


def plan_fixed_data(recipe: SpmdRecipe, device: Device, devices: Sequence[int], steps: int) -> Plan:
    """Memory and step time of the recipe, and of other numbers of devices with the micro-batch that suits them. Raises
    a RecipeError if nothing fits."""
    now = fixed_data_step(recipe, device)
    problem = refusal(now.memory, recipe, choice=_chosen_mesh(recipe, device))
    found = [suited(recipe, device, number) for number in devices or (recipe.placement.devices,)]
    fitting = [each for each in found if each is not None]
    if problem is not None and not fitting:
        raise problem
    facts = [*mesh_facts(recipe, device), *now.memory.lines()]
    if problem is None:
        facts += [
            f"a step of {now.tokens:,.0f} tokens takes {seconds_text(now.step_s)}: {listed(now.parts)}",
            _speed(now, steps),
        ]
    else:
        facts.append(f"as it is, it cannot run. {problem}")
    shown = [each for each in fitting if (each.devices, each.micro_batch) != (now.devices, now.micro_batch)]
    facts += [_choice(each, now, steps) for each in shown]
    missing = [number for number, each in zip(devices, found, strict=False) if each is None]
    notes = [
        f"assumed: documents of {now.length:,.0f} tokens, as long as they may be. Shorter ones have less attention."
    ]
    if missing:
        notes.append(f"with {', '.join(map(str, missing))} devices it does not fit, with a margin of {TOLERANCE:.0%}.")
    if now.step_s < _SMALL_STEP_S and not device.is_measured:
        notes.append(
            "starting its kernels may take longer than such a small step, and is not counted: this is a lower bound."
        )
    values = {
        "device": device.name, "mesh": asdict(now.sizes), "memory": memory_values(now.memory),
        "step_s": now.step_s, "parts_s": now.parts, "fits": problem is None,
        "choices": [_values(each) for each in fitting],
    }  # fmt: skip
    return Plan(
        title=f"{recipe.program} on {now.devices} x {device.name}{_axes(recipe, now)}", facts=tuple(facts),
        base=None, found=None, notes=(*notes, *device_notes(device)), values=values,
    )  # fmt: skip


def suited(recipe: SpmdRecipe, device: Device, devices: int) -> FixedDataStep | None:
    """The step on so many devices with the recipe's micro-batch, with a larger one if that fits and gains 3%, or with
    the largest smaller one that fits; None: none does."""
    recipe = placed_on(recipe, devices)
    own = fixed_data_step(recipe, device)
    if _fits(own):
        larger = [each for each in _larger(recipe, device, own) if _fits(each)]
        best = min([own, *larger], key=lambda each: each.step_s)
        return best if best.step_s < own.step_s * (1 - _LEAST_GAIN) else own
    return next((each for each in _smaller(recipe, device, own) if _fits(each)), None)


def placed_on(recipe: SpmdRecipe, devices: int) -> SpmdRecipe:
    """The recipe with another number of devices, and of its axes the nearest shape that has these."""
    policy = recipe.placement.policy
    if isinstance(policy, PolicyMeshSection) and devices != recipe.placement.devices:
        policy = section_of(nearest(policy, devices))
    return placed(recipe, devices, policy)


def placed(recipe: SpmdRecipe, devices: int, policy: PolicyMeshSection | Literal["auto"] | None) -> SpmdRecipe:
    """The recipe with these devices and axes."""
    placement = recipe.placement.model_copy(update={"devices": devices, "policy": policy})
    return recipe.model_copy(update={"placement": placement})


def fixed_data_step(recipe: SpmdRecipe, device: Device) -> FixedDataStep:
    """Of the recipe as it is, with documents as long as they may be."""
    shape, sizes = shape_of(recipe.model), mesh_sizes(recipe, device)
    if recipe.placement.policy == "auto":
        recipe = placed(recipe, sizes.devices, section_of(sizes))
    split = split_of(recipe, device, sizes)
    of_one = max(1.0, split.step_tokens / sizes.data_ranks)
    length = min(recipe.data.max_length or shape.context, of_one)
    passes = split.micro_batches
    step = training_step(
        shape, device, [length] * max(1, round(of_one / length)), mesh=sizes, passes=passes,
        checkpointing=recipe.model.activation_checkpointing,
    )  # fmt: skip
    # Only a calibration measures what an update takes whatever its size; the table's value has a controller in it.
    constant_s = passes * device.efficiency.update_s if device.is_measured else 0.0
    return FixedDataStep(
        devices=sizes.devices,
        sizes=sizes,
        micro_batch=recipe.micro_batch_tokens,
        passes=passes,
        tokens=float(split.step_tokens),
        length=length,
        parts={**_step_parts(step), "constant": constant_s},
        moved_s=step.moved_s,
        memory=memory_of(recipe, device),
    )


def _larger(recipe: SpmdRecipe, device: Device, own: FixedDataStep) -> Iterator[FixedDataStep]:
    micro, passes = recipe.micro_batch_tokens or MICRO_BATCH[device.kind] * own.sizes.context, own.passes
    for factor in (2**power for power in range(1, _LARGER + 1)):
        if passes == 1:
            return
        larger = fixed_data_step(recipe.model_copy(update={"micro_batch_tokens": micro * factor}), device)
        passes = larger.passes
        yield larger


def _smaller(recipe: SpmdRecipe, device: Device, own: FixedDataStep) -> Iterator[FixedDataStep]:
    """A row is never cut, so that none is below the longest one."""
    micro = recipe.micro_batch_tokens or MICRO_BATCH[device.kind] * own.sizes.context
    least = recipe.documents_per_row * (recipe.data.max_length or 1)
    for smaller in (micro >> power for power in range(1, _SMALLER + 1)):
        if smaller >= max(1, least):
            yield fixed_data_step(recipe.model_copy(update={"micro_batch_tokens": smaller}), device)


def _fits(step: FixedDataStep) -> bool:
    return step.memory.share <= 1 - TOLERANCE


def _choice(each: FixedDataStep, now: FixedDataStep, steps: int) -> str:
    micro = "" if each.micro_batch == now.micro_batch else f" with micro_batch_tokens: {each.micro_batch}"
    axes = "" if each.sizes.shard == each.devices else f" {each.sizes}"
    peak = f"{gib(each.memory.peak.num_bytes)} of {gib(each.memory.device.memory_bytes)}"
    return (
        f"{number_of_devices(each.devices)}{axes}{micro}: {seconds_text(each.step_s)} a step in {each.passes} "
        f"micro-batch{'es' if each.passes > 1 else ''}, {_speed(each, steps)}, {peak}"
    )


def _axes(recipe: SpmdRecipe, step: FixedDataStep) -> str:
    return "" if recipe.placement.policy is None else f" {step.sizes}"


def mesh_facts(recipe: SpmdRecipe, device: Device) -> list[str]:
    """What placement.policy: auto chooses, and why; nothing for other values."""
    choice = _chosen_mesh(recipe, device)
    return [] if choice is None else [choice.text]


def _chosen_mesh(recipe: SpmdRecipe, device: Device) -> MeshChoice | None:
    if recipe.placement.policy != "auto":
        return None
    from podium.planning.mesh_choice import choose_mesh

    return choose_mesh(recipe, device)


def _speed(each: FixedDataStep, steps: int) -> str:
    hours = each.devices * each.step_s * steps / 3600
    return f"{each.tokens / each.step_s:,.0f} tokens/s, {hours:.3g} device-hours for {steps:,} steps"


def _values(each: FixedDataStep) -> dict[str, object]:
    return {
        "devices": each.devices, "mesh": asdict(each.sizes), "micro_batch_tokens": each.micro_batch,
        "micro_batches": each.passes, "step_s": each.step_s, "parts_s": dict(each.parts),
        "peak_bytes": each.memory.peak.num_bytes,
    }  # fmt: skip


def _step_parts(step: StepTime) -> dict[str, float]:
    return {
        "products": step.products_s, "attention": step.attention_s, "activations": step.activations_s,
        "logits": step.logits_s, "optimizer": step.optimizer_s, "sums": step.sums_s, "collectives": step.collectives_s,
    }  # fmt: skip


def plan_fixed_data_run(
    path: Path, recipe: SpmdRecipe, lines: Sequence[tuple[int, Mapping[str, float]]], devices: Sequence[int], steps: int
) -> Plan:
    """Of a run: what its steps took over their tokens, and would on other numbers of devices."""
    kept = [values for _, values in lines[1:]]
    if len(kept) < _FEWEST_STEPS:
        raise RunFolderError(
            f"{path} has {len(lines)} steps, and a plan needs {_FEWEST_STEPS + 1}. Let it train longer."
        )
    now = recipe.placement.devices
    seconds = [values["step_s"] for values in kept]
    counts = [values.get("tokens", 0.0) for values in kept]
    line = fit_line([count / now for count in counts], seconds)
    tokens = statistics.fmean(counts)
    numbers = sorted({now, *(devices or (2 * now, 4 * now))})
    times = {number: line.constant + line.slope * tokens / number for number in numbers}
    facts = [
        f"measured: {seconds_text(statistics.fmean(seconds))} a step of {tokens:,.0f} tokens over {len(kept)} steps",
        f"a token on a device {seconds_text(line.slope)}, and {seconds_text(line.constant)} of every step "
        f"(median error {line.error:.1%})",
        *(
            f"{number_of_devices(number)}: {seconds_text(step_s)} a step, {tokens / step_s:,.0f} tokens/s, "
            f"{number * step_s * steps / 3600:.3g} device-hours for {steps:,} steps"
            for number, step_s in times.items()
        ),
    ]
    notes = []
    if len(times) > 1:
        notes.append("what sharding over more devices adds to a step is not in this run's records, and not counted.")
        if line.constant == 0.0:
            notes.append(
                "what a step takes whatever its tokens cannot be told, because steps are few, or all have about as "
                "many tokens: more devices may gain less."
            )
    values = {"run": str(path), "token_s": line.slope, "constant_s": line.constant, "step_s": times}
    return Plan(
        title=f"{path}: {recipe.program} on {number_of_devices(now)}", facts=tuple(facts), base=None, found=None,
        notes=tuple(notes), values=values,
    )  # fmt: skip
