# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks: in this process for one device, through torch's elastic launcher for several, or as one of the
ranks that torchrun started. A rank that dies ends the job with its own traceback. Torch-free until ranks start."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import pickle
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from podium import errors
from podium.engine.addresses import FileMeeting, Meeting
from podium.errors import LaunchError, PodiumError
from podium.runs.interrupts import STOPPING, InterruptHandler
from podium.spmd.own_hang import raising_if_hung
from podium.spmd.rank_processes import LOOK_S, RankMarks, RankProcesses
from podium.spmd.restart_budget import Restart, RestartBudget
from podium.stack_dumps import allow_dumps

Result = TypeVar("Result")

# What torch's launcher reports for a process that left no error.
_NO_WORDS = "<NONE>"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A process's rank and world size, and how it was started."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int | None = 1  # ranks on this machine; None: the launcher does not say
    attempt: int = 0  # number of earlier restarts of the group
    restart: Restart | None = None  # the last of them, if `launch` made it
    restarts_left: int = 0  # that `launch` will still make if no step is completed
    node: str = ""  # the machine, if there may be several
    launched: bool = False  # started by `launch`, which handles the user's Ctrl-C
    is_followed: bool = False  # rank 0 prints to the run's console.log, which its launcher shows
    meeting: Meeting | None = None  # where the ranks rendezvous; None: torchrun's store


def place_under_torchrun() -> RankPlace | None:
    """This process's place if torchrun started it. The environment variables are torchrun's documented interface."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return _place_from_environment(launched=False)


def launch(
    main: Callable[..., Result], args: tuple[Any, ...], *, ranks: int, restarts: int, stop_file: Path | None,
    stacks_file: Path | None = None, note: Callable[[str], object] = lambda text: None,
    newest_step: Callable[[], int] = lambda: 0, most_stopped_s: float = math.inf, most_hung_s: float = math.inf,
) -> Result:  # fmt: skip
    """Runs `main(RankPlace, *args)` on every rank; returns the result of rank 0.

    A single rank runs in this process, where a debugger can reach it. Several ranks run as processes, and this process
    waits for them. The first Ctrl-C asks them to save and stop (if there is a `stop_file`), the second ends all ranks.
    When a rank dies or fails, all are ended and started again, up to `restarts` times without a completed step between
    them, of which `newest_step` tells the last; `note` gets a line about each restart. Where the other ranks were when
    one failed is appended to `stacks_file`: it may have waited for one that hangs. A rank that is stopped (SIGSTOP) for
    `most_stopped_s`, or does not mark progress for `most_hung_s`, counts as dead."""
    if ranks == 1 and restarts == 0:
        with raising_if_hung(most_hung_s, stacks_file, note):
            return main(RankPlace(), *args)
    with tempfile.TemporaryDirectory(prefix="podium-") as meeting, InterruptHandler(stop_file) as interrupts:
        budget, restart = RestartBudget(restarts), None
        while True:
            marks = RankMarks(ranks)
            entry = _RankEntry(
                main=main, args=args, parent=os.getpid(), meeting=Path(meeting), restart=restart,
                restarts_left=restarts if restart is None else restart.left, marks=marks,
            )  # fmt: skip
            outcome = _Outcome()
            processes = RankProcesses(stacks_file, most_stopped_s, marks=marks, most_hung_s=most_hung_s)
            agent = threading.Thread(target=_run_agent, args=(outcome, entry, ranks), name="elastic-agent", daemon=True)
            agent.start()
            while agent.is_alive():
                agent.join(timeout=LOOK_S)
                processes.look(ends_others=lambda: budget.has_left(newest_step()))
            if interrupts.ended:
                raise KeyboardInterrupt
            if processes.told:
                note(processes.told)
            if processes.ended is not None and outcome.can_restart:
                outcome.error = LaunchError(processes.ended)
            if not outcome.can_restart:
                break
            cause = str(outcome.error).splitlines()[0]
            restart = budget.restart(cause, step=newest_step(), failed_s=processes.failed_s)
            if restart is None:
                break
            note(f"{restart.title}: {cause}")
    if outcome.error is not None:
        raise outcome.error
    result: Result = outcome.values[0]
    return result


class _Outcome:
    """Results of the agent's thread."""

    values: dict[int, Any]
    error: BaseException | None = None
    can_restart: bool = False  # a rank died or failed


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankEntry:
    """What a process does that becomes a rank."""

    main: Callable[..., Any]
    args: tuple[Any, ...]
    parent: int
    meeting: Path
    restart: Restart | None
    restarts_left: int
    marks: RankMarks

    @property
    def attempt(self) -> int:
        return 0 if self.restart is None else self.restart.attempt

    def __call__(self) -> Any:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher turns Ctrl-C into a request through the stop file
        allow_dumps(f"rank {os.environ['RANK']}")
        threading.Thread(target=_end_with_parent, args=(self.parent,), name="parent-watch", daemon=True).start()
        where = dataclasses.replace(
            _place_from_environment(launched=True), attempt=self.attempt, restart=self.restart,
            restarts_left=self.restarts_left, meeting=FileMeeting(path=self.meeting / f"ranks-{self.attempt}"),
        )  # fmt: skip
        with self.marks.published(where.rank):
            return self.main(where, *self.args)


def _run_agent(outcome: _Outcome, entry: _RankEntry, ranks: int) -> None:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent logs each rank's death at length; Podium reports the first one itself.
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Agent and ranks are on one machine and rendezvous over files: torch's own stores would listen on every interface.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(entry.meeting / f"rendezvous-{entry.attempt}"),
        rdzv_configs={"store_type": "file"},
        max_restarts=0,  # `launch` restarts: it says why, and the ranks report when they go on
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        outcome.values = elastic_launch(config, _run_entry)(entry)
    except ChildFailedError as error:
        outcome.error, outcome.can_restart = _first_failure(error), True
    except BaseException as error:
        outcome.error = error


def _run_entry(entry: _RankEntry) -> Any:
    return _ByValue(entry())


class _ByValue:
    """A result that the launcher gets as it is. Torch would pass each of its tensors as an open file, and a process can
    hold so many of these only."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (pickle.dumps(self._value),)


def _end_with_parent(parent: int) -> None:
    """Ends a rank with its launcher, however the launcher ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _place_from_environment(*, launched: bool) -> RankPlace:
    try:
        return RankPlace(
            rank=int(os.environ["RANK"]),
            world=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world=int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else None,
            attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            launched=launched,
        )
    except ValueError as error:
        raise LaunchError(f"torchrun's environment variables are not numbers ({error}).") from error


def _first_failure(error: Any) -> PodiumError:
    """The root cause: the rank that failed first, with its own message. A Podium error is raised as itself."""
    rank, failure = error.get_first_failure()
    data = failure.error_file_data.get("message", "")
    text, trace = (
        (data.get("message", ""), data.get("extraInfo", {}).get("py_callstack", ""))
        if isinstance(data, dict)
        else (str(data), "")
    )
    kind, _, message = text.partition(": ")
    known = getattr(errors, kind.rpartition(".")[2], None)
    if isinstance(known, type) and issubclass(known, PodiumError):
        return known(message)
    if trace or (text and text != _NO_WORDS):
        return LaunchError(f"rank {rank} failed first; the others were ended.\n{trace or text}".rstrip())
    how = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    hint = " Was it out of memory?" if how == "SIGKILL" else ""
    return LaunchError(f"rank {rank} (process {failure.pid}) died with {how}; the others were ended.{hint}")


class StopRequest:
    """Whether this rank should stop, because of a signal or, on rank 0, the stop file."""

    def __init__(self, place: RankPlace, stop_file: Path) -> None:
        self._place, self._stop_file = place, stop_file
        self._signalled = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            watched = (signal.SIGTERM,) if self._place.launched else (signal.SIGINT, signal.SIGTERM)
            for number in watched:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @property
    def signalled(self) -> bool:
        """Whether a signal came."""
        return self._signalled

    @property
    def requested(self) -> bool:
        """Whether a signal or the stop file tells this rank to stop."""
        return self._signalled or (self._place.rank == 0 and self._stop_file.exists())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signalled and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signalled = True
        if self._place.rank == 0 and not self._place.launched:
            print(STOPPING, flush=True)
