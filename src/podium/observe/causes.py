# SPDX-License-Identifier: Apache-2.0
"""The causes to which the time of a run is accounted. Tables, pages and the planner use these names. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

Cause = Literal[
    "generation",
    "episodes",
    "grading",
    "scoring",
    "update",
    "weights",
    "save",
    "evaluation",
    "start-up",
    "control",
    "waiting for prompts",
    "waiting for the tail of generation",
    "waiting for grading",
    "waiting for tools",
    "waiting for weights",
    "waiting for the other role",
    "waiting for other ranks",
    "waiting for data",
    "waiting for the controller",
    "waiting for recovery",
    "waiting for start-up",
    "waiting for save",
    "waiting for evaluation",
    "residency",
    "unknown",
]
"""What a second of a worker went into."""

# Names of inner spans that say what a process waits for.
FOR_PROMPTS: Final = "waiting for prompts"
FOR_REQUESTS: Final = "waiting for requests"
FOR_GENERATION: Final = "waiting for generation"
FOR_TOOLS: Final = "waiting for tools"
FOR_GRADING: Final = "waiting for grading"
FOR_RANKS: Final = "waiting for other ranks"

CauseKind = Literal["compute", "wait", "move", "unknown"]
"""`compute`: the worker does something. `move`: roles move on or off its device. All but `compute` is idle time."""


@dataclass(frozen=True, slots=True)
class CauseFacts:
    """What a cause means."""

    kind: CauseKind
    description: str


CAUSES: Final[Mapping[Cause, CauseFacts]] = {
    "generation": CauseFacts("compute", "an engine generates, also with few sequences"),
    "episodes": CauseFacts("compute", "an episode runner builds prompts and reads answers"),
    "grading": CauseFacts("compute", "a grader runs reward functions"),
    "scoring": CauseFacts("compute", "references, teachers, critics and reward models score episodes"),
    "update": CauseFacts("compute", "forward, backward and optimizer, of policy or critic"),
    "weights": CauseFacts("compute", "the worker sends, receives or installs weights"),
    "save": CauseFacts("compute", "the worker writes a checkpoint or a snapshot"),
    "evaluation": CauseFacts("compute", "the worker computes for an evaluation"),
    "start-up": CauseFacts("compute", "the worker imports, builds its roles, or prepares what it needs"),
    "control": CauseFacts(
        "compute", "the controller's own time (records, batches, messages, the program), and quick calls of workers"
    ),
    "waiting for prompts": CauseFacts("wait", "a generator has no prompt: the bound of staleness admits no more"),
    "waiting for the tail of generation": CauseFacts("wait", "the last, slowest episodes of a step are still running"),
    "waiting for grading": CauseFacts("wait", "episodes have ended, and rewards are missing"),
    "waiting for tools": CauseFacts("wait", "all running episodes wait for a tool or an environment"),
    "waiting for weights": CauseFacts("wait", "other workers send or install weights"),
    "waiting for the other role": CauseFacts(
        "wait", "learners for generators, generators for learners, graders and episode runners for either"
    ),
    "waiting for other ranks": CauseFacts("wait", "other ranks of the same role have not finished"),
    "waiting for data": CauseFacts("wait", "the loader has no batch ready"),
    "waiting for the controller": CauseFacts("wait", "nobody computes: messages, records, and the program's own code"),
    "waiting for recovery": CauseFacts("wait", "a dead worker is replaced, and the run is rewound"),
    "waiting for start-up": CauseFacts("wait", "other workers start, or the controller prepares the run"),
    "waiting for save": CauseFacts("wait", "a checkpoint is written"),
    "waiting for evaluation": CauseFacts("wait", "other workers evaluate"),
    "residency": CauseFacts("move", "roles move to the host and back, or a device changes sides"),
    "unknown": CauseFacts("unknown", "the timeline does not tell"),
}
assert tuple(CAUSES) == get_args(Cause)


def is_idle(cause: Cause) -> bool:
    """Whether a worker does nothing useful in this time."""
    return CAUSES[cause].kind != "compute"
