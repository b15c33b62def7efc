# SPDX-License-Identifier: Apache-2.0
"""Ends a run whose reported log-probs cannot be those of the tokens that engines sampled: tokens of the current weights
are compared with the learner's log-probs, older ones by evidence that holds for any policy. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from podium.algorithms.behavior_check import evidence_limit, has_run_away
from podium.controller.ledger import GroupRecord
from podium.errors import InvariantError, TrainingDivergedError
from podium.roles.stages import UpdateReport

# Of the group that is named.
_MOST_EVENTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """What is wrong, and in which group most."""

    what: str
    prompt: int | None = None
    of_group: str = ""


def check_logprobs(
    step: int, report: UpdateReport, groups: Sequence[GroupRecord], history: Callable[[int], Sequence[str]]
) -> None:
    """Raises an InvariantError if the log-probs that engines reported are not of the tokens they sampled, with a
    correction or without. `history`: prompt index -> what happened to its group."""
    fault = next(_faults(report), None)
    if fault is None:
        return
    worst = ""
    if fault.prompt is not None:
        rows = [each for each in groups if each.prompt_index == fault.prompt]
        worst = f"\nThe group of prompt {fault.prompt} has {fault.of_group}.\nIts history:" + "".join(
            f"\n  {each}" for each in (*rows, *history(fault.prompt)[-_MOST_EVENTS:])
        )
    raise InvariantError(
        f"step {step}: {fault.what} (invariant: behaviour log-probs).\nThe event: the update of step {step}, whose "
        f"groups are in the ledger.{worst}\nThis is a defect of Podium or of the engine: compare them with `podium "
        "verify`, and report it with the run folder. What was committed before this step is as it should be."
    )


def check_distance(step: int, report: UpdateReport) -> None:
    """Raises a TrainingDivergedError if nothing is left in the policy of the weights that sampled its tokens."""
    for age, statistics in sorted(report.ages.items()):
        if has_run_away(statistics):
            raise TrainingDivergedError(
                f"step {step}: the policy finds tokens of age {age} less likely than the weights that sampled them, by "
                f"{statistics.distance:.3g} nats a token on average. No correction can use such tokens. Either the "
                "policy has run away (lower optimizer.lr, algorithm.mini_batches, algorithm.epochs or "
                "rollout.staleness, and set algorithm.max_kl_behavior to stop earlier), or the engine reports "
                "log-probs that are too high (compare with `podium verify`)."
            )


def _faults(report: UpdateReport) -> Iterator[_Fault]:
    gap, check = report.gap, report.behavior
    if check.impossible:
        most = max(check.impossible, key=lambda prompt: check.impossible[prompt])
        yield _Fault(
            what=f"engines reported log-probs that are not finite or above 0 for {sum(check.impossible.values())} "
            "sampled tokens. No distribution has them",
            prompt=most,
            of_group=f"the most of them: {check.impossible[most]}",
        )
    if gap.is_of_other_tokens:
        widest = gap.widest_group
        yield _Fault(
            what=f"rollout and learner log-probs differ by {gap}. No rounding does that: they are of other tokens or "
            "of other weights than the engine says, or of another distribution",
            prompt=None if widest is None else widest[0],
            of_group=""
            if widest is None
            else f"the largest difference: {widest[1]:.2g} in the mean over {gap.by_group[widest[0]][1]} tokens",
        )
    for age, statistics in sorted(report.ages.items()):
        limit = evidence_limit(statistics.count, report.num_sequences)
        if statistics.evidence > limit:
            worst = max(check.evidence, key=lambda prompt: check.evidence[prompt], default=None)
            yield _Fault(
                what=f"tokens of age {age} are likelier under the policy than the engines that sampled them reported: "
                f"evidence of {statistics.evidence:.3g} nats over {statistics.count:.0f} tokens, above {limit:.3g}. No "
                "update of the policy does that: the log-probs are of other tokens or of another distribution",
                prompt=worst,
                of_group="" if worst is None else f"the most evidence: {check.evidence[worst]:.3g} nats",
            )
