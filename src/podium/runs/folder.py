# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: the resolved recipe, the state of the run, metrics and checkpoints. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import platform
import shutil
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from podium.errors import PodiumError, RunFolderError
from podium.models.cpu_settings import CpuSettings
from podium.observe.machine import MACHINE_FILE
from podium.observe.metrics import METRICS_FILE, read_metrics
from podium.recipe import Recipe, dump_recipe, load_recipe

PIPELINE_STATE = "pipeline.json"
_LOCK = "run.lock"
_LOCK_TRIES, _LOCK_PAUSE_S = 3, 0.05
Status = Literal["starting", "running", "stopped", "failed", "finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Paths of one run. Rank 0 or the launcher writes everything except metrics and checkpoints."""

    path: Path

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def metrics_file(self) -> Path:
        """Metrics, one JSON line per step."""
        return self.path / METRICS_FILE

    @property
    def samples_file(self) -> Path:
        """Answers of evaluations, one JSON line each."""
        return self.path / "samples.jsonl"

    @property
    def examples_file(self) -> Path:
        """The first rows of the data of a run on fixed data, token by token."""
        return self.path / "examples.jsonl"

    @property
    def machine_file(self) -> Path:
        """Memory, processors and GPUs of the machine that wrote the metrics."""
        return self.path / MACHINE_FILE

    @property
    def skipped_file(self) -> Path:
        """Rows that were skipped (data.on_error: skip), one JSON line each."""
        return self.path / "skipped_rows.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of all checkpoints."""
        return self.path / "checkpoints"

    @property
    def steps(self) -> Path:
        """The folder of recorded steps: what each was trained on."""
        return self.path / "steps"

    @property
    def rollouts(self) -> Path:
        """The folder of episodes, one Parquet file per step."""
        return self.path / "rollouts"

    @property
    def console_file(self) -> Path:
        """Everything that the console showed, as plain text. A resumed run appends to it."""
        return self.path / "console.log"

    @property
    def stacks_file(self) -> Path:
        """Stacks of all processes, for every hang of a worker."""
        return self.path / "stacks.txt"

    @property
    def stop_file(self) -> Path:
        """File that tells the ranks to save and stop."""
        return self.path / "stop-requested"

    @property
    def _state_file(self) -> Path:
        return self.path / "run.json"

    @classmethod
    def of(cls, recipe: Recipe) -> RunFolder:
        """The folder that a recipe names."""
        assert recipe.run.name is not None
        return cls(path=Path(recipe.run.folder) / recipe.run.name)

    @classmethod
    def check_free(cls, recipe: Recipe) -> None:
        """Raises an error if another run uses the recipe's folder."""
        folder = cls.of(recipe)
        if not folder.path.exists() or folder._was_never_begun():
            return
        if is_held(folder.path) or folder._is_being_started():
            raise RunFolderError(
                f"{folder.path} is running right now{_holder(folder.path)}. Look at it with `podium show "
                f"{folder.path}`, or choose another name with --set run.name=..."
            )
        begun = any(folder.checkpoints.glob("step-*"))
        first = "It has no checkpoint to resume from"
        if begun or is_pipeline_folder(folder.path):
            first = f"Continue it with `podium resume {folder.path}`"
        raise RunFolderError(
            f"{folder.path} exists already. {first}, replace it with --overwrite, or choose another name with "
            "--set run.name=..."
        )

    @classmethod
    def create(
        cls,
        recipe: Recipe,
        *,
        files: Mapping[str, str] | None = None,
        lineage: Mapping[str, Any] | None = None,
        mesh_reason: str | None = None,
    ) -> RunFolder:
        """Creates a folder with the recipe, the run's lineage, and fingerprints of the files that must not change
        before a resume. Never overwrites a run that has begun, only the remains of a killed start. The folder appears
        under its name when it is complete. `mesh_reason`: why the planner chose the axes of placement.policy."""
        cls.check_free(recipe)
        folder = cls.of(recipe)
        path, new = folder.path, cls(path=_incomplete(folder.path))
        try:
            if folder._was_never_begun():
                _remove(path)
            new.path.mkdir(parents=True, exist_ok=True)  # one that is there is of a process that was killed here
            with new.held():
                _empty(new.path)
                new.checkpoints.mkdir()
                new.recipe_file.write_text(_comment(mesh_reason) + dump_recipe(recipe), encoding="utf-8")
                new.update(
                    status="starting", versions=_versions(), program=recipe.written("program") or recipe.program,
                    files=dict(files or {}), lineage=dict(lineage or {}),
                )  # fmt: skip
                os.rename(new.path, path)  # not onto a folder that another process has made meanwhile
        except OSError as error:
            shutil.rmtree(new.path, ignore_errors=True)
            raise RunFolderError(f"the run folder {path} cannot be written: {error.strerror or error}.") from error
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Opens an existing run."""
        folder = cls(path=Path(path))
        if not folder.path.is_dir():
            raise RunFolderError(
                f"there is no run folder {path}. Runs are under `run.folder` of their recipe, by name."
            )
        if is_pipeline_folder(path):
            raise RunFolderError(f"{path} is the folder of a pipeline. Give that of one of its stages: {path}/STAGE.")
        if not folder.recipe_file.is_file() or not folder._state_file.is_file():
            raise RunFolderError(f"{path} is not a run folder: it has no recipe.yaml and run.json.")
        return folder

    def recipe(self, *, needs_environment: bool = True) -> Recipe:
        """The run's resolved recipe. Without `needs_environment` it can be read where environment variables of the run
        are missing."""
        return load_recipe(self.recipe_file, needs_environment=needs_environment)

    def state(self) -> dict[str, Any]:
        """The content of run.json."""
        try:
            values: dict[str, Any] = json.loads(self._state_file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RunFolderError(f"{self._state_file} is damaged ({error}). Restore it, or start a new run.") from error
        return values

    @property
    def status(self) -> Status:
        """The run's status in run.json."""
        status: Status = self.state()["status"]
        return status

    @property
    def is_starting(self) -> bool:
        """Whether it has begun no step, as far as run.json can be read."""
        with contextlib.suppress(OSError, RunFolderError, KeyError, TypeError):
            return self.status == "starting"
        return False

    def update(self, **values: Any) -> None:
        """Merges values into run.json, atomically."""
        state = self.state() if self._state_file.exists() else {}
        write_atomically(self._state_file, json.dumps({**state, **values}, indent=1))

    def write_recipe(self, recipe: Recipe, *, mesh_reason: str | None = None) -> None:
        """Replaces the run's recipe file. Without another reason, that of axes which stay is kept."""
        comment = _comment(mesh_reason) if mesh_reason is not None else self._kept_comment(recipe)
        write_atomically(self.recipe_file, comment + dump_recipe(recipe))

    def _kept_comment(self, recipe: Recipe) -> str:
        """What the recipe file says of its axes, if the recipe has the same."""
        if not self.recipe_file.is_file():
            return ""
        lines = self.recipe_file.read_text(encoding="utf-8").splitlines(keepends=True)
        comment = "".join(itertools.takewhile(lambda line: line.startswith("# "), lines))
        is_same = comment and self.recipe(needs_environment=False).placement.policy == recipe.placement.policy
        return comment if is_same else ""

    @property
    def _overwritten(self) -> Path:
        return overwritten(self.path)

    def set_aside(self) -> None:
        """Moves the folder of an earlier run out of the way; nothing if there is none. A folder that is not a run's is
        refused, and one that a process runs now. `forget_overwritten` removes it, `restore_overwritten` brings it
        back."""
        if not os.path.lexists(self.path):
            return
        is_run = self.recipe_file.is_file() and self._state_file.is_file() and not is_pipeline_folder(self.path)
        if self.path.is_symlink() or not is_run:
            raise RunFolderError(
                f"--overwrite: {self.path} is not the folder of a run (recipe.yaml and run.json), so it is left as it "
                "is. Remove it yourself, or choose another name with --set run.name=..."
            )
        with self.held():
            if self.is_starting and self._overwritten.exists():
                _remove(self.path)  # a killed start; the run before it is still set aside
                return
            self.forget_overwritten()
            os.replace(self.path, self._overwritten)

    def forget_overwritten(self) -> None:
        """Removes the earlier run that was set aside, if there is one. A stage of a pipeline removes the earlier
        pipeline."""
        paths = [self._overwritten]
        if is_pipeline_folder(self.path.parent):
            paths.append(overwritten(self.path.parent))
        for path in paths:
            if path.exists():
                shutil.rmtree(path)

    def restore_overwritten(self) -> bool:
        """Brings the earlier run back if the new one has left nothing; returns whether it did."""
        if self.path.exists() or not self._overwritten.exists():
            return False
        os.replace(self._overwritten, self.path)
        return True

    def discard_if_stopped_early(self) -> None:
        """Removes the folder of a run that was stopped before the end of its first step: it cannot be resumed."""
        if self.state().get("step") == 0 and not self.saved_steps():
            _remove(self.path)

    def end_failed(self, error: BaseException) -> None:
        """Records the failure in run.json, and adds to the error how to continue. Removes the folder of a run that
        failed before its first step, so that its name is free again."""
        with contextlib.suppress(OSError, PodiumError, KeyError):
            if not self.path.exists():
                return
            if self.status == "starting":
                stacks = self._saved_stacks()
                _remove(self.path)
                error.add_note(f"it failed before the end of its first step, and left nothing in {self.path}")
                if stacks is not None:
                    error.add_note(f"its stacks.txt is now {stacks}")
                return
            with contextlib.suppress(OSError):  # a full disk, for instance: how to continue is said all the same
                self.update(status="failed", error=(str(error) or type(error).__name__).splitlines()[0])
            steps = self.saved_steps()
            if steps and steps[-1] >= self.recipe(needs_environment=False).steps:
                error.add_note(f"all steps are done and saved: podium export {self.path} OUT")
            elif steps:
                error.add_note(f"continue from the checkpoint of step {steps[-1]} with: podium resume {self.path}")
                if self._last_logged_step() > steps[-1]:
                    error.add_note(f"the steps after {steps[-1]} are lost: checkpoint.every says how often a run saves")
            else:
                error.add_note(
                    f"{self.path} has no checkpoint to resume from: no step could be saved. Set checkpoint.every to "
                    "save before the end"
                )

    def _saved_stacks(self) -> Path | None:
        """Where the stacks of a run are whose folder is removed; None: there are none. Those of a hang say where."""
        if not self.stacks_file.exists():
            return None
        stacks = self.path.with_name(f"{self.path.name}.{self.stacks_file.name}")
        os.replace(self.stacks_file, stacks)
        return stacks

    def _last_logged_step(self) -> int:
        return max((each.step for each in read_metrics(self.path)), default=0)

    def _was_never_begun(self) -> bool:
        """Whether a process that was killed before the first step left this folder, and no process holds it."""
        with contextlib.suppress(OSError, RunFolderError):
            if self.is_starting and not self._is_being_started():
                with self.held():
                    return True
        return False

    def _is_being_started(self) -> bool:
        """Whether another process of this machine has made the folder and lives: it holds it from the next moment
        on."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            holder = json.loads((self.path / _LOCK).read_text(encoding="utf-8"))
            is_here: bool = holder["host"] == platform.node() and holder["pid"] != os.getpid()
            return self.is_starting and is_here and _lives(holder["pid"])
        return False

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Holds the folder: only one process runs it at a time."""
        return held(self.path)

    def saved_steps(self) -> list[int]:
        """Steps of complete checkpoints, oldest first."""
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def forget_after(self, step: int) -> None:
        """Removes samples and skipped rows of later steps: a resumed run writes them again."""
        for file in (self.samples_file, self.skipped_file):
            if file.exists():
                lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
                kept_lines = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
                write_atomically(file, "".join(kept_lines))

    def cpu_settings(self, num_ranks: int) -> CpuSettings | None:
        """CPU settings of a run on this many ranks, if it has begun. A resumed run keeps them: the number of threads
        changes the order of sums."""
        known = self.state().get("cpu", {})
        if known.get("ranks") != num_ranks:
            return None
        return CpuSettings(threads=known["threads"], onednn=known["onednn"], measured="as before")

    def note_cpu_settings(self, num_ranks: int, settings: CpuSettings) -> None:
        """Stores the CPU settings for a resumed run."""
        self.update(cpu={"ranks": num_ranks, "threads": settings.threads, "onednn": settings.onednn})

    def snapshot(self) -> dict[str, str]:
        """The texts of recipe.yaml and run.json, by name, as far as they are there."""
        files = (self.recipe_file, self._state_file)
        return {file.name: file.read_text(encoding="utf-8") for file in files if file.is_file()}

    def is_removed(self, snapshot: Mapping[str, str]) -> bool:
        """Whether files of the snapshot are no longer there: somebody has removed the folder."""
        return any(not (self.path / name).exists() for name in snapshot)

    def restore(self, snapshot: Mapping[str, str]) -> None:
        """Makes a folder that somebody removed again, with the files of the snapshot."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for name, text in snapshot.items():
            write_atomically(self.path / name, text)

    def skipped_places(self) -> set[str]:
        """Files and lines of all rows that were skipped so far."""
        if not self.skipped_file.exists():
            return set()
        lines = self.skipped_file.read_text(encoding="utf-8").splitlines(keepends=True)
        return {str(json.loads(line)["place"]) for line in lines if line.endswith("\n")}


def overwritten(path: Path) -> Path:
    """Where an earlier run or pipeline of this folder waits until the new one has finished its first step."""
    return path.with_name(f".overwritten-{path.name}")


def _incomplete(path: Path) -> Path:
    """The name of a run folder while it is made or removed: a process that is killed then leaves it under this one."""
    return path.with_name(f".incomplete-{path.name}")


def _remove(path: Path) -> None:
    """Removes a run folder. What is killed meanwhile leaves nothing under its name."""
    shutil.rmtree(_incomplete(path), ignore_errors=True)
    os.rename(path, _incomplete(path))
    shutil.rmtree(_incomplete(path))


def _empty(path: Path) -> None:
    """Removes what is in a folder that this process holds."""
    for each in path.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.name != _LOCK:
            each.unlink()


def is_pipeline_folder(path: str | Path) -> bool:
    """Whether the folder is a pipeline's."""
    return (Path(path) / PIPELINE_STATE).is_file()


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Locks a folder against other processes. The operating system releases the lock when this process ends in any
    way."""
    try:
        lock = (path / _LOCK).open("a+")
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror or error}.") from error
    with lock as file:
        for left in reversed(range(_LOCK_TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not left:
                    raise RunFolderError(
                        f"{path} is running right now{_holder(path)}. Wait for it, or end it first."
                    ) from error
            time.sleep(_LOCK_PAUSE_S)  # a process that only tests the lock releases it at once
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": platform.node(), "since_s": time.time()}))
        file.flush()
        yield


def _holder(path: Path) -> str:
    """Who runs the folder and since when, in brackets; empty if that cannot be read."""
    try:
        holder = json.loads((path / _LOCK).read_text(encoding="utf-8"))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since_s"]))
        return f" (process {holder['pid']} on {holder['host']}, since {since})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _lives(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):  # Linux alone tells of those that nobody has waited for
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] != "Z"
        )
    return True


def is_held(path: Path) -> bool:
    """Whether a process is running the folder now. Those who only ask do not see each other."""
    try:
        with (path / _LOCK).open("r") as file:  # also where nothing can be written
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def row_lines(step: int, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of a step as lines of samples.jsonl or skipped_rows.jsonl."""
    return [json.dumps({"step": step, **row}, ensure_ascii=False, default=str) + "\n" for row in rows]


def _comment(mesh_reason: str | None) -> str:
    """Why the planner chose the axes, above the recipe."""
    if mesh_reason is None:
        return ""
    lines = textwrap.wrap(mesh_reason, 118, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file: readers see the old text or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _versions() -> dict[str, str]:
    """Versions of Python and of the libraries that Podium computes with."""
    names = ("podium", "torch", "transformers", "numpy")
    versions = {}
    for name in names:
        with contextlib.suppress(Exception):
            versions[name] = version(name)
    return {"python": platform.python_version(), **versions}
