# SPDX-License-Identifier: Apache-2.0
"""Conversations read back from the tokens of an episode, with the templates of several models."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from scripted import CHATML, LLAMA, MISTRAL, PLAIN, byte_tokenizer, encoded
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from podium.data.kinds import Message
from podium.data.tasks import Task
from podium.environments.episode_texts import EpisodeTexts
from podium.environments.transcript import Transcript, TurnTokenizer

QUESTION: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'


def task_of(messages: list[Message] | None = None, text: str | None = None) -> Task:
    told = None if messages is None else tuple(messages)
    return Task(source="sums", messages=told, text=text, tools=None, reference=None, row={}, place="sums, row 1")


def told(tokenizer: Any, transcript: Transcript, task: Task) -> list[dict[str, Any]]:
    arrays = transcript.arrays()
    texts = EpisodeTexts(tokenizer, has_turns=True)
    found: list[dict[str, Any]] = json.loads(texts.messages(task, arrays.tokens_T, arrays.versions_T >= 0))
    return found


def say(transcript: Transcript, tokens: list[int], *, stopped: bool = True) -> None:
    count = len(tokens)
    transcript.add_answer(
        np.array(tokens, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32), stopped=stopped
    )


def results(*texts: str) -> list[Message]:
    return [{"role": "tool", "content": text, "tool_call_id": f"{at:09d}"} for at, text in enumerate(texts)]


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("texts", [("4",), ("4", "five\nlines <|im_end|"), ("",)])
def test_calls_and_their_results_come_back_from_the_tokens(texts: tuple[str, ...], stopped: bool) -> None:
    tokenizer = byte_tokenizer(CHATML)
    transcript = Transcript(TurnTokenizer(tokenizer), QUESTION)
    say(transcript, encoded(tokenizer, CALL * len(texts) + ("<|im_end|>" if stopped else "")), stopped=stopped)
    transcript.add_reply(transcript.reply(results(*texts)))
    say(transcript, encoded(tokenizer, "It is 4.<|im_end|>"))

    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    assert told(tokenizer, transcript, task_of(QUESTION)) == [
        *QUESTION,
        {"role": "assistant", "content": CALL * len(texts), "tool_calls": [call] * len(texts)},
        *({"role": "tool", "content": text, "name": "add"} for text in texts),
        {"role": "assistant", "content": "It is 4."},
    ]


@pytest.mark.parametrize("template", [CHATML, LLAMA, MISTRAL, PLAIN], ids=["chatml", "llama", "mistral", "plain"])
def test_what_a_person_replies_comes_back_from_the_tokens(template: str) -> None:
    tokenizer, question = byte_tokenizer(template), QUESTION[1:]
    turns = TurnTokenizer(tokenizer)
    transcript = Transcript(turns, question)
    say(transcript, encoded(tokenizer, "four"), stopped=False)
    transcript.add_reply(transcript.reply([{"role": "user", "content": "Sure?"}]))
    say(transcript, encoded(tokenizer, "yes"), stopped=False)

    assert told(tokenizer, transcript, task_of(question)) == [
        *question,
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "yes"},
    ]


def test_a_prompt_that_the_environment_wrote_is_told_and_not_that_of_the_task() -> None:
    tokenizer = byte_tokenizer(CHATML)
    transcript = Transcript(TurnTokenizer(tokenizer), [{"role": "user", "content": "Guess."}])
    say(transcript, encoded(tokenizer, "7<|im_end|>"))

    first, answer = told(tokenizer, transcript, task_of(QUESTION))
    assert "Guess." in first["content"]
    assert "2+2?" not in first["content"]
    assert answer == {"role": "assistant", "content": "7"}


def test_raw_text_is_what_a_user_says() -> None:
    tokenizer = byte_tokenizer(None)
    transcript = Transcript(TurnTokenizer(tokenizer), "2+2=")
    say(transcript, encoded(tokenizer, "4"), stopped=False)

    assert told(tokenizer, transcript, task_of(text="2+2=")) == [
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "4"},
    ]


def test_tokens_are_decoded_alone_with_the_space_that_they_begin_with() -> None:
    vocabulary = {"▁two": 0, "▁and": 1, "s": 2, "<0xE2>": 3}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    texts = EpisodeTexts(PreTrainedTokenizerFast(tokenizer_object=made), has_turns=False)

    text_U, which_T = texts.of_tokens(np.array([0, 2, 1, 0], np.int32))

    assert [text_U[at] for at in which_T] == [" two", "s", " and", " two"]
