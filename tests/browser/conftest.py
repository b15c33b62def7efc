# SPDX-License-Identifier: Apache-2.0
"""The distribution's Chromium before a server of the demo runs. A script of the page that fails, fails the test."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 15_000
DESKTOP, PHONE = {"width": 1200, "height": 900}, {"width": 360, "height": 740}
Serve = Callable[..., AbstractContextManager[str]]
OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: run `make test-browser`")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("Chromium is not installed: on Debian, `apt-get install chromium`")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from demo_runs import make_runs

    folder = tmp_path_factory.mktemp("runs")
    make_runs(folder)
    return folder


@contextmanager
def _served(folder: Path, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    from podium.ui.server import PageServer

    server = PageServer(folder, host=host, port=port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join(timeout=10)


@pytest.fixture
def serve() -> Serve:
    return _served


@pytest.fixture(scope="session")
def address(runs: Path) -> Iterator[str]:
    with _served(runs) as url:
        yield url


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens an address in a browser without history. After the test: no script failed, and none from an answer ran."""
    contexts, pages, failures = [], [], []

    def open_address(address: str, *, is_phone: bool = False, is_dark: bool = False) -> Page:
        context = browser.new_context(
            viewport=PHONE if is_phone else DESKTOP, has_touch=is_phone, is_mobile=is_phone,
            color_scheme="dark" if is_dark else "light",
        )  # fmt: skip
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda message: _keep(failures, message.type, message.text))
        pages.append(page)
        page.goto(address)
        return page

    yield open_address
    hacked = [page.evaluate("window.hacked ?? null") for page in pages if not page.is_closed()]
    for context in contexts:
        context.close()
    assert hacked == [None] * len(hacked)
    assert failures == []


def _keep(failures: list[str], kind: str, text: str) -> None:
    """Errors of the console. That a request failed is what some tests are about: the page shows it."""
    if kind == "error" and not text.startswith("Failed to load resource"):
        failures.append(text)
