# SPDX-License-Identifier: Apache-2.0
"""One sandbox: a Python that waits in its own namespaces for one order, and ends with what it ran.

    this process > bwrap > init of the namespaces (bwrap too) > the program > what it starts

When the init ends, the kernel ends everything in its namespace: that is how a sandbox is killed."""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import platform
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from podium.environments.sandbox import isolation
from podium.environments.sandbox.inside.main import READY
from podium.environments.sandbox.limits import SandboxLimits, SandboxResult, StoppedBy
from podium.environments.sandbox.seccomp import seccomp_filter
from podium.environments.supervisor import bytes_over, descendants
from podium.errors import SandboxError

_START_S = 30.0
_ENDING_S = 10.0
_WATCH_S = 0.02
_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """How sandboxes are made."""

    limits: SandboxLimits
    python: isolation.Interpreter
    paths: Sequence[str] = ()
    is_isolated: bool = True


class SandboxProcess:
    """A started sandbox, which is used once: `wait_ready`, `send`, `finish`. `kill` it in any case.

    It ends with the thread that starts it (die-with-parent), so that must be one that lives long."""

    def __init__(self, spec: SandboxSpec) -> None:
        """Starts it without waiting until Python runs in it."""
        self._spec = spec
        self._init: int | None = None  # a pidfd
        self._ending = threading.Lock()  # a number is not signalled after it was closed
        self._folder: str | None = None
        self._began_s = 0.0
        self.control, theirs = socket.socketpair()
        self.control.settimeout(_START_S)
        with theirs:
            if spec.is_isolated:
                self._popen = self._start_isolated(theirs.fileno())
            else:
                self._popen = self._start_unsafe(theirs.fileno())

    def _start_isolated(self, control: int) -> subprocess.Popen[bytes]:
        code = seccomp_filter(platform.machine())
        assert code is not None, "bubblewrap() refuses other machines"
        is_root = os.geteuid() == 0
        filter_read, filter_write = os.pipe()
        info_read, info_write = os.pipe()
        block_read, block_write = os.pipe()
        theirs = [filter_read, info_write, block_read]
        with open(filter_write, "wb") as file:
            file.write(code)
        try:
            line = isolation.arguments(
                self._spec.python, tmp_bytes=self._spec.limits.tmp_mib << 20, paths=self._spec.paths,
                control_fd=control, filter_fd=filter_read, info_fd=info_write, block_fd=block_read if is_root else None,
            )  # fmt: skip
            popen = _popen(line, (control, *theirs), env={}, folder=None)
            os.close(theirs.pop(1))
            init = _init_of(info_read)
            if init is not None:
                self._init = os.pidfd_open(init)
                if is_root:
                    _map_users(init)
            os.write(block_write, b"1")
        finally:
            for descriptor in (*theirs, info_read, block_write):
                os.close(descriptor)
        return popen

    def _start_unsafe(self, control: int) -> subprocess.Popen[bytes]:
        self._folder = tempfile.mkdtemp(prefix="podium-sandbox-")
        root = os.path.join(self._folder, "code")
        os.makedirs(os.path.dirname(os.path.join(root, isolation.INSIDE)))
        os.symlink(Path(__file__).parent / "inside", os.path.join(root, isolation.INSIDE))
        work = os.path.join(self._folder, "work")
        os.mkdir(work)
        line = [*self._spec.python.arguments, "-c", isolation.MAIN.format(root=root, control=control)]
        env = {**isolation.ENVIRONMENT, "HOME": work, "TMPDIR": work}
        return _popen(line, (control,), env=env, folder=work)

    def wait_ready(self) -> None:
        """Waits until Python runs in it. Raises a SandboxError if it does not start."""
        try:
            is_ready = self.control.recv(1) == READY
        except OSError:
            is_ready = False
        if not is_ready:
            self.kill()
            stderr = self._popen.stderr
            raise isolation.not_started(b"" if stderr is None else stderr.read(_CHUNK))

    def send(
        self, kind: str, *, peer: socket.socket | None = None, files: Mapping[str, str] | None = None,
        cpu_s: int | None = None, **order: Any,
    ) -> None:  # fmt: skip
        """Sends the order; it begins at once. `peer` is passed on to it."""
        limits = self._spec.limits.resources()
        if cpu_s is not None:
            limits["CPU"] = cpu_s
        is_root = os.geteuid() == 0 and self._spec.is_isolated
        if self._spec.is_isolated and _counts_by_namespace():
            limits["NPROC"] = self._spec.limits.processes + (not is_root)  # the init is another user's under root
        whole = {
            **order, "kind": kind, "files": dict(files or {}), "limits": limits,
            "user": isolation.INNER_USER if is_root else None,
        }  # fmt: skip
        data = marshal.dumps(whole, 2)
        self._began_s = time.monotonic()
        descriptors = [] if peer is None else [peer.fileno()]
        try:
            socket.send_fds(self.control, [_LENGTH.pack(len(data))], descriptors)
            self.control.sendall(data)
        except OSError as error:
            raise SandboxError(f"sandbox: a sandbox ended before it was used ({error})") from None

    def finish(
        self, *, stdin: bytes = b"", wall_s: float | None = None, on_control: Callable[[bytes], float] | None = None,
    ) -> SandboxResult:  # fmt: skip
        """Waits for the end of what was sent, within its limits, and ends everything that it has started.

        `on_control` gets what it writes to its control socket, and returns the new deadline."""
        exchange = _Exchange(self, stdin, self._began_s + (wall_s or self._spec.limits.wall_s), on_control)
        try:
            stopped_by = exchange.run()
        finally:
            self.kill()
        if stopped_by is None:
            exchange.drain()
        code: int | None = self._popen.returncode
        if code is not None and code < 0:
            code = 128 - code
        if stopped_by is None and code == 128 + signal.SIGXCPU:
            stopped_by = "cpu_s"
        return SandboxResult(
            stdout=bytes(exchange.stdout), stderr=bytes(exchange.stderr),
            exit_code=code if stopped_by is None else None,
            stopped_by=stopped_by, wall_s=time.monotonic() - self._began_s,
        )  # fmt: skip

    @property
    def popen(self) -> subprocess.Popen[bytes]:
        """The outermost process."""
        return self._popen

    def over(self) -> StoppedBy | None:
        """The limit that all of its processes together are above, if any."""
        pids = descendants(self._popen.pid)
        if not self._spec.is_isolated:
            pids.append(self._popen.pid)
        limits = self._spec.limits
        if len(pids) > limits.processes + 1:  # with the init
            return "processes"
        return "memory_mib" if bytes_over(limits.memory_mib << 20, pids) is not None else None

    def kill(self) -> None:
        """Ends everything in it, and waits for that."""
        self.control.close()
        if not self._spec.is_isolated:
            _kill_tree(self._popen)
        self.stop()
        if self._init is not None:
            _wait_for(self._init)
            with self._ending:
                os.close(self._init)
                self._init = None
        self._popen.wait(_ENDING_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def stop(self) -> None:
        """Begins its end, also while another thread is in `finish`."""
        with self._ending:
            if self._init is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._init, signal.SIGKILL)
            elif self._popen.poll() is None:
                self._popen.kill()

    def close(self) -> None:
        """Kills it, and closes its pipes."""
        self.kill()
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class _Exchange:
    """Feeds a program and reads what it writes, until it ends or is above a limit."""

    def __init__(
        self, process: SandboxProcess, stdin: bytes, deadline: float, on_control: Callable[[bytes], float] | None
    ) -> None:
        self._process, self._deadline, self._on_control = process, deadline, on_control
        self._stdin, self.stdout, self.stderr = memoryview(stdin), bytearray(), bytearray()
        self._room = process._spec.limits.output_kib << 10
        popen = process.popen
        assert popen.stdin is not None
        assert popen.stdout is not None
        assert popen.stderr is not None
        self._outputs = {popen.stdout: self.stdout, popen.stderr: self.stderr}
        self._input = popen.stdin

    def run(self) -> StoppedBy | None:
        """Which limit it is above; None: it has ended."""
        end = os.pidfd_open(self._process.popen.pid)
        try:
            with selectors.DefaultSelector() as selector:
                for stream in (*self._outputs, self._input):
                    os.set_blocking(stream.fileno(), False)
                for stream in self._outputs:
                    selector.register(stream, selectors.EVENT_READ)
                selector.register(self._input, selectors.EVENT_WRITE)
                selector.register(end, selectors.EVENT_READ)
                if self._on_control is not None:
                    selector.register(self._process.control, selectors.EVENT_READ)
                return self._loop(selector, end)
        finally:
            os.close(end)

    def _loop(self, selector: selectors.BaseSelector, end: int) -> StoppedBy | None:
        look_s = time.monotonic() + _WATCH_S
        while True:
            now = time.monotonic()
            if now >= self._deadline:
                return "wall_s"
            if now >= look_s:
                if (over := self._process.over()) is not None:
                    return over
                took_s = time.monotonic() - now
                look_s = time.monotonic() + max(_WATCH_S, 10 * took_s)
            for key, _ in selector.select(max(0.0, min(self._deadline, look_s) - time.monotonic())):
                if key.fileobj is self._input:
                    self._write(selector)
                elif key.fileobj is self._process.control:
                    self._hear(selector)
                elif key.fileobj == end:
                    return None
                elif not self._read(key.fileobj):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
                if self._room < 0:
                    return "output_kib"

    def drain(self) -> None:
        """Reads what is left in the pipes of a program that has ended."""
        for stream in self._outputs:
            while self._room > 0 and self._read(stream):
                pass

    def _read(self, stream: IO[bytes]) -> bool:
        try:
            part = os.read(stream.fileno(), min(_CHUNK, self._room + 1))
        except BlockingIOError:
            return False
        self._outputs[stream] += part[: self._room]
        self._room -= len(part)
        return bool(part)

    def _write(self, selector: selectors.BaseSelector) -> None:
        try:
            if self._stdin:
                self._stdin = self._stdin[os.write(self._input.fileno(), self._stdin[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it does not read all of it
            self._stdin = memoryview(b"")
        if not self._stdin:
            selector.unregister(self._input)
            self._input.close()

    def _hear(self, selector: selectors.BaseSelector) -> None:
        assert self._on_control is not None
        try:
            part = self._process.control.recv(_CHUNK)
        except OSError:
            part = b""
        if part:
            self._deadline = self._on_control(part)
        else:
            selector.unregister(self._process.control)


def _popen(line: Sequence[str], descriptors: Sequence[int], *, env: Mapping[str, str], folder: str | None) -> (
    subprocess.Popen[bytes]
):  # fmt: skip
    return subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=descriptors, env=env,
        cwd=folder, start_new_session=True, bufsize=0,
    )  # fmt: skip


def _init_of(info: int) -> int | None:
    """The pid of the namespaces' init, as bwrap reports it. None: bwrap failed."""
    text, deadline = b"", time.monotonic() + _START_S
    with selectors.DefaultSelector() as selector:
        selector.register(info, selectors.EVENT_READ)
        while b"}" not in text and selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(info, 4096)
            if not part:
                return None
            text += part
    return int(json.loads(text)["child-pid"]) if b"}" in text else None


def _map_users(init: int) -> None:
    """Two users inside: root, who sets the sandbox up, and the program's, who is nobody outside."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # bwrap failed: it says why
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{init}/{name}", "w") as file:
                file.write(f"0 0 1\n{isolation.INNER_USER} {isolation.NOBODY} 1\n")


def _wait_for(pidfd: int) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        selector.select(_ENDING_S)


def _kill_tree(popen: subprocess.Popen[bytes]) -> None:
    """Without a namespace nothing ends all at once: what leaves the tree stays until this process's supervisor ends."""
    pids = [*descendants(popen.pid), popen.pid]
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid != popen.pid or popen.poll() is None:
                os.kill(pid, signal.SIGKILL)


def _counts_by_namespace() -> bool:
    """Since Linux 5.14 a limit of processes counts those of the sandbox; before, all of the user's."""
    numbers = platform.release().split(".")
    with contextlib.suppress(ValueError, IndexError):
        return (int(numbers[0]), int(numbers[1])) >= (5, 14)
    return False
