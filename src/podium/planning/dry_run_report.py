# SPDX-License-Identifier: Apache-2.0
"""What a dry run has counted, beside what the planner predicts, as lines of text and as values for JSON. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from podium.errors import PodiumError
from podium.observe.formats import table
from podium.planning.collectives import Collective, seconds_of
from podium.planning.devices import Device
from podium.planning.fixed_data_plans import StepSplit
from podium.planning.memory import MemoryPlan, gib, memory_of
from podium.planning.plan_report import memory_values, seconds_text
from podium.recipe import DistillRecipe, DpoRecipe, SpmdRecipe
from podium.recipe.policy_mesh import MeshSizes

_STATE = ("weights", "gradients", "optimizer moments", "float32 masters")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank holds of the trained model."""

    rank: int
    model_parameters: int  # of the whole model
    held_parameters: int
    parameter_bytes: int  # with float32 masters
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """One training step of a recipe on a mesh."""

    recipe: SpmdRecipe
    device: Device
    sizes: MeshSizes
    split: StepSplit
    ranks: tuple[RankMemory, ...]  # the first holds at least as much as any other, the last at most as much
    collectives: tuple[Collective, ...]  # of one step of one rank
    counted_rank: int = 0  # which one that is
    seconds: float  # that the dry run took

    def predicted(self) -> tuple[dict[str, int], MemoryPlan] | None:
        """The planner's bytes of parameters, gradients and optimizer state, and its whole plan; None: it does not know
        the architecture."""
        try:
            plan = memory_of(self.recipe, self.device)
        except PodiumError:
            return None
        state, workers = plan.peak, 1 if self.device.kind == "cuda" else self.sizes.devices
        weights = (state.of("weights") + state.of("float32 masters")) // workers
        moments = state.of("optimizer moments") // workers
        # At the head of a step's only micro-batch there are no gradients yet; they become as large as the masters.
        gradients = moments // 2
        return {"parameters": weights, "gradients": gradients, "optimizer state": moments}, plan

    def lines(self) -> list[str]:
        """Readable text."""
        first, device, split = self.ranks[0], self.device, self.split
        apart_s, hidden_s = seconds_of(self.collectives, device)
        return [
            f"dry run: {self.recipe.program} of {first.model_parameters / 1e9:,.1f}B parameters on "
            f"{self.sizes.devices} x {device.name} {self.sizes}",
            f"  a step of {split.step_tokens:,} tokens: {split.micro_batches} "
            f"micro-batch{'es' if split.micro_batches > 1 else ''} of {split.tokens:,.0f} tokens on each of "
            f"{self.sizes.data_ranks} ranks with different data",
            "",
            *table([("memory", *(f"rank {each.rank}" for each in self.ranks), "planner"), *self._memory_rows()]),
            "",
            *table([_HEADER, *(_row(each, device) for each in self.collectives)]),
            "",
            f"collectives take {seconds_text(apart_s + hidden_s)} a step by the datasheet's links, "
            f"{seconds_text(apart_s)} of it where computation waits for them. Starting them is not "
            "counted. Untested on hardware.",
            *self._notes(),
            f"counted in {self.seconds:.0f} s. Nothing was computed, and no memory of the model was allocated.",
        ]

    def _memory_rows(self) -> list[tuple[str, ...]]:
        predicted = self.predicted()
        columns: list[Mapping[str, int]] = [
            {
                "parameters": each.parameter_bytes,
                "gradients": each.gradient_bytes,
                "optimizer state": each.optimizer_bytes,
            }
            for each in self.ranks
        ]
        if predicted is not None:
            columns.append(predicted[0])
        rows = [(name, *(gib(column[name]) for column in columns)) for name in columns[0]]
        rows.append(("together", *(gib(sum(column.values())) for column in columns)))
        if predicted is None:
            return [(*row, "-") for row in rows]
        empty = ("",) * len(self.ranks)
        others = [term for term in predicted[1].peak.terms if term.name not in _STATE]
        workers = 1 if self.device.kind == "cuda" else self.sizes.devices
        rows += [(term.name, *empty, gib(term.num_bytes / workers)) for term in others]
        return rows

    def _notes(self) -> list[str]:
        notes = []
        if self.ranks[-1].num_bytes < 0.9 * self.ranks[0].num_bytes:
            notes.append(
                "ranks hold unequal parts: FSDP divides the first dimension of a tensor, and some have fewer rows than "
                "there are ranks. Use a smaller placement.policy.shard with replicate."
            )
        if self.sizes.experts > 1:
            notes.append(
                "assumed: routers send as many tokens to each rank of experts. Where they do not, all-to-alls have "
                "other bytes, and the rank with popular experts gets more."
            )
        if self.counted_rank:
            notes.append(
                f"keys travel around ranks of context: counted for rank {self.counted_rank}, which sends most of a "
                "document over all of them."
            )
        if isinstance(self.recipe, DpoRecipe | DistillRecipe):
            notes.append("collectives of the reference or teachers beside the trained model are not counted.")
        return notes

    def as_json(self) -> dict[str, Any]:
        """Values of the same."""
        predicted = self.predicted()
        apart_s, hidden_s = seconds_of(self.collectives, self.device)
        return {
            "device": self.device.name,
            "mesh": asdict(self.sizes),
            "step": asdict(self.split),
            "counted_rank": self.counted_rank,
            "ranks": [{**asdict(each), "bytes": each.num_bytes} for each in self.ranks],
            "predicted": None if predicted is None else predicted[0],
            "memory": None if predicted is None else memory_values(predicted[1]),
            "collectives": [
                {**asdict(each), "sent_bytes": each.sent_bytes, "seconds": each.seconds(self.device)}
                for each in self.collectives
            ],
            "collectives_s": apart_s + hidden_s,
            "waited_s": apart_s,
            "seconds": self.seconds,
        }


_HEADER = ("collective", "axis", "ranks", "link", "calls", "tensors", "sent by a rank", "seconds")


def _row(each: Collective, device: Device) -> Sequence[str]:
    seconds = each.seconds(device)
    link = "network" if each.crosses_machines(device) else "machine"
    return (
        each.kind, each.axis, str(each.ranks), link, f"{each.calls:,}", _size(each.num_bytes), _size(each.sent_bytes),
        seconds_text(seconds) if seconds >= 1e-6 else "under 1 µs",
    )  # fmt: skip


def _size(num_bytes: float) -> str:
    return gib(num_bytes) if num_bytes >= 1 << 20 else f"{num_bytes:,.0f} bytes"
