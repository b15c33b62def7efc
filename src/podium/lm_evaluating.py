# SPDX-License-Identifier: Apache-2.0
"""`podium evaluate --tasks`: tasks of lm-eval, which asks a server of the model on this machine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from podium.errors import MissingExtraError, PodiumError
from podium.serving import ServedModel, ServingJob, serve_while

_KEY_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LmTasks:
    """What lm-eval is asked to do."""

    names: tuple[str, ...]
    num_fewshot: int | None = None
    limit: float | None = None  # rows of each task; below 1: the share of them
    include: Path | None = None  # folder with further tasks
    chat: bool = False  # prompts become user messages of the chat template
    num_concurrent: int = 16
    output: Path | None = None  # for results and answers


def require_lm_eval() -> None:
    """Raises an error that names the extra if lm-eval is not installed. Imports nothing."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingExtraError(
            "--tasks: needs the package `lm-eval`, which is not installed. Run `pip install podium[lm-eval]`."
        )


def evaluate_tasks(job: ServingJob, tasks: LmTasks, say: Callable[[str], object]) -> None:
    """Serves the model on a free port of this machine until lm-eval has ended. lm-eval prints its table."""
    require_lm_eval()
    # Other users of this machine may not use the server.
    key = f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"
    job = replace(job, host="127.0.0.1", port=0, key=key)

    async def ask(served: ServedModel) -> int:
        return await _lm_eval(command(job, tasks, served), key)

    code = serve_while(job, ask, say)
    if code != 0:
        raise PodiumError(f"lm-eval ended with exit code {code}. What it printed says why.")


def command(job: ServingJob, tasks: LmTasks, served: ServedModel) -> list[str]:
    """The command line of lm-eval. It sends token ids, so that a text is cut into tokens once."""
    model = {
        "model": job.name,
        "base_url": f"{served.url}/completions",
        "tokenizer": job.model.tokenizer or job.model.path,
        "max_length": served.max_length,
        "num_concurrent": tasks.num_concurrent,
        "trust_remote_code": job.model.trust_remote_code,
    }
    given: Sequence[tuple[str, object | None]] = (
        ("--num_fewshot", tasks.num_fewshot),
        ("--limit", tasks.limit),
        ("--include_path", tasks.include),
        ("--output_path", tasks.output),
    )
    return [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
        *("--tasks", ",".join(tasks.names)),
        *(part for name, value in given if value is not None for part in (name, str(value))),
        *(("--apply_chat_template",) if tasks.chat else ()),
        *(("--log_samples",) if tasks.output is not None else ()),
    ]


async def _lm_eval(arguments: Sequence[str], key: str) -> int:
    """Runs it in a folder of its own, because it asks git about the one that it is in. It ends when this is
    cancelled."""
    with tempfile.TemporaryDirectory(prefix="podium-lm-eval-") as folder:
        names = ("NO_PROXY", "no_proxy")
        direct = {name: ",".join(filter(None, (os.environ.get(name), "127.0.0.1"))) for name in names}
        process = await asyncio.create_subprocess_exec(
            *arguments, cwd=folder, env={**os.environ, **direct, "OPENAI_API_KEY": key}
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
