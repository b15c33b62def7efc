# SPDX-License-Identifier: Apache-2.0
"""User code that takes memory, leaves processes behind, or breaks what its process needs. Loaded by path, as a recipe's
own. Bad samples name what to do, and where to write the ids of processes: `fork /tmp/pids`."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from podium.environments.protocol import Observation, Outcome, Turn

FOREVER_S = 1e6
MIB = 2**20
SLEEP = [sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"]
_MAP_NORESERVE = 0x4000  # Linux; not every version of Python names it
_kept: list[bytes] = []


class Unusual(BaseException):
    """No Exception, like SystemExit."""


def act(what: str) -> None:
    do, _, file = what.partition(" ")
    match do:
        case "eat":  # as fast as it can, and without end
            while True:
                _kept.append(b"x" * (16 * MIB))
        case "eat_in_thread":
            threading.Thread(target=act, args=("eat",), daemon=True).start()
            time.sleep(FOREVER_S)
        case "eat_in_child":
            subprocess.run([sys.executable, "-c", "x = []\nwhile True: x.append(b'x' * 2**24)"], check=False)
        case "keep":  # a leak: every call leaves a little more
            _kept.append(b"x" * (64 * MIB))
            time.sleep(0.2)  # for the next measurement
        case "share":  # five processes that have the same 160 MiB, and none of its own
            _share(160 * MIB, copies=4, for_s=1.0)
        case "reserve":  # address space that is not used
            _reserve(64 * 1024 * MIB)
        case "map":  # a file, whose pages the kernel can take back
            _map(512 * MIB)
        case "fork":
            if (pid := os.fork()) == 0:
                time.sleep(FOREVER_S)
            _write(file, pid)
        case "fork_and_return":  # in both processes
            if (pid := os.fork()) != 0:
                _write(file, pid)
        case "popen":
            _write(file, subprocess.Popen(SLEEP).pid)
        case "session":
            _write(file, subprocess.Popen(SLEEP, start_new_session=True).pid)
        case "daemon":
            _daemon(file)
        case "daemon_and_exit":
            _daemon(file)
            os._exit(3)
        case "daemon_and_kill":
            _daemon(file)
            os.kill(os.getpid(), signal.SIGKILL)
        case "daemon_and_kill_parent":
            _daemon(file)
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(FOREVER_S)
        case "daemon_and_hang":
            _daemon(file)
            time.sleep(FOREVER_S)
        case _:
            _break(do)


def _break(do: str) -> None:
    match do:
        case "sys_exit":
            sys.exit(0)
        case "system_exit":
            raise SystemExit("enough")
        case "interrupt":
            raise KeyboardInterrupt
        case "unusual":
            raise Unusual("odd")
        case "exit":
            os._exit(3)
        case "exit_zero":
            os._exit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill_group":
            os.killpg(0, signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "ignore":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # handlers are for the main thread only
                signal.pthread_sigmask(signal.SIG_BLOCK, {number})
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(FOREVER_S)
        case "write_out" | "write_err":
            while True:
                os.write(1 if do == "write_out" else 2, b"x" * 65536)
        case "print_err":
            while True:
                print("x" * 1000, file=sys.stderr)
        case "close_in":
            sys.stdin.close()
            os.close(0)
        case "close_out":
            for stream in (sys.stdout, sys.stderr):
                stream.close()
            os.close(1)
            os.close(2)
        case "close_all":
            os.closerange(0, 1024)
        case "print":
            print("a line", flush=True)
            print("a line of errors", file=sys.stderr, flush=True)


def _write(file: str, pid: int) -> None:
    """All at once: a reader finds nothing or the whole number."""
    Path(f"{file}.new").write_text(str(pid))
    os.rename(f"{file}.new", file)


def _daemon(file: str) -> None:
    """The double fork: in a session of its own, and its parent is gone."""
    if os.fork() == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            time.sleep(FOREVER_S)
        _write(file, pid)
        os._exit(0)
    while not os.path.exists(file):
        time.sleep(0.01)


def _share(num_bytes: int, copies: int, for_s: float) -> None:
    block = b"x" * num_bytes
    pids = []
    for _ in range(copies):
        if (pid := os.fork()) == 0:
            time.sleep(for_s)
            os._exit(len(block) % 2)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def _reserve(num_bytes: int) -> None:
    with mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | _MAP_NORESERVE):
        time.sleep(0.3)


def _map(num_bytes: int) -> None:
    with tempfile.TemporaryFile(dir=os.path.dirname(__file__)) as file:
        for _ in range(num_bytes // MIB):
            file.write(b"x" * MIB)
        file.flush()
        with mmap.mmap(file.fileno(), num_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as view:
            for at in range(0, num_bytes, mmap.PAGESIZE):
                view[at]
            time.sleep(0.3)


def reward(answer: str) -> float:
    act(answer)
    return 1.0


async def async_reward(answer: str) -> float:
    await asyncio.sleep(0)
    act(answer)
    return 1.0


def length(answer: str) -> float:
    return float(len(answer))


class Hungry:
    """One turn; the tasks whose number is in `bad` misbehave in it."""

    def __init__(self, how: str, bad: list[int]) -> None:
        self._how, self._bad = how, bad

    async def reset(self, task: Any) -> Observation:
        self._number = task.row["number"]
        return Observation(messages="question")

    async def step(self, turn: Turn) -> Outcome:
        if self._number in self._bad:
            act(self._how)
        return Outcome(reward=1.0, done=True)


class HungryInThreads(Hungry):
    """The same with plain functions."""

    def step(self, turn: Turn) -> Outcome:  # type: ignore[override]
        return asyncio.run(super().step(turn))
