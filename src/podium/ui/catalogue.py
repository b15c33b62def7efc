# SPDX-License-Identifier: Apache-2.0
"""The runs and pipelines of a folder, each with an id. A path is never made from what a request says: ids are looked
up here. Nothing that is read lies outside the folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from podium.errors import PodiumError, RunFolderError
from podium.runs.folder import is_pipeline_folder
from podium.runs.pipeline_folder import PipelineFolder
from podium.ui.answers import PageError

# Between the names of a pipeline and of its stage. Names have it escaped, so that no run has the id of a stage.
_OF_STAGE = ":"
_ESCAPES = {"\\": "\\x5c", _OF_STAGE: "\\x3a"}
# Files of a run are named so. Anything else of such a name is not opened.
_FILES = (".json", ".jsonl", ".yaml", ".log", ".lock", ".sqlite")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One run or pipeline. `parent` is the id of the pipeline that a stage belongs to; `broken` says why a folder
    cannot be read."""

    id: str
    path: Path
    is_pipeline: bool = False
    parent: str | None = None
    broken: str | None = None


class RunCatalogue:
    """Looks into the folder again at every call: runs come and go while the page is open."""

    def __init__(self, folder: Path) -> None:
        """`folder` has runs, or is a run or pipeline itself."""
        if not folder.is_dir():
            raise RunFolderError(
                f"there is no folder {folder}. Give the folder of your runs (`run.folder` of a recipe, by default "
                "runs/), or that of one run."
            )
        self.folder = folder
        self._root = folder.resolve()
        self._places: dict[str, Path] = {}  # where each id was in the last listing

    def entries(self) -> list[RunEntry]:
        """All runs and pipelines, with the stages after their pipeline."""
        if _is_run(self._root) or is_pipeline_folder(self._root):
            return list(self._family(self._root))
        try:
            paths = sorted(Path(each.path) for each in os.scandir(self._root) if not each.name.startswith("."))
        except OSError as error:
            raise PageError(500, f"{self.folder} cannot be read: {error.strerror or error}.") from error
        families = {path: self._entries_at(path) for path in paths}
        self._places = {entry.id: path for path, family in families.items() for entry in family}
        return [entry for family in families.values() for entry in family]

    def find(self, run_id: str) -> RunEntry:
        """The entry with this id. Where it was in the last listing is looked first: streams ask twice a second."""
        place = self._places.get(run_id)
        found = None if place is None else _with_id(run_id, self._entries_at(place))
        found = found or _with_id(run_id, self.entries())
        if found is None:
            raise PageError(
                404,
                f"there is no run {run_id[:200]!r} in {self.folder}. It was removed or renamed: go back to the list.",
            )
        return found

    def readable(self, run_id: str) -> RunEntry:
        """The entry with this id, if it can be read."""
        entry = self.find(run_id)
        if entry.broken is not None:
            raise PageError(422, entry.broken)
        return entry

    def _entries_at(self, path: Path) -> list[RunEntry]:
        """A folder that may not be looked into is none of a run: `lost+found`, or one of another user."""
        try:
            return list(self._family(path))
        except OSError:
            return []

    def _family(self, path: Path) -> Iterator[RunEntry]:
        """A run; or a pipeline and its stages; nothing for other files and folders."""
        if not is_pipeline_folder(path):
            if _is_run(path) or _looks_like_a_run(path):
                yield RunEntry(id=_id(path), path=path, broken=self._fault(path))
            return
        fault, stages = self._fault(path), list[str]()
        if fault is None:
            try:
                stages = [str(name) for name in PipelineFolder.open(path).state()["order"]]
            except (PodiumError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                fault = f"{path / 'pipeline.json'} is damaged ({error}). Restore it, or remove the folder."
        yield RunEntry(id=_id(path), path=path, is_pipeline=True, broken=fault)
        for name in stages:
            stage = path / name
            if os.sep not in name and name not in ("", ".", "..") and _is_run(stage):
                id = stage_id(_id(path), name)
                yield RunEntry(id=id, path=stage, parent=_id(path), broken=self._fault(stage))

    def _fault(self, path: Path) -> str | None:
        """Why a folder is not read: it, or one of its entries, is a link to somewhere else; or what has the name of
        a file is none: reading a pipe would never end."""
        try:
            entries = list(os.scandir(path))
            links = [each.path for each in entries if each.is_symlink()]
            strange = [each.path for each in entries if not _is_readable(each)]
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}."
        outside = [each for each in (str(path), *links) if not Path(each).resolve().is_relative_to(self._root)]
        if outside:
            return (
                f"{outside[0]} is a link out of {self.folder}, and the page reads nothing outside of that folder. "
                "Start `podium ui` with the folder that it links to."
            )
        if strange:
            return f"{strange[0]} is no regular file, so the page does not open it. Remove it, or restore the file."
        if not is_pipeline_folder(path) and not ((path / "recipe.yaml").is_file() and _is_run(path)):
            missing = "run.json" if not _is_run(path) else "recipe.yaml"
            return f"{path} has no {missing}: it is no whole run folder. Restore the file, or remove the folder."
        return None


def _with_id(run_id: str, entries: Iterable[RunEntry]) -> RunEntry | None:
    return next((entry for entry in entries if entry.id == run_id), None)


def stage_id(pipeline: str, name: str) -> str:
    """The id of a stage, by the id of its pipeline."""
    return f"{pipeline}{_OF_STAGE}{_id(Path(name))}"


def _id(path: Path) -> str:
    """The name of a folder. Bytes of it that are no UTF-8 are escaped: browsers cannot send them back. So is what
    separates the names of pipeline and stage."""
    name = os.fsencode(path.name)
    for char, escape in _ESCAPES.items():
        name = name.replace(char.encode(), escape.encode())
    return name.decode("utf-8", "backslashreplace")


def _is_readable(entry: os.DirEntry[str]) -> bool:
    """Whether an entry of a run folder that has the name of a file is one. Links are judged by what they lead to."""
    try:
        return not entry.name.endswith(_FILES) or stat.S_ISREG(entry.stat().st_mode)
    except OSError:  # a link to nothing, or one that is gone
        return True


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file()


def _looks_like_a_run(path: Path) -> bool:
    """Whether this is what is left of a run: its state is lost."""
    return (path / "recipe.yaml").is_file() and ((path / "metrics.jsonl").is_file() or (path / "checkpoints").is_dir())
