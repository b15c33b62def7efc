# SPDX-License-Identifier: Apache-2.0
"""Episodes as text: each token by itself, and the conversation turn by turn, read back from the tokens."""

# L tokens of one episode

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.data.kinds import Message
from podium.data.masks import ChatTemplateError
from podium.data.tasks import Task
from podium.data.token_texts import TokenTexts
from podium.data.tokenizer import answer_text
from podium.data.trajectories import Ints
from podium.environments.chat_format import ToolCall
from podium.environments.transcript import TurnTokenizer

# In the place of a message's content in a rendering.
_CONTENT = "mmmmmmmm"
_QUESTION: Message = {"role": "user", "content": "question"}


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a chat template writes before, between and after messages of a role that answer the model."""

    role: str
    before: str
    between: str
    after: str

    def contents(self, reply: str) -> list[str] | None:
        """The contents of the messages that were rendered as `reply`; None: they were of another form. The model may
        have written the first of what the template writes itself: the end of its turn."""
        if not reply.endswith(self.after):
            return None
        for said in range(len(self.before)):
            begin = self.before[said:]
            if begin.strip() and reply.startswith(begin) and len(begin) + len(self.after) <= len(reply):
                inner = reply[len(begin) : len(reply) - len(self.after)]
                return inner.split(self.between) if self.between else [inner]
        return None


class EpisodeTexts:
    """Reads the episodes of a run with its own copy of the tokenizer, in one thread at a time."""

    def __init__(self, tokenizer: Any, *, has_turns: bool) -> None:
        """`has_turns`: an environment may answer the model."""
        self._tokenizer = tokenizer
        self._turns = TurnTokenizer(tokenizer, hidden_tools=True) if has_turns else None
        self._texts = TokenTexts(tokenizer)
        self._frames: tuple[_Frame, ...] | None = None

    def of_tokens(self, tokens_T: NDArray[np.int32]) -> tuple[list[str], Ints]:
        """The text of each different token by itself, and which of them each token is."""
        different, which_T = np.unique(tokens_T, return_inverse=True)
        return [self._texts.of(token) for token in different.tolist()], which_T

    def of_sequences(self, task: Task, sequences: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]]) -> str:
        """The conversations of an episode as JSON, one after the other: tokens of each, and which were sampled."""
        told = [message for tokens_L, sampled_L in sequences for message in self._told(task, tokens_L, sampled_L)]
        return json.dumps(told, ensure_ascii=False, default=str)

    def messages(self, task: Task, tokens_L: NDArray[np.int32], sampled_L: NDArray[np.bool_]) -> str:
        """The conversation of an episode as JSON."""
        return self.of_sequences(task, [(tokens_L, sampled_L)])

    def _told(self, task: Task, tokens_L: NDArray[np.int32], sampled_L: NDArray[np.bool_]) -> list[Message]:
        edges = [0, *(np.flatnonzero(np.diff(sampled_L)) + 1).tolist(), len(sampled_L)]
        parts = [(bool(sampled_L[begin]), tokens_L[begin:end]) for begin, end in pairwise(edges) if end > begin]
        told: list[Message] = []
        calls: Sequence[ToolCall] = ()
        if parts and not parts[0][0]:
            told += self._prompt(task, parts.pop(0)[1])
        for is_answer, part_L in parts:
            if is_answer:
                calls = self._calls(part_L)
                told.append(_answer(answer_text(self._tokenizer, part_L.tolist()), calls))
            else:
                told += self._reply(part_L, calls)
        return told

    def _prompt(self, task: Task, tokens_L: NDArray[np.int32]) -> list[Message]:
        """The task's own messages, if they are what the tokens say; an environment may have written others."""
        text = str(self._tokenizer.decode(tokens_L.tolist(), skip_special_tokens=False))
        told = [{"role": "user", "content": task.text}] if task.messages is None else [dict(m) for m in task.messages]
        if task.has_prompt and all(str(each.get("content") or "").strip() in text for each in told):
            return told
        return [{"role": "user", "content": answer_text(self._tokenizer, tokens_L.tolist())}]

    def _calls(self, answer_L: NDArray[np.int32]) -> Sequence[ToolCall]:
        if self._turns is None:
            return ()
        found = self._turns.calls_of(answer_L, stopped=True)
        return tuple(call for call in found if isinstance(call, ToolCall))

    def _reply(self, reply_L: NDArray[np.int32], calls: Sequence[ToolCall]) -> list[Message]:
        text = str(
            self._tokenizer.decode(reply_L.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        for frame in self._known_frames():
            contents = frame.contents(text)
            if contents is None:
                continue
            names = [call.name for call in calls] if frame.role == "tool" and len(calls) == len(contents) else []
            return [
                {"role": frame.role, "content": content, **({"name": names[at]} if names else {})}
                for at, content in enumerate(contents)
            ]
        return [{"role": "tool" if calls else "user", "content": answer_text(self._tokenizer, reply_L.tolist())}]

    def _known_frames(self) -> tuple[_Frame, ...]:
        if self._frames is None:
            found = (self._frame(role) for role in ("tool", "user"))
            self._frames = tuple(frame for frame in found if frame is not None)
        return self._frames

    def _frame(self, role: str) -> _Frame | None:
        if self._turns is None:
            return None
        message: Message = {"role": role, "content": _CONTENT}
        try:
            before, found, after = self._tail([message], role).partition(_CONTENT)
        except ChatTemplateError:
            return None
        between = ""
        with suppress(ChatTemplateError):  # some templates let one message of a role follow an answer, and no second
            middle = self._tail([message, message], role).removeprefix(before).removesuffix(after)
            between = middle.removeprefix(_CONTENT).removesuffix(_CONTENT)
        return _Frame(role, before, between, after) if found else None

    def _tail(self, messages: Sequence[Message], role: str) -> str:
        assert self._turns is not None
        identified = [
            {**each, "tool_call_id": f"{at:09d}"} if role == "tool" else each for at, each in enumerate(messages)
        ]
        form = self._turns.form_before(role, None)
        before = self._turns.render([_QUESTION], None)
        after = self._turns.render([_QUESTION, form.message(identified), *identified], None)
        return self._turns.tail(before, after, form)


def _answer(text: str, calls: Sequence[ToolCall]) -> Message:
    if not calls:
        return {"role": "assistant", "content": text}
    functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    return {
        "role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": f} for f in functions],
    }  # fmt: skip
