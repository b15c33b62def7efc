# SPDX-License-Identifier: Apache-2.0
"""What a run has recorded of its time: steps, lengths of its episodes, and what its graders did. Torch-free."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

from podium.controller.layout import num_learners
from podium.controller.ledger import LEDGER_FILE
from podium.errors import RunFolderError
from podium.observe.metrics import parse_line
from podium.observe.timeline import CONTROLLER, EngineSteps, TimelineSpan, engine_steps, read_timeline
from podium.planning.prediction import LAYOUTS, Configuration, LayoutName, Workload
from podium.recipe import OnPolicyRecipe, Recipe
from podium.runs.folder import RunFolder, is_pipeline_folder

# Steps that are measured, at least: less says nothing of their spread.
_FEWEST_STEPS = 3
# The newest ones count: a run's answers become longer.
_MOST_STEPS = 64
# Episodes whose lengths are kept.
_MOST_GROUPS = 4_096
# Decoding steps of an interval that says something of their time.
_FEWEST_DECODES = 4
# Of the timeline: as much as is read in a second.
_TIMELINE_BYTES = 8 << 20
_GRADE = "grader.grade"
# How the devices of workers on GPUs are called: `train[0]@node/gpu3#0`.
_ON_GPU = re.compile(r"@.*/(gpu|cuda)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """Steps of a steady run: without the first, in which processes start and a pipeline fills, and without the last of
    a run with staleness, in which nothing more is generated."""

    path: Path
    recipe: OnPolicyRecipe
    steps: tuple[Mapping[str, float], ...]  # metrics of each
    first: int  # number of the first of them
    groups: tuple[tuple[float, ...], ...]  # sampled tokens of each episode, in the order of the run's prompts
    num_before: int  # steps whose groups are the first of these: they fill the pipeline of a simulation
    gradings: Mapping[str, Sequence[TimelineSpan]]  # by grader, of all steps that the timeline has
    window: tuple[float, float]  # when these steps were
    start_s: float
    kind: Literal["cpu", "cuda"] = "cpu"  # of its devices
    engine_steps: tuple[EngineSteps, ...] = ()  # summaries of all engines, in these steps

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return statistics.fmean(self.values("step_s"))

    @property
    def num_episodes(self) -> float:
        """Graded episodes of a step, on average."""
        return statistics.fmean(self.values("episodes"))

    @property
    def is_synchronous(self) -> bool:
        """Whether a step generates, and then learns from that."""
        return any("time/rollout_s" in values for values in self.steps)

    def values(self, name: str) -> list[float]:
        """One metric of all steps; 0 where a step has none."""
        return [values.get(name, 0.0) for values in self.steps]

    def configuration(self) -> Configuration:
        """What the run was."""
        return configuration_of(self.recipe, self.kind)

    def workload(self) -> Workload:
        """Its batch, and what was between its steps."""
        outside = [sum(self.values(f"time/{name}_s")) for name in ("checkpoint", "evaluation")]
        return workload_of(self.recipe, start_s=self.start_s, outside_s=sum(outside) / len(self.steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """Decoding steps of one engine in an interval of about a second, in which it took in hardly any prompts."""

    lanes: float  # in a step, on average: a step time that is linear in the lanes is exact for their mean
    step_s: float
    steps: int

    @property
    def seconds(self) -> float:
        """Of all of them."""
        return self.steps * self.step_s


def decode_points(records: RunRecords, *, most_prefill: float = 0.05) -> tuple[DecodePoint, ...]:
    """What decoding steps took with how many lanes, by the engines' own summaries. Intervals of which prompts took more
    than this share are left out: an engine does not count the steps that took them in. The rest has them in it. Empty
    where engines record no summaries, or take in prompts all the time."""
    return tuple(
        DecodePoint(lanes=each.lanes, step_s=(each.end_s - each.begin_s) / each.steps, steps=each.steps)
        for each in records.engine_steps
        if each.steps >= _FEWEST_DECODES and each.lanes > 0
        and each.prefill_s <= most_prefill * (each.end_s - each.begin_s)
    )  # fmt: skip


def read_records(path: Path, spans: Sequence[TimelineSpan] | None = None) -> RunRecords:
    """The records of a run on Ray or inline. Raises a RunFolderError for one that has too few steps. `spans`: those of
    the newest part of its timeline, where somebody has read them already."""
    folder = opened(path)
    recipe = folder.recipe(needs_environment=False)
    if not isinstance(recipe, OnPolicyRecipe):
        raise RunFolderError(f"{path} is a run of {recipe.program}, which generates nothing.")
    lines = step_lines(folder)
    staleness = recipe.rollout.staleness
    begin, end = 1 + staleness, len(lines) - staleness
    if end - begin < _FEWEST_STEPS:
        needed = _FEWEST_STEPS + 1 + 2 * staleness
        raise RunFolderError(
            f"{path} has {len(lines)} steps, and a plan needs {needed}: the first ones fill the pipeline. Let it train "
            "longer."
        )
    begin = max(begin, end - _MOST_STEPS)
    kept = lines[begin:end]
    spans = newest_spans(path) if spans is None else spans
    is_synchronous = any("time/rollout_s" in values for _, values in kept)
    num_before = 0 if is_synchronous else min(begin, staleness + 1)
    groups = _groups(path, lines[begin - num_before][0], lines[-1][0])
    started = sum(span.end_s - span.begin_s for span in spans if (span.worker, span.name) == (CONTROLLER, "start-up"))
    window = _window(spans, len(kept), skipped=len(lines) - end)
    return RunRecords(
        path=path,
        recipe=recipe,
        steps=tuple(values for _, values in kept),
        first=kept[0][0],
        groups=groups,
        num_before=num_before,
        gradings=_gradings(spans),
        window=window,
        start_s=started,
        kind=device_kind_of(recipe, spans),
        engine_steps=tuple(each for each in engine_steps(spans) if window[0] <= each.begin_s < window[1]),
    )


def device_kind_of(recipe: OnPolicyRecipe, spans: Iterable[TimelineSpan]) -> Literal["cpu", "cuda"]:
    """What a run of `placement.device: auto` found, by the names of its workers."""
    if recipe.placement.device != "auto":
        return recipe.placement.device
    return "cuda" if any(_ON_GPU.search(worker) for worker in {span.worker for span in spans}) else "cpu"


def newest_spans(path: Path, most_bytes: int = _TIMELINE_BYTES) -> list[TimelineSpan]:
    """Of the timeline of a run, what is in the last bytes of its files."""
    return list(read_timeline(path, most_bytes=most_bytes))


def opened(path: Path) -> RunFolder:
    """The folder of one run."""
    if path.is_dir() and is_pipeline_folder(path):
        raise RunFolderError(f"{path} is a pipeline. Give the folder of one of its stages, for example {path}/NAME.")
    return RunFolder.open(path)


class StepLines(Sequence[tuple[int, Mapping[str, float]]]):
    """Number and metrics of lines, each parsed when somebody looks at it: of a long run only the first and the last
    ones matter. A line that no run wrote is an error then."""

    def __init__(self, path: Path, lines: Sequence[bytes]) -> None:
        self._path, self._lines = path, lines

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, at: int) -> tuple[int, Mapping[str, float]]: ...

    @overload
    def __getitem__(self, at: slice) -> list[tuple[int, Mapping[str, float]]]: ...

    def __getitem__(self, at: int | slice) -> tuple[int, Mapping[str, float]] | list[tuple[int, Mapping[str, float]]]:
        """One line, or several."""
        return (
            [self._parsed(line) for line in self._lines[at]] if isinstance(at, slice) else self._parsed(self._lines[at])
        )

    def _parsed(self, line: bytes) -> tuple[int, Mapping[str, float]]:
        found = parse_line(line)
        if found is None:
            raise RunFolderError(
                f"{self._path} has a line that Podium did not write ({line[:60]!r}). Something else changed the file; "
                "remove that line, or move the file away."
            )
        return found.step, found.values


def step_lines(folder: RunFolder) -> StepLines:
    """All steps."""
    return _lines_with(folder, b'"step_s"')


def heldout_lines(folder: RunFolder) -> StepLines:
    """All evaluations."""
    return _lines_with(folder, b'"heldout/')


def _lines_with(folder: RunFolder, name: bytes) -> StepLines:
    """The lines of the metrics that have a name. The last line of a run that was killed may not be whole."""
    path = folder.metrics_file
    content = path.read_bytes() if path.is_file() else b""
    found = [line for line in content.split(b"\n") if name in line]
    if found and parse_line(found[-1]) is None and content.endswith(found[-1]):
        found.pop()
    return StepLines(path, found)


def configuration_of(recipe: OnPolicyRecipe, kind: Literal["cpu", "cuda"]) -> Configuration:
    """What a plan may change, as the recipe has it on devices of a kind."""
    placement = recipe.placement
    apart = placement.devices - num_learners(recipe)
    return Configuration(
        layout=placement.layout,
        devices=placement.devices,
        rollout_devices=apart or None,
        staleness=recipe.rollout.staleness,
        lanes=recipe.rollout.running_on(kind),
        graders=recipe.grading.workers,
        micro_batch=recipe.micro_batch_tokens,
        max_rollout_devices=placement.max_rollout_devices,
    )


def workload_of(recipe: OnPolicyRecipe, *, start_s: float = 0.0, outside_s: float = 0.0) -> Workload:
    """The batch of a recipe, and which layouts it can have."""
    rollout, algorithm = recipe.rollout, recipe.full_algorithm
    return Workload(
        groups_per_step=rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        steps=recipe.steps,
        on_new_weights=rollout.on_new_weights,
        replaces_uniform=algorithm.dynamic_sampling,
        max_replaced=algorithm.num_refills * rollout.prompts_per_step,
        start_s=start_s,
        outside_s=outside_s,
        layouts=tuple(layout for layout in LAYOUTS if _allows(recipe, layout)),
        most_staleness=_most_staleness(recipe),
        most_devices=1 if recipe.placement.launcher == "inline" else None,
    )


def _most_staleness(recipe: OnPolicyRecipe) -> int | None:
    """None: any. No token can be older than the steps of the run."""
    if not recipe.can_be_stale or recipe.rollout.offload_optimizer or recipe.placement.launcher == "inline":
        return 0
    return recipe.steps - 1 if recipe.steps else None


def _allows(recipe: OnPolicyRecipe, layout: LayoutName) -> bool:
    rollout = recipe.rollout
    if recipe.placement.launcher == "inline":  # one process on one device
        return layout == "colocated"
    if layout == "split":
        return True
    if rollout.engine == "vllm":
        return False
    lends = not (recipe.device_rewards or rollout.on_new_weights == "finish" or rollout.offload_optimizer)
    return layout == "colocated" or lends


def _groups(path: Path, first: int, last: int) -> tuple[tuple[float, ...], ...]:
    """Lengths of the episodes of these steps, by group; empty without a ledger."""
    file = path / LEDGER_FILE
    if not file.is_file():
        return ()
    try:
        with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as ledger:
            rows = ledger.execute(
                "SELECT prompt_index, tokens FROM episodes WHERE step BETWEEN ? AND ? AND state != 'failed' "
                "ORDER BY prompt_index, sample, attempt",
                (first, last),
            ).fetchall()
    except sqlite3.DatabaseError:
        return ()
    groups: dict[int, list[float]] = {}
    for index, tokens in rows:
        groups.setdefault(index, []).append(float(tokens))
    return tuple(tuple(lengths) for lengths in groups.values())[:_MOST_GROUPS]


def _window(spans: Sequence[TimelineSpan], count: int, skipped: int) -> tuple[float, float]:
    """When `count` steps before the last `skipped` ones were, by the ends of updates; always, where these are lost."""
    ends = sorted(span.end_s for span in spans if (span.worker, span.name) == (CONTROLLER, "update"))
    ends = ends[: len(ends) - skipped] if skipped else ends
    return (ends[-count - 1], ends[-1]) if len(ends) > count else (float("-inf"), float("inf"))


def _gradings(spans: Sequence[TimelineSpan]) -> dict[str, list[TimelineSpan]]:
    """What graders did."""
    found: dict[str, list[TimelineSpan]] = {}
    for span in spans:
        if span.name == _GRADE:
            found.setdefault(span.worker, []).append(span)
    return found


def program_of(folder: RunFolder) -> Recipe:
    """The recipe of a run, also where its environment variables are missing."""
    return folder.recipe(needs_environment=False)
