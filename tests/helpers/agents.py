# SPDX-License-Identifier: Apache-2.0
"""Agents for tests, as the text of a file: they speak the protocol with the standard library."""

from __future__ import annotations

AGENTS = '''
import asyncio
import json
import os
import time
from urllib.parse import urlsplit

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


async def ask(base_url, key, messages, **body):
    """(status, answer) of one chat completion."""
    return await post(base_url, key, "chat/completions", {"messages": messages, **body})


async def post(base_url, key, endpoint, body):
    url = urlsplit(base_url)
    data = json.dumps({"model": "policy", **body}).encode()
    head = (
        f"POST {url.path}/{endpoint} HTTP/1.1\\r\\nHost: {url.netloc}\\r\\nAuthorization: Bearer {key}\\r\\n"
        f"Content-Type: application/json\\r\\nContent-Length: {len(data)}\\r\\nConnection: close\\r\\n\\r\\n"
    )
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(head.encode() + data)
    raw = await reader.read()
    writer.close()
    top, _, text = raw.partition(b"\\r\\n\\r\\n")
    return int(top.split()[1]), json.loads(text)


def said(answer):
    return answer["choices"][0]["message"]


def digits(text):
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


async def several_turns(task, base_url, key):
    """Three turns with a tool between them; the reward is the share of digits of the last answer."""
    messages = [dict(each) for each in task.messages]
    for _ in range(3):
        status, answer = await ask(base_url, key, messages, tools=TOOLS)
        assert status == 200, answer
        message = said(answer)
        await asyncio.sleep(0.01)
        messages += [message, {"role": "user", "content": "and more?"}]
    return digits(message["content"] or "")


async def two_responses(task, base_url, key):
    """A conversation over OpenAI's responses, of which the second names the first."""
    messages = [dict(each) for each in task.messages]
    status, first = await post(base_url, key, "responses", {"input": messages})
    assert status == 200, first
    more = {"input": "and more?", "previous_response_id": first["id"]}
    status, second = await post(base_url, key, "responses", more)
    assert status == 200, second
    return 1.0


async def graded_by_the_recipe(task, base_url, key):
    await ask(base_url, key, [dict(each) for each in task.messages])


async def summarises(task, base_url, key):
    """Replaces its history in the middle, asks two questions at once behind it, and repeats one."""
    messages = [dict(each) for each in task.messages]
    _, first = await ask(base_url, key, messages)
    messages += [said(first), {"role": "user", "content": "go on"}]
    _, second = await ask(base_url, key, messages)
    short = [{"role": "user", "content": "sum: " + str(len(said(second)["content"] or ""))}]
    _, third = await ask(base_url, key, short)
    behind = [*short, said(third)]
    forks = [[*behind, {"role": "user", "content": word}] for word in ("left", "right")]
    answers = await asyncio.gather(*(ask(base_url, key, fork) for fork in forks))
    await ask(base_url, key, forks[0])
    return digits(said(answers[0][1])["content"] or "") + digits(said(answers[1][1])["content"] or "")


async def rewards_turns(task, base_url, key):
    """As `summarises`, with a reward for every answer: its share of digits, and one for the episode."""
    rewards = {}

    async def asked(messages):
        _, answer = await ask(base_url, key, messages)
        rewards[answer["id"]] = digits(said(answer)["content"] or "")
        return said(answer)

    messages = [dict(each) for each in task.messages]
    messages += [await asked(messages), {"role": "user", "content": "go on"}]
    second = await asked(messages)
    short = [{"role": "user", "content": "sum: " + str(len(second["content"] or ""))}]
    behind = [*short, await asked(short)]
    forks = [[*behind, {"role": "user", "content": word}] for word in ("left", "right")]
    answers = await asyncio.gather(*map(asked, forks))
    return {"reward": len(answers[0]["content"] or "") / 8, "turn_rewards": rewards}


def in_a_thread(task, base_url, key):
    return asyncio.run(several_turns(task, base_url, key))


async def fails(task, base_url, key):
    """Every fourth question: raises, hangs, never asks, or is killed. Others answer."""
    number = sum(map(ord, task.messages[-1]["content"])) % 5
    if os.environ.get("AGENT_FAULT") and number == 0:
        await {"raise": _raise, "hang": _hang, "silent": _silent, "exit": _exit}[os.environ["AGENT_FAULT"]]()
        return None
    return await several_turns(task, base_url, key)


async def _raise():
    raise KeyError("a bug of the agent")


async def _hang():
    await asyncio.sleep(3600)


async def _silent():
    pass


async def _exit():
    os._exit(7)
'''
