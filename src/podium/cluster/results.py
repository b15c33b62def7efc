# SPDX-License-Identifier: Apache-2.0
"""Answers of workers, merged by trajectory id with complete checks; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from podium.cluster.identity import WorkerId
from podium.cluster.meshes import MeshRegistry
from podium.cluster.objects import RowRefs, Stored
from podium.data.trajectories import Ints, RowsT, TrajectoryIds
from podium.errors import ResultError

Value = TypeVar("Value")

Reduction = Literal["sum", "mean", "max", "min"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number, and how the numbers of several workers are reduced. `weight` is the denominator of a mean: the tokens
    or rows behind this worker's value."""

    name: str
    value: float
    reduction: Reduction
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of a worker's time, in seconds since 1970 by that worker's clock. `values`: numbers about it."""

    name: str
    begin_s: float
    end_s: float
    worker: WorkerId
    values: Mapping[str, float] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Dataclasses with slots are slow to pickle, and this is in every message."""
        return Span, (self.name, self.begin_s, self.end_s, self.worker, self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult(Generic[Value]):
    """One worker's answer to a call of `call_all` or `call_one`."""

    worker: WorkerId
    value: Value


@dataclass(frozen=True, kw_only=True, eq=False)
class Computed(Generic[RowsT]):
    """Result of a role's method for a shard: rows for the object store (or only the ids of processed rows), and
    metrics. A streaming method yields one per block."""

    rows: RowsT | None = None
    done: TrajectoryIds | None = None  # if there are no rows to store
    metrics: tuple[Metric, ...] = ()
    note: Any = None  # a small value for the controller: facts about each row, beside ids and lengths

    def __post_init__(self) -> None:
        assert (self.rows is None) != (self.done is None), "either rows to store, or the ids of what is done"

    @property
    def ids(self) -> TrajectoryIds:
        """Trajectories that were computed, with rows or without."""
        ids = self.rows.ids if self.rows is not None else self.done
        assert ids is not None
        return ids


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardResult(Generic[RowsT]):
    """The answer of a rank: its worker, its rows, and where they are stored."""

    worker: WorkerId
    rank: int
    ids: TrajectoryIds
    lengths_N: Ints
    stored: Stored[RowsT] | None
    metrics: tuple[Metric, ...]
    note: Any = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Merged(Generic[RowsT]):
    """The results of all ranks as one: ids ascending, rows by reference."""

    rows: RowRefs[RowsT] | None  # None if the workers only reported what they had done
    metrics: Mapping[str, float]
    results: tuple[ShardResult[RowsT], ...] = field(repr=False)


def merge(
    results: Sequence[ShardResult[RowsT]], expected: Sequence[TrajectoryIds], registry: MeshRegistry, role: str
) -> Merged[RowsT]:
    """Joins the results of a sharded call. `expected[k]` are the ids that rank k got: each must come back exactly once,
    from the living worker of that rank. The order of `results` does not matter."""
    ordered = sorted(results, key=lambda result: (result.rank, result.ids.array_N4[:1].tolist()))
    problems = [*_strangers(ordered, registry, role), *_miscounts(ordered, expected, registry, role)]
    if problems:
        raise ResultError(
            f"the answers of role {role} do not add up, so nothing of this call is used:\n  " + "\n  ".join(problems)
        )
    return Merged(
        rows=stored_rows(ordered) if any(result.stored is not None for result in ordered) else None,
        metrics=reduce_metrics([(result.worker, metric) for result in ordered for metric in result.metrics]),
        results=tuple(ordered),
    )


def stored_rows(results: Sequence[ShardResult[RowsT]]) -> RowRefs[RowsT]:
    """All rows of several results (such as the blocks of a stream) by reference, ids ascending."""
    without = [str(result.worker) for result in results if result.stored is None and len(result.ids)]
    if without:
        raise ResultError(
            f"{', '.join(without)} answered without rows, the others with. A method either returns rows everywhere or "
            "nowhere."
        )
    return RowRefs.join(
        [RowRefs.whole(each.stored, each.ids, each.lengths_N) for each in results if each.stored is not None]
    )


def _strangers(results: Sequence[ShardResult[RowsT]], registry: MeshRegistry, role: str) -> list[str]:
    """Answers from unexpected workers, or from dead incarnations."""
    mesh, problems = registry.mesh(role), []
    for result in results:
        worker, wrong = result.worker, ""
        if worker.pool != mesh.pool or worker.index not in mesh.slots:
            wrong = f"does not host {role}"
        elif not registry.is_current(worker):
            wrong = f"is of a dead incarnation; {registry.worker(worker.pool, worker.index)} has its slot now"
        elif mesh.rank_of(worker.index) != result.rank:
            wrong = f"is rank {mesh.rank_of(worker.index)}, not {result.rank}"
        if wrong:
            problems.append(f"{worker} answered with {result.ids} and {wrong}")
    return problems


def _miscounts(
    results: Sequence[ShardResult[RowsT]], expected: Sequence[TrajectoryIds], registry: MeshRegistry, role: str
) -> list[str]:
    workers, problems = registry.workers_of(role), []
    by_rank: list[list[ShardResult[RowsT]]] = [[] for _ in expected]
    for result in results:
        if 0 <= result.rank < len(expected):
            by_rank[result.rank].append(result)
        else:
            problems.append(f"{result.worker} answered for rank {result.rank}; there are {len(expected)}")
    for rank, (ids, answers) in enumerate(zip(expected, by_rank, strict=True)):
        if len(answers) == 1 and answers[0].ids.same_as(ids):
            continue  # the usual case: exactly the requested ids, in that order
        got = TrajectoryIds.concatenate([answer.ids for answer in answers])
        who = ", ".join(str(answer.worker) for answer in answers) or str(workers[rank])
        missing, foreign, twice = ids.without(got), got.without(ids), got.repeated()
        if len(missing):
            problems.append(f"missing from {who}: {missing}")
        if len(foreign):
            problems.append(f"foreign, from {who} (rank {rank} was not given it): {foreign}")
        if len(twice):
            problems.append(f"more than once, from {who}: {twice}")
    everywhere = TrajectoryIds.concatenate(list(expected)).repeated()
    if len(everywhere):
        holders = [
            worker
            for worker, ids in zip(workers, expected, strict=True)
            if len(everywhere.without(ids)) < len(everywhere)
        ]
        problems.append(f"given to several ranks, or twice to one ({', '.join(map(str, holders))}): {everywhere}")
    return problems


def reduce_metrics(reported: Sequence[tuple[WorkerId, Metric]]) -> dict[str, float]:
    """One number for each name, by the reduction that the workers declare; they must agree on it."""
    by_name: dict[str, list[tuple[WorkerId, Metric]]] = {}
    for worker, metric in reported:
        by_name.setdefault(metric.name, []).append((worker, metric))
    return {name: _reduced(name, metrics) for name, metrics in by_name.items()}


def _reduced(name: str, reported: Sequence[tuple[WorkerId, Metric]]) -> float:
    first_worker, first = reported[0]
    for worker, metric in reported:
        if metric.reduction != first.reduction:
            raise ResultError(
                f"metric {name}: {first_worker} declares {first.reduction} and {worker} declares {metric.reduction}. "
                f"A name has one reduction."
            )
    values = np.array([metric.value for _, metric in reported], np.float64)
    match first.reduction:
        case "sum":
            return float(values.sum())
        case "max":
            return float(values.max())
        case "min":
            return float(values.min())
        case "mean":
            weights = np.array([metric.weight for _, metric in reported], np.float64)
            # A rank without rows has weight 0 and any value: it must not turn the mean into NaN.
            counted = weights > 0
            return float(values[counted] @ weights[counted] / weights.sum()) if counted.any() else float("nan")
