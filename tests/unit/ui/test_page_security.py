# SPDX-License-Identifier: Apache-2.0
"""Who gets an answer of `podium ui`, and that nothing outside of its folder is ever read."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.run_folders import UNSAFE, make_run_folder
from podium.errors import PodiumError
from podium.ui.access import Access, is_loopback
from podium.ui.answers import json_text
from podium.ui.server import PageServer

Serve = Callable[..., Any]


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "/assets/../../secret.txt",
        "//etc/passwd",
        "/etc/passwd",
        "/api/runs/..",
        "/api/runs/../secret",
        "/api/runs/%2e%2e%2fsecret",
        "/api/runs/..%2f..%2fsecret/metrics",
        "/api/runs/%2fetc/metrics",
        "/api/runs/one/../../secret/metrics",
        "/api/runs/one%2f..%2f..%2fsecret",
        "/api/runs/.hidden",
        "/api/runs/one%00/metrics",
        "/api/compare?a=one&b=../secret",
        "/api/compare?a=one&b=/etc",
        "/api/events?run=../secret",
        "/api/runs/one/rollouts/..%2f..%2f1/1",
        "/api/runs/one/rollouts/1/..",
    ],
)
def test_no_address_leads_out_of_the_folder(browser: Any, runs: Path, path: str) -> None:
    (runs.parent / "secret.txt").write_text("the secret")
    make_run_folder(runs.parent, "secret")
    shutil.copytree(runs / "one", runs / ".hidden")

    found = browser.ask(path)

    assert found.status in (400, 404), found.body
    assert set(found.json) == {"error"}
    assert b"the secret" not in found.body


def test_a_run_that_is_a_link_out_of_the_folder_is_not_read(browser: Any, runs: Path) -> None:
    outside = make_run_folder(runs.parent / "elsewhere", "outside")
    (runs / "link").symlink_to(outside.path)
    (runs / "inside").symlink_to(runs / "one")

    rows = {row["id"]: row for row in browser.get("/api/runs")["runs"]}
    assert "is a link out of" in rows["link"]["broken"]
    assert rows["link"]["metrics"] == {}
    assert rows["inside"]["broken"] is None
    for path in ("", "/metrics", "/timeline", "/rollouts"):
        assert "is a link out of" in browser.error(f"/api/runs/link{path}", 422)


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts", "samples.jsonl", "examples.jsonl", "events.jsonl"])
def test_a_file_that_is_a_link_out_of_the_folder_is_not_read(browser: Any, runs: Path, name: str) -> None:
    place = runs / "two" / name
    place.unlink(missing_ok=True)
    place.symlink_to(runs.parent / "secret")

    assert f"{name} is a link out of" in browser.error("/api/runs/two", 422)
    assert browser.ask("/api/runs/one").status == 200


def test_a_link_among_the_rollouts_is_not_read(browser: Any, runs: Path) -> None:
    folder = runs / "one" / "rollouts"
    outside = runs.parent / "outside.parquet"
    (folder / "step-00000004.parquet").rename(outside)
    (folder / "step-00000004.parquet").symlink_to(outside)

    assert browser.get("/api/runs/one/rollouts")["steps"] == [1, 3]
    assert browser.ask("/api/runs/one/rollouts?step=4").status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_answered(browser: Any, method: str) -> None:
    found = browser.ask("/api/runs", method=method)

    assert found.status == 405
    assert found.headers["Allow"] == "GET, HEAD"


def test_head_has_no_body(browser: Any) -> None:
    found, whole = browser.ask("/api/runs", method="HEAD"), browser.ask("/api/runs")

    assert (found.status, found.body) == (200, b"")
    assert found.headers["Content-Length"] == str(len(whole.body))


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/runs", "/api/nothing"])
def test_every_answer_has_the_headers(browser: Any, path: str) -> None:
    headers = browser.ask(path).headers

    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Access-Control-Allow-Origin" not in headers


def test_content_types(browser: Any) -> None:
    kinds = {path: browser.ask(path).headers["Content-Type"] for path in ("/", "/app.js", "/api/runs")}

    assert kinds == {
        "/": "text/html; charset=utf-8",
        "/app.js": "text/javascript; charset=utf-8",
        "/api/runs": "application/json; charset=utf-8",
    }


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "127.0.0.1.evil"])
def test_a_request_to_another_name_is_refused(browser: Any, host: str) -> None:
    """A page of another site whose name was made to resolve to this machine."""
    for path in ("/", "/api/runs"):
        assert browser.ask(path, headers={"Host": host}).status == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:8700", "127.0.0.1:1", "[::1]:8700", "LOCALHOST"])
def test_names_of_this_machine_are_fine(browser: Any, host: str) -> None:
    assert browser.ask("/api/runs", headers={"Host": host}).status == 200


def test_another_host_needs_the_token(runs: Path, serve: Serve) -> None:
    browser = serve(runs, host="0.0.0.0")
    token = browser.server.access.token
    assert browser.server.url.endswith(f"/#token={token}")
    assert len(token) >= 32

    def status(path: str, **headers: str) -> int:
        return int(browser.ask(path, headers={"Host": "my-machine:8700", **headers}).status)

    assert status("/") == 200  # the page itself has no data
    assert status("/api/runs") == 401
    assert status("/api/runs", Authorization=f"Bearer {token}") == 200
    assert status("/api/runs", Authorization=f"Bearer {token}x") == 401
    assert status("/api/runs", Authorization="Bearer ") == 401
    assert status("/api/runs", Authorization=f"Basic {token}") == 401
    assert status(f"/api/runs?token={token}") == 401  # only where headers cannot be sent
    assert status("/api/events?run=one") == 401
    assert status("/api/events?run=one&token=wrong") == 401
    assert b"token=" in browser.ask("/api/runs").body  # says what to do


def test_tokens_differ_and_loopback_has_none() -> None:
    assert Access.at("0.0.0.0").token != Access.at("0.0.0.0").token
    assert Access.at("127.0.0.1").token is None


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("", False), ("192.168.1.2", False), ("example.org", False), ("localhost.example.org", False)],
)  # fmt: skip
def test_what_is_loopback(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


def test_model_output_is_json_without_html(browser: Any) -> None:
    found = browser.ask("/api/runs/one/rollouts/4/7")

    assert found.headers["Content-Type"].startswith("application/json")
    assert b"<" not in found.body
    assert found.json["episodes"][0]["messages"][1]["content"] == UNSAFE


def test_json_text_is_what_it_was() -> None:
    value = {"a<b": [1.5, None, "</script>&\u2028\u2029é"], "nan": float("nan"), "deep": [{"inf": float("inf")}]}
    import json

    text = json_text(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"a<b": [1.5, None, "</script>&\u2028\u2029é"], "nan": None, "deep": [{"inf": None}]}


def test_a_port_in_use_is_said(runs: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PodiumError, match=rf"port {port} of 127.0.0.1 is in use.*--port {port + 1}"):
            PageServer(runs, port=port, files={})


def test_a_host_that_is_not_this_machine_is_said(runs: Path) -> None:
    with pytest.raises(PodiumError, match=r"no server can listen on 192.0.2.1.*--host"):
        PageServer(runs, host="192.0.2.1", files={})
