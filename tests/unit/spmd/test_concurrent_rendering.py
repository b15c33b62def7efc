# SPDX-License-Identifier: Apache-2.0
"""The loader's thread and the evaluator render chats at the same moment, and neither may disturb the other."""

from __future__ import annotations

import datetime
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from helpers.tiny import TEMPLATE, tiny_tokenizer
from podium.data.chat import DocumentMaker, Dropped, Made, Prompt
from podium.data.rows import Row


class SlowClock(datetime.datetime):
    """Holds one thread up when a template asks for the year, until it is released or a moment has passed."""

    held: threading.Thread | None = None
    begun = threading.Event()
    released = threading.Event()

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        if threading.current_thread() is cls.held:
            cls.begun.set()
            cls.released.wait(1.0)
        return datetime.datetime(2026, 1, 1)


def _row(answer: str = "12") -> Row:
    turns = [("user", "what is 5+7?"), ("assistant", answer), ("user", "and 1+1?"), ("assistant", "2")]
    return Row({"messages": [{"role": role, "content": content} for role, content in turns]}, "rows.jsonl, line 1")


def _maker() -> DocumentMaker:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{% generation %}", "{% generation %}{{ strftime_now('%Y') }}")
    return DocumentMaker(tokenizer, "assistant", 256, "error")


def _trained(made: Made | Dropped) -> list[bool]:
    assert isinstance(made, Made)
    return list(made.document.trained)


@pytest.mark.parametrize("other", ["make", "prompt_of"])
def test_rendering_in_two_threads_marks_as_rendering_in_one(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", SlowClock)
    alone = _trained(_maker().make(_row()))
    first, second = _maker(), _maker()
    SlowClock.begun.clear()
    SlowClock.released.clear()

    def slowly() -> Made | Dropped:
        monkeypatch.setattr(SlowClock, "held", threading.current_thread())
        return first.make(_row())

    def beside() -> Made | Dropped | Prompt | None:
        assert SlowClock.begun.wait(10.0)
        try:
            return getattr(second, other)(_row("twelve of course"))  # type: ignore[no-any-return]
        finally:
            SlowClock.released.set()

    with ThreadPoolExecutor(2) as pool:
        slow, quick = pool.submit(slowly), pool.submit(beside)

    assert _trained(slow.result()) == alone
    assert isinstance(quick.result(), Made | Prompt)
