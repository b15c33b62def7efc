# SPDX-License-Identifier: Apache-2.0
"""The text of a drafted recipe, with comments, and of the Python file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podium.drafting.columns import ON_POLICY, Method
from podium.drafting.measuring import FixedSizes, Lengths, ModelFacts, OnPolicySizes
from podium.recipe.loading import dump_values

_LEARNING_RATES: Mapping[Method, str] = {
    "sft": "2.0e-5", "distill": "2.0e-5", "dpo": "1.0e-6", "kto": "1.0e-6", "reward_model": "1.0e-5", "grpo": "1.0e-6",
    "ppo": "1.0e-6", "expert_iteration": "1.0e-5", "on_policy_distill": "1.0e-6",
}  # fmt: skip
_PAGES: Mapping[Method, str] = {
    "sft": "training.md", "distill": "distillation.md", "dpo": "preferences.md", "kto": "preferences.md",
    "reward_model": "reward_models.md", "grpo": "methods.md", "ppo": "methods.md", "expert_iteration": "methods.md",
    "on_policy_distill": "methods.md",
}  # fmt: skip
_COMMENT_COLUMN = 58


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """Everything that a drafted recipe says."""

    method: Method
    model: ModelFacts
    source: Mapping[str, Any]  # of data.train
    heldout: Mapping[str, Any] | None
    teacher: str | None
    rows: str  # "64 rows"
    is_counted: bool  # False: there are more rows
    lengths: Lengths
    sizes: FixedSizes | OnPolicySizes
    learns_scores: bool  # reward_model: scores instead of pairs
    skips_template: bool  # the model has a chat template and the rows are plain text
    reward: str | None  # `file.py:function`
    run: str  # its name


def recipe_text(choices: Choices) -> str:
    """The recipe as YAML with comments."""
    method, sizes = choices.method, choices.sizes
    steps = sizes.steps
    lines = [
        f"# {method}, drafted by `podium init`. Every key: docs/recipe.md; the method: docs/{_PAGES[method]}.",
        f"program: {'dpo' if method == 'kto' else method}",
        *_model_lines(choices.model),
        *_data_lines(choices),
        *_method_lines(choices),
        *(_rollout_lines(sizes) if isinstance(sizes, OnPolicySizes) else _step_lines(sizes)),
        _commented(f"optimizer: {_optimizer(method, steps)}", "with an adapter, ten times this rate is usual"),
        _commented(f"steps: {steps}", _step_note(choices)),
        _commented("placement: {devices: 1}", "GPUs of this machine; without one, the CPU"),
        f"checkpoint: {{every: {_every(steps)}, keep: 2}}",
        *([f"evaluation: {{every: {_every(steps)}}}"] if choices.heldout is not None else []),
        f"run: {dump_values({'name': choices.run})}",
    ]
    return "\n".join(lines) + "\n"


def _model_lines(model: ModelFacts) -> list[str]:
    template = [] if model.chat_template is None else [f"  chat_template: {dump_values(model.chat_template)}"]
    return [
        "model:",
        f"  path: {dump_values(model.path)}",
        *template,
        _commented("  # lora: {rank: 16}", "trains an adapter, with much less memory"),
    ]


def _data_lines(choices: Choices) -> list[str]:
    what = "prompts" if choices.method in ON_POLICY else "documents"
    heldout = (
        f"  heldout: [{dump_values(choices.heldout)}]"
        if choices.heldout is not None
        else _commented("  # heldout: [{path: FILE}]", "rows to evaluate on; with it: evaluation: {every: 50}")
    )
    return [
        "data:",
        f"  train: [{dump_values(choices.source)}]",
        heldout,
        f"  # {what}: {choices.lengths}",
        *(
            ["  # text is read without the chat template; for chats, rows need `messages`"]
            if choices.skips_template
            else []
        ),
        _commented(f"  max_length: {choices.sizes.max_length}", _length_note(choices)),
    ]


def _length_note(choices: Choices) -> str:
    context, longest, limit = choices.model.context, choices.lengths.longest, choices.sizes.max_length
    if choices.method in ON_POLICY:
        return "prompt and answer; longer prompts are left out"
    if longest > limit:
        return f"the model's context of {context}; longer documents are cut"
    return "tokens; longer documents are cut"


def _method_lines(choices: Choices) -> list[str]:
    method = choices.method
    lines: list[str] = []
    if method == "dpo":
        lines.append(_commented("preference: {loss: sigmoid, beta: 0.1}", "or ipo, simpo, orpo"))
    elif method == "kto":
        lines.append("preference: {loss: kto, beta: 0.1}")
    elif method == "reward_model":
        lines.append(f"reward_model: {{learns: {'scores' if choices.learns_scores else 'pairs'}}}")
    if choices.teacher is not None:
        lines.append(f"teachers: [{dump_values({'path': choices.teacher})}]")
    if choices.reward is not None:
        reward = f"reward: [{dump_values({'function': choices.reward})}]"
        lines.append(_commented(reward, "or {verifier: numeric}: docs/rewards.md"))
    return lines


def _rollout_lines(sizes: OnPolicySizes) -> list[str]:
    return [
        "rollout:",
        _commented(f"  prompts_per_step: {sizes.prompts_per_step}", "prompts of a step"),
        _commented("  samples_per_prompt: 8", "answers to each prompt"),
        _commented(f"  max_new_tokens: {sizes.max_new_tokens}", "longest answer"),
    ]


def _step_lines(sizes: FixedSizes) -> list[str]:
    return [_commented(f"tokens_per_step: {sizes.tokens_per_step}", "tokens of one optimizer step, over all devices")]


def _optimizer(method: Method, steps: int) -> str:
    rate = _LEARNING_RATES[method]
    if method in ON_POLICY:
        return f"{{lr: {rate}}}"
    return f"{{lr: {rate}, schedule: cosine, warmup_steps: {steps // 20}}}"


def epochs_of(method: Method) -> int:
    """Epochs of fixed data that are usual for a method."""
    return 3 if method in ("sft", "distill") else 1


def _step_note(choices: Choices) -> str:
    """How many epochs the steps are, which is not the usual number for very few or very many rows."""
    epochs = choices.sizes.epochs
    number = f"{epochs:.0f}" if epochs >= 10 else f"{epochs:.2g}"
    about = "about" if choices.is_counted else "less than"
    return f"{about} {number} epoch{'' if number == '1' else 's'} of {choices.rows}; or give `epochs` instead"


def _every(steps: int) -> int:
    return max(1, steps // 5)


def _commented(text: str, comment: str) -> str:
    return f"{text:<{_COMMENT_COLUMN}}  # {comment}"


REWARD = '''def reward(answer, reference):
    """1 for a right answer, 0 for any other. Change this to what your answers are worth.

    `reference` is the row's right answer, from `{column}`. Further parameters that a reward can take:
    `row`, `prompt`, `num_tokens`, `truncated` (docs/rewards.md).
    """
    return 1.0 if reference is not None and final(answer) == final(reference) else 0.0


def final(text):
    """What counts of a text: what is behind ####, and of that the last number, or all of it if there is none."""
    text = text.rpartition("####")[2]
    numbers = re.findall(r"-?\\d[\\d,]*(?:\\.\\d+)?", text)
    return numbers[-1].replace(",", "") if numbers else text.strip().lower()
'''
EMPTY_REWARD = '''def reward(answer, prompt):
    """What an answer is worth, as a number. The data has no right answers, so this has to be written first.

    Further parameters that a reward can take: `row`, `num_tokens`, `truncated` (docs/rewards.md).
    """
    raise NotImplementedError("write the reward in this file first")
'''
AS_CHAT = '''def as_chat(row):
    """Asks the prompt as the user's turn of a chat, because the model has a chat template."""
    return {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
'''


def functions_text(*, has_reward: bool, reference: str | None, as_chat: bool) -> str:
    """The Python file beside a recipe; empty if it needs none."""
    parts: list[str] = []
    if has_reward:
        parts.append(EMPTY_REWARD if reference is None else REWARD.replace("{column}", reference))
    if as_chat:
        parts.append(AS_CHAT)
    if not parts:
        return ""
    head = '"""Functions of a recipe drafted by `podium init`."""\n\n'
    return head + ("import re\n\n\n" if has_reward and reference is not None else "\n") + "\n\n".join(parts)
