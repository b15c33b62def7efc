# SPDX-License-Identifier: Apache-2.0
"""Script that Ray's raylet runs to start a worker, in place of Ray's own: asks the fork server for a process.

It uses only the standard library, because every worker waits for it. If the fork server does not answer, or the worker
is not an ordinary Python worker, this process becomes the worker, as without a fork server."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, whose modules would hide others of the same name

import json
import os
import socket
import struct

# Ray gives up a worker that has not registered after 60 s; starting without the fork server takes some of them.
ANSWER_S = 20.0
READY, FORKED = b"R", b"F"
SOCKET = "socket"
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main() -> None:
    """Waits for the fork server at most ANSWER_S. Falls back to Ray's setup script for workers that need more than a
    fork."""
    arguments = sys.argv[1:]
    worker = worker_command(arguments)
    if worker is not None:
        address = os.path.join(os.path.dirname(sys.argv[0]), SOCKET)
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(ANSWER_S)
            request = _request(worker)
            if request is not None and _is_ready(server, address):
                _send(server, request)
                return
        os.execv(sys.executable, [sys.executable, *worker])
    script = next(each for each in arguments if each.endswith("default_worker.py"))
    setup = os.path.join(os.path.dirname(script), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, setup, *arguments])


def worker_command(arguments: list[str]) -> list[str] | None:
    """The command of the worker, without the options of Ray's script. None: it needs more than a fork."""
    rest = []
    for each in arguments:
        if each.startswith(_CONTEXT):
            context = json.loads(each.removeprefix(_CONTEXT) or "{}")
            if any(context.values()):
                return None
        elif each.startswith(_LANGUAGE):
            if each != f"{_LANGUAGE}PYTHON":
                return None
        else:
            rest.append(each)
    return rest if rest[0].endswith("default_worker.py") else None


def _is_ready(server: socket.socket, address: str) -> bool:
    try:
        server.connect(address)
        return server.recv(1) == READY
    except OSError:
        return False


def _request(worker: list[str]) -> bytes | None:
    """The request; None if the working folder of this process is gone."""
    try:
        return json.dumps({"arguments": worker, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    except OSError:
        return None


def _send(server: socket.socket, request: bytes) -> None:
    """Sends the request. From here on the fork server owns the worker: this process must not start a second one."""
    socket.send_fds(server, [struct.pack("!I", len(request))], [0, 1, 2])
    server.sendall(request)
    if server.recv(1) != FORKED:
        raise SystemExit("the fork server did not start a worker.")


if __name__ == "__main__":
    main()
