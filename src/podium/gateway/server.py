# SPDX-License-Identifier: Apache-2.0
"""The gateway: routes, keys and sessions over HTTP. Nothing in a request names a file."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from podium.data.kinds import Message
from podium.errors import PodiumError
from podium.gateway.anthropic_wire import (
    MessageEvents,
    anthropic_error,
    anthropic_error_event,
    anthropic_message,
    messages_call,
)
from podium.gateway.branches import SessionRecord
from podium.gateway.chat import ChatAnswer, ChatCall, ChatSession, ModelService, SessionSettings, readable
from podium.gateway.chat_wire import ChatChunks, chat_call, chat_completion
from podium.gateway.completing import complete, complete_in
from podium.gateway.completions_wire import (
    CompletedPrompt,
    CompletionCall,
    CompletionChunks,
    completion_call,
    completion_response,
)
from podium.gateway.http import HttpAnswer, HttpRequest
from podium.gateway.refusal import RequestRefusedError
from podium.gateway.responses_wire import ResponseWriter, response_call, response_error_event
from podium.gateway.shown_text import OnText
from podium.observe.timing import wall_clock_s

C = TypeVar("C", ChatCall, CompletionCall)
_MOST_SESSIONS = 100_000
_MOST_RESPONSES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAccess:
    """What a client needs: `path` (and the server's address before it) is its base URL, with `/v1` for OpenAI's."""

    id: str
    key: str

    @property
    def path(self) -> str:
        """The session's path. Clients of OpenAI take `path + /v1`, those of Anthropic `path`."""
        return f"/sessions/{self.id}"


class Gateway:
    """Answers requests with one model. Its `handle` is the handler of an HttpServer. Used from one event loop."""

    def __init__(
        self, service: ModelService, *, key: str | None = None, host_names: frozenset[str] | None = None
    ) -> None:
        """`key`: of the endpoints outside of sessions; None: they need none. `host_names`: Host headers that are
        answered, so that a page of another site cannot reach a server without a key; None: all."""
        self.service, self._key, self._host_names = service, key, host_names
        self._sessions: dict[str, tuple[SessionAccess, ChatSession]] = {}
        # By session and response: the messages so far.
        self._said: WeakKeyDictionary[ChatSession, dict[str, tuple[Message, ...]]] = WeakKeyDictionary()
        self._began = int(wall_clock_s())

    def open_session(
        self, settings: SessionSettings | None = None, service: ModelService | None = None
    ) -> SessionAccess:
        """A new session with a key of its own. `service`: what answers it; default: the gateway's."""
        if len(self._sessions) >= _MOST_SESSIONS:
            raise RequestRefusedError(503, f"{_MOST_SESSIONS} sessions are open. Close some.")
        access = SessionAccess(id=secrets.token_hex(8), key=f"sk-{secrets.token_urlsafe(24)}")
        self._sessions[access.id] = access, ChatSession(service or self.service, settings)
        return access

    async def close_session(self, id: str) -> SessionRecord:
        """Ends a session: its requests are cancelled, its key is unknown. Returns what was sampled."""
        _, session = self._sessions.pop(id)
        return await session.close()

    def admit(self, request: HttpRequest) -> None:
        """Checks host and key of a request whose body is not read yet: the `admission` of an HttpServer."""
        self._check_host(request)
        if request.path != "/health":
            self._authorized(request)

    async def handle(self, request: HttpRequest) -> HttpAnswer:
        """Answers one request, or raises a RequestRefusedError."""
        try:
            return await self._handle(request)
        except PodiumError as error:
            if "/v1/messages" not in request.path:
                raise
            refusal = error if isinstance(error, RequestRefusedError) else RequestRefusedError(500, str(error))
            return HttpAnswer(status=refusal.status, content=anthropic_error(refusal))

    async def _handle(self, request: HttpRequest) -> HttpAnswer:
        self._check_host(request)
        if request.path == "/health":
            return HttpAnswer(content={"status": "ok"})
        session, path = self._authorized(request)
        method = request.method
        if path.startswith("/v1/models"):
            _require(method, "GET")
            return self._models(path)
        match path:
            case "/v1/chat/completions":
                _require(method, "POST")
                return await self._chat(request, session)
            case "/v1/completions":
                _require(method, "POST")
                return await self._completions(request, session)
            case "/v1/responses":
                _require(method, "POST")
                return await self._responses(request, session)
            case "/v1/messages":
                _require(method, "POST")
                return await self._messages(request, session)
            case "/v1/messages/count_tokens":
                _require(method, "POST")
                return self._count_tokens(request, session)
        raise RequestRefusedError(404, "there is no such endpoint.", code="not_found")

    # Endpoints

    def _models(self, path: str) -> HttpAnswer:
        name = self.service.name
        model = {
            "id": name, "object": "model", "created": self._began, "owned_by": "podium",
            "max_model_len": self.service.backend.capacity.max_length,
            **({} if self.service.gate.version is None else {"version": self.service.gate.version}),
        }  # fmt: skip
        if path.rstrip("/") == "/v1/models":
            return HttpAnswer(content={"object": "list", "data": [model]})
        if path != f"/v1/models/{name}":
            raise _unknown_model(name)
        return HttpAnswer(content=model)

    async def _chat(self, request: HttpRequest, session: ChatSession | None) -> HttpAnswer:
        body = request.json_object()
        if session is None:
            self._require_model(body.get("model"))
        call = _of_agent(chat_call(body, idempotency_key=request.headers.get("idempotency-key")), request)
        logprobs = bool(body.get("logprobs"))
        if not body.get("stream"):
            answer = await self._answer(call, session)
            answer.collect()
            content = chat_completion(
                answer, self.service.conversations, self.service.name, id=call.id, logprobs=logprobs
            )
            return HttpAnswer(content=content)
        options = body.get("stream_options") or {}
        chunks = ChatChunks(
            self.service.name,
            self.service.conversations,
            id=call.id,
            with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            logprobs=logprobs,
        )
        return await streamed(lambda on_text: self._answer(call, session, on_text), chunks)

    def _answer(
        self, call: ChatCall, session: ChatSession | None, on_text: OnText | None = None
    ) -> Coroutine[Any, Any, ChatAnswer]:
        return self.service.chat(call, on_text) if session is None else session.chat(call, on_text)

    async def _messages(self, request: HttpRequest, session: ChatSession | None) -> HttpAnswer:
        body = request.json_object()
        if session is None:
            self._require_model(body.get("model"))
        call = _of_agent(messages_call(body, idempotency_key=request.headers.get("idempotency-key")), request)
        if not body.get("stream"):
            answer = await self._answer(call, session)
            answer.collect()
            content = anthropic_message(answer, self.service.name, id=call.id)
            return HttpAnswer(content=content, headers=_versioned(answer))
        writer = MessageEvents(self.service.name, id=call.id)
        events = await streamed(lambda on_text: self._answer(call, session, on_text), writer)
        return replace(events, error_event=anthropic_error_event)

    async def _responses(self, request: HttpRequest, session: ChatSession | None) -> HttpAnswer:
        body = request.json_object()
        if session is None:
            self._require_model(body.get("model"))
        previous, said = body.get("previous_response_id"), self._said_in(session)
        before: tuple[Message, ...] = ()
        if previous is not None:
            if said is None or previous not in said:
                raise RequestRefusedError(
                    404,
                    "this response is not known. Responses are kept in sessions only, the newest "
                    f"{_MOST_RESPONSES} of each: send the whole input.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            before = said[previous]
        wanted = response_call(body, before, idempotency_key=request.headers.get("idempotency-key"))
        writer = ResponseWriter(wanted, self.service.name)

        async def answered(on_text: OnText | None = None) -> ChatAnswer:
            answer = await self._answer(_of_agent(wanted.call, request), session, on_text)
            if said is not None and body.get("store") is not False:
                said[writer.id] = (*wanted.said, answer.choices[0].message)
                if len(said) > _MOST_RESPONSES:
                    del said[next(iter(said))]
            return answer

        if body.get("stream"):
            return replace(await streamed(answered, writer), error_event=response_error_event)
        answer = await answered()
        answer.collect()
        return HttpAnswer(content=writer.response(answer), headers=_versioned(answer))

    def _count_tokens(self, request: HttpRequest, session: ChatSession | None) -> HttpAnswer:
        body = request.json_object()
        if session is None:
            self._require_model(body.get("model"))
        call = messages_call({"max_tokens": 1, **body})
        prompt = readable(lambda: self.service.conversations.begin(call.messages, call.tools))
        return HttpAnswer(content={"input_tokens": len(prompt.tokens_T)})

    async def _completions(self, request: HttpRequest, session: ChatSession | None) -> HttpAnswer:
        body = request.json_object()
        if session is None:
            self._require_model(body.get("model"))
        service = self.service
        call = completion_call(
            body, service.backend.capacity.vocab_size, idempotency_key=request.headers.get("idempotency-key")
        )
        call = _of_agent(call, request)

        def completed(on_text: OnText | None = None) -> Coroutine[Any, Any, list[CompletedPrompt]]:
            if session is None:
                return complete(service, call, on_text)
            return complete_in(session, call, on_text)

        if not body.get("stream"):
            done = await completed()
            for each in done:
                each.collect()
            return HttpAnswer(content=completion_response(call, done, service.conversations, service.name))
        if len(call.prompts) * call.wish.n != 1:
            raise RequestRefusedError(400, "a stream has one prompt and one choice.", param="stream")

        async def one(on_text: OnText) -> CompletedPrompt:
            return (await completed(on_text))[0]

        return await streamed(one, CompletionChunks(call, service.conversations, service.name))

    def _said_in(self, session: ChatSession | None) -> dict[str, tuple[Message, ...]] | None:
        return None if session is None else self._said.setdefault(session, {})

    # Keys

    def _authorized(self, request: HttpRequest) -> tuple[ChatSession | None, str]:
        """The session and the path within it. An unknown session and a wrong key get the same answer."""
        given = _given_key(request)
        parts = request.path.split("/", 3)
        if len(parts) > 2 and parts[1] == "sessions":
            access, session = self._sessions.get(parts[2], (None, None))
            known = access.key if access is not None else ""
            if not _same(given, known) or session is None:
                raise _wrong_key()
            return session, "/" + (parts[3] if len(parts) > 3 else "")
        if self._key is not None and not _same(given, self._key):
            raise _wrong_key()
        return None, request.path

    def _check_host(self, request: HttpRequest) -> None:
        if self._host_names is None:
            return
        name = request.headers.get("host", "").lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if name not in self._host_names:
            raise RequestRefusedError(421, "the request is addressed to another host. Use the address of this server.")

    def _require_model(self, name: Any) -> None:
        if name is not None and name != self.service.name:
            raise _unknown_model(self.service.name)


class Chunks(Protocol):
    """What a stream says of the text so far."""

    def more(self, text: str) -> str | None:
        """The event of new text, if there is some."""

    def last(self, answer: Any, /) -> list[str]:
        """The events of the finished answer."""


async def streamed(begin: Callable[[OnText], Awaitable[Any]], chunks: Chunks) -> HttpAnswer:
    """Events of an answer while it is sampled. An error before the first of them is an error of the request."""
    latest, changed = [""], asyncio.Event()

    def on_text(text: str) -> None:
        latest[0] = text
        changed.set()

    task = asyncio.ensure_future(begin(on_text))

    async def until_news() -> None:
        waiting = asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    async def events() -> AsyncIterator[str]:
        try:
            first = getattr(chunks, "first", None)
            if first is not None:
                yield first()
            while not task.done():
                changed.clear()
                text = chunks.more(latest[0])
                if text is not None:
                    yield text
                await until_news()
            answer = task.result()
            if isinstance(answer, ChatAnswer | CompletedPrompt):
                answer.collect()
            for each in chunks.last(answer):
                yield each
        finally:
            task.cancel()

    try:
        await until_news()
        if task.done():
            task.result()
    except BaseException:
        task.cancel()
        raise
    return HttpAnswer(events=events())


def _of_agent(call: C, request: HttpRequest) -> C:
    """The call, told apart from the same one with another `X-Session-ID`: several agents of one session may ask the
    same, and neither repeats the other."""
    agent = request.headers.get("x-session-id")
    return call if not agent else replace(call, content=sha256(call.content + agent.encode()).digest())


def _versioned(answer: ChatAnswer) -> dict[str, str]:
    """The header that names the weights, where the form of the answer has no field for them."""
    return {} if answer.version is None else {"X-Podium-Version": answer.version}


def _given_key(request: HttpRequest) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _same(given: str, known: str) -> bool:
    """Compared in constant time. An empty key is never right."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), known.encode()) and bool(known)


def _wrong_key() -> RequestRefusedError:
    return RequestRefusedError(
        401, "the API key is unknown. Send it as `Authorization: Bearer KEY`.", code="invalid_api_key"
    )


def _unknown_model(name: str) -> RequestRefusedError:
    return RequestRefusedError(404, f"this server has the model {name!r} only.", param="model", code="model_not_found")


def _require(method: str, wanted: str) -> None:
    if method != wanted:
        raise RequestRefusedError(405, f"{method[:20]} is not answered here. Use {wanted}.")
