# SPDX-License-Identifier: Apache-2.0
"""`podium serve` as a user types it: a model and a run answer over HTTP until Ctrl-C, and mistakes are refused."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import assert_gone, started, wait_until
from helpers.workspace import Workspace

ASK = [{"role": "user", "content": "what is 1+2?"}]


def post(url: str, body: Any, *, key: str = "") -> Any:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def url_in(output: Path) -> str | None:
    found = re.search(r"serving \S+ at (\S+)", output.read_text())
    return found[1] if found else None


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "run"])
def test_a_model_and_a_run_are_served_until_ctrl_c(workspace: Workspace, what: str) -> None:
    target = str(workspace.model)
    if what == "run":
        assert workspace.process("train", workspace.recipe()).code == 0
        target = "runs/sums"
    key, output = workspace.path / "key", workspace.path / "server.txt"
    key.write_text("a-secret-key\n")
    arguments = ["-m", "podium", "serve", target, "--port", "0", "--name", "tiny", "--key-file", str(key)]
    with started(arguments, output) as process:
        wait_until(lambda: url_in(output) is not None or process.poll() is not None, "the start of the server")
        url = url_in(output)
        assert url is not None, output.read_text()
        assert url.startswith("http://127.0.0.1:")
        body = {"model": "tiny", "messages": ASK, "max_tokens": 8, "seed": 5}
        answers = [post(f"{url}/chat/completions", body, key="a-secret-key") for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert 1 <= answers[0]["usage"]["completion_tokens"] <= 8
        scored = {"model": "tiny", "prompt": "1+2", "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        (choice,) = post(f"{url}/completions", scored, key="a-secret-key")["choices"]
        marks = choice["logprobs"]
        assert len(marks["token_logprobs"]) == 4
        assert marks["token_logprobs"][0] is None
        assert all(value <= max(top.values()) for value, top in zip(
            marks["token_logprobs"][1:], marks["top_logprobs"][1:], strict=True
        ))  # fmt: skip
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(f"{url}/chat/completions", body)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
        assert_gone(process.pid)
    assert "ended" in output.read_text()
    assert "Traceback" not in output.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--key-file", "missing.txt"], "--key-file: missing.txt"),
        (["--api-key", "short"], "8 characters"),
        (["--api-key", "long-enough", "--key-file", "x"], "give one of them"),
        (["--step", "3"], "are of a run"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_before_the_model_is_loaded(
    workspace: Workspace, options: list[str], words: str
) -> None:  # fmt: skip
    outcome = workspace.podium("serve", str(workspace.model), *options)

    assert outcome.code == 2
    assert words in " ".join((outcome.err + outcome.out).replace("│", " ").split())
    assert "Traceback" not in outcome.err
