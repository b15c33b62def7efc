# SPDX-License-Identifier: Apache-2.0
"""Lists the runs and pipelines of a folder, one line each. Torch-free and fast."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from podium.errors import PodiumError, RunFolderError
from podium.observe.formats import one_line, table
from podium.recipe.plugins import Plugin, split_plugin
from podium.runs.folder import RunFolder, is_pipeline_folder
from podium.runs.pipeline_folder import PipelineFolder
from podium.runs.standing import RunStanding, changed_s, standing_of, status_of

_HEADER = ("name", "program", "status", "step", "last", "held-out", "changed")
_PROGRAM, _CHANGED = _HEADER.index("program"), _HEADER.index("changed")
_WIDTH, _SHORTEST_PROGRAM = 80, 8
Row = tuple[str, ...]


def list_lines(path: Path) -> list[str]:
    """One line per run and pipeline, the last changed first. A folder without any says so."""
    if not path.is_dir():
        return [f"no runs: there is no folder {path}. `podium train RECIPE` makes it, or give another one."]
    if (path / "run.json").is_file():
        raise RunFolderError(f"{path} is a run itself. Look at it with `podium show {path}`, or list {path.parent}.")
    found = [each for each in path.iterdir() if not each.name.startswith(".") and _is_listed(each)]
    if not found:
        return [f"no runs in {path}. `podium train RECIPE` makes one in the recipe's run.folder."]
    newest_first = sorted(found, key=lambda each: (-changed_s(each), each.name))
    return _fitting([_row(each) for each in newest_first])


def _fitting(rows: list[Row]) -> list[str]:
    """The table, made narrower until it has 80 columns: custom programs without their function, days without the time,
    then the beginning of programs. Names of runs are never cut: they are what one types."""
    shorter: list[Callable[[Row, int], Row]] = [
        lambda row, _: _replaced(row, _PROGRAM, row[_PROGRAM].partition(":")[0]),
        lambda row, _: _replaced(row, _CHANGED, row[_CHANGED].partition(" ")[0]),
        lambda row, room: _replaced(row, _PROGRAM, one_line(row[_PROGRAM], limit=max(_SHORTEST_PROGRAM, room))),
    ]
    lines = table([_HEADER, *rows])
    for shortened in shorter:
        excess = max(map(len, lines)) - _WIDTH
        if excess <= 0:
            break
        room = max(len(row[_PROGRAM]) for row in rows) - excess
        rows = [shortened(row, room) for row in rows]
        lines = table([_HEADER, *rows])
    return lines


def _replaced(row: Row, at: int, cell: str) -> Row:
    return (*row[:at], cell, *row[at + 1 :])


def _is_listed(path: Path) -> bool:
    return is_pipeline_folder(path) or (path / "run.json").is_file()


def _row(path: Path) -> Row:
    try:
        return _pipeline_row(PipelineFolder.open(path)) if is_pipeline_folder(path) else _run_row(path)
    except (PodiumError, OSError):  # the others can be listed; `podium show` says what is wrong with this one
        return (path.name, "-", "damaged", "-", "-", "-", _moment(changed_s(path)))


def _run_row(path: Path) -> Row:
    run = RunFolder.open(path)
    standing, program = standing_of(run), run.recipe(needs_environment=False).program
    steps = f"{standing.step}/{standing.num_steps}"
    return (path.name, _short(program), standing.status, steps, *_figures(standing), _moment(changed_s(path)))


def _pipeline_row(folder: PipelineFolder) -> Row:
    """Its figures are those of the stage that changed last."""
    state = folder.state()
    begun = [run for run in map(folder.run, state["order"]) if (run.path / "run.json").is_file()]
    done = sum(folder.record(name).status == "done" for name in state["order"])
    changed = max([changed_s(folder.path), *(changed_s(run.path) for run in begun)])
    figures = ("-", "-")
    if begun:
        figures = _figures(standing_of(max(begun, key=lambda run: changed_s(run.path))))
    steps = f"{done}/{len(state['order'])} stages"
    return (folder.path.name, "pipeline", status_of(folder.path, state), steps, *figures, _moment(changed))


def _figures(standing: RunStanding) -> tuple[str, str]:
    last = str(standing.figures[0]) if standing.figures else "-"
    return last, str(standing.heldout) if standing.heldout is not None else "-"


def _short(program: str) -> str:
    """A custom program without the folder or package that it is in; `podium show` has all of it."""
    if not Plugin.has_shape(program):
        return program
    module, function = split_plugin(program)
    is_file = module.endswith(".py") or os.sep in module
    return f"{os.path.basename(module) if is_file else module.rpartition('.')[2]}:{function}"


def _moment(seconds: float) -> str:
    """Local date and time of this year; of another year only the date."""
    then = time.localtime(seconds)
    return time.strftime("%m-%d %H:%M" if then.tm_year == time.localtime().tm_year else "%Y-%m-%d", then)
