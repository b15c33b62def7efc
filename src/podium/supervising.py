# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a command: starts the controller of a run again where it dies, or where its Ray died. Torch-free.

`podium train` and `podium resume` of a recipe with a controller run in a child process. Its parent, the supervisor,
does nothing but wait, so that little can happen to it. A child that is killed is followed by another one. Until it has
told that the run began, the next one repeats the command. From then on Ray and the workers stay, and the next one
attaches to them. When the supervisor is killed, the kernel ends the child, and with it the run."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO

from podium.controller.recovery import Abort, Death, RecoveryPlan
from podium.environments.supervisor import adopt_orphans, descendants, end_all, end_like, reaped, signal_with_end_of
from podium.errors import RecipeError
from podium.observe.console import PlainConsole
from podium.observe.recording import RecordedConsole
from podium.recipe import OnPolicyRecipe
from podium.recipe.loading import read_values
from podium.recipe.pipeline_loading import overridden
from podium.recipe.programs import recipe_class
from podium.recipe.schema import OnPolicyPlacementSection
from podium.runs.folder import is_pipeline_folder, overwritten
from podium.runs.host_memory import forget_memory, keep_memory
from podium.runs.supervised import GUARD, SUPERVISION, KeptRay, Predecessor, SupervisedRun, Supervision, note_end
from podium.spmd.launch import place_under_torchrun

_VERBS = ("train", "resume")
# What ends a run on purpose: handed on to the child, and no reason to start it again.
_ENDS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
# `si_code` of a signal that a terminal sends: its whole foreground process group has it.
_SI_KERNEL = 128
_LOOK_S = 0.5
# After the death of a controller, its guard ends Ray and the workers. What is left then is ended here.
_GUARD_S = 10.0
_FAILED = 2


def is_supervised(arguments: Sequence[str]) -> bool:
    """Whether a command line has a supervisor: it runs a recipe that has a controller, or a pipeline with one."""
    if sys.platform != "linux" or not arguments or arguments[0] not in _VERBS or place_under_torchrun() is not None:
        return False
    return any(_controlled(Path(each)) for each in arguments[1:])


def _controlled(path: Path, overrides: Sequence[str] = ()) -> list[Mapping[str, Any]]:
    """`placement` of all recipes with a controller that a path leads to: it is a recipe or a pipeline, or the folder of
    one. Nothing is checked: the command itself says what is wrong."""
    try:  # a path may be any argument, also one that is too long for a name
        file = path / "recipe.yaml" if path.is_dir() else path
        values: Mapping[str, Any] = read_values(file) if file.is_file() else {}
        with contextlib.suppress(RecipeError):
            values = overridden(values, overrides)
    except (RecipeError, OSError):
        return []
    defaults, stages = _mapping(values.get("defaults")), _mapping(values.get("stages"))
    recipes = [values, *({**defaults, **_mapping(each)} for each in stages.values())]
    kinds = [recipe_class(each) for each in recipes]
    return [
        {**_mapping(defaults.get("placement")), **_mapping(each.get("placement"))}
        for each, kind in zip(recipes, kinds, strict=True)
        if kind is not None and issubclass(kind, OnPolicyRecipe)
    ]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def limit_before_run(arguments: Sequence[str], key: Literal["restarts", "heartbeat_timeout_s"]) -> float:
    """A number of `placement` that counts until the run has begun and tells its own: the largest of all recipes with a
    controller, as file and `--set` of a command line say; the default where they say something else."""
    overrides = [text for option, text in pairwise(arguments) if option == "--set"]
    overrides += [each.removeprefix("--set=") for each in arguments if each.startswith("--set=")]
    default: float = OnPolicyPlacementSection.model_fields[key].default
    found: list[Any] = [each.get(key) for path in arguments[1:] for each in _controlled(Path(path), overrides)]
    numbers: list[float] = [each if type(each) in (int, float) and 0 <= each < math.inf else default for each in found]
    return max(numbers, default=default)


def supervise(arguments: Sequence[str]) -> Sequence[str]:
    """Starts a child process, and others after it as long as there are deaths to be answered. Returns only in them,
    with the arguments of their command. The supervisor ends like the last of them."""
    adopt_orphans()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS | {signal.SIGCHLD})
    watch, supervisor = _Watch(arguments), os.getpid()
    while True:
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os.close(reading)
            signal_with_end_of(supervisor, signal.SIGKILL)
            if not watch.shares_terminal:
                os.setpgid(0, 0)  # signals to the group of the supervisor come by way of it, once
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            SUPERVISION.set(Supervision(writing, watch.predecessor, watch.folder))
            atexit.register(note_end)
            return watch.arguments
        os.close(writing)
        watch.follow(child, reading)
        os.close(reading)


class _Watch:
    """Follows the child processes of one command."""

    def __init__(self, first: Sequence[str]) -> None:
        self.shares_terminal = os.isatty(0)
        self.predecessor: Predecessor | None = None
        self.arguments = self._first = first  # of the next child
        self._run: SupervisedRun | None = None
        self._pipeline: Path | None = None
        self._is_alone = False  # whether no other child goes on with the run
        self._plan = RecoveryPlan(int(limit_before_run(first, "restarts")))
        self._heartbeat_timeout_s = limit_before_run(first, "heartbeat_timeout_s")
        self._memory: TextIO | None = None
        self._ray: KeptRay | None = None  # of the last child: it stays if that one dies
        self._folders: set[str] = set()  # of all children
        self._is_recorded = False
        self._begin()

    def _begin(self) -> None:
        """Before the next child."""
        self._asked: str | None = None  # why the child is started again, unless it died
        self._is_death = True
        self._is_ending = False
        self._has_said_end = False
        self._pending = b""  # a part of a message
        self._stopped_s = 0.0
        self._to_hand_on: int | None = None  # a signal that came

    @property
    def folder(self) -> Path | None:
        """Of the run that the last child carried out."""
        return None if self._run is None else self._run.folder

    def follow(self, child: int, pipe: int) -> None:
        """Waits for the end of a child. Returns if another one goes on; otherwise this process ends too."""
        self._begin()
        code = self._wait(child, pipe)
        cause = self._cause(code)
        if cause is None or self._is_alone or (self._run is None and code >= 0):
            self._end(code)
        ended_s = time.monotonic()
        is_recorded = self._run is not None and self._is_recorded and (self._run.folder / "run.json").is_file()
        is_kept = is_recorded and self._ray is not None and _lives(self._ray)
        self.predecessor = Predecessor(
            cause=cause, ended_s=ended_s, is_recorded=is_recorded, ray=self._ray if is_kept else None
        )
        if self._ray is not None and is_kept:
            _end_others(self._ray)
        else:
            self._end_family(child)
        target = self._target if self._run is None or is_recorded or self._target != self._run.folder else None
        console = RecordedConsole(PlainConsole(sys.stdout, log_every=1), log_every=1)
        if self._run is not None and is_recorded:
            console.record_in(self._run.folder / "console.log")
        decision = self._plan.decide(Death(part="controller", cause=cause)) if self._is_death else None
        if isinstance(decision, Abort):
            advice = "Give the command again." if target is None else f"Continue it with: podium resume {target}"
            console.warning(f"{cause} The run ends: {decision.reason}. {advice}")
            self._end(code if code < 0 else _FAILED)
        self.arguments = self._first if target is None else ["resume", str(target)]
        goes_on = "A new controller goes on with the run." if self._run is not None else "The command is started again."
        console.warning(f"{cause} {goes_on}")

    @property
    def _target(self) -> Path | None:
        """What is resumed: the run, or the pipeline of which it is a stage. None: nothing is there to go on with. While
        an earlier pipeline is still set aside, the command that replaces it is repeated."""
        if self._run is None:
            return self._pipeline if self._pipeline is not None and not overwritten(self._pipeline).exists() else None
        folder = self._run.folder
        return folder.parent if is_pipeline_folder(folder.parent) else folder

    def _wait(self, child: int, pipe: int) -> int:
        """The exit code of the child; negative: the signal that ended it. Waits as long as the command takes."""
        os.set_blocking(pipe, False)
        while True:
            news = signal.sigtimedwait(_ENDS | {signal.SIGCHLD}, _LOOK_S)
            if news is not None and news.si_signo in _ENDS:
                self._is_ending = True
                self._to_hand_on = None if self.shares_terminal and news.si_code == _SI_KERNEL else news.si_signo
                if self.shares_terminal:
                    time.sleep(_LOOK_S)  # the child has it too if it was sent to their group, and says so
            code, _ = reaped(child)
            self._read(pipe)
            if code is not None:
                return code
            if self._to_hand_on is not None:
                os.kill(child, self._to_hand_on)
                self._to_hand_on = None
            self._look_at(child)

    def _read(self, pipe: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while read := os.read(pipe, 65536):
                *lines, self._pending = (self._pending + read).split(b"\n")
                for line in lines:
                    for name, value in json.loads(line).items():
                        self._note(name, value)

    def _note(self, name: str, value: Any) -> None:
        match name:
            case "run":
                before, self._run, self._is_alone = self._run, SupervisedRun.of(value), False
                self._heartbeat_timeout_s = self._run.heartbeat_timeout_s
                if before is None or before.folder != self._run.folder:  # the next stage of a pipeline
                    self._forget_memory(before)
                    self._is_recorded = False
                    self._plan = RecoveryPlan(self._run.restarts)
            case "pipeline":
                self._pipeline = Path(value)
            case "alone":
                self._is_alone = True
            case "recorded":
                self._is_recorded = True
            case "progress":
                self._plan.note_progress()
                if self._memory is None and self._run is not None:
                    self._memory = keep_memory(self._run.folder)
            case "ray":
                self._ray = None if value is None else KeptRay.of(value)
                if self._ray is not None and self._ray.folder is not None:
                    self._folders.add(self._ray.folder)
            case "end":
                self._has_said_end = True
            case "signal":
                if self.shares_terminal:
                    self._to_hand_on = None
            case "restart" | "start_anew":
                self._asked, self._is_death, self._ray = value, name == "restart", None
            case _:
                raise AssertionError(name)

    def _look_at(self, child: int) -> None:
        """Kills a child that has been stopped for longer than the heartbeat timeout, if another one would go on.
        Counts looks instead of reading the clock: this process may have been stopped itself."""
        if self._is_alone or (self._run is None and self._pipeline is not None):
            return
        from podium.cluster.processes import kill, look

        found = look(child)
        self._stopped_s = self._stopped_s + _LOOK_S if found is not None and found.is_stopped else 0.0
        if found is not None and self._stopped_s >= self._heartbeat_timeout_s:
            self._asked = (
                f"The controller (process {child}) is stopped (SIGSTOP) and has given no sign of life for "
                f"{self._heartbeat_timeout_s:g} s."
            )
            kill(found)

    def _cause(self, code: int) -> str | None:
        """Why the child died; None: it has ended, or was told to."""
        if self._is_ending:
            return None
        if self._asked is not None or (code >= 0 and self._has_said_end) or -code in _ENDS:
            return self._asked
        if code >= 0:
            return f"The controller was ended from within, with exit code {code}: Ray does that if its raylet dies."
        return f"The controller was killed by {signal.Signals(-code).name}."

    def _end_family(self, child: int) -> None:
        """Returns when nothing is left of the processes of a child: they hold devices and memory."""
        # The guard of a child whose Ray stays ends nothing as long as this process lives. Before a run there is none.
        is_guarded = self._run is not None and not self._folders and self._ray is None
        end_s = time.monotonic() + (_GUARD_S if is_guarded else 0.0)
        while reaped(child)[1] and time.monotonic() < end_s:
            time.sleep(0.02)
        end_all(child)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders, self._ray = set(), None

    def _end(self, code: int) -> NoReturn:
        if self._ray is not None:  # the child did not come to end it
            self._end_family(0)
        self._forget_memory(self._run)
        end_like(code)

    def _forget_memory(self, run: SupervisedRun | None) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if run is not None:
            forget_memory(run.folder)


def _lives(ray: KeptRay) -> bool:
    """Whether all of its processes live. Guards come and go."""
    from podium.cluster.processes import look

    found = [(each, look(each.pid)) for each in ray.processes if each.name != GUARD]
    return all(now is not None and now.is_alive and now.started == each.started for each, now in found)


def _end_others(ray: KeptRay) -> None:
    """Ends what a dead child has left beside its Ray and its workers."""
    from podium.cluster.processes import kill, look

    roots = [each.pid for each in ray.processes]
    kept = {*roots, *(pid for root in roots for pid in descendants(root))}
    others = [look(pid) for pid in descendants(os.getpid()) if pid not in kept]
    for each in others:
        if each is not None:
            kill(each)
