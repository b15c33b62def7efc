# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side: what their recipes say differently, and what came of it. Torch-free and fast."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podium.observe import StepMetrics, read_metrics
from podium.observe.formats import curve, table
from podium.recipe.changes import written_differences
from podium.runs.folder import RunFolder
from podium.runs.standing import standing_of

# What people look at first; the other metrics follow in the order of their names.
_FIRST = (
    "heldout/score", "heldout/loss", "reward/mean", "loss", "groups/solve_rate", "response/mean", "kl/reference",
    "kl/behavior", "entropy", "grad_norm", "staleness/mean",
)  # fmt: skip
# Their values are those of the machine, so they differ in any two runs. Medians over the steps are compared.
_SPEED = ("step_s", "tokens_per_s", "mfu")
_TIMED = ("_s", "_per_s", "mfu")
# Keys of a recipe that every run has for itself.
_OWN = ("run.name", "run.folder")
_SHOWN = 12
_COLUMNS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """One metric of two runs, at the steps that both have."""

    name: str
    first_step: int  # at which they differ
    num_differing: int
    num_steps: int
    sides: tuple[Mapping[int, float], Mapping[int, float]]  # step -> value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunComparison:
    """Two runs beside each other."""

    runs: tuple[Path, Path]
    standings: tuple[str, str]
    changed: Mapping[str, tuple[object, object]]  # keys of the recipe, and both values
    differing: Sequence[MetricDifference]
    num_equal: int  # metrics with the same value at every step that both have
    alone: tuple[Sequence[str], Sequence[str]]  # metrics that only one of them has
    speeds: Sequence[tuple[str, float, float]]  # name, and the median of each

    def lines(self, *, everything: bool = False) -> list[str]:
        """As text. `everything`: all metrics that differ, and not only the first."""
        first, second = map(str, self.runs)
        lines = [f"a: {first} ({self.standings[0]})", f"b: {second} ({self.standings[1]})"]
        if self.changed:
            rows = [(key, _shown(a), _shown(b)) for key, (a, b) in self.changed.items()]
            lines += ["recipe:", *table([("key", "a", "b"), *rows])]
        else:
            lines.append("recipe: the same")
        if self.speeds:
            speeds = [(name, _number(a), _number(b), f"{b / a:.2f}" if a else "-") for name, a, b in self.speeds]
            lines += ["speed, as medians over the steps:", *table([("metric", "a", "b", "b / a"), *speeds])]
        shown = self.differing if everything else self.differing[:_SHOWN]
        if shown:
            lines += ["metrics that differ:", *table([_HEAD, *(_row(each) for each in shown)])]
            if len(self.differing) > len(shown):
                lines.append(f"  and {len(self.differing) - len(shown)} more (--all)")
        lines.append(f"equal at every step that both have: {self.num_equal} metrics")
        for side, names in zip(("a", "b"), self.alone, strict=True):
            if names:
                lines.append(f"only in {side}: {', '.join(names)}")
        return lines


_HEAD = ("metric", "last a", "last b", "first differs at", "curve a", "curve b")


def compare_runs(first: Path, second: Path) -> RunComparison:
    """Reads both runs, which may be running or have failed."""
    folders = RunFolder.open(first), RunFolder.open(second)
    recipes = [each.recipe(needs_environment=False) for each in folders]
    standings = [standing_of(each) for each in folders]
    sides = [_by_name(read_metrics(each.metrics_file)) if each.metrics_file.is_file() else {} for each in folders]
    both = sides[0].keys() & sides[1].keys()
    compared = {name: (sides[0][name], sides[1][name]) for name in both if not name.endswith(_TIMED)}
    differing = [found for name, pair in compared.items() if (found := _difference(name, *pair)) is not None]
    return RunComparison(
        runs=(first, second),
        standings=(
            f"{recipes[0].program}, {standings[0].status}, step {standings[0].step} of {standings[0].num_steps}",
            f"{recipes[1].program}, {standings[1].status}, step {standings[1].step} of {standings[1].num_steps}",
        ),
        changed={key: pair for key, pair in written_differences(*recipes).items() if key not in _OWN},
        differing=sorted(differing, key=lambda each: _place(each.name)),
        num_equal=len(compared) - len(differing),
        alone=(sorted(sides[0].keys() - both), sorted(sides[1].keys() - both)),
        speeds=[
            (name, statistics.median(sides[0][name].values()), statistics.median(sides[1][name].values()))
            for name in _SPEED
            if name in both
        ],
    )


def _by_name(lines: Iterable[StepMetrics]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.values.items():
            found.setdefault(name, {})[line.step] = value
    return found


def _difference(name: str, first: Mapping[int, float], second: Mapping[int, float]) -> MetricDifference | None:
    """None: the values are the same at all steps that both have."""
    steps = sorted(first.keys() & second.keys())
    differing = [step for step in steps if not _is_same(first[step], second[step])]
    if not differing:
        return None
    return MetricDifference(
        name=name, first_step=differing[0], num_differing=len(differing), num_steps=len(steps), sides=(first, second)
    )


def _is_same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


def _place(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def _row(each: MetricDifference) -> tuple[str, ...]:
    """Both curves have one scale."""
    finite = [value for side in each.sides for value in side.values() if math.isfinite(value)]
    scale = (min(finite), max(finite)) if finite else (0.0, 0.0)
    curves = [curve([side[step] for step in sorted(side)], scale, columns=_COLUMNS) for side in each.sides]
    lasts = [_number(side[max(side)]) for side in each.sides]
    where = f"step {each.first_step} ({each.num_differing} of {each.num_steps})"
    return (each.name, *lasts, where, *curves)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
