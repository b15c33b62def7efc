# SPDX-License-Identifier: Apache-2.0
"""`ray start --head` uses token authentication as soon as ~/.ray/auth_token exists, and a run with RAY_ADDRESS then
waited 20 s for a failed connection. The token in that file works, and a missing or wrong one is reported at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.processes import descendants, started, wait_until
from podium.cluster import joined_ray
from podium.errors import ClusterError

TOKEN, OTHER = "a" * 64, "b" * 64
AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
# Opens the cluster as a run does, and prints what it did and what came of it.
JOIN = """
import asyncio, json, sys
import ray
from podium.cluster import RayCluster, open_ray
from podium.errors import ClusterError

said = []
async def join():
    async with open_ray(RayCluster(), tell=said.append) as cluster:
        answer = ray.get(ray.remote(lambda: 7).remote(), timeout=60)  # of a worker
        return {"cpus": cluster.total("CPU"), "answer": answer}
try:
    result = asyncio.run(join())
except ClusterError as error:
    result = {"error": str(error)}
print(json.dumps({**result, "said": said}))
"""


def _home(folder: Path, token: str | None) -> str:
    (folder / ".ray").mkdir(parents=True)
    if token is not None:
        (folder / ".ray/auth_token").write_text(token)
    return str(folder)


# --- against a Ray that asks for a token ---


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a cluster that `ray start --head` started where ~/.ray/auth_token exists. No process is left of it."""
    home = _home(tmp_path_factory.mktemp("head"), TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as files,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("HOME", home)
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # on loopback only
        for name in AUTH:
            patch.delenv(name, raising=False)
        command = ["-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
        command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--num-gpus=0"]
        command += ["--object-store-memory=100000000", f"--temp-dir={files}", "--disable-usage-stats"]
        output = tmp_path_factory.mktemp("ray") / "start.txt"
        with started(command, output) as process:
            try:
                wait_until(lambda: process.poll() is not None or "--block" in output.read_text(), "the start of Ray")
                assert process.poll() is None, output.read_text()
                yield f"127.0.0.1:{port}"
            finally:
                for pid in (process.pid, *descendants(process.pid)):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _join(address: str, home: str, **environment: str) -> Mapping[str, object]:
    kept = {name: value for name, value in os.environ.items() if name not in AUTH}
    joined = subprocess.run(
        [sys.executable, "-c", JOIN],
        env={**kept, "HOME": home, "RAY_ADDRESS": address, **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert joined.returncode == 0, joined.stderr
    result: Mapping[str, object] = json.loads(joined.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(400)
def test_the_token_of_the_home_folder_opens_the_cluster(head: str, tmp_path: Path) -> None:
    joined = _join(head, _home(tmp_path / "home", TOKEN))

    assert joined["cpus"] == 2
    assert joined["answer"] == 7
    assert f"joining Ray at {head}" in joined["said"]  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("token", "environment", "parts"),
    [
        (None, {}, ["~/.ray/auth_token", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE=token"]),
        (None, {"RAY_AUTH_MODE": "token"}, ["RAY_AUTH_MODE", "~/.ray/auth_token"]),
        (OTHER, {}, ["RAY_AUTH_TOKEN", "~/.ray/auth_token"]),
        (TOKEN, {"RAY_AUTH_TOKEN": OTHER}, ["RAY_AUTH_TOKEN"]),
        (TOKEN, {"RAY_AUTH_MODE": "disabled"}, ["RAY_AUTH_MODE=token"]),
    ],
)
def test_a_missing_or_wrong_token_is_named(
    head: str, tmp_path: Path, token: str | None, environment: dict[str, str], parts: list[str]
) -> None:
    joined = _join(head, _home(tmp_path / "home", token), **environment)

    assert all(part in str(joined["error"]) for part in parts), joined


# --- decisions, without a Ray ---


class FakeRay:
    """A Ray that asks for a token (`wanted`; None: it does not), and what this process has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, wanted: str | None, here: str | None) -> None:
        self.wanted, self.here = wanted, here
        self.modes: list[str | None] = []
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        monkeypatch.setattr(joined_ray, "has_token", lambda: self.here is not None)
        monkeypatch.setattr(joined_ray, "is_token_refused", self._is_refused)
        monkeypatch.setattr(joined_ray, "set_auth_mode", self._set)

    def _is_refused(self, address: str) -> bool:
        sent = self.here if self.modes and self.modes[-1] == "token" else None
        return self.wanted is not None and sent != self.wanted

    def _set(self, mode: str | None) -> None:
        self.modes.append(mode)


def _authenticate() -> None:
    joined_ray._authenticate("127.0.0.1:1")


def test_a_token_is_sent_only_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, wanted=None, here=TOKEN)
    _authenticate()
    assert ray.modes == []

    ray = FakeRay(monkeypatch, wanted=TOKEN, here=TOKEN)
    _authenticate()
    assert ray.modes == ["token"]


def test_the_mode_is_as_before_when_the_token_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, wanted=TOKEN, here=OTHER)

    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:1"):
        _authenticate()

    assert ray.modes == ["token", None]


def test_an_address_that_ray_resolves_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch, wanted=TOKEN, here=TOKEN)

    asyncio.run(joined_ray.check_joinable("auto", 1.0))

    assert ray.modes == []
