# SPDX-License-Identifier: Apache-2.0
"""What rewards are given: episodes as samples with texts."""

from __future__ import annotations

import numpy as np

from podium.data.kinds import Message
from podium.data.tasks import Task
from podium.environments.signatures import Sample
from podium.roles.carriers import GradeShard
from podium.roles.texts import EpisodeText


def sample_of(shard: GradeShard, row: int, text: EpisodeText, *, tools: bool) -> Sample:
    """One episode of a shard. `tools`: turns between the policy's are tool results, else user messages."""
    id = shard.ids[row]
    task = shard.tasks[id.prompt_index]
    environment = float(shard.environment_N[row])
    return Sample(
        id=id,
        group=id.prompt_index,
        prompt_text=task.prompt_text,
        messages=task.messages,
        answer=text.answer,
        reference=task.reference,
        row=task.row,
        source=task.source,
        num_tokens=text.num_sampled,
        truncated=bool(shard.truncated_N[row]),
        tokens=text.tokens,
        turns=_turns(task, text, tools=tools),
        environment_reward=None if np.isnan(environment) else environment,
    )


def _turns(task: Task, text: EpisodeText, *, tools: bool) -> list[Message] | None:
    """The whole conversation if it has several turns."""
    if len(text.turns) < 2:
        return None
    other = "tool" if tools else "user"
    question: list[Message] = [{"role": "user", "content": task.text}] if task.text is not None else []
    spoken: list[Message] = [
        {"role": "assistant" if is_policy else other, "content": said} for is_policy, said in text.turns
    ]
    return [*(question if task.messages is None else task.messages), *spoken]
