# SPDX-License-Identifier: Apache-2.0
"""Several streams as one: order, failures, and what happens when the reader leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from podium.cluster.streams import merged


def test_items_come_in_the_order_of_their_arrival() -> None:
    async def body() -> list[str | None]:
        gate = asyncio.Event()

        async def late() -> AsyncIterator[str | None]:
            await gate.wait()
            yield "late"

        async def early() -> AsyncIterator[str | None]:
            yield "early"
            yield None  # an item like any other
            gate.set()

        return [item async for item in merged([late(), early()])]

    assert asyncio.run(asyncio.wait_for(body(), 10)) == ["early", None, "late"]


def test_the_first_failure_ends_it_and_the_others() -> None:
    ended = []

    async def waits() -> AsyncIterator[int]:
        try:
            await asyncio.Event().wait()
            yield 0
        finally:
            ended.append("waits")

    async def fails() -> AsyncIterator[int]:
        yield 1
        raise KeyError("lost")

    items = []

    async def body() -> None:
        async for item in merged([waits(), fails()]):
            items.append(item)  # noqa: PERF401  # what came before the failure

    with pytest.raises(KeyError, match="lost"):
        asyncio.run(asyncio.wait_for(body(), 10))
    assert items == [1]
    assert ended == ["waits"]


def test_no_stream_gives_nothing() -> None:
    async def body() -> list[int]:
        return [item async for item in merged(list[AsyncIterator[int]]())]

    assert asyncio.run(asyncio.wait_for(body(), 10)) == []
