# SPDX-License-Identifier: Apache-2.0
"""Runs of the fault-injection benchmark: unbroken ones, and trials that are hit, resumed and compared."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from kills_processes import POOLS, Process, ProcessFamily, hit, names_victim, wait_until
from kills_task import STEPS, Task
from kills_trials import RANK, VICTIMS, Attempt, Moment, Row, Trial, cells

MOST_ATTEMPTS = 4
_UNBROKEN_S = 600.0
# The line of the console's header that needs all roles to be built; the first step follows at once. A controller that
# takes the place of one that died before it had said so says where it goes on instead.
_READY = re.compile(r"^devices:|: going on after step ", re.MULTILINE)
_STEP = re.compile(r"^step +\d+/", re.MULTILINE)
_ADVICE = re.compile(r"podium (resume|train)")
# Tracebacks, and lines of Ray's own log.
_RAW = re.compile(r"Traceback|\((raylet|gcs_server)\)|^\[[^]]+ [EWFC] \d+", re.MULTILINE)
# Metrics that hold times, or how much of the work could be shared, which is a matter of time too.
_TIMES = ("_s", "mfu", "per_s", "cache_used", "reused_tokens", "prefilled_tokens", "preemptions")


class StoppedError(Exception):
    """Ctrl-C: what runs is ended, nothing is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    end_s: float  # a command that has not ended so long after the hit hangs
    left_s: float  # processes that are there so long after the end of their command are left


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a complete run computed."""

    weights: str  # of the last checkpoint's tensors, the optimizer's included
    ledger: list[list[Any]]
    metrics: dict[str, dict[str, float]]  # by step; times left out

    def first_difference(self, other: Numbers) -> int | None:
        steps = sorted({int(step) for step in (*self.metrics, *other.metrics)})
        return next((step for step in steps if self.metrics.get(str(step)) != other.metrics.get(str(step))), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbroken:
    """A run that nobody hit: what it computed, and when what happened, in seconds after its start."""

    layout: str
    appeared_s: dict[str, float]  # each victim
    ready_s: float
    step_s: float
    closing_s: float  # from the last step to the end of the command
    wall_s: float
    numbers: Numbers

    def delay_s(self, victim: str, moment: Moment) -> float:
        """How long to wait after the event of a moment."""
        if moment.steps is None:
            until = self.ready_s
            if victim == "worker":  # is one only until it has a role
                until = max(at for role, at in self.appeared_s.items() if role in POOLS)
            return moment.share * max(0.0, until - self.appeared_s.get(victim, until))
        return moment.share * (self.closing_s if moment.steps >= STEPS else self.step_s)


@dataclass(slots=True, kw_only=True)
class Command:
    """A `podium` command under way, in a session of its own, with a Ray of its own."""

    process: subprocess.Popen[bytes]
    family: ProcessFamily
    output: Path
    began: float

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began

    def reached(self, steps: int) -> bool:
        return len(_STEP.findall(self.text)) >= steps and (steps > 0 or _READY.search(self.text) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What was done to a command, and when."""

    at: float
    age_s: float
    while_: str
    told: int  # how much the command had said until then
    pid: int
    steps: int  # that it had said to be done


@dataclass(slots=True, kw_only=True)
class Bench:
    """Makes the runs of one folder. `stop` ends them early, from another thread."""

    task: Task
    folder: Path
    limits: Limits
    stop: threading.Event = field(default_factory=threading.Event)

    def unbroken(self, layout: str) -> Unbroken:
        """Runs once without a hit, or reads what an earlier start of this benchmark recorded."""
        place = self.folder / f"unbroken-{layout}"
        file = place / "unbroken.json"
        if file.exists():
            values = json.loads(file.read_text(encoding="utf-8"))
            return Unbroken(**{**values, "numbers": Numbers(**values["numbers"])})
        shutil.rmtree(place, ignore_errors=True)
        found = self._measured(layout, place)
        file.write_text(json.dumps(asdict(found)), encoding="utf-8")
        return found

    def _measured(self, layout: str, place: Path) -> Unbroken:
        victims = [victim for _, victim in cells([layout], (*VICTIMS, RANK), "KILL")]
        appeared_s: dict[str, float] = {}
        ready_s, step_at = 0.0, [0.0] * (STEPS + 1)
        with self._started("train", layout, place) as command:
            while not command.ended:
                self._check(command.age_s < _UNBROKEN_S, f"the unbroken run of {layout}", command)
                if len(appeared_s) < len(victims):
                    there = {victim for victim, found in command.family.by_victim().items() if found}
                    appeared_s |= dict.fromkeys(there - appeared_s.keys(), command.age_s)
                ready_s = ready_s or (command.age_s if command.reached(0) else 0.0)
                done = len(_STEP.findall(command.text))
                step_at = [at or (command.age_s if done >= step > 0 else 0.0) for step, at in enumerate(step_at)]
                time.sleep(0.02)
            self._check(command.process.returncode == 0, f"the unbroken run of {layout}", command)
            wall_s = command.age_s
        return Unbroken(
            layout=layout,
            appeared_s=appeared_s,
            ready_s=ready_s,
            step_s=statistics.median(later - sooner for sooner, later in pairwise(step_at[1:])),
            closing_s=wall_s - step_at[-1],
            wall_s=wall_s,
            numbers=numbers_of(place / "run"),
        )

    def _check(self, holds: bool, what: str, command: Command) -> None:
        if self.stop.is_set():
            raise StoppedError
        if not holds:
            raise SystemExit(f"{what} failed or took too long, so there is nothing to compare with:\n{command.text}")

    def run(self, trial: Trial, unbroken: Unbroken) -> Row:
        """Trains, hits, and resumes until the run is complete or has failed too often."""
        began = time.monotonic()
        place = self.folder / f"{trial.seed}-{trial.number:04d}-{trial.layout}-{trial.victim}-{trial.signal}"
        shutil.rmtree(place, ignore_errors=True)
        moments = list(trial.moments)
        attempts: list[Attempt] = []
        while len(attempts) < MOST_ATTEMPTS and not is_complete(place / "run"):
            attempts.append(self._attempt(trial, moments, unbroken, place))
            moments = moments[attempts[-1].num_hits :]
        completed = is_complete(place / "run")
        numbers = numbers_of(place / "run") if completed else None
        return Row(
            trial=trial,
            attempts=tuple(attempts),
            completed=completed,
            weights_equal=numbers is not None and numbers.weights == unbroken.numbers.weights,
            ledger_equal=numbers is not None and numbers.ledger == unbroken.numbers.ledger,
            first_difference=numbers.first_difference(unbroken.numbers) if numbers is not None else None,
            wall_s=time.monotonic() - began,
            recoveries=recoveries_of(place / "run"),
        )

    def _attempt(self, trial: Trial, moments: Sequence[Moment], unbroken: Unbroken, place: Path) -> Attempt:
        verb = "resume" if any((place / "run" / "checkpoints").glob("step-*/checkpoint.json")) else "train"
        if verb == "train":
            shutil.rmtree(place / "run", ignore_errors=True)
        with self._started(verb, trial.layout, place) as command:
            # A command that nobody hits may be slow where the machine is busy; it is not the judged one.
            whole = command.began + self.limits.end_s + 2 * unbroken.wall_s
            hits: list[Hit] = []
            for moment in moments:
                found = self._hit(command, trial, moment, unbroken, whole, hits)
                if found is None:
                    break
                hits.append(found)
            done = hits[-1] if hits else None
            until = whole if done is None else done.at + self.limits.end_s
            in_time = self._wait(lambda: command.ended, until=until)
            ended = time.monotonic()
            code = command.process.returncode if in_time else None
            if not in_time:
                (place / "hung.txt").write_text(_stacks(command.family), encoding="utf-8")
                command.family.end()
                command.process.wait()
            self._wait(lambda: not command.family.living(), until=ended + self.limits.left_s)
            left = command.family.all_living()
            gone_s = time.monotonic() - ended
            said = command.text[hits[0].told :] if hits else ""
        expected = done is not None and code != 0 and trial.victim != "controller"
        return Attempt(
            verb=verb,
            code=code,
            wall_s=ended - command.began,
            num_hits=len(hits),
            hit_at_s=None if done is None else done.age_s,
            hit_while=None if done is None else done.while_,
            end_s=None if done is None else ended - done.at,
            named=names_victim(trial.victim).search(said) is not None if expected else None,
            advised=_ADVICE.search(said) is not None if expected else None,
            raw=_RAW.search(said) is not None if expected else None,
            left=tuple(process.label for process in left) if in_time else (),
            gone_s=gone_s,
        )

    def _hit(
        self, command: Command, trial: Trial, moment: Moment, unbroken: Unbroken, until: float, before: Sequence[Hit]
    ) -> Hit | None:
        """Waits for the moment and hits the victim; None if the command ended before. `before`: earlier hits of the
        command, whose victims are dead or dying."""
        found: list[Process] = []
        known, done = {each.pid for each in before}, before[-1].steps if before else 0

        def there() -> bool:
            found[:] = [each for each in command.family.by_victim()[trial.victim] if each.pid not in known]
            return bool(found) or command.ended

        if moment.steps is None:
            self._wait(there, until=until)
        else:
            steps = done + moment.steps
            self._wait(lambda: command.ended or command.reached(steps), until=until)
        due = time.monotonic() + unbroken.delay_s(trial.victim, moment)
        self._wait(lambda: command.ended, until=due)
        while True:
            self._wait(there, until=until)  # one may have ended meanwhile, as others take its place
            if command.ended or not found:
                return None
            victim = found[int(trial.pick * len(found))]
            told = len(command.text)
            if hit(victim.pid, signal.Signals[f"SIG{trial.signal}"]):
                break
        steps_done = len(_STEP.findall(command.text))
        return Hit(
            at=time.monotonic(), age_s=command.age_s, while_=f"{victim.label}, {steps_done} steps done", told=told,
            pid=victim.pid, steps=steps_done,
        )  # fmt: skip

    def _wait(self, happened: Callable[[], bool], *, until: float) -> bool:
        in_time = wait_until(lambda: self.stop.is_set() or happened(), until)
        if self.stop.is_set():
            raise StoppedError
        return in_time

    @contextmanager
    def _started(self, verb: str, layout: str, place: Path) -> Iterator[Command]:
        """The command; nothing of it is left afterwards, whatever happened. Paths of Ray's sockets must be short."""
        place.mkdir(parents=True, exist_ok=True)
        output = place / f"said-{len(list(place.glob('said-*')))}.txt"
        arguments = [verb, str(place / "run")]
        if verb == "train":
            arguments = [verb, str(self.task.recipe_file(layout))]
            arguments += ["--set", f"run.folder={place}", "--set", "run.name=run"]
        with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as ray_folder:
            environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
            environment |= {"RAY_TMPDIR": ray_folder, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "podium", *arguments],
                    stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
                )  # fmt: skip
            family = ProcessFamily(ray_folder=Path(ray_folder), leader=process.pid)
            command = Command(process=process, family=family, output=output, began=time.monotonic())
            try:
                yield command
            finally:
                family.end()
                process.wait()


def numbers_of(run: Path) -> Numbers:
    """What a run folder says of its run."""
    return Numbers(weights=weights_of(run), ledger=ledger_of(run), metrics=metrics_of(run))


def weights_of(run: Path) -> str:
    """Of the last step's checkpoints: the policy's, a critic's, a refreshed reference's; optimizer state included."""
    every = hashlib.sha256()
    for kind in ("checkpoints", "critic", "reference"):
        for file in sorted((run / kind / f"step-{STEPS:08d}").glob("rank-*.safetensors")):
            every.update(file.read_bytes())
    return every.hexdigest()


def ledger_of(run: Path) -> list[list[Any]]:
    """Every episode; none of a run without a ledger. Attempts are left out: a retried episode is the same episode."""
    if not (run / "episodes.sqlite").exists():
        return []
    with closing(sqlite3.connect(run / "episodes.sqlite")) as ledger_file:
        rows = ledger_file.execute(
            "SELECT prompt_index, sample, branch, step, state, finish, version, tokens, reward FROM episodes "
            "ORDER BY 1, 2, 3"
        ).fetchall()
    return [list(each) for each in rows]


def recoveries_of(run: Path) -> tuple[tuple[str, float], ...]:
    """What each recovery of a run replaced, and how long it took."""
    from podium.runs.events import recoveries

    return tuple((each.part, each.seconds) for each in recoveries(run))


def is_complete(run: Path) -> bool:
    """Whether the last checkpoint is whole; the command that wrote it may still have failed afterwards."""
    return (run / "checkpoints" / f"step-{STEPS:08d}" / "checkpoint.json").exists()


def metrics_of(run: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        kept = {name: value for name, value in values.items() if not name.endswith(_TIMES)}
        found.setdefault(str(values["step"]), {}).update(kept)
    return found


def source_fingerprint() -> str:
    """Of Podium's code and of this benchmark's: runs of other code are not compared."""
    import podium

    package = Path(podium.__file__).parent
    files: Sequence[Path] = sorted(package.rglob("*.py")) + sorted(Path(__file__).parent.glob("kills*.py"))
    every = hashlib.sha256()
    for file in files:
        every.update(file.read_bytes())
    return every.hexdigest()[:16]


def _stacks(family: ProcessFamily) -> str:
    """What hung processes were doing, as far as it can be told from outside."""
    lines = []
    for process in family.all_living():
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        state = next((line for line in status if line.startswith("State:")), "")
        lines.append(f"{process.pid} {state} {process.title[:120]}")
    return "\n".join(lines) + "\n"
