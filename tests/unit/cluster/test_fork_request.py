# SPDX-License-Identifier: Apache-2.0
"""Which workers are forked, and that the others start as Ray starts them."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from podium.cluster import fork_request
from podium.cluster.fork_request import worker_command
from podium.cluster.fork_server import ForkServer

WORKER = "/ray/_private/workers/default_worker.py"


def test_an_ordinary_worker_is_forked_without_the_options_of_rays_setup_script() -> None:
    options = [WORKER, "--worker-id=7", "--runtime-env-hash=0", "--language=PYTHON"]
    assert worker_command(options) == [WORKER, "--worker-id=7", "--runtime-env-hash=0"]
    assert worker_command([*options, "--serialized-runtime-env-context={}"]) == options[:3]
    assert worker_command([*options, "--worker-type=WORKER"]) == [*options[:3], "--worker-type=WORKER"]


@pytest.mark.parametrize(
    "option",
    [
        "--language=JAVA",
        f"--serialized-runtime-env-context={json.dumps({'py_executable': '/other/python'})}",
        f"--serialized-runtime-env-context={json.dumps({'env_vars': {'A': 'b'}})}",
    ],
)
def test_a_worker_that_needs_more_than_a_fork_is_not_forked(option: str) -> None:
    assert worker_command([WORKER, "--worker-id=7", option]) is None


def test_flags_of_the_interpreter_are_not_lost_in_a_fork() -> None:
    assert worker_command(["-s", WORKER]) is None


@pytest.mark.parametrize(
    ("language", "becomes", "keeps"), [("PYTHON", "default_worker.py", 2), ("JAVA", "setup_worker.py", 3)]
)
def test_without_a_server_the_process_becomes_the_worker(
    tmp_path: Path, language: str, becomes: str, keeps: int
) -> None:
    """One that needs more than a fork becomes Ray's setup script, which stands beside the worker's."""
    (tmp_path / becomes).write_text("import sys; print(sys.argv)")
    options = [str(tmp_path / "default_worker.py"), "--worker-id=7", f"--language={language}"]
    script = tmp_path / "fork_request.py"
    script.symlink_to(fork_request.__file__)
    output = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, timeout=30, check=True
    )
    expected = options[:keeps] if becomes == "default_worker.py" else [str(tmp_path / becomes), *options]
    assert output.stdout.strip() == str(expected)


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[ForkServer]:
    folder = Path(tempfile.mkdtemp(prefix="fork"))  # short: the address of a socket has 107 bytes
    server = ForkServer((), folder / "s")
    yield server
    server.end()
    folder.rmdir()


def connected(server: ForkServer) -> socket.socket:
    """A request that the server is ready for."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(30)
    client.connect(str(server.folder / fork_request.SOCKET))
    assert client.recv(1) == fork_request.READY
    return client


def num_files(server: ForkServer) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


@pytest.mark.slow
def test_a_request_that_breaks_off_leaves_the_server_as_it_was(fork_server: ForkServer) -> None:
    with connected(fork_server):
        before = num_files(fork_server)
    for body in (b"", b"{", b"x" * 1000):
        with connected(fork_server) as client:
            socket.send_fds(client, [struct.pack("!I", 1000)], [0, 1, 2])
            client.sendall(body)
    for body in (b"x" * 1000, b"{}".ljust(1000), b"[]".ljust(1000)):  # whole, and no request
        with connected(fork_server) as client:
            socket.send_fds(client, [struct.pack("!I", 1000)], [0, 1, 2])
            client.sendall(body)
            assert client.recv(1) == b""  # it was read, and refused
    with connected(fork_server):
        assert num_files(fork_server) == before
    assert fork_server.workers() == []


@pytest.mark.slow
def test_what_a_request_asks_for_runs_with_its_streams(fork_server: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "default_worker.py"
    script.write_text("import os, sys; print(sys.argv, sys.path[0], os.environ, os.getcwd())")
    request = [sys.executable, str(fork_server.script), str(script), "--worker-id=7", "--language=PYTHON"]
    output = subprocess.run(
        request, env={"ONLY": "this"}, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    environment = f"environ({ {'ONLY': 'this', 'LC_CTYPE': 'C.UTF-8'} })"
    expected = f"{[str(script), '--worker-id=7']} {tmp_path} {environment} {tmp_path}"
    assert output.stdout.strip() == expected or output.stdout.strip() == expected.replace(", 'LC_CTYPE': 'C.UTF-8'", "")


@pytest.mark.parametrize("name", ["a b", "back\\slash", "quote's"])
def test_a_folder_that_the_raylet_cannot_be_given_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match=re.escape(str(tmp_path / name))):
        ForkServer((), tmp_path / name)
    assert not (tmp_path / name).exists()
