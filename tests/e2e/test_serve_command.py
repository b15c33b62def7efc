# SPDX-License-Identifier: Apache-2.0
"""`podium serve` as a user types it: a model and a run answer over HTTP until Ctrl-C, and mistakes are refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
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


@pytest.mark.slow
def test_a_running_job_is_followed_and_a_broken_checkpoint_is_not_served(workspace: Workspace) -> None:
    recipe = workspace.recipe(checkpoint={"every": 2, "keep": 9}, steps=2)
    assert workspace.process("train", recipe).code == 0
    run, output = workspace.path / "runs" / "sums", workspace.path / "server.txt"
    body = {"model": "tiny", "prompt": "1+2", "max_tokens": 0, "echo": True, "logprobs": 1}

    def newest(url: str) -> str:
        with urllib.request.urlopen(f"{url}/models", timeout=60) as answer:
            return str(json.loads(answer.read())["data"][0]["version"])

    with started(["-m", "podium", "serve", "runs/sums", "--port", "0", "--name", "tiny"], output) as process:
        wait_until(lambda: url_in(output) is not None or process.poll() is not None, "the start of the server")
        url = url_in(output)
        assert url is not None, output.read_text()
        assert newest(url) == "step-2"
        before = post(f"{url}/completions", body)
        assert before["system_fingerprint"] == "step-2"

        assert workspace.process("resume", "runs/sums", "--set", "steps=4").code == 0
        wait_until(lambda: newest(url) == "step-4" or process.poll() is not None, "the newer checkpoint")
        after = post(f"{url}/completions", body)
        assert after["system_fingerprint"] == "step-4"
        assert "step 4 of runs/sums is served from now on" in output.read_text()

        broken = run / "checkpoints" / "step-00000006"
        shutil.copytree(run / "checkpoints" / "step-00000004", broken.with_name("copied"))
        largest = max(broken.with_name("copied").rglob("*"), key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-8])
        broken.with_name("copied").rename(broken)
        wait_until(lambda: "step 6 is not served, and step 4 goes on" in output.read_text(), "the word on the damage")
        assert post(f"{url}/completions", body)["choices"] == after["choices"]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
    assert "Traceback" not in output.read_text()
    shutil.rmtree(broken)

    with started(
        ["-m", "podium", "serve", "runs/sums", "--port", "0", "--name", "tiny", "--no-follow"], output
    ) as process:
        wait_until(lambda: url_in(output) is not None or process.poll() is not None, "the start of the server")
        url = url_in(output)
        assert url is not None, output.read_text()
        again = post(f"{url}/completions", body)
    assert again["choices"] == after["choices"]  # what a fresh start answers
    assert before["choices"] != after["choices"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--key-file", "missing.txt"], "--key-file: missing.txt"),
        (["--api-key", "short"], "8 characters"),
        (["--api-key", "long-enough", "--key-file", "x"], "give one of them"),
        (["--step", "3"], "are of a run"),
        (["--follow"], "--follow is of a run"),
        (["--follow", "--step", "3"], "remove --step"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_before_the_model_is_loaded(
    workspace: Workspace, options: list[str], words: str
) -> None:  # fmt: skip
    outcome = workspace.podium("serve", str(workspace.model), *options)

    assert outcome.code == 2
    assert words in " ".join((outcome.err + outcome.out).replace("│", " ").split())
    assert "Traceback" not in outcome.err


def test_a_port_in_use_is_reported_before_the_model_is_looked_for(workspace: Workspace) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        outcome = workspace.podium("serve", "nowhere", "--port", str(port))

    workspace.refused(outcome, f"no server can listen on 127.0.0.1, port {port}: Address already in use", "--port")


def test_an_address_of_another_machine_is_refused(workspace: Workspace) -> None:
    outcome = workspace.podium("serve", "nowhere", "--host", "192.0.2.1", "--port", "0")

    workspace.refused(outcome, "no server can listen on 192.0.2.1", "--host")


def test_a_misspelt_run_is_told_from_those_there_are(workspace: Workspace) -> None:
    run = workspace.path / "runs" / "sums"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("program: sft\n")
    outcome = workspace.podium("serve", "runs/smus", "--port", "0")

    workspace.refused(outcome, "there is no runs/smus. runs has the runs sums.", left=("sums",))


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--include", "nowhere"], "--include: there is no folder"), (["--out", "train.jsonl"], "is a file")],
)
def test_folders_of_tasks_are_looked_at_before_the_model(
    workspace: Workspace, options: list[str], words: str
) -> None:  # fmt: skip
    outcome = workspace.podium("evaluate", str(workspace.model), "--tasks", "arc_easy", *options)

    assert outcome.code == 2
    assert words in " ".join((outcome.err + outcome.out).replace("│", " ").split())
