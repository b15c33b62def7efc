# SPDX-License-Identifier: Apache-2.0
"""`podium serve` as a user types it, with OpenAI's and Anthropic's own clients: `make test-clients`."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("openai") is None or importlib.util.find_spec("anthropic") is None:
    pytest.skip("the clients are not installed in this environment: run `make test-clients`", allow_module_level=True)

import anthropic
import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.processes import assert_gone, started, wait_until
from helpers.workspace import Workspace

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

KEY = "a-secret-key"
ASK: Any = [{"role": "user", "content": "what is 1+2?"}]
NEW = 8


@contextmanager
def served(workspace: Workspace) -> Iterator[str]:
    """The address of the tiny model, up to and with /v1."""
    output, key = workspace.path / "server.txt", workspace.path / "key"
    key.write_text(KEY)
    arguments = ["-m", "podium", "serve", str(workspace.model), "--port", "0", "--name", "tiny", "--key-file", str(key)]
    with started(arguments, output) as process:
        wait_until(lambda: url_in(output) is not None or process.poll() is not None, "the start of the server")
        url = url_in(output)
        assert url is not None, output.read_text()
        yield url
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
        assert_gone(process.pid)
    assert "Traceback" not in output.read_text()


def url_in(output: Path) -> str | None:
    found = re.search(r"serving \S+ at (\S+)", output.read_text())
    return found[1] if found else None


def greedy_by_transformers(model: Path, messages: Any) -> tuple[str, list[float]]:
    """The likeliest answer to a chat without its end, and the log-prob of each of its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokens = torch.tensor([prompt])
    for _ in range(NEW):
        with torch.no_grad():
            chosen = network(tokens).logits[0, -1].argmax()
        tokens = torch.cat([tokens, chosen[None, None]], dim=1)
        if int(chosen) == tokenizer.eos_token_id:
            break
    with torch.no_grad():
        logprobs = network(tokens).logits[0, :-1].log_softmax(-1)
    answer = tokens[0, len(prompt) :]
    values = logprobs[len(prompt) - 1 :].gather(1, answer[:, None])[:, 0]
    return tokenizer.decode(answer, skip_special_tokens=True), values.tolist()


def test_clients_get_what_transformers_generates_from_a_served_model(workspace: Workspace) -> None:
    text, logprobs = greedy_by_transformers(workspace.model, ASK)

    with served(workspace) as url, openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        how: Any = {"model": "tiny", "messages": ASK, "max_tokens": NEW, "temperature": 0}

        reply = client.chat.completions.create(**how, logprobs=True)
        (choice,) = reply.choices
        assert choice.message.content == text
        assert [token.logprob for token in choice.logprobs.content] == pytest.approx(logprobs, abs=1e-4)
        assert reply.usage.completion_tokens == len(logprobs)

        deltas = [event.choices[0].delta.content or "" for event in client.chat.completions.create(**how, stream=True)]
        assert "".join(deltas) == text

        completion = client.completions.create(model="tiny", prompt="1+2=", max_tokens=1, temperature=0, logprobs=1)
        assert completion.usage.completion_tokens == 1
        response = client.responses.create(model="tiny", input=ASK, max_output_tokens=NEW, temperature=0)
        assert response.output_text == text

        with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY, max_retries=0) as other:
            greedy = {"temperature": 0}  # this version of the client has no argument for it
            message = other.messages.create(model="tiny", messages=ASK, max_tokens=NEW, extra_body=greedy)
            assert "".join(block.text for block in message.content) == text

        with (
            openai.OpenAI(base_url=url, api_key="another-key", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.chat.completions.create(**how)
