# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible endpoint in a thread, on an ephemeral port of the loopback: answers what a test says."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-very-secret-0123456789"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the server answers: a chat completion with this text, or other bytes."""

    text: str | None = None
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    usage: tuple[int, int] | None = (100, 10)
    finish_reason: str = "stop"
    wait: threading.Event | None = None  # answers when it is set

    @property
    def content(self) -> bytes:
        if self.body is not None:
            return self.body
        choice = {"message": {"role": "assistant", "content": self.text}, "finish_reason": self.finish_reason}
        reply: dict[str, Any] = {"choices": [choice]}
        if self.usage is not None:
            reply["usage"] = {"prompt_tokens": self.usage[0], "completion_tokens": self.usage[1]}
        return json.dumps(reply).encode()


@dataclass
class JudgeServer:
    """The server's address, and all requests so far: their bodies and headers."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_open: int = 0  # at the same time


@contextlib.contextmanager
def judge_server(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[JudgeServer]:
    """A server that answers each request's body with `answer`, which may be called by several threads at once."""
    lock, num_open = threading.Lock(), 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal num_open
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                num_open += 1
                server.most_open = max(server.most_open, num_open)
                server.requests.append(body)
                server.headers.append({"path": self.path, **dict(self.headers)})
            reply = answer(body)
            if reply.wait is not None:
                reply.wait.wait(30.0)
            with lock:
                num_open -= 1
            with contextlib.suppress(OSError):  # the client is gone
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.content)))
                self.end_headers()
                self.wfile.write(reply.content)

        def log_message(self, *arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = JudgeServer(f"http://127.0.0.1:{http.server_address[1]}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join(5.0)


def blocks_of(body: dict[str, Any]) -> dict[str, str]:
    """The judged blocks of a request, by name."""
    text = body["messages"][1]["content"]
    return {
        match[1]: match[3]
        for match in re.finditer(r"^<<<([A-Z ]+) (\w+)>>>\n(.*?)\n<<<END \2>>>$", text, re.DOTALL | re.MULTILINE)
    }
