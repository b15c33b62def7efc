# SPDX-License-Identifier: Apache-2.0
"""The processes of one command: found, told apart by role, hit, and ended. Never those of another Ray on the machine.

Ray's daemons leave the process group of the command that started them and lose their parent when it dies. What all of
them keep is the environment: RAY_TMPDIR names a folder that no other command has.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

POOLS = {"learner": "train", "generator": "rollout", "grader": "graders", "runner": "runners"}
SUPERVISOR = "supervisor"
_DAEMONS = ("raylet", "gcs_server")
_SPAWNED = "spawn_main"  # a process of torch's launcher
_FORK_SERVER = "podium.cluster.fork_server"
_ACTOR_NAME = re.compile(r"^:actor_name:(.*)$", re.MULTILINE)
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    pid: int
    title: str  # what it calls itself, or its command line
    parent: int

    @property
    def program(self) -> str:
        return Path(self.title.split(" ", 1)[0]).name

    @property
    def label(self) -> str:
        """Short: the program, or what Python runs."""
        scripts = [Path(part).name for part in self.title.split(" ") if part.endswith(".py")]
        return scripts[0] if self.program.startswith("python") and scripts else self.program

    @property
    def is_ray_worker(self) -> bool:
        """Also before it has given itself a title. The raylet has the same script among its arguments."""
        untitled = self.program.startswith("python") and (
            "default_worker.py" in self.title or _FORK_SERVER in self.title
        )
        return untitled or self.title.startswith(("ray::IDLE", "ray::Worker"))


@dataclass(slots=True, kw_only=True)
class ProcessFamily:
    """All processes of one command, by the folder that Ray was told to use and by the session of the command."""

    ray_folder: Path
    leader: int
    _foreign: set[int] = field(default_factory=set)

    def living(self) -> list[Process]:
        """Looks only at processes that were not found to be somebody else's before."""
        found = []
        for pid in _pids():
            if pid not in self._foreign:
                process = self._look_at(pid)
                if process is None:
                    self._foreign.add(pid)
                else:
                    found.append(process)
        return found

    def all_living(self) -> list[Process]:
        """Looks at every process of the machine: ids may have been given out again."""
        self._foreign.clear()
        return self.living()

    def end(self, patience_s: float = 30.0) -> None:
        """Ends all of them; those that they start meanwhile too."""
        until = time.monotonic() + patience_s
        while (left := self.all_living()) and time.monotonic() < until:
            for process in left:
                hit(process.pid, signal.SIGKILL)
            time.sleep(_LOOK_S)

    def by_victim(self) -> dict[str, list[Process]]:
        """Processes of each kind of victim, in an order that does not depend on their ids."""
        living = {process.pid: process for process in self.living()}
        names = self._actor_names()
        found = {daemon: [each for each in living.values() if each.program == daemon] for daemon in _DAEMONS}
        found[SUPERVISOR] = [living[self.leader]] if self.leader in living else []
        # The supervisor forks the controller, which keeps its title. A launcher of ranks has no supervisor.
        title = living[self.leader].title if self.leader in living else ""
        forked = [each for each in living.values() if each.parent == self.leader != each.pid and each.title == title]
        found["controller"] = forked or found[SUPERVISOR]
        # What it forks has its title at first, and another parent.
        above = {each.pid for each in found["controller"]}
        found["fork_server"] = [each for each in living.values() if _FORK_SERVER in each.title and each.parent in above]
        ranks = [each for each in living.values() if each.parent == self.leader and _SPAWNED in each.title]
        found["rank"] = sorted(ranks, key=lambda each: each.pid)
        others = {*names, *(each.pid for each in found["fork_server"])}
        found["worker"] = [each for each in living.values() if each.is_ray_worker and each.pid not in others]
        by_name = sorted((name, pid) for pid, name in names.items() if pid in living)
        for victim, pool in POOLS.items():
            found[victim] = [living[pid] for name, pid in by_name if name.startswith(f"{pool}[")]
        return found

    def _actor_names(self) -> dict[int, str]:
        """Ray notes in the log of every worker what its actor calls itself, as soon as it is built."""
        found = {}
        for file in self.ray_folder.glob("ray/session_latest/logs/worker-*.out"):
            with suppress(OSError, ValueError):
                names = _ACTOR_NAME.findall(file.read_text(errors="replace"))
                if names and names[-1] != "Worker":
                    found[int(file.stem.rpartition("-")[2])] = names[-1]
        return found

    def _look_at(self, pid: int) -> Process | None:
        place = Path(f"/proc/{pid}")
        try:
            state, parent, _, session = (place / "stat").read_text().rpartition(")")[2].split()[:4]
            if state == "Z":
                return None
            if int(session) != self.leader:
                marker = f"RAY_TMPDIR={self.ray_folder}".encode()
                if marker not in (place / "environ").read_bytes().split(b"\0"):
                    return None
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            return Process(pid=pid, title=command, parent=int(parent))
        except OSError:
            return None


def hit(pid: int, number: signal.Signals) -> bool:
    """Sends a signal. False: the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def wait_until(happened: Callable[[], bool], until: float) -> bool:
    """Whether it happened before this moment of the monotonic clock."""
    while not happened():
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_S)
    return True


def names_victim(victim: str) -> re.Pattern[str]:
    """What an error must contain to name the victim."""
    if victim in POOLS:
        return re.compile(rf"\b{POOLS[victim]}\[\d|\b{victim}", re.IGNORECASE)
    words = {
        "raylet": r"raylet|\bnode\b",
        "gcs_server": r"gcs|head",
        "worker": r"worker|\w\[\d",
        "fork_server": r"fork server",
        "rank": r"rank \d",
    }
    return re.compile(words[victim], re.IGNORECASE)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
