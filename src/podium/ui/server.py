# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of `podium ui`: Python's own, read-only, for a person or a few.

Only GET and HEAD are answered. On loopback the Host header must name this machine; on any other host a token is needed.
Names of files come from a fixed list, ids of runs from a listing, so no path is made from a request."""

from __future__ import annotations

import errno
import http
import http.server
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from podium.errors import PodiumError
from podium.ui.access import Access
from podium.ui.answers import PageError, Query, json_text
from podium.ui.site import Site
from podium.ui.streams import run_events

_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml", ".png": "image/png", ".ico": "image/x-icon", ".txt": "text/plain; charset=utf-8",
}  # fmt: skip
_JSON = "application/json; charset=utf-8"
_SECURITY = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
# Browsers open up to six streams for one page, and a few people look at once.
_MOST_STREAMS = 32
# Connections at once, each with a thread, and further ones that are told so.
_MOST_CONNECTIONS, _MOST_REFUSALS, _REFUSAL_S = 128, 16, 2.0
# A browser that neither sends nor takes anything for so long is gone.
_SOCKET_S = 30.0
_REFUSAL_BYTES = 1 << 16


def assets() -> dict[str, bytes]:
    """The files of the page by name, as they are in the package."""
    folder = resources.files("podium.ui") / "assets"
    if not folder.is_dir():
        return {}
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}


class PageServer(http.server.ThreadingHTTPServer):
    """Answers until `stop`. Threads of requests end with the process."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, folder: Path, *, host: str = "127.0.0.1", port: int = 0, cache: Path | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:  # fmt: skip
        """Port 0 takes a free one. `files`: those of the page, by default Podium's own."""
        self.site, self.access = Site(folder, cache=cache), Access.at(host)
        self.assets = assets() if files is None else files
        self.stopping = threading.Event()
        self.streams = threading.BoundedSemaphore(_MOST_STREAMS)
        self._connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._refusals = threading.BoundedSemaphore(_MOST_REFUSALS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            self.site.close()
            raise _cannot_listen(host, port, error) from error

    def server_bind(self) -> None:
        """Without looking the machine's name up, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address to open, with the token if there is one."""
        host = self.access.host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server_port}/" + (f"#token={self.access.token}" if self.access.token else "")

    def prepare(self) -> None:
        """Begins to import what answers that take long need. Without it the first of them takes a second longer."""
        self.site.prepare()

    def stop(self) -> None:
        """Ends streams, threads and the server. Called from another thread than `serve_forever`."""
        self.stopping.set()
        self.shutdown()
        self.close()

    def close(self) -> None:
        """Ends what is left after `serve_forever` has returned."""
        self.stopping.set()
        self.server_close()
        self.site.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a connection a thread. Where all are taken it is answered that, and where those that answer that are
        taken too, it is closed."""
        for slots, work in ((self._connections, self.process_request_thread), (self._refusals, self._refuse)):
            if slots.acquire(blocking=False):
                thread = threading.Thread(target=_released_after, args=(slots, work, request, client_address))
                thread.daemon = True
                try:
                    thread.start()
                    return
                except RuntimeError:  # the system gives no more threads
                    slots.release()
        self.shutdown_request(request)

    def _refuse(self, request: Any, client_address: Any) -> None:
        """Reads what is asked, so that the answer arrives, and says that there are too many."""
        text = f"{_MOST_CONNECTIONS} connections are open. Close some pages, and reload in half a minute."
        body = json_text({"error": text}).encode()
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {_JSON}\r\nContent-Length: {len(body)}\r\n"
        security = "".join(f"{name}: {value}\r\n" for name, value in _SECURITY.items())
        try:
            request.settimeout(_REFUSAL_S)
            request.recv(_REFUSAL_BYTES)
            request.sendall(f"{head}{security}Retry-After: 30\r\nConnection: close\r\n\r\n".encode() + body)
        except OSError:
            pass
        finally:
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error."""


def _released_after(slots: threading.BoundedSemaphore, work: Callable[..., None], *args: Any) -> None:
    try:
        work(*args)
    finally:
        slots.release()


def _cannot_listen(host: str, port: int, error: OSError) -> PodiumError:
    if error.errno == errno.EADDRINUSE:
        return PodiumError(
            f"port {port} of {host} is in use, perhaps by another `podium ui`. End that one, or give another port with "
            f"--port {port + 1} (--port 0 takes a free one)."
        )
    if error.errno == errno.EACCES:
        return PodiumError(f"port {port} may not be used: those below 1024 need rights. Give another one with --port.")
    return PodiumError(
        f"no server can listen on {host}, port {port}: {error.strerror or error}. Give an address of this machine with "
        "--host, or leave it out."
    )


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "podium", ""
    protocol_version = "HTTP/1.1"
    timeout = _SOCKET_S

    def do_GET(self) -> None:
        """Answers with the page, JSON or a stream of events."""
        try:
            self._answer()
        except PageError as error:
            self._send_error(error.status, str(error))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True
        except PodiumError as error:
            self._send_error(422, str(error))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
            self._send_error(500, f"the page server failed: {text}. Please report it.")

    do_HEAD = do_GET

    def _refuse_method(self) -> None:
        self.close_connection = True
        self._send_error(405, f"{self.command} is not answered: the page only reads. Use GET.")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What Python's server has to say of a request that is none."""
        self.close_connection = True
        self._send_error(code, f"the request cannot be read: {message or http.HTTPStatus(code).phrase}. Use GET.")

    def _answer(self) -> None:
        try:
            address = urlsplit(self.path)
        except ValueError as error:
            raise PageError(400, f"the request has no address ({error}). Open the page at / instead.") from error
        access = self.server.access
        if not access.allows_name(self.headers.get("Host")):
            raise PageError(
                421, "the request is addressed to another host. Open the page by the address that `podium ui` printed."
            )
        if not address.path.startswith("/api/"):
            self._send_asset(address.path)
            return
        query = Query.of(address.query)
        is_stream = address.path == "/api/events"
        if not access.allows_token(self._token(query, is_stream)):
            raise PageError(
                401, "this page needs a token. Open the whole address that `podium ui` printed, with #token=."
            )
        if is_stream:
            self._send_events(query.text("run"))
        else:
            self._send(200, _JSON, json_text(self.server.site.answer(address.path, query)).encode())

    def _token(self, query: Query, is_stream: bool) -> str | None:
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        if scheme.lower() == "bearer":
            return token.strip()
        return query.values.get("token") if is_stream else None  # EventSource cannot send headers

    def _send_asset(self, path: str) -> None:
        name = "index.html" if path == "/" else path.removeprefix("/assets/").removeprefix("/")
        content = self.server.assets.get(name)
        if content is None:
            raise PageError(404, f"there is nothing at {path[:200]!r}. Open the page at / instead.")
        self._send(200, _TYPES.get(Path(name).suffix, "application/octet-stream"), content)

    def _send_events(self, run_id: str) -> None:
        if not run_id:
            raise PageError(400, "the address needs run=RUN: the id of a run.")
        self.server.site.data(run_id)
        if not self.server.streams.acquire(blocking=False):
            raise PageError(503, f"{_MOST_STREAMS} pages follow runs already. Close some of them, and reload.")
        try:
            self._head(200, "text/event-stream; charset=utf-8", None)
            self.close_connection = True
            if self.command == "HEAD":
                return
            for text in run_events(self.server.site, run_id, self.server.stopping):
                self.wfile.write(text.encode())
                self.wfile.flush()
        finally:
            self.server.streams.release()

    def _send_error(self, status: int, text: str) -> None:
        try:
            self._send(status, _JSON, json_text({"error": text}).encode())
        except OSError:
            self.close_connection = True

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self._head(status, kind, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: int, kind: str, length: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        for name, value in _SECURITY.items():
            self.send_header(name, value)
        self.send_header(*(("Connection", "close") if length is None else ("Content-Length", str(length))))
        if status == 405:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the token may be in the address."""
