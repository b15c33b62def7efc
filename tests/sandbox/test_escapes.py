# SPDX-License-Identifier: Apache-2.0
"""Programs that try to get out of their sandbox, to harm the machine, or to learn what they should not."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podium.environments.sandbox import Sandbox

_ENV = "PODIUM_TEST_SECRET"
_MARK = "98765.125"


def said(sandbox: Sandbox, program: str, **named: object) -> str:
    """What the program printed. It must have ended well."""
    result = sandbox.run(program, **named)  # type: ignore[arg-type]
    assert result.ok, (result.stopped_by, result.exit_code, result.error_text)
    return result.text.strip()


def test_a_program_runs_as_nobody_without_capabilities_and_with_no_new_privileges(sandbox: Sandbox) -> None:
    status = said(sandbox, "print(open('/proc/self/status').read())")

    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (fields["CapPrm"], fields["CapEff"], fields["CapAmb"]) == ("0" * 16,) * 3
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    if os.geteuid() == 0:
        assert fields["Uid"].split() == ["1"] * 4


def test_a_service_on_the_loopback_of_the_machine_cannot_be_reached(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"""
import socket
for address in (("127.0.0.1", {port}), ("10.0.0.1", 80)):
    try:
        socket.create_connection(address, timeout=2)
        print("connected")
    except OSError as error:
        print(type(error).__name__)
print([line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line])
"""
        assert said(sandbox, program).splitlines() == ["ConnectionRefusedError", "OSError", "['lo']"]


def test_sockets_of_virtual_machines_and_of_the_kernel_are_refused(sandbox: Sandbox) -> None:
    program = """
import socket
raw = socket.SOCK_RAW
for family, kind in ((socket.AF_VSOCK, socket.SOCK_STREAM), (socket.AF_NETLINK, raw), (socket.AF_PACKET, raw)):
    try:
        socket.socket(family, kind)
        print("made one")
    except OSError as error:
        print(error.errno)
"""
    assert said(sandbox, program).split() == ["97"] * 3


def test_secrets_of_the_run_are_not_visible(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    monkeypatch.setenv(_ENV, "hunter2")
    paths = [str(secret), os.path.expanduser("~/.netrc"), "/etc/passwd", "/etc/shadow", __file__, os.getcwd(), "/home",
             "/root/.ssh", "/var", "/sys", "/run", "/mnt", "/opt/secret"]  # fmt: skip
    program = f"""
import os
print([path for path in {paths!r} if os.path.lexists(path)])
print({_ENV!r} in os.environ, sorted(os.listdir("/tmp")))
"""
    assert said(sandbox, program).splitlines() == ["[]", "False ['program.py']"]


def test_nothing_outside_of_tmp_can_be_written(sandbox: Sandbox, tmp_path: Path) -> None:
    program = f"""
import os
for path in ("/x", "/usr/bin/x", "/etc/x", "/code/x", "/dev/x", "/proc/sys/kernel/core_pattern",
             "/proc/sysrq-trigger", {os.path.join(sys.base_prefix, "x")!r}, {str(tmp_path / "x")!r}):
    try:
        open(path, "w").write("x")
        print("wrote", path)
    except OSError:
        pass
open("/tmp/x", "w").write("mine")
print(open("/tmp/x").read())
"""
    assert said(sandbox, program) == "mine"
    assert not os.path.exists("/tmp/x") or Path("/tmp/x").read_text() != "mine"


def test_a_link_leads_only_to_what_is_visible_anyway(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    program = f"""
import os
os.symlink({str(secret)!r}, "/tmp/link")
for path in ("/tmp/link", "/proc/1/root" + {str(secret)!r}, "/proc/self/root/.." + {str(secret)!r}):
    try:
        print(open(path).read())
    except OSError as error:
        print(type(error).__name__)
"""
    assert set(said(sandbox, program).split()) <= {"FileNotFoundError", "PermissionError"}


def test_only_the_sandbox_has_processes_in_proc(sandbox: Sandbox) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        program = f"""
import os
print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
for number in ({other.pid}, {os.getpid()}, 1):
    try:
        print(open(f"/proc/{{number}}/environ").read())
    except OSError as error:
        print(type(error).__name__)
"""
        pids, *errors = said(sandbox, program).splitlines()
        assert len(pids.split(",")) == 2
        assert set(errors) <= {"FileNotFoundError", "PermissionError", ""}
    finally:
        other.communicate(b"\n")


def test_signals_reach_no_process_outside_nor_the_init_of_the_sandbox(sandbox: Sandbox) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        program = f"""
import os, signal
for number in ({other.pid}, {os.getpid()}, {os.getppid()}, 1):
    try:
        os.kill(number, signal.SIGKILL)
    except OSError as error:
        pass
try:
    os.kill(-1, signal.SIGKILL)
except OSError as error:
    pass
print("still here")
"""
        assert said(sandbox, program) == "still here"
        assert other.poll() is None
    finally:
        other.communicate(b"\n")


def test_calls_of_debuggers_and_administrators_are_refused(sandbox: Sandbox) -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
new_user, new_mounts, trace_me = 0x10000000, 0x00020000, 0
for name, arguments in (("unshare", (new_user,)), ("unshare", (new_mounts,)), ("ptrace", (trace_me, 0, 0, 0)),
                        ("mount", (b"none", b"/tmp", b"tmpfs", 0, None)), ("memfd_create", (b"x", 0)),
                        ("setns", (0, 0)), ("chroot", (b"/tmp",)), ("shmget", (0, 4096, 0o1600))):
    ctypes.set_errno(0)
    print(name, getattr(libc, name)(*arguments), ctypes.get_errno())
"""
    assert {line.split(" ", 1)[1] for line in said(sandbox, program).splitlines()} == {"-1 1"}


def test_programs_with_the_setuid_bit_give_no_rights(sandbox: Sandbox) -> None:
    script = """
before=$(id -u)
cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id
test "$(/tmp/id -u)" = "$before" && echo same
su -c id 2>/dev/null && echo "became root"
exit 0
"""
    assert said(sandbox, script, language="shell") == "same"


def test_descriptors_of_the_run_are_closed(sandbox: Sandbox, tmp_path: Path) -> None:
    with open(tmp_path / "open.txt", "w") as file:
        os.set_inheritable(file.fileno(), True)
        # The fourth is of the listing itself.
        assert said(sandbox, "import os; print(os.listdir('/proc/self/fd'))") == "['0', '1', '2', '3']"


def test_a_fork_bomb_is_held_and_nothing_of_it_is_left(sandbox: Sandbox) -> None:
    program = f"""
import os
children = 0
while True:
    try:
        if not os.fork():
            os.setsid()
            os.execv("/usr/bin/sleep", ["sleep", "{_MARK}"])
        children += 1
    except OSError as error:
        print(error.errno, children <= 18)
        break
"""
    assert said(sandbox, program) == "11 True"
    assert not _left_behind()


@pytest.mark.slow
def test_a_fork_bomb_that_never_ends_is_ended(sandbox: Sandbox) -> None:
    program = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    result = sandbox.run(program, wall_s=3.0)

    assert result.stopped_by == "wall_s"
    assert result.wall_s < 30.0


def test_threads_count_like_processes(sandbox: Sandbox) -> None:
    program = """
import threading
event, started = threading.Event(), 0
try:
    for _ in range(200):
        threading.Thread(target=event.wait, daemon=True).start()
        started += 1
except RuntimeError:
    pass
print(started < 20)
event.set()
"""
    assert said(sandbox, program) == "True"


def test_a_memory_bomb_ends_with_a_memory_error(sandbox: Sandbox) -> None:
    result = sandbox.run("x = bytearray(10**9)\nprint(len(x))")

    assert (result.exit_code, result.text) == (1, "")
    assert "MemoryError" in result.error_text


def test_memory_of_several_processes_counts_together(sandbox: Sandbox) -> None:
    program = """
import os, time
for _ in range(3):
    if not os.fork():
        x = bytearray(b'x') * (70 << 20)
        time.sleep(60)
time.sleep(60)
"""
    result = sandbox.run(program)

    assert result.stopped_by == "memory_mib"
    assert result.wall_s < 15.0


def test_shared_memory_and_files_in_tmp_are_limited(sandbox: Sandbox) -> None:
    program = """
for folder in ("/tmp", "/dev/shm"):
    total = 0
    try:
        for number in range(10):
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                for _ in range(4):
                    total += file.write(bytes(1 << 20))
    except OSError as error:
        print(error.errno, total >> 20)
"""
    assert said(sandbox, program).splitlines() == ["28 7", "28 8"]  # the program itself is in /tmp


def test_shared_pages_without_a_file_count_as_memory(sandbox: Sandbox) -> None:
    program = """
import mmap, time
x = mmap.mmap(-1, 400 << 20)
for at in range(0, 400 << 20, 4096):
    x[at] = 1
time.sleep(60)
"""
    assert sandbox.run(program).stopped_by == "memory_mib"


def test_a_program_that_writes_without_end_is_ended_and_its_output_is_cut(sandbox: Sandbox) -> None:
    result = sandbox.run("import sys\nwhile True: sys.stdout.write('x' * 1000); sys.stderr.write('y' * 1000)")

    assert result.stopped_by == "output_kib"
    assert len(result.stdout) + len(result.stderr) <= 64 << 10


def test_processor_time_and_time_are_limited(sandbox: Sandbox) -> None:
    result = sandbox.run("import time\nprint(1, flush=True)\ntime.sleep(60)", wall_s=1.0)
    assert (result.stopped_by, result.exit_code, result.text) == ("wall_s", None, "1\n")
    assert result.wall_s < 10.0


@pytest.mark.slow
def test_a_busy_loop_is_ended_by_its_processor_time() -> None:
    from podium.environments.sandbox import SandboxLimits

    box = Sandbox(SandboxLimits(cpu_s=1, wall_s=100.0), workers=1)
    try:
        assert box.run("while True: pass").stopped_by == "cpu_s"
    finally:
        box.close()


def test_processes_that_leave_their_session_end_with_the_program(sandbox: Sandbox) -> None:
    program = f"""
import os
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execv("/usr/bin/sleep", ["sleep", "{_MARK}"])
    os._exit(0)
print("done")
"""
    assert said(sandbox, program) == "done"
    assert not _left_behind()


def test_a_program_finds_nothing_of_the_one_before(sandbox: Sandbox) -> None:
    sandbox.run("open('/tmp/left', 'w').write('x'); open('/dev/shm/left', 'w').write('x')")

    for _ in range(6):  # more than wait in the pool
        assert said(sandbox, "import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'))") == "['program.py'] []"


def _left_behind() -> list[str]:
    """Processes of the machine that a program has marked as its own."""
    deadline, found = time.monotonic() + 5.0, ["?"]
    while found and time.monotonic() < deadline:
        lines = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
        found = [line for line in lines if line.startswith("sleep") and _MARK in line]
        time.sleep(0.02)
    return found
