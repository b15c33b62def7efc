# SPDX-License-Identifier: Apache-2.0
"""Requests to an OpenAI-compatible endpoint: limits, retries, deadlines and what they cost."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from podium.environments.judge_limits import RateLimit, backoff_s, retry_after_s
from podium.environments.judge_prompts import ChatMessages
from podium.errors import RecipeError
from podium.recipe.judges import JudgeSection

_DEFAULTS: Mapping[str, Any] = {"temperature": 0, "max_tokens": 1024}
_MAX_BYTES = 4 << 20
_MOST_SHOWN = 200
_TRANSIENT = (408, 425, 429)


class JudgeError(Exception):
    """A judgement is unavailable: says why. The text never has the key."""


class _TransientError(JudgeError):
    """A request that may succeed later. `wait_s`: what the endpoint asks for."""

    def __init__(self, text: str, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.wait_s = wait_s


@dataclass(slots=True)
class JudgeTally:
    """What judgements cost."""

    requests: int = 0
    retries: int = 0
    cache_hits: int = 0
    tokens_in: int = 0
    tokens_out: int = 0

    def __iadd__(self, other: JudgeTally) -> JudgeTally:
        self.requests += other.requests
        self.retries += other.retries
        self.cache_hits += other.cache_hits
        self.tokens_in += other.tokens_in
        self.tokens_out += other.tokens_out
        return self


@dataclass(frozen=True, slots=True)
class Waiting:
    """A clock and how to wait by it."""

    now_s: Callable[[], float] = time.monotonic
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep
    chance: Callable[[], float] = random.random


def request_fields(section: JudgeSection) -> dict[str, Any]:
    """What every request has beside model and messages."""
    return {name: value for name, value in {**_DEFAULTS, **section.request}.items() if value is not None}


class JudgeEndpoint:
    """Sends requests to one endpoint, within its limits. For one event loop; close it in the end.

    `share`: the processes among which the limits are divided."""

    def __init__(
        self, section: JudgeSection, key: str | None, *, share: int = 1, waiting: Waiting | None = None
    ) -> None:
        self._section, self._key = section, key
        self._waiting = waiting or Waiting()
        rate = section.requests_per_second
        self._rate = RateLimit(None if rate is None else rate / share)
        concurrency = max(1, section.concurrency // share)
        self._places = asyncio.Semaphore(concurrency)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="judge")
        assert section.base_url is not None, "a judge in the run itself has no endpoint"
        self.identity = section.base_url
        self._post = _Poster(section.base_url + "/chat/completions", key)
        self.asking: dict[str, asyncio.Lock] = {}
        """A lock for each content that is being judged."""

    def body(self, messages: ChatMessages) -> dict[str, Any]:
        """The request's content."""
        return {"model": self._section.model, "messages": messages, **request_fields(self._section)}

    async def ask(self, body: Mapping[str, Any], read: Callable[[str], Any], tally: JudgeTally) -> str:
        """The judge's answer, which `read` accepts: one that it refuses by an error is asked for once more.

        Waits for the requests before it, and then for at most `deadline_s`. Raises a JudgeError."""
        async with self._places:
            await self._turn()
            end_s = self._waiting.now_s() + self._section.deadline_s
            text = await self._answer(body, end_s, tally)
            try:
                read(text)
            except Exception:
                await self._turn()
                text = await self._answer(body, end_s, tally)
            return text

    def close(self) -> None:
        """Ends the threads that are idle."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self) -> None:
        """Waits until the rate limit allows a request."""
        if (wait_s := self._rate.reserve(self._waiting.now_s())) > 0:
            await self._waiting.wait(wait_s)

    async def _answer(self, body: Mapping[str, Any], end_s: float, tally: JudgeTally) -> str:
        """The first answer, after retries; the caller has its turn for the first request."""
        retry = 0
        while True:
            try:
                return await self._request(body, end_s, tally)
            except _TransientError as error:
                now_s = self._waiting.now_s()
                wait_s = max(backoff_s(retry, self._waiting.chance()), error.wait_s or 0.0)
                if retry >= self._section.retries:
                    tries = f"{retry + 1} times" if retry else "once"
                    raise JudgeError(f"{error}; it was sent {tries} (judge.retries)") from None
                if now_s + wait_s >= end_s:
                    raise JudgeError(
                        f"{error}; another try after {wait_s:.1f} s would be later than {self._section.deadline_s:g} s "
                        "(judge.deadline_s)"
                    ) from None
                if error.wait_s is not None:
                    self._rate.hold(now_s + error.wait_s)
                await self._waiting.wait(wait_s)
                await self._turn()
            retry += 1
            tally.retries += 1

    async def _request(self, body: Mapping[str, Any], end_s: float, tally: JudgeTally) -> str:
        left_s = end_s - self._waiting.now_s()
        if left_s <= 0:
            raise JudgeError(f"there was no answer within {self._section.deadline_s:g} s (judge.deadline_s)")
        limit_s = min(self._section.timeout_s, left_s)
        exchange = _Exchange(json.dumps(body).encode(), limit_s)
        tally.requests += 1
        try:
            sent = asyncio.get_running_loop().run_in_executor(self._threads, self._post, exchange)
            status, headers, data = await asyncio.wait_for(sent, limit_s)
        except TimeoutError:
            which = "judge.timeout_s" if limit_s == self._section.timeout_s else "judge.deadline_s"
            raise _TransientError(f"the endpoint did not answer within {limit_s:.3g} s ({which})") from None
        except (OSError, http.client.HTTPException) as error:
            raise _TransientError(self._clean(f"no connection to the endpoint ({_cause(error)})")) from None
        finally:
            exchange.abort()
        return self._parsed(status, headers, data, tally)

    def _parsed(self, status: int, headers: http.client.HTTPMessage, data: bytes, tally: JudgeTally) -> str:
        if len(data) > _MAX_BYTES:
            raise JudgeError(f"the endpoint's answer is larger than {_MAX_BYTES >> 20} MiB")
        try:
            reply: Any = json.loads(data)
        except (ValueError, RecursionError):
            reply = None
        if not 200 <= status < 300:
            raise self._refusal(status, headers, reply)
        reply = reply if isinstance(reply, dict) else {}
        usage = reply.get("usage")
        tally.tokens_in += _count(usage, "prompt_tokens")
        tally.tokens_out += _count(usage, "completion_tokens")
        with contextlib.suppress(KeyError, IndexError, TypeError):
            choice = reply["choices"][0]
            text = choice["message"]["content"]
            if choice.get("finish_reason") == "length":
                raise JudgeError("the judge's answer was cut off. Raise judge.request.max_tokens")
            if isinstance(text, str):
                return text
        raise JudgeError("the endpoint's answer has no text in choices[0].message.content")

    def _refusal(self, status: int, headers: http.client.HTTPMessage, reply: Any) -> JudgeError:
        error = reply.get("error") if isinstance(reply, dict) else None
        message, code = (error.get("message"), error.get("code")) if isinstance(error, dict) else (error, None)
        text = f"the endpoint answered {status} {http.client.responses.get(status, '')}".rstrip()
        if status in (401, 403):  # what such an answer quotes may be the key
            return JudgeError(f"{text}. Look at judge.api_key_env or judge.api_key_file")
        if 300 <= status < 400:
            return JudgeError(f"{text}, and redirects are not followed. Correct judge.base_url")
        if isinstance(message, str) and message:
            text = self._clean(f"{text}: {message[:_MOST_SHOWN]}")
        if (status in _TRANSIENT or status >= 500) and code != "insufficient_quota":
            return _TransientError(text, retry_after_s(headers.get("Retry-After")))
        return JudgeError(text)

    def _clean(self, text: str) -> str:
        return text if not self._key else text.replace(self._key, "[key]")


class _Exchange:
    """One request, which can be aborted from another thread."""

    def __init__(self, body: bytes, limit_s: float) -> None:
        self.body, self.limit_s = body, limit_s
        self._lock = threading.Lock()
        self._is_over = False
        self._socket: socket.socket | None = None

    def use(self, connected: socket.socket) -> None:
        """The connection's socket. Raises an error if the request is aborted already."""
        with self._lock:
            if self._is_over:
                raise TimeoutError
            self._socket = connected

    def abort(self) -> None:
        """Ends the request: a thread that reads from its connection returns at once."""
        with self._lock:
            self._is_over = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


class _Poster:
    """Posts JSON in the calling thread, over a connection of its own. Redirects are not followed, so the key goes
    nowhere else."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = str(parts.hostname), parts.port, parts.path
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def __call__(self, exchange: _Exchange) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection: http.client.HTTPConnection
        if self._context is not None:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=exchange.limit_s, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=exchange.limit_s)
        with contextlib.closing(connection):
            connection.connect()
            exchange.use(connection.sock)
            connection.request("POST", self._path, exchange.body, self._headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read(_MAX_BYTES + 1)


def read_key(section: JudgeSection, key: str) -> str | None:
    """The API key that the recipe names; `key` is the judge's place in the recipe. The key's text is in no error."""
    if section.api_key_env is not None:
        where, text = f"{key}.api_key_env: the variable {section.api_key_env}", os.environ.get(section.api_key_env)
        if text is None:
            raise RecipeError(f"{where} is not set where rewards run. Set it there, or use api_key_file.")
    elif section.api_key_file is not None:
        where = f"{key}.api_key_file: {section.api_key_file}"
        try:
            text = Path(section.api_key_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{where} cannot be read ({type(error).__name__}).") from None
    else:
        return None
    text = text.strip()
    if not text or not text.isascii() or not text.isprintable():
        raise RecipeError(f"{where} is empty, or is no key: it has several lines, or characters that no key has.")
    return text


def _count(usage: object, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _cause(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text[:_MOST_SHOWN]}" if text else type(error).__name__
