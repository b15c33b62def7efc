# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of an engine that follow rank 0: processes on the same node, one device each.

A rank ends with rank 0: its pipe is closed then. Rank 0 is told when one of them ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from podium.engine.meeting import await_all, interface_of
from podium.engine.mesh import Mesh
from podium.errors import RolloutError
from podium.models.causal_lm import load_config
from podium.models.cpu_settings import CpuSettings
from podium.models.tensor_axis import TensorAxis
from podium.models.tensor_plan import MODEL_TYPES, undivided
from podium.recipe import ModelSection
from podium.rollout.native.follower import Follower
from podium.rollout.native.loading import load_for_engine
from podium.rollout.native.tensor_group import Command, Problem, TensorLeader

KEY = "placement.generator.tensor"
_LOOPBACK = "127.0.0.1"
# For a process to import its code, and for all to meet.
_START_S, _MEET_S = 300.0, 60.0
# Until a process whose connection is closed has ended.
_DEATH_S = 1.0
_MAIN = (
    "import json, sys; options = json.loads(sys.argv[1]); sys.path[:] = options['path']; "
    "from podium.rollout.native.tensor_ranks import main; main(options['connection'])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """What a rank needs to know."""

    section: ModelSection
    folder: Path
    max_length: int | None
    cpu: CpuSettings | None
    rank: int
    size: int
    device: str
    meeting: Path  # file over which the ranks meet
    timeout_s: float


class RankAxis(TensorAxis):
    """An axis over a group of torch's backend alone: the default group of the process is that of others."""

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, joined in dimension `dim`."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self.group.allgather([parts], [part.contiguous()]).wait()
        return torch.cat(parts, dim=dim)


def require_divisible(section: ModelSection, folder: Path, size: int) -> None:
    """Raises an error if so many ranks cannot divide the model."""
    config = load_config(folder, trust_remote_code=section.trust_remote_code).get_text_config()
    if config.model_type not in MODEL_TYPES:
        raise RolloutError(
            f"{KEY}: {config.model_type} is not among the architectures that the native engine divides "
            f"({', '.join(MODEL_TYPES)}). Set it to 1, or use rollout.engine vllm."
        )
    if left := undivided(config.to_dict(), size):
        raise RolloutError(f"{KEY}: {size} does not divide {' and '.join(left)} of {folder}.")


def start_ranks(
    section: ModelSection,
    folder: Path,
    device: torch.device,
    *,
    size: int,
    max_length: int | None,
    cpu: CpuSettings | None,
    timeout_s: float,
) -> TensorLeader:
    """Starts ranks 1 to `size` - 1 on the devices behind `device`, which is rank 0's, and forms a group of them. They
    load the model at once, together with rank 0: see `load_for_engine`."""
    require_divisible(section, folder, size)
    if device.type == "cuda" and torch.cuda.device_count() < (device.index or 0) + size:
        raise RolloutError(
            f"{KEY}: {size} devices are asked for and this process sees {torch.cuda.device_count()}. Lower it."
        )
    scratch = Path(tempfile.mkdtemp(prefix="podium-ranks-"))
    task = RankTask(
        section=section, folder=folder, max_length=max_length, cpu=cpu, rank=0, size=size, device=str(device),
        meeting=scratch / "meeting", timeout_s=timeout_s,
    )  # fmt: skip
    ranks = _Ranks(task, scratch, device)
    try:
        return ranks.led()
    except BaseException:
        ranks.end()
        raise


class _Ranks:
    """The processes of the ranks."""

    def __init__(self, task: RankTask, scratch: Path, device: torch.device) -> None:
        self._task, self._scratch, self._device = task, scratch, device
        self._is_ending = threading.Event()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, task.size):
            ours, theirs = socket.socketpair()
            self._connections.append(Connection(ours.detach()))
            with theirs:
                self._processes.append(_process(theirs.fileno()))
            where = "cpu" if device.type == "cpu" else f"cuda:{(device.index or 0) + rank}"
            self._connections[-1].send(replace(task, rank=rank, device=where))

    def led(self) -> TensorLeader:
        """Waits until the ranks are up, and forms the group."""
        for rank, (connection, process) in enumerate(zip(self._connections, self._processes, strict=True), start=1):
            _await_up(rank, connection, process)
        axis, timeout_s = joined_axis(self._task, self._device), self._task.timeout_s
        if self._device.type == "cpu":  # all have met, and gloo asks the store nothing more; NCCL may
            shutil.rmtree(self._scratch, ignore_errors=True)
        leader = TensorLeader(
            axis, self._connections, self._device, timeout_s=timeout_s, end=self.end, who_died=self.who_died
        )
        for rank, process in enumerate(self._processes, start=1):
            arguments = (rank, process, leader)
            threading.Thread(target=self._watch, args=arguments, name=f"watch rank {rank}", daemon=True).start()
        return leader

    def _watch(self, rank: int, process: subprocess.Popen[bytes], leader: TensorLeader) -> None:
        """Waits for the end of a process, which unblocks it."""
        process.wait()
        if not self._is_ending.is_set():
            leader.fail(_death(rank, process))

    def who_died(self) -> str | None:
        """The first rank that has ended, or ends soon."""
        for rank, process in enumerate(self._processes, start=1):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DEATH_S)
                return _death(rank, process)
        return None

    def end(self, grace_s: float = 0.0) -> None:
        """Ends the processes: those that have not ended by themselves are killed."""
        self._is_ending.set()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            process.kill()
            process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _death(rank: int, process: subprocess.Popen[bytes]) -> str:
    return f"rank {rank} (process {process.pid}) ended with exit code {process.returncode}"


def _process(connection: int) -> subprocess.Popen[bytes]:
    options = {"path": [entry or os.getcwd() for entry in sys.path], "connection": connection}
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, json.dumps(options)], stdin=subprocess.DEVNULL, pass_fds=(connection,)
    )


def _await_up(rank: int, connection: Connection, process: subprocess.Popen[bytes]) -> None:
    """A process that does not come up closes its pipe, so that nobody waits for it."""
    try:
        is_up = connection.poll(_START_S) and connection.recv()
    except (EOFError, OSError):
        is_up = False
    if not is_up:
        code = process.poll()
        what = f"has not come up in {_START_S:.0f} s" if code is None else f"ended with exit code {code} at its start"
        raise RolloutError(f"rank {rank} of the engine (process {process.pid}) {what}. See its output above.")


def joined_axis(task: RankTask, device: torch.device) -> TensorAxis:
    """This rank's place among the ranks of the engine. They meet over a file; gloo connects them over loopback.
    Collective."""
    store = dist.FileStore(str(task.meeting), task.size)  # type: ignore[attr-defined]
    what = f"the {task.size} ranks of an engine"
    await_all(store, rank=task.rank, world=task.size, timeout_s=_MEET_S, what=what)
    mine, timeout = dist.PrefixStore("ranks", store), timedelta(seconds=task.timeout_s)  # type: ignore[attr-defined]
    group: Any
    if device.type == "cuda":
        torch.cuda.set_device(device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        group = dist.ProcessGroupNCCL(mine, task.rank, task.size, nccl)
    else:
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = timeout
        gloo._devices = [dist.ProcessGroupGloo.create_device(interface=interface_of(_LOOPBACK))]
        group = dist.ProcessGroupGloo(mine, task.rank, task.size, gloo)
    axis = RankAxis(group=group, rank=task.rank, size=task.size)
    total = axis.sum(torch.tensor([task.rank + 1.0], device=device)).item()
    if total != task.size * (task.size + 1) / 2:
        raise RolloutError(f"{what} do not reach each other: the probe gave {total}.")
    return axis


def main(descriptor: int) -> None:
    """Runs one rank until rank 0 ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for rank 0, whose end ends this one
        signal.signal(number, signal.SIG_IGN)
    transformers.logging.set_verbosity_error()
    connection = Connection(descriptor)
    code = 0
    try:
        task: RankTask = connection.recv()
        connection.send(True)
        commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(connection, commands, task), name="read commands", daemon=True).start()
        _follow(task, commands.get, connection.send)
    except BaseException as error:
        code = 1
        traceback.print_exc()
        with contextlib.suppress(OSError):
            connection.send(Problem(text=f"{type(error).__name__}: {error}", trace=traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads of torch


def _read(connection: Connection, commands: queue.SimpleQueue[Command], task: RankTask) -> None:
    """Takes commands from the pipe, also while the rank computes. Ends the process when rank 0 is gone, which may have
    been killed: its folder is removed here."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            commands.put(connection.recv())
    shutil.rmtree(task.meeting.parent, ignore_errors=True)
    os._exit(1)


def _follow(task: RankTask, receive: Callable[[], Command], answer: Callable[[Any], object]) -> None:
    device = torch.device(task.device)
    mesh = Mesh(rank=0, world=1, device=device, devices=None, tensor=joined_axis(task, device))
    model, _ = load_for_engine(task.section, task.folder, mesh, max_length=task.max_length, cpu=task.cpu)
    Follower(model, device, receive=receive, answer=answer).serve()
