# SPDX-License-Identifier: Apache-2.0
"""`podium serve`: the gateway over an engine of this machine, until it is interrupted."""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from podium.data.control_tokens import AS_TEXT, ControlRule
from podium.errors import PodiumError, RolloutError
from podium.following import FollowedRun, Follower
from podium.gateway.backend import EngineThread
from podium.gateway.chat import ModelService
from podium.gateway.conversation import Conversations
from podium.gateway.http import HttpLimits, HttpServer
from podium.gateway.server import Gateway
from podium.gateway.version_gate import VersionGate
from podium.recipe import ModelSection, PlacementSection, RolloutSection
from podium.rollout.engine import RolloutEngine
from podium.ui.access import is_loopback

T = TypeVar("T")

# Where --max-length is not given: of a model with a longer context, the cache would hold only few answers at a time.
_MOST_CONTEXT = 32_768
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_SHORTEST_KEY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingJob:
    """What is served, and where. `model.path` is a local folder. `key`: None: only this machine's clients, without."""

    model: ModelSection
    name: str
    rollout: RolloutSection
    device: Literal["auto", "cpu", "cuda"] = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    shows_key: bool = False  # a new key, which nobody knows yet
    limits: HttpLimits = field(default_factory=HttpLimits)
    rule: ControlRule = AS_TEXT
    version: str | None = None  # what clients are told of the weights
    follow: FollowedRun | None = None


def serving_key(given: str | None, file: Path | None, host: str) -> str | None:
    """The API key: given, from a file, or a new one where other machines can reach the server."""
    if given is not None and file is not None:
        raise PodiumError("--api-key and --key-file: give one of them.")
    if file is not None:
        try:
            given = file.expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise PodiumError(f"--key-file: {file} cannot be read ({error}). Give a text file with the key.") from error
    if given is None:
        return None if is_loopback(host) else f"sk-{secrets.token_urlsafe(24)}"
    if not re.fullmatch(r"[!-~]+", given) or len(given) < _SHORTEST_KEY:
        raise PodiumError(f"the API key needs {_SHORTEST_KEY} characters or more, printable ASCII without spaces.")
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that is served."""

    url: str  # with /v1
    max_length: int


def serve(job: ServingJob, say: Callable[[str], object]) -> None:
    """Loads the model and answers requests until SIGINT or SIGTERM."""

    async def for_ever(served: ServedModel) -> None:
        for line in _usage_lines(job, served.url):
            say(line)
        await asyncio.get_running_loop().create_future()

    serve_while(job, for_ever, say)
    say("ended")


def serve_while(
    job: ServingJob, work: Callable[[ServedModel], Coroutine[Any, Any, T]], say: Callable[[str], object]
) -> T | None:
    """Loads the model and answers requests until the work has ended, whose result is returned. None: SIGINT or SIGTERM
    came first, and the work was cancelled."""
    import transformers

    from podium.data.tokenizer import load_tokenizer, stop_tokens
    from podium.engine.mesh import check_devices, join
    from podium.engine.sharding import compute_dtype
    from podium.rollout.checkpoints import context_of, open_engine, require_engine

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    placement, folder = PlacementSection(device=job.device), Path(job.model.path)
    check_devices(placement, 1)
    require_engine(job.rollout)
    # One for the event loop and one for the engine's thread: tokenizers are not thread-safe.
    tokenizer, engines_own = load_tokenizer(job.model), load_tokenizer(job.model)
    mesh = join(placement, rank=0, world=1, local_rank=0)
    opened = open_engine(
        job.model, folder, mesh, job.rollout, tokenizer=engines_own,
        max_length=_max_length(job.rollout.max_length, context_of(job.model, folder)), cpu=None,
    )  # fmt: skip
    say(
        f"{opened.words}; up to {opened.engine.capacity.max_running} answers at a time, of "
        f"{opened.engine.capacity.max_length} tokens with their prompts"
    )
    dtype = str(compute_dtype(job.model, mesh.device)).removeprefix("torch.")
    return asyncio.run(_serve(job, opened.engine, tokenizer, stop_tokens(tokenizer, folder), work, dtype, say))


async def _serve(
    job: ServingJob, engine: RolloutEngine, tokenizer: Any, stops: frozenset[int],
    work: Callable[[ServedModel], Coroutine[Any, Any, T]], dtype: str, say: Callable[[str], object],
) -> T | None:  # fmt: skip
    """Serves until the work has ended, a signal comes or the engine ends."""
    backend = EngineThread(engine)
    server: HttpServer | None = None
    following: asyncio.Future[None] | None = None
    try:
        conversations = Conversations(tokenizer, rule=job.rule)
        service = ModelService(job.name, conversations, backend, stop_tokens=stops)
        service.gate = VersionGate(job.version)
        names = None if job.key is not None else frozenset({*_LOCAL_NAMES, job.host.lower()})
        gateway = Gateway(service, key=job.key, host_names=names)
        server = HttpServer(gateway.handle, limits=job.limits, admission=gateway.admit)
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        port = await server.listen(job.host, job.port)
        if job.follow is not None:
            follower = Follower(job.follow, job.model, dtype, backend, service.gate, say)
            following = asyncio.ensure_future(follower.follow())
        working = asyncio.ensure_future(work(ServedModel(url=_url(job, port), max_length=engine.capacity.max_length)))
        waits = [working, asyncio.ensure_future(stop.wait()), asyncio.ensure_future(backend.ended.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            if not each.done():
                each.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        if not working.cancelled():
            return working.result()
        if not stop.is_set():
            raise RolloutError(f"the engine has ended: {backend.failure}.")
        return None
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if server is not None:
            await server.close()
        await asyncio.to_thread(backend.close)


def _max_length(wanted: int | None, context: int | None) -> int:
    limit = context or _MOST_CONTEXT
    return min(wanted or _MOST_CONTEXT, limit)


def _url(job: ServingJob, port: int) -> str:
    host = "127.0.0.1" if job.host in ("0.0.0.0", "") else "[::1]" if job.host == "::" else job.host
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{host}:{port}/v1"


def _usage_lines(job: ServingJob, url: str) -> list[str]:
    key = "none" if job.key is None else job.key if job.shows_key else "YOUR KEY"
    lines = [
        f"serving {job.name} at {url} (Ctrl-C ends it)",
        f'  OpenAI(base_url="{url}", api_key="{key}")',
        f"  lm_eval --model local-completions --model_args model={job.name},base_url={url}/completions,"
        f"tokenizer={job.model.tokenizer or job.model.path} --tasks TASKS",
    ]
    if not is_loopback(job.host):
        lines.append("Everybody who has the key and reaches this machine can use it. The connection is not encrypted.")
    return lines
