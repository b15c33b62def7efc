# SPDX-License-Identifier: Apache-2.0
"""A folder of runs, and a server that a test asks."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.run_folders import add_extras, make_run_folder
from podium.ui.server import PageServer

PAGE = {"index.html": b"<!doctype html><html><head></head><body></body></html>", "app.js": b"export const x = 1;"}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Browser:
    """Sends requests exactly as given: nothing is normalized."""

    def __init__(self, server: PageServer) -> None:
        self.server = server

    def ask(self, path: str, *, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=20)
        try:
            connection.putrequest(method, path, skip_host="Host" in (headers or {}))
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            connection.endheaders()
            found = connection.getresponse()
            return Answer(found.status, dict(found.getheaders()), found.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        found = self.ask(path)
        assert found.status == 200, found.body
        return found.json

    def error(self, path: str, status: int) -> str:
        found = self.ask(path)
        assert found.status == status, found.body
        return str(found.json["error"])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs: `one` has everything, `two` is shorter and has another learning rate."""
    folder = tmp_path / "runs"
    add_extras(make_run_folder(folder, "one"))
    make_run_folder(folder, "two", steps=6, lr=2e-3)
    return folder


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Browser]]:
    """Starts servers, which end with the test."""
    servers: list[PageServer] = []

    def start(folder: Path, **options: Any) -> Browser:
        server = PageServer(folder, **{"cache": tmp_path / "cache", "files": PAGE, **options})
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return Browser(server)

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def browser(runs: Path, serve: Callable[..., Browser]) -> Browser:
    return serve(runs)
