# SPDX-License-Identifier: Apache-2.0
"""Keeps each request on one version of the weights: a new version waits for the requests under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class VersionGate:
    """Requests share the weights, and a replacement has them alone. Used from one event loop.

    `use` waits while a replacement waits or is under way, and `replace` waits until all uses that began before it have
    ended, which the deadline of requests bounds."""

    def __init__(self, version: str | None = None) -> None:
        """`version`: the name of the weights in place; None: they have none."""
        self._version, self._uses = version, 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @property
    def version(self) -> str | None:
        """The version that a request gets which begins now."""
        return self._version

    @asynccontextmanager
    async def use(self) -> AsyncIterator[str | None]:
        """The version, which does not change inside of this context."""
        while not self._open.is_set():
            await self._open.wait()
        self._uses += 1
        self._idle.clear()
        try:
            yield self._version
        finally:
            self._uses -= 1
            if not self._uses:
                self._idle.set()

    @asynccontextmanager
    async def replace(self, version: str) -> AsyncIterator[None]:
        """Nothing uses the weights inside of this context. They are `version` after it, unless it raises. One
        replacement at a time."""
        self._open.clear()
        try:
            await self._idle.wait()
            yield
            self._version = version
        finally:
            self._open.set()
