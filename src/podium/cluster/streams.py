# SPDX-License-Identifier: Apache-2.0
"""Merges several asynchronous streams into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def merged(streams: Sequence[AsyncIterator[Item]]) -> AsyncIterator[Item]:
    """Yields items of all streams in order of arrival. The first failure ends it; leaving it cancels the streams. Waits
    for any stream to yield its next item or to end."""
    arrivals: asyncio.Queue[tuple[Item] | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncIterator[Item]) -> None:
        try:
            async for item in stream:
                arrivals.put_nowait((item,))
            arrivals.put_nowait(None)
        except Exception as error:
            arrivals.put_nowait(error)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(pumps)
        while running:
            match await arrivals.get():
                case None:
                    running -= 1
                case Exception() as error:
                    raise error
                case (item,):
                    yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
