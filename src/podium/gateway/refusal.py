# SPDX-License-Identifier: Apache-2.0
"""Why the gateway does not answer a request: a sentence, and what OpenAI's clients expect beside it."""

from __future__ import annotations

from podium.errors import PodiumError


class RequestRefusedError(PodiumError):
    """A request that the gateway does not answer: says why, with the HTTP status and the part of the request."""

    def __init__(self, status: int, text: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, object]:
        """The error in OpenAI's shape."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
