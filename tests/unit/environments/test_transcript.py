# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens: sampled tokens stay, the template's own words go between them, and rewriting is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import (
    CHATML,
    COUNTING,
    DEEPSEEK,
    FORGETFUL,
    GLM,
    HARMONY,
    LLAMA,
    MISTRAL,
    PLAIN,
    QWEN_CODER,
    byte_tokenizer,
    encoded,
    task,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from podium.data.kinds import Message
from podium.data.prompts import PromptTokenizer
from podium.data.tasks import Task
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.environments.chat_format import ToolCall
from podium.environments.transcript import Transcript, TurnTokenizer, check_template
from podium.errors import DataError, ModelError
from podium.roles.texts import TextReader

QUESTION: list[Message] = [{"role": "user", "content": "2+2?"}]
RESULT: list[Message] = [{"role": "tool", "content": "4", "tool_call_id": "000000000"}]
_CHATML, _LLAMA, _MISTRAL, _PLAIN = (byte_tokenizer(template) for template in (CHATML, LLAMA, MISTRAL, PLAIN))


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def say(transcript: Transcript, tokens: list[int], *, stopped: bool = True, version: int = 0) -> None:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    transcript.add_answer(
        np.array(tokens, np.int32), logprobs, np.full(len(tokens), version, np.int32), stopped=stopped
    )


def hear(transcript: Transcript, messages: list[Message]) -> None:
    transcript.add_reply(transcript.reply(messages))


def text_of(tokenizer: Any, transcript: Transcript) -> str:
    return str(tokenizer.decode(transcript.tokens_T.tolist()))


def test_a_chatml_conversation_by_hand() -> None:
    transcript = Transcript(TurnTokenizer(_CHATML), QUESTION)
    say(transcript, encoded(_CHATML, "ask<|im_end|>"), version=7)
    hear(transcript, RESULT)
    say(transcript, encoded(_CHATML, "4<|im_end|>"), version=8)

    parts = [
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", "ask<|im_end|>",
        "\n<|im_start|>user\n<tool_response>4</tool_response><|im_end|>\n<|im_start|>assistant\n", "4<|im_end|>",
    ]  # fmt: skip
    assert [_CHATML.decode(piece.tokens_L.tolist()) for piece in transcript.pieces] == parts
    arrays = transcript.arrays()
    lengths = [len(encoded(_CHATML, part)) for part in parts]
    assert lengths == [23, 4, 52, 2]
    assert arrays.loss_mask_T.tolist() == [False] * 23 + [True] * 4 + [False] * 52 + [True] * 2
    assert arrays.behavior_logprobs_T.tolist() == [0.0] * 23 + [-1, -2, -3, -4] + [0.0] * 52 + [-1, -2]
    assert arrays.versions_T.tolist() == [-1] * 23 + [7] * 4 + [-1] * 52 + [8] * 2
    assert arrays.turn_ends == (26, 80)


def test_sampled_tokens_stay_though_reading_them_back_would_give_others() -> None:
    a, b, end = encoded(_CHATML, "a") + encoded(_CHATML, "b") + encoded(_CHATML, "<|im_end|>")
    assert encoded(_CHATML, _CHATML.decode([a, b])) != [a, b]
    transcript = Transcript(TurnTokenizer(_CHATML), QUESTION)
    say(transcript, [a, b, end])
    hear(transcript, RESULT)

    begin = transcript.num_prompt_tokens
    assert transcript.tokens_T[begin : begin + 3].tolist() == [a, b, end]


def test_an_answer_cut_off_gets_its_end_of_turn_as_untrained_tokens() -> None:
    whole, cut = (Transcript(TurnTokenizer(_CHATML), QUESTION) for _ in range(2))
    say(whole, encoded(_CHATML, "ask<|im_end|>"))
    say(cut, encoded(_CHATML, "ask"), stopped=False)
    for transcript in (whole, cut):
        hear(transcript, RESULT)

    assert cut.tokens_T.tolist() == whole.tokens_T.tolist()
    assert (whole.arrays().loss_mask_T.sum(), cut.arrays().loss_mask_T.sum()) == (4, 3)
    assert cut.arrays().versions_T[cut.arrays().turn_ends[0] + 1] == -1


def test_another_end_of_turn_that_the_template_knows_takes_the_place_of_the_usual_one() -> None:
    transcript = Transcript(TurnTokenizer(_LLAMA), QUESTION)
    say(transcript, encoded(_LLAMA, "ask<|eom|>"))
    hear(transcript, RESULT)
    assert text_of(_LLAMA, transcript).endswith(
        "ask<|eom|><|header|>ipython<|/header|>\n\n4<|eot|><|header|>assistant<|/header|>\n\n"
    )


def test_an_end_token_that_the_template_does_not_know_is_followed_by_its_own() -> None:
    transcript = Transcript(TurnTokenizer(_LLAMA), QUESTION)
    say(transcript, encoded(_LLAMA, "ask</s>"))
    hear(transcript, RESULT)
    assert "ask</s><|eot|><|header|>ipython" in text_of(_LLAMA, transcript)


def test_where_turns_have_no_end_the_beginning_of_the_next_is_not_said_twice() -> None:
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ {'user': '[INST]', 'assistant': '[/INST]', 'tool': '[TOOL_RESULTS]'}[m.role] }}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}[/INST]{% endif %}"
    )
    stopped, cut = (Transcript(TurnTokenizer(tokenizer), QUESTION) for _ in range(2))
    say(stopped, encoded(tokenizer, "ask[TOOL_RESULTS]"))
    say(cut, encoded(tokenizer, "ask"), stopped=False)
    for transcript in (stopped, cut):
        hear(transcript, RESULT)
        assert text_of(tokenizer, transcript) == "[INST]2+2?[/INST]ask[TOOL_RESULTS]4[/INST]"


def test_a_template_that_wants_structured_calls_before_results_gets_them() -> None:
    transcript = Transcript(TurnTokenizer(_MISTRAL), QUESTION)
    for number in range(2):
        say(transcript, encoded(_MISTRAL, '[TOOL_CALLS][{"name": "add"}]</s>'))
        hear(transcript, [{"role": "tool", "content": "4", "tool_call_id": f"{number:09d}"}])
    say(transcript, encoded(_MISTRAL, " 4</s>"))
    hear(transcript, [{"role": "user", "content": "Sure?"}])
    requested = '[TOOL_CALLS][{"name": "add"}]</s>[TOOL_RESULTS]4[/TOOL_RESULTS]'
    assert text_of(_MISTRAL, transcript) == "<s>[INST] 2+2?[/INST]" + requested * 2 + " 4</s>[INST] Sure?[/INST]"


def test_plain_words_around_turns_are_not_said_twice() -> None:
    """The answer ends in the newline that the template writes behind it."""
    transcript = Transcript(TurnTokenizer(_PLAIN), QUESTION)
    say(transcript, encoded(_PLAIN, "4\n"))
    hear(transcript, [{"role": "user", "content": "Sure?"}])
    assert text_of(_PLAIN, transcript) == "user: 2+2?\nassistant: 4\nuser: Sure?\nassistant: "


def test_words_that_the_model_says_before_the_environment_does_are_kept() -> None:
    """Only an end of turn can be shared: an answer that goes on as the user is followed by the real user."""
    transcript = Transcript(TurnTokenizer(_PLAIN), QUESTION)
    say(transcript, encoded(_PLAIN, "4\nuser: Sure?"), stopped=False)
    hear(transcript, [{"role": "user", "content": "Sure?"}])
    assert text_of(_PLAIN, transcript).endswith("assistant: 4\nuser: Sure?\nuser: Sure?\nassistant: ")


def test_raw_text_continues_as_it_is() -> None:
    tokenizer = byte_tokenizer(None)
    transcript = Transcript(TurnTokenizer(tokenizer), ">>> 2+2\n")
    say(transcript, encoded(tokenizer, "4\n"))
    hear(transcript, [{"role": "user", "content": ">>> a"}, {"role": "user", "content": "b\n"}])
    assert text_of(tokenizer, transcript) == ">>> 2+2\n4\n>>> ab\n"
    assert transcript.pieces[-1].tokens_L.tolist() == encoded(tokenizer, ">>> ab\n")


@pytest.mark.parametrize("template", [None, PLAIN])
def test_a_tokenizer_that_marks_first_words_marks_none_in_the_middle(template: str | None) -> None:
    vocabulary = {symbol: index for index, symbol in enumerate("▁\n:?+2" + "abcdefghijklmnopqrstuvwxyz")}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = template
    assert encoded(tokenizer, "x")[0] == vocabulary["▁"]

    transcript = Transcript(TurnTokenizer(tokenizer), "x" if template is None else QUESTION)
    say(transcript, [vocabulary["y"]])
    hear(transcript, [{"role": "user", "content": "z"}])
    behind = transcript.pieces[-1].tokens_L.tolist()
    assert behind == [vocabulary[letter] for letter in ("z" if template is None else "\nuser:▁z\nassistant:▁")]


@pytest.mark.parametrize("requested", [task(), task(text="$ ls"), task("Grüße")])
def test_the_first_prompt_is_the_one_of_single_answers(requested: Task) -> None:
    start = requested.text if requested.messages is None else requested.messages
    assert start is not None
    prompt = Transcript(TurnTokenizer(_CHATML), start).tokens_T
    assert prompt.tolist() == requested.encode(PromptTokenizer(_CHATML)).tolist()


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="no tokens"):
        Transcript(TurnTokenizer(_CHATML), "")


def test_an_answers_text_has_no_special_tokens_and_its_calls_are_found_by_them() -> None:
    turns = TurnTokenizer(_MISTRAL)
    said = 'Let me see.[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'
    tokens = np.array(encoded(_MISTRAL, said + "</s>"), np.int32)
    assert turns.text_of(tokens) == said.replace("[TOOL_CALLS]", "")
    (call,) = turns.calls_of(tokens, stopped=True)
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("add", {"a": 1})
    assert turns.calls_of(tokens[:-1], stopped=False) == (call,)


def test_a_turns_text_is_the_answer_that_a_reward_sees() -> None:
    turns, reader = TurnTokenizer(_MISTRAL), TextReader(_MISTRAL)
    for said in ("4</s>", "4", "[INST]4 .[/INST] 5</s>", "</s>"):
        tokens = np.array(encoded(_MISTRAL, said), np.int32)
        block = TrajectoryBlock(
            ids=TrajectoryIds.of([TrajectoryId(0, 0)]), offsets=np.array([0, len(tokens)]), tokens_T=tokens,
            loss_mask_T=np.ones(len(tokens), np.bool_), behavior_logprobs_T=np.zeros(len(tokens), np.float32),
            versions_T=np.zeros(len(tokens), np.int32),
        )  # fmt: skip
        (seen,) = reader.read(block)
        assert turns.text_of(tokens) == seen.answer


def test_answers_without_a_logprob_for_every_token_are_refused() -> None:
    transcript = Transcript(TurnTokenizer(_CHATML), QUESTION)
    with pytest.raises(DataError, match=r"2 tokens, 1 log-probs.* 2 versions"):
        transcript.add_answer(np.zeros(2, np.int32), np.zeros(1, np.float32), np.zeros(2, np.int32), stopped=True)


def test_the_date_may_change_at_midnight() -> None:
    tokenizer = byte_tokenizer(LLAMA.replace("{{ strftime_now('%d %b %Y') }}", "Monday"))
    transcript = Transcript(TurnTokenizer(tokenizer), QUESTION)
    say(transcript, encoded(tokenizer, "ask<|eot|>"))
    hear(transcript, RESULT)
    tokenizer.chat_template = tokenizer.chat_template.replace("Monday", "Tuesday")
    say(transcript, encoded(tokenizer, "4<|eot|>"))
    hear(transcript, [{"role": "user", "content": "Sure?"}])
    assert text_of(tokenizer, transcript).startswith("<s>[Monday]")
    assert "Tuesday" not in text_of(tokenizer, transcript)


@pytest.mark.parametrize(
    ("template", "role"),
    [(CHATML, "tool"), (CHATML, "user"), (LLAMA, "tool"), (LLAMA, "user"), (MISTRAL, "tool"), (PLAIN, "tool"),
     (FORGETFUL, "tool")],
)  # fmt: skip
def test_templates_that_only_add_pass_the_check(template: str, role: str) -> None:
    check_template(byte_tokenizer(template), role=role)


@pytest.mark.parametrize(
    ("template", "role", "why"),
    [
        (FORGETFUL, "user", "thought"),
        (COUNTING, "tool", "earlier part"),
        (MISTRAL.replace("[TOOL_RESULTS]{{ m.content }}", ""), "tool", "tool message"),
        ("{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML, "tool",
         "(no tools)"),
        (None, "tool", "the tokenizer"),
    ],
)  # fmt: skip
def test_templates_that_rewrite_refuse_or_leave_out_are_reported_at_the_start(
    template: str | None, role: str, why: str
) -> None:
    with pytest.raises(ModelError) as caught:
        check_template(byte_tokenizer(template), role=role)
    assert str(caught.value).startswith("model.chat_template: ")
    assert why in str(caught.value)


# --- properties ---------------------------------------------------------------------------------------------------

_ANSWERS = st.tuples(st.lists(st.integers(0, 256), min_size=1, max_size=6), st.booleans())
_SAID = st.text(alphabet="abcxyz 0.\n<>", max_size=8)
_ROUNDS = st.lists(
    st.tuples(_ANSWERS, st.lists(st.tuples(st.sampled_from(["tool", "user"]), _SAID), min_size=1, max_size=3))
)


@given(rounds=_ROUNDS)
def test_a_transcript_is_the_concatenation_of_its_pieces(rounds: Any) -> None:
    """Any bytes may be sampled, ended or cut off: they stand unchanged where they were drawn, and all else is the
    environment's, untrained."""
    transcript = Transcript(TurnTokenizer(_CHATML), QUESTION)
    end = encoded(_CHATML, "<|im_end|>")
    pieces = [encoded(_CHATML, "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")]
    for (tokens, stopped), said in rounds:
        sampled = tokens + end if stopped else tokens
        messages = [{"role": role, "content": text} for role, text in said]
        say(transcript, sampled, stopped=stopped)
        hear(transcript, messages)
        shown = "".join(
            f"<|im_start|>user\n<tool_response>{text}</tool_response><|im_end|>\n" if role == "tool"
            else f"<|im_start|>user\n{text}<|im_end|>\n"
            for role, text in said
        )  # fmt: skip
        behind = ("" if stopped else "<|im_end|>") + f"\n{shown}<|im_start|>assistant\n"
        pieces += [sampled, encoded(_CHATML, behind)]

    assert [piece.tokens_L.tolist() for piece in transcript.pieces] == pieces
    assert transcript.tokens_T.tolist() == [token for piece in pieces for token in piece]
    arrays = transcript.arrays()
    mask = [index % 2 == 1 for index, piece in enumerate(pieces) for _ in piece]
    assert arrays.loss_mask_T.tolist() == mask
    assert (arrays.versions_T >= 0).tolist() == mask
    assert not arrays.behavior_logprobs_T[~arrays.loss_mask_T].any()
    assert all(mask[end] and not mask[end + 1] for end in arrays.turn_ends)
    assert len(transcript) == len(mask)
    TrajectoryBlock(
        ids=TrajectoryIds.of([TrajectoryId(0, 0)]), offsets=np.array([0, len(mask)]), tokens_T=arrays.tokens_T,
        loss_mask_T=arrays.loss_mask_T, behavior_logprobs_T=arrays.behavior_logprobs_T, versions_T=arrays.versions_T,
    )  # fmt: skip


# Contents that no template changes by trimming, and answers as the tokenizer itself would write them.
_WORDS = st.from_regex(r"\A[abxyz0-9]{1,6}\Z")
_FAMILIES = {"chatml": (_CHATML, "<|im_end|>"), "llama": (_LLAMA, "<|eot|>"), "plain": (_PLAIN, "\n")}


@given(family=st.sampled_from(sorted(_FAMILIES)), rounds=st.lists(st.tuples(_WORDS, _WORDS, st.booleans()), max_size=4))
def test_the_text_is_the_templates_own_rendering(family: str, rounds: list[tuple[str, str, bool]]) -> None:
    tokenizer, end = _FAMILIES[family]
    transcript = Transcript(TurnTokenizer(tokenizer), QUESTION)
    chat = list(QUESTION)
    for said, heard, cut in rounds:
        say(transcript, encoded(tokenizer, said if cut else said + end), stopped=not cut)
        hear(transcript, [{"role": "tool", "content": heard}])
        chat += [{"role": "assistant", "content": said}, {"role": "tool", "content": heard}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text_of(tokenizer, transcript) == rendered
    assert transcript.tokens_T.tolist() == encoded(tokenizer, rendered)


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("template", [QWEN_CODER, GLM, DEEPSEEK, HARMONY])
def test_templates_of_families_with_their_own_calls_can_continue(template: str, role: str) -> None:
    check_template(byte_tokenizer(template), role=role)


def test_an_answer_of_harmony_brings_its_channel_along() -> None:
    tokenizer = byte_tokenizer(HARMONY)
    transcript = Transcript(TurnTokenizer(tokenizer), QUESTION)
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
    tokens = np.array(encoded(tokenizer, said), np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    before = tokenizer.decode(transcript.tokens_T.tolist())
    transcript.add_answer(tokens, zeros, zeros.astype(np.int32), stopped=True)
    transcript.add_reply(transcript.reply([{"role": "user", "content": "sure?"}]))

    after = tokenizer.decode(transcript.tokens_T.tolist())

    assert after == before + said + "<|start|>user<|message|>sure?<|end|><|start|>assistant"


def test_a_cut_answer_of_harmony_gets_its_end() -> None:
    tokenizer = byte_tokenizer(HARMONY)
    transcript = Transcript(TurnTokenizer(tokenizer), QUESTION)
    tokens = np.array(encoded(tokenizer, "<|channel|>final<|message|>fo"), np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    transcript.add_answer(tokens, zeros, zeros.astype(np.int32), stopped=False)
    reply = transcript.reply([{"role": "user", "content": "go on"}])

    assert tokenizer.decode(reply.tokens_L.tolist()) == "<|end|><|start|>user<|message|>go on<|end|><|start|>assistant"
