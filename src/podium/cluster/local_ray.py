# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster on this machine that belongs to one run: started in the background, watched, and ended with all of its
processes. Under a supervisor it can outlive its process, and the next one attaches to it."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path

from podium.cluster import processes
from podium.cluster.blocking import is_any_left
from podium.cluster.fork_server import ForkServer, new_folder
from podium.cluster.layout import RayCluster
from podium.cluster.processes import (
    ProcessInfo,
    children,
    children_of_thread,
    command_of,
    descendants,
    kill,
    kill_trees,
    look,
)
from podium.cluster.ray_compat import (
    GCS_SERVER,
    RAYLET,
    TOKEN,
    VITAL_PROCESSES,
    ask_for_token,
    init_local,
    join_local,
    may_be_worker,
    package_folder,
)
from podium.cluster.starting import StartingProcesses
from podium.errors import AttachError, ClusterError, RayDiedError
from podium.runs.supervised import GUARD, KeptProcess, KeptRay

_LOOK_S = 0.1
# The cluster's processes are listed less often, because that reads a file for each of their threads.
_GATHER_S = 2.0
# From the first process to a connected driver. With cold disks Ray's own processes take half a minute.
_START_S = 120.0
# Time for Ray to end the cluster itself; remaining processes are then killed.
_SHUTDOWN_S = 10.0
_FORK_SERVER = "fork server"


class LocalRay:
    """Starts in the background when it is created. `ready` is done when the driver is connected, or fails with a
    ClusterError.

    The thread `ray start` runs ray.init and stays until the end: the kernel ends the children of a thread that exits.
    The thread `ray watch` checks Ray's processes from the first one on. It calls `on_failure` once, when a vital
    process dies or is stopped for as long as the heartbeat timeout. `stop` ends both."""

    def __init__(
        self, settings: RayCluster, *, supervisor: int | None = None, attach_to: KeptRay | None = None
    ) -> None:
        """`supervisor`: a process above this one, with which the cluster ends at the latest; then it can outlive this
        process (`outlive`). `attach_to`: does not start a cluster, but connects to this one."""
        self._settings, self._attach_to = settings, attach_to
        self._supervisor = None if supervisor is None else os.pidfd_open(supervisor)
        self._token = TOKEN if attach_to is None else attach_to.token
        self.ready: Future[None] = Future()
        self.failure: ClusterError | None = None
        self._on_failure: list[Callable[[ClusterError], object]] = []
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._initialized = threading.Event()  # ray.init has returned, or raised
        self._stopping, self._stopped = threading.Event(), threading.Event()
        self._began_s = time.monotonic()
        self._others = set(children(os.getpid()))  # of the caller: not Ray's
        self._folder = package_folder()
        self._vital: dict[str, ProcessInfo] = {}
        self._frozen_s: dict[str, float] = {}
        self._family: dict[int, ProcessInfo] = {}
        self._gathered_s = self._began_s
        self.starting = StartingProcesses()
        self._guard = _Guard(self._supervisor)
        self._undo_token: Callable[[], None] = lambda: None
        self._fork_server: ForkServer | None = None
        if attach_to is not None:
            self._take_over(attach_to)
        elif settings.preload and sys.platform == "linux":  # elsewhere libraries do not support a fork
            with contextlib.suppress(OSError):  # no space, or the address too long: workers start without it
                folder = new_folder()
                self._guard.tell(f"folder {folder}")
                self._fork_server = ForkServer(settings.preload, folder, owner=self._supervisor)
                self._gather_family()
        self._starter = threading.Thread(target=self._start, name="ray start", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="ray watch", daemon=True)
        self._starter.start()
        self._watcher.start()

    def on_failure(self, call: Callable[[ClusterError], object]) -> None:
        """Registers a callback, called from the watching thread, or at once if the cluster has already failed."""
        with self._lock:
            self._on_failure.append(call)
            failure = self.failure
        if failure is not None:
            call(failure)

    @property
    def is_attached(self) -> bool:
        """Whether another process has started it."""
        return self._attach_to is not None

    @property
    def can_outlive(self) -> bool:
        """Whether it may go on after the death of this process."""
        return self._supervisor is not None

    def outlive(self, resume_step: int | None, *, is_ready: bool) -> KeptRay:
        """From now on the cluster does not end with this process, but with its supervisor. Returns what the next
        process needs to attach to it. `resume_step`: with which its workers were built; `is_ready`: all of them."""
        import ray

        assert self._supervisor is not None
        self._gather_family()
        mine = [each for each in map(look, children(os.getpid())) if each is not None and self._is_rays(each.pid)]
        kept = {each.pid: each.name for each in (*mine, *self._vital.values())}
        if self._attach_to is not None:
            kept |= {each.pid: each.name for each in self._attach_to.processes if each.name != GUARD}
        if self._fork_server is not None:
            kept[self._fork_server.pid] = _FORK_SERVER
        kept[self._guard.pid] = GUARD
        self._guard.tell("outlives")
        for each in self._attach_to.processes if self._attach_to is not None else ():
            now = look(each.pid) if each.name == GUARD else None
            if now is not None and now.started == each.started:
                kill(now)  # this process has another one
        found = {pid: now for pid in kept if (now := look(pid)) is not None}
        return KeptRay(
            address=ray.get_runtime_context().gcs_address,
            token=self._token,
            processes=tuple(KeptProcess(pid=pid, started=now.started, name=kept[pid]) for pid, now in found.items()),
            folder=None if self._fork_server is None else str(self._fork_server.folder),
            resume_step=resume_step,
            is_ready=is_ready,
        )

    def _take_over(self, ray: KeptRay) -> None:
        """Knows the processes of a cluster that another process has started."""
        self._guard.tell("outlives")
        if ray.folder is not None:
            self._guard.tell(f"folder {ray.folder}")
        for each in ray.processes:
            now = look(each.pid)
            if now is None or now.started != each.started or each.name == GUARD:
                continue
            self._remember(now)
            if each.name in VITAL_PROCESSES:
                self._note_vital(each.name, now)
            elif each.name == _FORK_SERVER and ray.folder is not None:
                self._fork_server = ForkServer.attached(Path(ray.folder), now)

    def check(self) -> ClusterError | None:
        """Checks the cluster now; a failure is reported as if the watch had found it."""
        if not self._stopping.is_set():
            with self._looking:
                self._look()
        return self.failure

    def stop(self) -> None:
        """Ends the cluster and everything that it started, within some seconds in any state. May be called twice."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._watcher.join()
        self._gather_family()
        end_s = time.monotonic() + _SHUTDOWN_S
        if self.failure is not None:
            self._kill_family(but=GCS_SERVER)  # Ray queries it during shutdown, and waits for long if it is gone
        while not self._initialized.wait(_LOOK_S) and time.monotonic() < end_s:
            self._kill_family()  # processes that ray.init still starts
        closing = threading.Thread(target=_shutdown, name="ray shutdown", daemon=True)
        # A call that hangs in Ray would continue in memory that the shutdown frees.
        if self._initialized.is_set() and not is_any_left():
            closing.start()
            closing.join(_SHUTDOWN_S)
        self._kill_family()
        self._stopped.set()
        if self._fork_server is not None:
            self._fork_server.end()
        self._guard.end()
        if self._supervisor is not None:
            os.close(self._supervisor)
        if closing.is_alive() or not self._initialized.is_set() or is_any_left():
            import ray

            atexit.unregister(ray.shutdown)  # it would wait for the thread that hangs
        else:
            self._undo_token()

    def _start(self) -> None:
        try:
            self._undo_token = ask_for_token(self._token)
            if self._attach_to is not None:
                join_local(self._settings, self._attach_to.address)
            else:
                init_local(
                    self._settings,
                    setup_worker=self._fork_server.script if self._fork_server is not None else None,
                    is_wanted=lambda: self.failure is None and not self._stopping.is_set(),
                    outlives=self.can_outlive,
                )
        except BaseException as error:
            self.check()  # the death of one of its processes is the better reason
            if self._attach_to is not None:
                self._fail(AttachError(f"the Ray of the controller before this one cannot be joined: {error}."))
            self._fail(ClusterError(f"a local Ray cannot be started: {error}."))
        else:
            with contextlib.suppress(InvalidStateError):
                self.ready.set_result(None)
        self._initialized.set()
        self._stopped.wait()

    def _watch(self) -> None:
        """Watches Ray's processes. Waits only for the next check; `stop` ends it."""
        while not self._stopping.wait(_LOOK_S):
            with self._looking:
                self._look()
            if not self.ready.done() and time.monotonic() - self._began_s > _START_S:
                up = ", ".join(f"{name} (process {each.pid})" for name, each in self._vital.items()) or "none"
                self._fail(
                    ClusterError(f"a local Ray did not start in {_START_S:.0f} s; of its processes there are: {up}.")
                )

    def _look(self) -> None:
        if len(self._vital) < len(VITAL_PROCESSES):
            for pid in children(os.getpid()):
                process_info = look(pid) if pid not in self._others else None
                if (
                    process_info is not None
                    and process_info.name in VITAL_PROCESSES
                    and process_info.name not in self._vital
                ):
                    self._note_vital(process_info.name, process_info)
        for name, process in self._vital.items():
            now = look(process.pid)
            if now is None or not now.is_alive or now.started != process.started:
                self._fail(
                    RayDiedError(f"Ray's {name} (process {process.pid}) died, and Ray does not work without it.")
                )
                return
            # Counts checks instead of reading the clock: this process may have been stopped itself.
            self._frozen_s[name] = self._frozen_s.get(name, 0.0) + _LOOK_S if now.is_stopped else 0.0
            if self._frozen_s[name] >= self._settings.heartbeat_timeout_s:
                self._fail(
                    RayDiedError(
                        f"Ray's {name} (process {process.pid}) is stopped (SIGSTOP) and has given no sign of life for "
                        f"{self._settings.heartbeat_timeout_s:g} s."
                    )
                )
                return
        self._look_at_workers()
        if time.monotonic() - self._gathered_s > _GATHER_S:
            self._gather_family()

    def _note_vital(self, name: str, process: ProcessInfo) -> None:
        self._vital[name] = process
        self._guard.tell(f"vital {process.pid} {process.started} {name}")

    def _look_at_workers(self) -> None:
        """Checks the processes that the raylet's first thread starts."""
        raylet = self._vital.get(RAYLET)
        if raylet is None:
            return
        pids = children_of_thread(raylet.pid, raylet.pid)
        if self._fork_server is not None:
            pids += self._fork_server.workers()  # after the raylet's: a worker is there before its request ends
        processes_now = [look(pid) for pid in pids]
        living = [each for each in processes_now if each is not None and each.is_alive]
        for each in living:
            self._remember(each)
        self.starting.look([each for each in living if may_be_worker(command_of(each.pid))])

    def _gather_family(self) -> None:
        """Remembers which processes belong to the cluster: once their parent is dead, the kernel no longer tells."""
        self._gathered_s = time.monotonic()
        mine = [pid for pid in children(os.getpid()) if pid not in self._others and self._is_rays(pid)]
        if self._attach_to is not None:
            mine += [each.pid for each in self._attach_to.processes if each.pid in self._family]
        if self._fork_server is not None:
            mine.append(self._fork_server.pid)
        for pid in [*mine, *descendants(mine)]:
            process = look(pid)
            if process is not None:
                self._remember(process)

    def _remember(self, process: ProcessInfo) -> None:
        known = self._family.get(process.pid)
        if known is None or known.started != process.started:
            self._family[process.pid] = process
            self._guard.tell(f"family {process.pid} {process.started}")

    def _is_rays(self, pid: int) -> bool:
        """Whether a child process belongs to Ray: those of Ray run a file of its package. Others belong to the
        caller."""
        return self._folder in command_of(pid)

    def _kill_family(self, *, but: str | None = None) -> None:
        self._gather_family()
        kill_trees(process for process in self._family.values() if process.name != but)

    def _fail(self, failure: ClusterError) -> None:
        with self._lock:
            if self.failure is not None or self._stopping.is_set():
                return
            self.failure = failure
            calls = list(self._on_failure)
        with contextlib.suppress(InvalidStateError):
            self.ready.set_exception(failure)
        for call in calls:
            call(failure)


class _Guard:
    """The process that ends the cluster if this one is killed, or cannot notice that Ray is dead."""

    def __init__(self, supervisor: int | None = None) -> None:
        """`supervisor`: its pidfd, if the cluster may outlive this process."""
        inherited = () if supervisor is None else (supervisor,)
        command = [sys.executable, "-I", "-S", processes.__file__, *map(str, inherited)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=inherited)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it may have been killed, or told to end
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        assert self._process.stdin is not None
        self.tell("end")
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def is_connected() -> bool:
    """Whether this process has joined or started a Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _shutdown() -> None:
    import ray

    ray.shutdown()
