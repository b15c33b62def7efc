# SPDX-License-Identifier: Apache-2.0
"""Lists the runs and pipelines of a folder, one line each. Torch-free and fast."""

from __future__ import annotations

from pathlib import Path

from podium.errors import PodiumError, RunFolderError
from podium.observe.formats import table
from podium.runs.folder import RunFolder, is_pipeline_folder
from podium.runs.pipeline_folder import PipelineFolder
from podium.runs.standing import RunStanding, changed_s, moment, standing_of, status_of

_HEADER = ("name", "program", "status", "step", "last", "held-out", "changed")
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
    return table([_HEADER, *(_row(each) for each in newest_first)])


def _is_listed(path: Path) -> bool:
    return is_pipeline_folder(path) or (path / "run.json").is_file()


def _row(path: Path) -> Row:
    try:
        return _pipeline_row(PipelineFolder.open(path)) if is_pipeline_folder(path) else _run_row(path)
    except (PodiumError, OSError):  # the others can be listed; `podium show` says what is wrong with this one
        return (path.name, "-", "damaged", "-", "-", "-", moment(changed_s(path)))


def _run_row(path: Path) -> Row:
    run = RunFolder.open(path)
    standing, program = standing_of(run), run.recipe(needs_environment=False).program
    steps = f"{standing.step}/{standing.num_steps}"
    return (path.name, program, standing.status, steps, *_figures(standing), moment(changed_s(path)))


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
    return (folder.path.name, "pipeline", status_of(folder.path, state), steps, *figures, moment(changed))


def _figures(standing: RunStanding) -> tuple[str, str]:
    last = str(standing.figures[0]) if standing.figures else "-"
    return last, str(standing.heldout) if standing.heldout is not None else "-"
