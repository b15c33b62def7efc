# SPDX-License-Identifier: Apache-2.0
"""A process that imports torch and the code of the roles once, and forks the workers of a local Ray.

Imports take most of a worker's start time. A forked worker has them done, and shares the memory of the code with the
others. The raylet runs `fork_request` for each worker, which sends a request to this process through a socket. The fork
server uses no device and has one thread, so its workers may use CUDA and start threads. It does not import Ray, which
reads its settings from the environment when it is imported."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import runpy
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from podium.cluster import fork_request
from podium.cluster.fork_request import FORKED, READY
from podium.cluster.processes import ProcessInfo, children, kill, look
from podium.importing import import_all

# Between a reply and the rest of its request; both ends are on this machine.
_REQUEST_S = 5.0
# The raylet parses the command of a worker by its own rules: quotes and backslashes do not survive.
_SAFE_PATH = re.compile(r"[\w./+@:,=~-]+")
# Ray's setting for its workers, so that the kernel ends them before other processes when memory runs out.
_OOM_SCORE = "1000"
_COMMAND = f"from {__name__} import main; main()"
# Ray gives a worker with less than two cores one OpenMP thread, unless the user's environment says otherwise. That is
# read when torch is imported. OpenBLAS would start its threads then, and a process with threads cannot be forked.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
# jemalloc, which comes with pyarrow, stops its thread for a fork.
_SAFE_THREADS = {"jemalloc_bg_thd"}
# Most requests that may wait while the modules are imported.
_BACKLOG = 128


def new_folder() -> Path:
    """A unique name for the folder of a fork server."""
    return Path(tempfile.gettempdir(), f"podium-fork-{secrets.token_hex(8)}")


class ForkServer:
    """The controller's side: starts the fork server and ends it."""

    def __init__(self, modules: Sequence[str], folder: Path, *, owner: int | None = None) -> None:
        """Creates `folder`, which `end` removes. Only this user can access it and the socket in it. It ends with this
        process, or with its `owner`, of which this is a pidfd."""
        if not _SAFE_PATH.fullmatch(str(folder)):
            raise OSError(f"Ray's raylet cannot be given a script in {folder}")
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.script = self.folder / "fork_request.py"  # the command that the raylet runs for each worker
        try:
            self._process: subprocess.Popen[bytes] | None = self._start(modules, owner)
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.pid = self._process.pid
        self._info = look(self.pid)

    @classmethod
    def attached(cls, folder: Path, process: ProcessInfo) -> ForkServer:
        """The server that another process has started in this folder."""
        server = cls.__new__(cls)
        server.folder, server.script = folder, folder / "fork_request.py"
        server._process, server.pid, server._info = None, process.pid, process
        return server

    def _start(self, modules: Sequence[str], owner: int | None) -> subprocess.Popen[bytes]:
        self.script.symlink_to(fork_request.__file__)
        # It listens before it has imported anything: an early worker waits.
        with socket.socket(socket.AF_UNIX) as listener, _interrupts_blocked():
            listener.bind(str(self.folder / fork_request.SOCKET))
            listener.listen(_BACKLOG)
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, str(listener.fileno()), *modules],
                stdin=subprocess.PIPE if owner is None else owner,  # readable when that process has ended
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a module that cannot be imported is reported by the worker that needs it
                pass_fds=[listener.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **_ONE_THREAD},
            )

    def workers(self) -> list[int]:
        """Process ids of the workers that it forked."""
        return children(self.pid)

    def end(self) -> None:
        """Ends the fork server, not its workers. May be called twice."""
        if self._info is not None:
            kill(self._info)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C, as Ray's own do: the controller decides what Ctrl-C ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerProcess:
    """Arguments of a worker's process."""

    arguments: list[str]  # the script and its options
    environment: dict[str, str]
    folder: str
    streams: list[int]  # standard input, output and error

    def become(self) -> None:
        """Turns this newly forked process into the worker. Returns when the worker ends."""
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # as the raylet does with its child processes
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        # Otherwise all workers would have the same random numbers. Python's own module reseeds itself.
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()
        sys.argv = list(self.arguments)
        sys.path.insert(0, os.path.dirname(self.arguments[0]))
        runpy.run_path(self.arguments[0], run_name="__main__")


def main() -> None:
    """Serves until its owner is gone. In a forked process, this is the worker's main function."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes dead children
    import_all(sys.argv[2:])
    if _uses_device() or _other_threads() - _SAFE_THREADS or "ray" in sys.modules:
        return  # it must not fork: workers start without it
    gc.freeze()  # a collection in a worker would copy the memory that they share
    worker = _serve(listener)
    if worker is not None:
        worker.become()


def _uses_device() -> bool:
    """Whether this process uses CUDA, which does not work after a fork."""
    files = Path("/proc/self/fd")
    return any(os.path.realpath(file).startswith("/dev/nvidia") for file in files.iterdir())


def _other_threads() -> set[str]:
    """Names of the threads beside this one."""
    threads = [thread for thread in Path("/proc/self/task").iterdir() if int(thread.name) != os.getpid()]
    return {(thread / "comm").read_text().strip() for thread in threads}


def _serve(listener: socket.socket) -> _WorkerProcess | None:
    """Forks on every request. Waits for the next request, or the end of standard input. Returns None at the end, and in
    a forked process the worker to become."""
    while True:
        ready, _, _ = select.select([listener.fileno(), sys.stdin.fileno()], [], [])
        if listener.fileno() not in ready:
            return None
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_REQUEST_S)
            streams: list[int] = []
            pid = None
            # An OSError: that process has timed out and become the worker itself, or there is no memory for another.
            with contextlib.suppress(OSError):
                worker = _receive(connection, streams)
                pid = os.fork()
                if pid != 0:
                    connection.sendall(FORKED)
        if pid == 0:
            listener.close()
            return worker
        for stream in streams:
            os.close(stream)


def _receive(connection: socket.socket, streams: list[int]) -> _WorkerProcess:
    """Fills `streams` as soon as they arrive. An OSError means that the process at the other end is gone or late, or
    that it sent something else than a request."""
    connection.sendall(READY)
    head, received, _, _ = socket.recv_fds(connection, 4, 3)
    streams += received
    if len(head) < 4:
        raise ConnectionError
    (size,) = struct.unpack("!I", head)
    with connection.makefile("rb") as file:
        body = file.read(size)
    is_gone = select.select([connection], [], [], 0)[0]  # it sends no more than this, so it must have ended
    if len(body) < size or len(streams) < 3 or is_gone:
        raise ConnectionError
    try:
        return _WorkerProcess(**json.loads(body), streams=streams)
    except (ValueError, TypeError) as error:
        raise ConnectionError(f"not a request: {error}") from error
