# SPDX-License-Identifier: Apache-2.0
"""What the planner says of the memory of runs on an H200 that were recorded, beside the records. Needs no GPU.

    python benchmarks/plan_memory.py

The records are those of docs/planning.md: `plan_gpu.py` on two hosts with one H200 each, torch 2.11. `held` is the most
that all processes held of the GPU, beyond what was held before; `allocated` the peak of torch's allocator. A plan is of
the largest micro-batch that there can be; the updates of GRPO had 25,400 tokens in two, so those are predicted too."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sft_gpu
from grpo_task import make_task
from plan_gpu import Case
from podium.planning.devices import GIB, device_named
from podium.planning.memory import MemoryPlan, memory_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """GiB of one run, on both hosts; None: not recorded."""

    program: str
    shape: str
    held: tuple[float, float]
    allocated: float | None = None
    micro_batch: int | None = None  # tokens, where they were fewer than there can be


RECORDS = (
    Record(program="sft", shape="0.6b", held=(37.03, 36.97), allocated=33.70),
    Record(program="sft", shape="1.7b", held=(64.14, 64.14), allocated=60.47),
    Record(program="grpo", shape="0.6b", held=(37.27, 37.25), micro_batch=12_700),
    Record(program="grpo", shape="1.7b", held=(65.32, 65.32), micro_batch=12_700),
)


def predicted(record: Record, folder: Path) -> Iterator[tuple[str, MemoryPlan]]:
    """Of the recipe that was run, and with the micro-batches that it had."""
    case = Case(program=record.program, shape=record.shape, device="cuda", steps=18, warmup=6, folder=folder)
    folder.mkdir()
    if record.program == "grpo":
        make_task(case.task)
    else:
        sft_gpu.make_model(folder / "model", record.shape)
    recipe, device = case.recipe(), device_named("H200")
    yield "as planned", memory_of(recipe, device)
    if record.micro_batch is not None:
        recorded = recipe.model_copy(update={"micro_batch_tokens": record.micro_batch})
        yield f"micro-batches of {record.micro_batch:,} tokens", memory_of(recorded, device)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for number, record in enumerate(RECORDS):
            print(f"{record.program} {record.shape}: held {record.held[0]:.2f}, {record.held[1]:.2f} GiB")
            for name, plan in predicted(record, Path(scratch) / str(number)):
                for line in lines(record, name, plan):
                    print(f"  {line}")


def lines(record: Record, name: str, plan: MemoryPlan) -> Iterator[str]:
    """One prediction beside the record."""
    largest = max(plan.phases, key=lambda phase: phase.held_bytes)
    needed, held = plan.peak.num_bytes / GIB, plan.held_bytes / GIB
    errors = ", ".join(f"{held / each - 1:+.1%}" for each in record.held)
    before = ", ".join(f"{needed / each - 1:+.1%}" for each in record.held)
    yield f"{name}: {held:.2f} GiB ({errors}) in the {largest.phase}"
    yield f"  without what torch's allocator keeps {needed:.2f} GiB ({before})"
    if record.allocated is not None:
        alive = (plan.peak.num_bytes - plan.peak.of("CUDA context")) / GIB
        error = f"{alive / record.allocated - 1:+.1%}"
        yield f"  peak of the allocator {record.allocated:.2f} GiB, predicted {alive:.2f} ({error})"
    yield "  " + ", ".join(f"{term.name} {term.num_bytes / GIB:.2f}" for term in (*largest.terms, *largest.kept))


if __name__ == "__main__":
    main()
