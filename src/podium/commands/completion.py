# SPDX-License-Identifier: Apache-2.0
"""Shell completion of run folders, recipe files and data files. Typer's scripts complete no paths by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from podium.data.files import format_of
from podium.runs.folder import is_pipeline_folder

_RUNS = "runs"


def complete_run(incomplete: str) -> list[str]:
    """Folders of runs and pipelines, and folders on the way to them. With nothing typed: those in runs/."""
    start = f"{_RUNS}/" if not incomplete and Path(_RUNS).is_dir() else incomplete
    return [
        str(path) if _is_run(path) and not is_pipeline_folder(path) else f"{path}/"
        for path in _matching(start)
        if path.is_dir()
    ]


def complete_recipe(incomplete: str) -> list[str]:
    """YAML files, and folders."""
    return list(_files(incomplete, lambda path: path.suffix in (".yaml", ".yml")))


def complete_data(incomplete: str) -> list[str]:
    """Files in a format that Podium reads, and folders."""
    return list(_files(incomplete, lambda path: format_of(path.name) is not None))


def complete_folder(incomplete: str) -> list[str]:
    """Folders."""
    return list(_files(incomplete, lambda path: False))


def _files(incomplete: str, fits: Callable[[Path], bool]) -> Iterator[str]:
    for path in _matching(incomplete):
        if path.is_dir():
            yield f"{path}/"
        elif fits(path):
            yield str(path)


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file()


def _matching(incomplete: str) -> list[Path]:
    """Entries whose path begins with what was typed. Hidden ones only after a dot."""
    typed = Path(incomplete)
    parent, name = (typed, "") if incomplete.endswith("/") else (typed.parent, typed.name)
    try:
        return sorted(
            path
            for path in parent.iterdir()
            if path.name.startswith(name) and (name.startswith(".") or not path.name.startswith("."))
        )
    except OSError:
        return []
