# SPDX-License-Identifier: Apache-2.0
"""A conversation as tokens, turn by turn: sampled tokens stay as they are, and the chat template adds the others."""

# T tokens of the whole conversation · L tokens of one piece of it

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.data.control_tokens import AS_TEXT, ControlRule
from podium.data.documents import Mask, Tokens
from podium.data.kinds import Message
from podium.data.masks import ChatRenderer, ChatTemplateError, HiddenToolsError, Tools
from podium.data.prompts import PromptTokenizer, without_end
from podium.data.routed_experts import Experts, continued
from podium.data.rows import Row
from podium.data.tokenizer import answer_text
from podium.environments.chat_format import Call, ToolFormat, detect_format, parse_calls
from podium.errors import DataError, ModelError

# Replaces the model's answer in a rendering. Letters: no tokenizer that splits at words joins the last one with the
# newline or bracket that a template writes after a turn.
_STAND_IN = "okay"
_THOUGHT = "hmm"
_HARMONY_HEADER = re.compile(r"(<\|channel\|>\w+)?<\|message\|>")
# Each of them ends an answer: <|return|> the last one, which the template writes as <|end|> in a history.
_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_QUESTION: Message = {"role": "user", "content": "question"}
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TranscriptSpan:
    """Tokens added to the conversation together: the prompt, an answer, or a reply of the environment."""

    tokens_L: Tokens
    logprobs_L: NDArray[np.float32]  # 0 where not sampled
    versions_L: Tokens  # -1 where not sampled
    sampled: bool
    stopped: bool = False  # an answer that ended at a stop token, not at a limit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnvironmentReply:
    """The tokens that an environment's messages add to a transcript, and the rendering that the next reply
    continues."""

    tokens_L: Tokens
    shadow: tuple[Message, ...]
    rendered: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TranscriptArrays:
    """A transcript in the format of a TrajectoryBlock, and the position of each answer's last token."""

    tokens_T: Tokens
    loss_mask_T: Mask
    behavior_logprobs_T: NDArray[np.float32]
    versions_T: Tokens
    turn_ends: tuple[int, ...]
    experts: Experts | None  # of the first positions


class Transcript:
    """The tokens of one episode so far. It begins with a chat that waits for an answer, or with raw text.

    In a chat, the model's template renders every reply with the whole conversation. Placeholders replace the answers,
    because their sampled tokens are kept and never tokenized again from text."""

    def __init__(
        self, tokenizer: TurnTokenizer, start: Sequence[Message] | str, tools: Tools = None, *, observed: bool = False
    ) -> None:
        """`observed`: a `start` that is text is of the environment, and not of a row."""
        self._tokenizer, self._tools = tokenizer, tools
        self._shadow: tuple[Message, ...] | None = None if isinstance(start, str) else tuple(start)
        self._rendered: str | None = "" if self._shadow is None else tokenizer.render(self._shadow, tools)
        if isinstance(start, str):
            prompt = tokenizer.observed_prompt(start) if observed else tokenizer.text_prompt(start)
        else:
            prompt = tokenizer.chat_prompt(self._rendered or "")
        if len(prompt) == 0:
            raise DataError("the prompt has no tokens, so there is nothing that an answer could follow.")
        self._pieces = [_unsampled(prompt)]
        self._experts: Experts | None = None
        self._length = self.num_prompt_tokens

    def fork(self) -> Transcript:
        """A transcript that begins with all of this one and goes on independently."""
        other = copy.copy(self)
        other._pieces = list(self._pieces)
        return other

    def forget_rendering(self) -> None:
        """Frees the text of the conversation. It is rendered again if the conversation goes on from here."""
        if self._shadow is not None:
            self._rendered = None

    @property
    def pieces(self) -> tuple[TranscriptSpan, ...]:
        """Prompt, answers and replies, in order."""
        return tuple(self._pieces)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, before the first answer."""
        return len(self._pieces[0].tokens_L)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens_T(self) -> Tokens:
        """All tokens of the episode so far."""
        return np.concatenate([piece.tokens_L for piece in self._pieces])

    def add_answer(
        self, tokens_L: Tokens, logprobs_L: NDArray[np.float32], versions_L: Tokens, *, stopped: bool,
        experts: Experts | None = None,
    ) -> None:  # fmt: skip
        """Adds an answer exactly as it was sampled; `stopped` if it ended at a stop token. `experts`: of the whole
        conversation; those of earlier turns stay what they were."""
        if not len(tokens_L) == len(logprobs_L) == len(versions_L) or len(tokens_L) == 0:
            raise DataError(
                f"an answer has {len(tokens_L)} tokens, {len(logprobs_L)} log-probs and {len(versions_L)} versions; "
                "every token needs one of each, and an answer one token at least."
            )
        self._add(
            TranscriptSpan(
                tokens_L=np.asarray(tokens_L, np.int32),
                logprobs_L=np.asarray(logprobs_L, np.float32),
                versions_L=np.asarray(versions_L, np.int32),
                sampled=True,
                stopped=stopped,
            )
        )
        self._experts = continued(self._experts, experts)

    def reply(self, messages: Sequence[Message]) -> EnvironmentReply:
        """The tokens that these messages would add after the last answer, including the next generation prompt."""
        assert self._pieces[-1].sampled, "a reply follows an answer"
        if self._shadow is None:
            text = "".join(str(message.get("content", "")) for message in messages)
            return EnvironmentReply(tokens_L=self._tokenizer.continuation(text), shadow=(), rendered="")
        form = self._tokenizer.form_before(str(messages[0]["role"]), self._tools)
        shadow = (*self._shadow, form.message(messages), *messages)
        rendered = self._tokenizer.render(shadow, self._tools)
        if self._rendered is None or not rendered.startswith(self._rendered):
            # A template that writes the date changes at midnight, which does not rewrite earlier turns.
            self._rendered = self._tokenizer.render(self._shadow, self._tools)
        tokens = self._tokenizer.encode_behind(self._tokenizer.tail(self._rendered, rendered, form))
        tokens = tokens[self._tokenizer.already_said(self._pieces[-1], tokens) :]
        return EnvironmentReply(tokens_L=np.array(tokens, np.int32), shadow=shadow, rendered=rendered)

    def add_reply(self, reply: EnvironmentReply) -> None:
        """Adds the environment's reply to the last answer."""
        if self._shadow is not None:
            self._shadow, self._rendered = reply.shadow, reply.rendered
        self._add(_unsampled(reply.tokens_L))

    def arrays(self) -> TranscriptArrays:
        """The episode as arrays for training."""
        sampled = [np.full(len(piece.tokens_L), piece.sampled) for piece in self._pieces]
        ends = np.cumsum([len(piece.tokens_L) for piece in self._pieces])
        return TranscriptArrays(
            tokens_T=self.tokens_T,
            loss_mask_T=np.concatenate(sampled),
            behavior_logprobs_T=np.concatenate([piece.logprobs_L for piece in self._pieces]),
            versions_T=np.concatenate([piece.versions_L for piece in self._pieces]),
            turn_ends=tuple(int(end) - 1 for end, piece in zip(ends, self._pieces, strict=True) if piece.sampled),
            experts=self._experts,
        )

    def _add(self, piece: TranscriptSpan) -> None:
        self._pieces.append(piece)
        self._length += len(piece.tokens_L)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """An assistant turn for renderings. Some templates require reasoning in it, or calls of the tools whose results
    follow."""

    thought: str  # begins the content where the template knows reasoning: it must not get lost
    calls: bool

    def message(self, following: Sequence[Message]) -> Message:
        """The stand-in as a message before `following`; tool results need calls with their ids."""
        if not self.calls:
            return {"role": "assistant", "content": self.thought + _STAND_IN}
        results = [message for message in following if message["role"] == "tool"]
        calls: list[dict[str, Any]] = [
            # Some templates name the tool of a result by its call.
            {
                "id": each.get("tool_call_id"),
                "type": "function",
                "function": {"name": each.get("name") or "probe", "arguments": {}},
            }
            for each in results
        ]
        return {"role": "assistant", "content": self.thought, "tool_calls": calls}


class TurnTokenizer:
    """Tokens of turns and text of answers, with one tokenizer. Shared by the episodes of a thread; tokenizers are not
    thread-safe."""

    def __init__(
        self, tokenizer: Any, tool_format: ToolFormat | None = None, *, hidden_tools: bool = False,
        rule: ControlRule = AS_TEXT,
    ) -> None:  # fmt: skip
        """`hidden_tools`: the template need not show tools to the model."""
        self._tokenizer, self._hidden_tools = tokenizer, hidden_tools
        self._renderer = ChatRenderer(tokenizer, rule)
        self._prompts = PromptTokenizer(tokenizer, rule)
        self._stand_in_tokens = self._renderer.encode(_STAND_IN)
        self._forms: dict[tuple[str, bool], StandIn] = {}
        self.tool_format = detect_format(tokenizer, tool_format)

    def text_prompt(self, text: str) -> Tokens:
        """Tokens of raw text, the same as for single answers: with the tokenizer's start token, and without an end
        token."""
        return self._prompts.tokens(None, text, None, Row({}, "the episode's prompt"))

    def observed_prompt(self, text: str) -> Tokens:
        """Tokens of raw text that an environment begins with: like those of a row's, but control tokens are text."""
        marked = self._renderer.content_text(text)
        if marked == text:
            return self.text_prompt(text)
        tokens = self._renderer.encode(marked, special=True)
        return np.array(without_end(self._tokenizer, tokens), np.int32)

    def chat_prompt(self, rendered: str) -> Tokens:
        """Tokens of a rendered chat."""
        return np.array(self._renderer.encode(rendered), np.int32)

    def text_of(self, tokens_L: Tokens) -> str:
        """The text of an answer, as a reward sees it."""
        return answer_text(self._tokenizer, tokens_L.tolist())

    def calls_of(self, tokens_L: Tokens, *, stopped: bool, tools: Tools = None) -> tuple[Call, ...]:
        """The tool calls of an answer. They are parsed from all tokens except the final stop token: some formats mark
        calls by special tokens, which are not in its text. `tools`: their schemas say the types of arguments."""
        return parse_calls(self.marked_text(tokens_L, stopped=stopped), self.tool_format, tools)

    def marked_text(self, tokens_L: Tokens, *, stopped: bool) -> str:
        """The text of an answer with its special tokens, except the final stop token."""
        tokens = tokens_L.tolist()
        if stopped and tokens and tokens[-1] in self._renderer.special_ids:
            tokens.pop()
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def continuation(self, text: str) -> Tokens:
        """Tokens of an observation that follows raw text."""
        return np.array(self.encode_behind(self._renderer.content_text(text)), np.int32)

    def render(self, messages: Sequence[Message], tools: Tools) -> str:
        """The chat as the template renders it, up to the generation prompt."""
        return self._renderer.text(messages, tools, generation_prompt=True)

    def require_tools_shown(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raises a ChatTemplateError if the template says nothing about the tools of an episode."""
        if not self._hidden_tools:
            self._renderer.require_tools_shown(messages, tools)

    def form_before(self, role: str, tools: Tools) -> StandIn:
        """The form of an assistant turn before a message of `role`. Raises a ChatTemplateError if no form lets the
        conversation grow without being rewritten. Found by trying, once."""
        key = role, tools is None
        if key not in self._forms:
            self._forms[key] = self._fitting_form(role, tools)
        return self._forms[key]

    def tail(self, before: str, after: str, form: StandIn) -> str:
        """The text of a rendering after its last answer; `before` is the prompt of that answer."""
        if not after.startswith(before):
            raise ChatTemplateError(
                "the chat template renders the earlier part of the conversation differently once a turn is added, so "
                "the model would not have seen what it is trained on"
            )
        turn = after[len(before) :]
        if self.tool_format == "harmony":
            return _harmony_tail(turn, form)
        wanted = self._end_text.lstrip() if form.calls else _STAND_IN
        begin = turn.find(wanted) if wanted else -1
        if form.thought and _THOUGHT not in turn[: max(begin, 0)]:
            raise ChatTemplateError(
                "the chat template drops what the model thought in an earlier turn, so the model would not have seen "
                "what it is trained on"
            )
        if begin < 0 or (not form.thought and not form.calls and turn[:begin].strip()):
            raise ChatTemplateError(
                "the chat template does not put an assistant turn where it asked for it, so what it writes behind the "
                "turn is unknown"
            )
        tail = turn[begin:] if form.calls else turn[begin + len(wanted) :]
        return self._from_special(tail)

    def encode_behind(self, text: str) -> list[int]:
        """The tokens of a text after an answer: without the mark that some tokenizers put before a first word."""
        before, both = self._stand_in_tokens, self._renderer.encode(_STAND_IN + text)
        return both[len(before) :] if both[: len(before)] == before else self._renderer.encode(text)

    def already_said(self, answer: TranscriptSpan, tail_L: Sequence[int]) -> int:
        """Number of the template's tokens after the answer that are already the answer's last ones. A truncated answer
        has none of them, and the template's end of turn is added after it, untrained."""
        said, special = answer.tokens_L.tolist(), self._renderer.special_ids
        most = 0
        while most < min(len(tail_L), len(self._end_tokens)) and tail_L[most] == self._end_tokens[most]:
            most += 1
        # If turns have no end token, the model stops at the token that begins the next turn.
        begins_special = len(tail_L) > 0 and tail_L[0] in special
        for count in range(min(max(most, int(begins_special)), len(said)), 0, -1):
            if said[-count:] == list(tail_L[:count]):
                return count
        # Another end of turn of the template, such as the one after a call, replaces the usual one.
        ends_special = begins_special and (most > 0 or self._texts_of_special.get(tail_L[0]) in _HARMONY_ENDS)
        return int(ends_special and answer.stopped and said[-1] in self._special_ids_of_template)

    def _fitting_form(self, role: str, tools: Tools) -> StandIn:
        prompt = self.render([_QUESTION], tools).rstrip()
        thinks = "</think>" in self._renderer.template(tools) and not prompt.endswith("</think>")
        opened = "" if prompt.endswith("<think>") else "<think>\n"
        thought = f"{opened}{_THOUGHT}\n</think>\n\n" if thinks else ""
        plain = StandIn(thought=thought, calls=False)
        try:
            self._try_form(plain, role, tools)
        except ChatTemplateError:
            calling = StandIn(thought=thought, calls=True)
            if role != "tool" or not self._fits(calling, role, tools):
                raise
            return calling
        return plain

    def _fits(self, form: StandIn, role: str, tools: Tools) -> bool:
        try:
            self._try_form(form, role, tools)
        except ChatTemplateError:
            return False
        return True

    def _try_form(self, form: StandIn, role: str, tools: Tools) -> None:
        """Two rounds: some templates forbid or rewrite only what is two turns back."""
        chat: list[Message] = [_QUESTION]
        rendered = self.render(chat, tools)
        for number in range(2):
            message = {"role": role, "content": "result"}
            if role == "tool":
                message["tool_call_id"] = f"{number:09d}"
            chat += [form.message([message]), message]
            before, rendered = rendered, self.render(chat, tools)
            if message["content"] not in self.tail(before, rendered, form):
                raise ChatTemplateError(f"the chat template leaves out what a {role} message says")

    def _from_special(self, tail: str) -> str:
        """Removes space before an end-of-turn token: the template adds it, the answer ended without it."""
        stripped = tail.lstrip()
        return stripped if stripped.startswith(self._special_texts) else tail

    @cached_property
    def _end_text(self) -> str:
        """The template's text after an assistant turn."""
        chat = [_QUESTION, {"role": "assistant", "content": _STAND_IN}]
        return self._renderer.text(chat, None, generation_prompt=False).rpartition(_STAND_IN)[2]

    @cached_property
    def _end_tokens(self) -> list[int]:
        return self.encode_behind(self._from_special(self._end_text))

    @cached_property
    def _special_texts(self) -> tuple[str, ...]:
        return tuple(text for text in self._texts_of_special.values() if text)

    @cached_property
    def _special_ids_of_template(self) -> set[int]:
        template = self._renderer.template([_PROBE_TOOL])
        return {id for id, text in self._texts_of_special.items() if text in template}

    @cached_property
    def _texts_of_special(self) -> dict[int, str]:
        ids = sorted(self._renderer.special_ids)
        return {id: str(text) for id, text in zip(ids, self._tokenizer.convert_ids_to_tokens(ids), strict=True)}


def _harmony_tail(turn: str, form: StandIn) -> str:
    """The text behind an answer whose header, with its channel, is sampled too. `turn`: the stand-in, and the rest."""
    header, mark, tail = turn.partition("<|call|>" if form.calls else _STAND_IN)
    if not mark or "<|start|>" in header or not (form.calls or _HARMONY_HEADER.fullmatch(header)):
        raise ChatTemplateError(
            "the chat template does not put an assistant turn where it asked for it, so what it writes behind the turn "
            "is unknown"
        )
    return mark + tail if form.calls else tail


def check_tools_shown(tokenizer: Any, messages: Sequence[Message], tools: Tools) -> None:
    """Called before a run with tools: raises a ModelError if the chat template says nothing about them in this
    prompt."""
    try:
        ChatRenderer(tokenizer).require_tools_shown(messages, tools)
    except HiddenToolsError as error:
        raise ModelError(
            f"model.chat_template: {error} If the model needs no description, set environment.hidden_tools to true."
        ) from error


def check_template(tokenizer: Any, *, role: str = "tool", tools: Tools = None) -> None:
    """Called before a run: raises a ModelError unless the chat template can continue a conversation without rewriting
    it.

    `role` is the role that answers the model: `tool` for tools, `user` for most custom environments. Some templates
    pass for one and not for the other: they keep reasoning between tool calls and drop it after a user message."""
    try:
        TurnTokenizer(tokenizer).form_before(role, tools)
    except ChatTemplateError as error:
        why = str(error) if error.__cause__ is None else f"it refuses them ({error.__cause__})"
        raise ModelError(
            f"model.chat_template: not fit for episodes of several turns with {role} messages: {why}. Name a template "
            "in model.chat_template that renders every turn the same way whatever follows it, or keep episodes to one "
            "turn."
        ) from error


def _unsampled(tokens_L: Tokens) -> TranscriptSpan:
    return TranscriptSpan(
        tokens_L=tokens_L,
        logprobs_L=np.zeros(len(tokens_L), np.float32),
        versions_L=np.full(len(tokens_L), -1, np.int32),
        sampled=False,
    )
