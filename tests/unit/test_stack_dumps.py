# SPDX-License-Identifier: Apache-2.0
"""A process that cannot answer shows its stacks, without root; one that did not allow it is left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from helpers.processes import wait_until
from podium.cluster.processes import look
from podium.stack_dumps import dumped_stacks, dumper_name, frames_of_threads, innermost, is_debugged

# A regular expression that backtracks for hours holds Python's lock all the time.
_HOLDS_LOCK = """
import re
from podium.stack_dumps import allow_dumps

def backtracks():
    print("ready", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")

allow_dumps("rank 3")
backtracks()
"""
_ALLOWS_NOTHING = "print('ready', flush=True); input()"


def started(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    process = started(_HOLDS_LOCK)
    yield process
    process.kill()
    process.communicate()


def test_a_process_in_a_call_that_holds_the_lock_shows_its_stack_every_time(busy: subprocess.Popen[str]) -> None:
    for _ in range(2):
        stacks = dumped_stacks(busy.pid)
        assert stacks is not None
        assert stacks.count("in backtracks") == 1
        # Not in the module re, which it calls.
        assert re.fullmatch(r'File "<string>", line [67] in backtracks', innermost(stacks) or "")
    assert dumper_name(busy.pid) == "rank 3"
    assert busy.poll() is None


def test_a_stopped_process_shows_none(busy: subprocess.Popen[str]) -> None:
    os.kill(busy.pid, signal.SIGSTOP)
    wait_until(lambda: (now := look(busy.pid)) is not None and now.is_stopped, "its stop", deadline_s=20)
    assert dumped_stacks(busy.pid) is None


def test_a_process_that_did_not_allow_it_gets_no_signal() -> None:
    process = started(_ALLOWS_NOTHING)
    assert dumped_stacks(process.pid) is None
    assert dumper_name(process.pid) is None
    process.communicate("\n")
    assert process.returncode == 0


def test_a_process_that_is_gone_shows_none(busy: subprocess.Popen[str]) -> None:
    busy.kill()
    busy.wait()
    assert dumped_stacks(busy.pid) is None


RUN = """  File "/home/user/maps.py", line 3 in clean
  File "/lib/podium/data/examples.py", line 60 in make
"""


@pytest.mark.parametrize(
    "debugger",
    [
        '  File "/lib/python3.11/cmd.py", line 9 in cmdloop\n  File "/lib/python3.11/pdb.py", line 7 in interaction\n',
        '  File "/lib/site-packages/debugpy/_vendored/pydevd/pydevd.py", line 9 in do_wait_suspend\n',
        '  File "/lib/site-packages/IPython/core/debugger.py", line 9 in interaction\n',
    ],
)
def test_a_thread_that_a_debugger_has_stopped_is_debugged_and_not_one_of_a_notebook(debugger: str) -> None:
    def main_thread(text: str) -> list[str]:
        return frames_of_threads(f"Thread 0x01 (most recent call first):\n{text}")[-1]

    assert is_debugged(main_thread(debugger + RUN))
    assert not is_debugged(main_thread(RUN))
    assert not is_debugged(main_thread(RUN + debugger))  # it has started the run, and lets it go on
