# SPDX-License-Identifier: Apache-2.0
"""A Ray of a run on a machine that others use too: who has no token of it cannot use it, and nobody else can read the
token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from helpers.processes import started, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(120)]

NOBODY = 65534
# Asks Ray's gcs_server for a value as this user, after everything is imported that another user may not read.
ASK = """
import os, sys, encodings.idna
from ray._raylet import GcsClient
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
try:
    open(f"/proc/{sys.argv[3]}/environ", "rb").read()
    print("read the environment")
except PermissionError:
    print("must not read the environment")
client = GcsClient(address=sys.argv[1], cluster_id="00" * 28)
print("answered", client.internal_kv_get(b"podium", None, timeout=5.0))
"""


# A run's Ray, as a process of its own. Prints where it is, its token, and what a worker's environment has of it.
HOST = """
import json, os, sys, time
import ray
from podium.cluster import RayCluster
from podium.cluster.local_ray import LocalRay

before = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}
local = LocalRay(RayCluster(cpus=1))
local.ready.result(100)
from podium.cluster.worker import Worker

worker = Worker.options(num_cpus=0).remote("worker", "node", tuple(sys.path))
seen = ray.get(worker.__ray_call__.remote(lambda self: sorted(os.environ)), timeout=60)
told = {"address": ray.get_runtime_context().gcs_address, "token": os.environ["RAY_AUTH_TOKEN"], "seen": seen}
print(json.dumps({**told, "pid": os.getpid()}), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
local.stop()
after = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}
print("as before" if after == before else after, flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a run's Ray told about itself."""

    address: str
    token: str
    seen: list[str]
    pid: int


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("host")
    output, stop = folder / "output", folder / "stop"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        with started(["-c", HOST, str(stop)], output) as process:
            wait_until(lambda: "}\n" in output.read_text() or process.poll() is not None, "the start of Ray")
            assert process.poll() is None, output.read_text()
            line = next(line for line in output.read_text().splitlines() if line.startswith("{"))
            yield Host(**json.loads(line))
            stop.touch()
            assert process.wait(60) == 0
            assert output.read_text().splitlines()[-1] == "as before"


def ask(host: Host, user: int, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", ASK, host.address, str(user), str(host.pid)],
        env={**kept, **environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_who_has_the_token_is_let_in(host: Host) -> None:
    said = ask(host, os.getuid(), RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=host.token)
    # And told that its id is not that of this cluster.
    assert "InvalidAuthToken" not in said, said
    assert "answered" in said or "cluster" in said.lower(), said


@pytest.mark.parametrize(
    "environment", [{}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64}], ids=["no token", "wrong token"]
)
@pytest.mark.parametrize("user", [os.getuid(), NOBODY], ids=["this user", "another user"])
def test_who_has_not_is_refused(host: Host, user: int, environment: dict[str, str]) -> None:
    if user == NOBODY and os.getuid() != 0:
        pytest.skip("only root can become another user")
    said = ask(host, user, **environment)
    assert "InvalidAuthToken" in said, said
    assert "answered" not in said
    if user == NOBODY:
        assert "must not read the environment" in said


def test_user_code_does_not_find_the_token(host: Host) -> None:
    assert "PATH" in host.seen
    assert "RAY_AUTH_TOKEN" not in host.seen
