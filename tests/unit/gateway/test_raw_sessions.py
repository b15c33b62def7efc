# SPDX-License-Identifier: Apache-2.0
"""Completions of raw text and token ids in sessions: recorded like chats, continued token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import CHATML, byte_tokenizer, encoded

from helpers.gateways import Reply, Served, serving
from podium.gateway.episodes import sequences_of
from podium.gateway.raw_prompts import PrefixIndex, text_bytes, token_bytes
from podium.gateway.server import SessionAccess

TOKENIZER = byte_tokenizer(CHATML)


def served(work: Callable[[Served, SessionAccess], Any], script: Callable[[str], str] = lambda prompt: "four") -> None:
    async def run() -> None:
        async with asyncio.timeout(30), serving(TOKENIZER, script) as server:
            await work(server, server.gateway.open_session())

    asyncio.run(run())


async def completed(server: Served, session: SessionAccess, prompt: Any, **body: Any) -> Reply:
    headers = body.pop("headers", {})
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, **body}
    return await server.post(f"{session.path}/v1/completions", body, key=session.key, **headers)


def text_of(tokens: Any) -> str:
    return str(TOKENIZER.decode(tokens.tolist()))


def test_a_text_that_extends_a_recorded_one_continues_the_sampled_tokens() -> None:
    a, b, end = (encoded(TOKENIZER, each)[0] for each in ("a", "b", "<|im_end|>"))

    async def work(server: Served, session: SessionAccess) -> None:
        first = (await completed(server, session, "x=", max_tokens=2)).json["choices"][0]
        assert (first["text"], first["finish_reason"]) == ("ab", "length")
        second = await completed(server, session, "x=ab ok? ", max_tokens=3)
        assert second.json["choices"][0]["text"] == "ab"

        record = await server.gateway.close_session(session.id)
        (branch,) = record.branches
        assert branch.turns == (0, 1)
        assert text_of(branch.tokens_T) == "x=ab ok? ab<|im_end|>"
        # Read back from the text, `ab` would be one token.
        assert branch.tokens_T[branch.loss_mask_T].tolist() == [a, b, a, b, end]
        assert branch.tokens_T.tolist()[:4] == [*encoded(TOKENIZER, "x="), a, b]
        assert server.engine.requests[1].prompt.tolist() == branch.tokens_T.tolist()[:-3]

    async def unmerged() -> None:
        async with asyncio.timeout(30), serving(TOKENIZER, lambda prompt: "ab") as server:
            whole = server.engine.tokenizer
            server.engine.tokenizer = _Apart(whole, [a, b])
            await work(server, server.gateway.open_session())

    asyncio.run(unmerged())


class _Apart:
    """Encodes what the engine says as these tokens."""

    def __init__(self, tokenizer: Any, tokens: list[int]) -> None:
        self._tokenizer, self._tokens = tokenizer, tokens

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def __call__(self, text: str, **how: Any) -> dict[str, list[int]]:
        return {"input_ids": list(self._tokens)}


def test_token_ids_that_extend_a_recorded_sequence_continue_it_and_others_begin_anew() -> None:
    async def work(server: Served, session: SessionAccess) -> None:
        prompt = encoded(TOKENIZER, "1+1=")
        first = (await completed(server, session, prompt, return_token_ids=True)).json["choices"][0]
        assert first["prompt_token_ids"] == prompt
        assert text_of(np.array(first["token_ids"])) == "four<|im_end|>"
        more = encoded(TOKENIZER, " and 2+2=")
        await completed(server, session, [*prompt, *first["token_ids"], *more])
        # One token less is another sequence: the end of the answer is not there.
        await completed(server, session, [*prompt, *first["token_ids"][:-1], *more])

        record = await server.gateway.close_session(session.id)
        assert sorted(branch.turns for branch in record.branches) == [(0, 1), (2,)]
        assert record.trained_tokens == record.sampled_tokens == 15
        found = sequences_of(record)
        assert sorted(found.parents) == [-1, -1, found.turns.index(0)]

    served(work)


def test_an_answer_that_was_cut_off_goes_on_without_anything_between() -> None:
    async def work(server: Served, session: SessionAccess) -> None:
        first = (await completed(server, session, "count: ", max_tokens=2, return_token_ids=True)).json["choices"][0]
        prompt = [*first["prompt_token_ids"], *first["token_ids"]]
        await completed(server, session, prompt, max_tokens=2)

        (branch,) = (await server.gateway.close_session(session.id)).branches
        assert (branch.turns, text_of(branch.tokens_T)) == ((0, 1), "count: fofo")
        assert branch.loss_mask_T.tolist() == [False] * 7 + [True] * 4
        assert branch.turn_ends == (8, 10)

    served(work)


def test_a_stop_string_that_the_client_writes_again_is_the_sampled_one() -> None:
    """As agents do that ask for an action up to `Observation:` and write that behind it."""

    async def work(server: Served, session: SessionAccess) -> None:
        # The scripted engine knows no stop strings: all of its answer is recorded, and shown up to the stop.
        await completed(server, session, "Action: ", stop=["Obs:"], max_tokens=20)
        await completed(server, session, "Action: look Obs: a door. Action: ", max_tokens=20)
        await completed(server, session, "Action: look and go: ", max_tokens=20)

        branches = sorted((await server.gateway.close_session(session.id)).branches, key=lambda each: each.turns)
        assert [branch.turns for branch in branches] == [(0, 1), (2,)]
        assert text_of(branches[0].tokens_T).count("Obs:") == 2
        assert branches[1].loss_mask_T.sum() == len(encoded(TOKENIZER, "look Obs:")) + 1

    served(work, lambda prompt: "look Obs:")


def test_token_ids_may_continue_a_chat() -> None:
    async def work(server: Served, session: SessionAccess) -> None:
        await server.chat(session, [{"role": "user", "content": "2+2?"}])
        before = server.engine.requests[0].prompt.tolist() + encoded(TOKENIZER, "four<|im_end|>")
        await completed(server, session, [*before, *encoded(TOKENIZER, "\n<|im_start|>user\nmore")])

        (branch,) = (await server.gateway.close_session(session.id)).branches
        assert branch.turns == (0, 1)

    served(work)


def test_repeated_completions_are_answered_from_the_record() -> None:
    async def work(server: Served, session: SessionAccess) -> None:
        body = {"prompt": ["1+1=", "2+2="], "n": 2}
        first = await completed(server, session, **body)
        again = await completed(server, session, **body)
        assert [each["text"] for each in first.json["choices"]] == ["four"] * 4
        assert again.json["choices"] == first.json["choices"]
        assert again.json["usage"] == first.json["usage"] == {
            "prompt_tokens": 8, "completion_tokens": 20, "total_tokens": 28
        }  # fmt: skip
        assert len(server.engine.requests) == 4
        keyed = [await completed(server, session, "1+1=", headers={"Idempotency-Key": "k"}) for _ in range(2)]
        assert keyed[0].json["choices"] == keyed[1].json["choices"]
        other = await completed(server, session, "3+3=", headers={"Idempotency-Key": "k"})
        assert (other.status, other.json["error"]["code"]) == (409, "idempotency_key_reused")
        assert len(server.engine.requests) == 5

        record = await server.gateway.close_session(session.id)
        assert (record.requests, record.repeated_requests, record.turns) == (3, 3, 5)
        ids = [reply.json["id"].removeprefix("cmpl-") for reply in (first, again, *keyed)]
        assert len(set(ids)) == 4
        assert record.turns_by_id[ids[0]] == record.turns_by_id[ids[1]] == (0, 1, 2, 3)
        assert record.turns_by_id[ids[2]] == record.turns_by_id[ids[3]] == (4,)

    served(work)


def test_a_chat_and_a_completion_with_the_same_body_are_not_the_same_request() -> None:
    async def work(server: Served, session: SessionAccess) -> None:
        messages = [{"role": "user", "content": "2+2?"}]
        await server.chat(session, messages, prompt="2+2?")
        reply = await completed(server, session, "2+2?", messages=messages)
        assert reply.json["object"] == "text_completion"
        assert (await server.gateway.close_session(session.id)).repeated_requests == 0

    served(work)


def test_a_stream_of_a_session_is_recorded_when_it_is_collected() -> None:
    async def work(server: Served, session: SessionAccess) -> None:
        reply = await completed(server, session, "1+1=", stream=True)
        assert "".join(event["choices"][0]["text"] for event in reply.events[:-1]) == "four"
        assert {event["id"] for event in reply.events[:-1]} == {reply.events[0]["id"]}
        record = await server.gateway.close_session(session.id)
        assert record.sampled_tokens == 5
        assert list(record.turns_by_id) == [reply.events[0]["id"].removeprefix("cmpl-")]

    served(work)


def test_what_samples_nothing_is_not_recorded() -> None:
    async def work(server: Served, session: SessionAccess) -> None:
        scored = await completed(server, session, "1+1", max_tokens=0, echo=True, logprobs=0)
        assert scored.json["choices"][0]["logprobs"]["token_logprobs"] == [None, -1, -2]
        assert (await completed(server, session, "")).status == 400
        assert (await completed(server, session, [[]])).status == 400
        assert (await completed(server, session, "\ud800")).status == 400
        assert (await completed(server, session, [len(TOKENIZER)])).status == 400
        record = await server.gateway.close_session(session.id)
        assert (record.turns, record.requests) == (0, 0)

    served(work)


@given(
    st.lists(st.text(alphabet="ab", max_size=5), max_size=8), st.text(alphabet="ab", max_size=8)
)  # fmt: skip
def test_the_longest_known_beginning_is_found(known: list[str], text: str) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    for at, each in enumerate(known):
        index.add(text_bytes(each), at)
    fitting = [(len(each), at) for at, each in enumerate(known) if text.startswith(each)]
    expected = max(fitting, default=None)
    assert index.longest(text_bytes(text)) == (None if expected is None else (expected[1], expected[0]))


def test_keys_of_tokens_are_of_their_numbers() -> None:
    assert token_bytes(np.array([1, 2], np.int64)) == token_bytes(np.array([1, 2], np.int32))
    with pytest.raises(UnicodeEncodeError):
        "\ud800".encode()
    assert text_bytes("a\ud800").startswith(text_bytes("a"))
