# SPDX-License-Identifier: Apache-2.0
"""A small HTTP/1.1 server on asyncio: JSON requests in, JSON or server-sent events out. Loopback unless told otherwise.

It reads what API clients send: a request line, headers, a body with Content-Length. Everything else is refused. A
client that goes away cancels the handler of its request."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from podium.errors import PodiumError, exception_text
from podium.gateway.refusal import RequestRefusedError

# Read before it is known who asks: a connection that is closed with unread bytes may lose its answer.
_SMALL_BODY = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What one server takes. `request_s`: from the whole request to the end of its answer."""

    body_bytes: int = 16 << 20
    head_bytes: int = 32 << 10
    connections: int = 4096
    idle_s: float = 75.0
    read_s: float = 60.0
    request_s: float = 600.0
    write_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request. Names of headers are in lower case; the path has no query."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestRefusedError(415, f"Content-Type is {kind!r}; send application/json.")
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise RequestRefusedError(400, f"the body is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise RequestRefusedError(400, "the body must be a JSON object.")
        return value


def plain_error_event(error: RequestRefusedError) -> str:
    """A refusal as the last event of a stream, in OpenAI's form."""
    return f"data: {json.dumps(error.body())}\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """A JSON answer, or events: strings that are sent as they come."""

    status: int = 200
    content: Any = None
    events: AsyncIterator[str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    error_event: Callable[[RequestRefusedError], str] = plain_error_event


def require_listenable(host: str, port: int) -> None:
    """Raises the error of `listen` if a server cannot listen there now, before anything else takes time."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as asyncio's servers do
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                probe.listen(1)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> PodiumError:
    return PodiumError(
        f"no server can listen on {host}, port {port}: {error.strerror or error}. Give another port with --port (0 "
        "takes a free one), or an address of this machine with --host."
    )


Handler = Callable[[HttpRequest], Awaitable[HttpAnswer]]
Admission = Callable[[HttpRequest], object]
"""Gets a request whose body is not read yet. Raises a RequestRefusedError for one that is not to be read."""


class HttpServer:
    """Answers until `close`. `handler` is cancelled when its client goes away or the deadline passes."""

    def __init__(
        self, handler: Handler, *, limits: HttpLimits | None = None, admission: Admission | None = None
    ) -> None:
        """`admission`: looks at a request before its body is read, if that is large."""
        self._handler, self._limits, self._admission = handler, limits or HttpLimits(), admission
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Begins to listen; returns the port. Port 0 takes a free one."""
        try:
            self._server = await asyncio.start_server(
                self._connected, host, port, limit=self._limits.head_bytes, backlog=1024
            )
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Listens no more and ends all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        connection = _Connection(reader, writer, self._limits, self._admission)
        try:
            if len(self._connections) > self._limits.connections:
                await connection.refuse(RequestRefusedError(503, "too many connections are open; try again later."))
                return
            while await self._serve_one(connection):
                pass
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(writer.wait_closed(), 1.0)

    async def _serve_one(self, connection: _Connection) -> bool:
        """Reads one request and answers it. False: the connection ends."""
        try:
            request = await connection.read()
        except RequestRefusedError as error:
            await connection.refuse(error)
            return False
        if request is None:
            return False
        keep = request.headers.get("connection", "").lower() != "close"
        work = asyncio.ensure_future(self._answer(connection, request))
        gone = asyncio.ensure_future(connection.client_gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not gone.result():  # the next request is here already
                await work
            return work.done() and work.result() and keep
        finally:
            for each in (work, gone):
                each.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, connection: _Connection, request: HttpRequest) -> bool:
        """Writes the handler's answer. False: the connection cannot be used again."""
        try:
            async with asyncio.timeout(self._limits.request_s):
                try:
                    answer = await self._handler(request)
                except RequestRefusedError as error:
                    answer = HttpAnswer(status=error.status, content=error.body())
                except PodiumError as error:  # what the client can change is a RequestRefusedError
                    answer = HttpAnswer(status=500, content=RequestRefusedError(500, str(error)).body())
                except ConnectionError:
                    raise
                except Exception as error:
                    text = f"the gateway failed: {exception_text(error)}. Please report it."
                    answer = HttpAnswer(status=500, content=RequestRefusedError(500, text).body())
                if answer.events is None:
                    await connection.write_json(answer)
                    return True
                return await connection.write_events(answer.events, answer.error_event)
        except TimeoutError:
            text = f"the request took longer than {self._limits.request_s:g} s."
            await connection.refuse(RequestRefusedError(504, text, code="timeout"))
            return False


class _Connection:
    """One connection. A byte that is read while watching for the client's end belongs to the next request."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: HttpLimits,
        admission: Admission | None,
    ) -> None:  # fmt: skip
        self._reader, self._writer, self._limits, self._admission = reader, writer, limits, admission
        self._ahead = b""
        self._began = False

    async def read(self) -> HttpRequest | None:
        """The next request; None if the client has closed the connection."""
        self._began = False
        try:
            async with asyncio.timeout(self._limits.idle_s):
                head = self._ahead + await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError as error:
            raise RequestRefusedError(431, f"the headers are longer than {self._limits.head_bytes} bytes.") from error
        self._ahead = b""
        method, path, headers = _parsed(head)
        size = self._body_size(headers)
        request = HttpRequest(method=method, path=path, headers=headers, body=b"")
        if self._admission is not None and size > _SMALL_BODY:
            self._admission(request)
        return replace(request, body=await self._body(size, headers))

    def _body_size(self, headers: Mapping[str, str]) -> int:
        if "transfer-encoding" in headers:
            raise RequestRefusedError(411, "send the body with Content-Length, not in chunks.")
        text = headers.get("content-length", "0")
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            raise RequestRefusedError(400, "Content-Length is not a number.")
        size = int(text)
        if size > self._limits.body_bytes:
            raise RequestRefusedError(413, f"the body has {size} bytes; at most {self._limits.body_bytes} are read.")
        return size

    async def _body(self, size: int, headers: Mapping[str, str]) -> bytes:
        if headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(self._limits.read_s):
                return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError from error

    async def client_gone(self) -> bool:
        """Returns when the client closes the connection (True) or sends more (False)."""
        try:
            self._ahead = await self._reader.read(1)
        except ConnectionError:
            return True
        return not self._ahead

    async def write_json(self, answer: HttpAnswer) -> None:
        body = json.dumps(answer.content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        self._head(answer.status, "application/json", {"Content-Length": str(len(body)), **answer.headers}, body)
        await self._drain()

    async def write_events(self, events: AsyncIterator[str], error_event: Callable[[RequestRefusedError], str]) -> bool:
        """Sends events as they come. A refusal becomes the last event."""
        self._head(200, "text/event-stream; charset=utf-8", {"Transfer-Encoding": "chunked"}, b"")
        try:
            async for event in events:
                self._chunk(event)
                await self._drain()
        except PodiumError as error:
            refusal = error if isinstance(error, RequestRefusedError) else RequestRefusedError(500, str(error))
            self._chunk(error_event(refusal))
        self._writer.write(b"0\r\n\r\n")
        await self._drain()
        return True

    async def refuse(self, error: RequestRefusedError) -> None:
        """Says why, if nothing has been said yet; the connection ends after it."""
        if not self._began:
            await self.write_json(
                HttpAnswer(status=error.status, content=error.body(), headers={"Connection": "close"})
            )

    def _head(self, status: int, kind: str, headers: Mapping[str, str], body: bytes) -> None:
        self._began = True
        lines = [f"HTTP/1.1 {status} {_phrase(status)}", f"Content-Type: {kind}", "Cache-Control: no-store"]
        lines += ["X-Content-Type-Options: nosniff", *(f"{name}: {value}" for name, value in headers.items())]
        self._writer.write("\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body)

    def _chunk(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def _drain(self) -> None:
        async with asyncio.timeout(self._limits.write_s):
            await self._writer.drain()


def _parsed(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").lstrip("\r\n").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[1].startswith("/"):
        raise RequestRefusedError(400, "the request line is not that of HTTP/1.1.")
    headers: dict[str, str] = {}
    for line in lines:
        if not line:
            continue
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or (name == "content-length" and name in headers):
            raise RequestRefusedError(400, "a header of the request is malformed.")
        headers[name] = value.strip()
    return parts[0], parts[1].partition("?")[0], headers


def _phrase(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "Error"
