# SPDX-License-Identifier: Apache-2.0
"""The first program of a sandbox. It starts before there is anything to run, gets one order, and becomes what that
names: a Python program, a shell script, the program whose functions are tested, or the tests.

Nothing here is trusted by those outside: a program may change everything in its sandbox. Imports are few, because every
execution pays for them."""

from __future__ import annotations

import _socket
import marshal
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

READY = b"R"
_MOST_DESCRIPTORS = 1 << 20
_LENGTH_BYTES = 8


def main(control_fd: int) -> None:
    """Waits for the order, and carries it out. `control_fd`: the socket to the outside."""
    os.closerange(3, control_fd)
    os.closerange(control_fd + 1, _MOST_DESCRIPTORS)
    _add_exit()
    control = _socket.socket(fileno=control_fd)
    control.send(READY)
    order, peer = _receive(control)
    _become(order["user"])
    _limit(order["limits"])
    for name, text in order["files"].items():
        _write(name, text)
    if order["kind"] in ("python", "shell"):
        control.close()
        _run_python(order) if order["kind"] == "python" else _run_shell(order)
    elif order["kind"] == "serve":
        control.close()
        from podium.environments.sandbox.inside import serving

        serving.serve(peer, order["program"])
    else:
        from podium.environments.sandbox.inside import testing

        testing.run_tests(peer, control.detach(), order)


def _add_exit() -> None:
    """Python starts without `site`, which makes exit() and quit()."""
    import _sitebuiltins
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))


def _receive(control: _socket.socket) -> tuple[dict[str, Any], int]:
    head, ancillary, _, _ = control.recvmsg(_LENGTH_BYTES, _socket.CMSG_SPACE(4))
    if len(head) < _LENGTH_BYTES:
        os._exit(0)  # nobody needs this sandbox any more
    left = int.from_bytes(head, "little")
    parts = []
    while left:
        part = control.recv(min(left, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        left -= len(part)
    peer = int.from_bytes(ancillary[0][2][:4], sys.byteorder) if ancillary else -1
    return marshal.loads(b"".join(parts)), peer


def _become(user: int | None) -> None:
    """Under root the sandbox begins as its root, which could mount what is outside. This drops all capabilities."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        hard = value + 1 if name == "CPU" else value  # first a signal with a name, then SIGKILL
        kind = getattr(resource, f"RLIMIT_{name}")
        present = resource.getrlimit(kind)[1]
        if present != resource.RLIM_INFINITY:
            value, hard = min(value, present), min(hard, present)
        resource.setrlimit(kind, (value, hard))


def _write(name: str, text: str) -> None:
    if folder := os.path.dirname(name):
        os.makedirs(folder, exist_ok=True)
    with open(name, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        file.write(text)


def _run_python(order: dict[str, Any]) -> None:
    name = "program.py"
    _write(name, order["program"])
    module = type(sys)("__main__")
    module.__file__ = name
    sys.modules["__main__"] = module
    sys.argv = [name, *order["args"]]
    sys.path[0] = os.getcwd()
    try:
        exec(compile(order["program"], name, "exec"), module.__dict__)
    except Exception as error:
        trace = error.__traceback__
        error.__traceback__ = None if trace is None else trace.tb_next  # without this file
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _run_shell(order: dict[str, Any]) -> NoReturn:
    _write("program.sh", order["program"])
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    os.execv(shell, [shell, "program.sh", *order["args"]])
