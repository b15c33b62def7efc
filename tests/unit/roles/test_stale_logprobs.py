# SPDX-License-Identifier: Apache-2.0
"""Log-probs of older tokens are checked in every update, with recomputed log-probs and without, and a run with wrong
ones ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from helpers.made_batches import make_report
from helpers.on_policy import CASES, Episodes, RecordingEngine, make_episodes, recording_engine, run_update
from helpers.tiny import save_tiny_model
from podium.algorithms.behavior_check import BehaviorCheck
from podium.controller.behavior_logprobs import check_logprobs
from podium.data.trajectories import TrajectoryBlock
from podium.engine.scoring import score
from podium.errors import InvariantError
from podium.roles.interfaces import UpdateNote
from podium.weights.canary import LogprobGap

# The second recomputes log-probs before the update, and drops tokens.
CASE = pytest.mark.parametrize("case", ["clipped", "token mask"])


@dataclass(frozen=True, eq=False)
class Setting:
    engine: RecordingEngine
    episodes: Episodes  # with the log-probs of the learner, all of version 0 where the update begins with version 2
    own_T: np.ndarray
    trained_T: np.ndarray

    def update(self, case: str, behavior_T: np.ndarray | None = None, *, newest: int = 2) -> UpdateNote:
        block = self.episodes.block
        if behavior_T is not None:
            block = replace(block, behavior_logprobs_T=behavior_T.astype(np.float32))
        versions = tuple(range(newest + 1))
        return run_update(self.engine, replace(self.episodes, block=block), CASES[case], versions=versions).note


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder: Path = save_tiny_model("qwen3", tmp_path_factory.mktemp("stale"))
    engine, made = recording_engine(folder), make_episodes(folder, temperature=0.8)
    own_T = score(engine.language_model, engine.mesh, made.block, temperature=0.8).values_T
    trained_T = made.block.loss_mask_T & (own_T != 0)
    block = replace(made.block, behavior_logprobs_T=np.where(trained_T, own_T, 0).astype(np.float32))
    return Setting(engine=engine, episodes=replace(made, block=block), own_T=own_T, trained_T=trained_T)


def prompts_T(block: TrajectoryBlock) -> np.ndarray:
    """Prompt index of each token."""
    return np.repeat(block.ids.array_N4[:, 0], block.lengths_N)


def checked(note: UpdateNote) -> None:
    """As the controller does with what learners report."""
    report = make_report(
        ages=note.ages, behavior=note.behavior, gap=LogprobGap.merge([]), num_sequences=note.num_sequences
    )
    check_logprobs(7, report, (), lambda prompt: (f"admitted: prompt {prompt}",))


@CASE
def test_evidence_of_stale_tokens_is_reported_by_age_and_by_group(setting: Setting, case: str) -> None:
    """Log-probs 1 nat too low in group 1: log((1 + e) / 2) for each of its tokens, and 0 elsewhere."""
    block = setting.episodes.block
    mine_T = setting.trained_T & (prompts_T(block) == 1)
    note = setting.update(case, block.behavior_logprobs_T - mine_T)

    each, count = np.log((1 + np.e) / 2), int(mine_T.sum())
    assert sorted(note.ages) == [2]
    assert note.ages[2].count == setting.trained_T.sum()
    assert note.ages[2].evidence == pytest.approx(count * each, rel=1e-4)
    assert note.ages[2].distance == pytest.approx(-count / setting.trained_T.sum(), rel=1e-4)
    assert note.behavior.evidence[1] == pytest.approx(count * each, rel=1e-4)
    assert all(abs(value) < 1e-4 for prompt, value in note.behavior.evidence.items() if prompt != 1)


@CASE
def test_stale_log_probs_that_are_too_low_end_the_run_with_their_group(setting: Setting, case: str) -> None:
    """Evidence of almost 6 nats a token against a limit of 30 nats, 0.02 a token and 4.6 a sequence."""
    block = setting.episodes.block
    checked(setting.update(case))
    shifted_T = block.behavior_logprobs_T - 6.0 * setting.trained_T
    shifted_T -= 3.0 * (setting.trained_T & (prompts_T(block) == 3))

    with pytest.raises(InvariantError, match="invariant: behaviour log-probs") as raised:
        checked(setting.update(case, shifted_T))

    report = str(raised.value)
    assert "step 7: tokens of age 2 are likelier" in report
    assert "The event: the update of step 7" in report
    most = setting.update(case, shifted_T).behavior.evidence
    worst = max(most, key=lambda prompt: most[prompt])
    assert f"The group of prompt {worst} has the most evidence: {most[worst]:.3g} nats" in report
    assert f"Its history:\n  admitted: prompt {worst}" in report


@CASE
@pytest.mark.parametrize("newest", [0, 2])  # of the current weights too
@pytest.mark.parametrize("wrong", [0.5, float("nan"), float("inf")])
def test_one_log_prob_that_no_distribution_has_ends_the_run(
    setting: Setting, case: str, newest: int, wrong: float
) -> None:
    block = setting.episodes.block
    behavior_T = block.behavior_logprobs_T.copy()
    place = np.flatnonzero(setting.trained_T)[-1]
    behavior_T[place] = wrong
    note = setting.update(case, behavior_T, newest=newest)

    prompt = int(prompts_T(block)[place])
    assert note.behavior.impossible == {prompt: 1}
    with pytest.raises(InvariantError, match=rf"above 0 for 1 sampled tokens.*\n.*\nThe group of prompt {prompt} has"):
        checked(note)


@CASE
def test_tokens_of_the_current_weights_alone_have_no_evidence(setting: Setting, case: str) -> None:
    """They are compared with the learner's log-probs, as ever."""
    note = setting.update(case, setting.episodes.block.behavior_logprobs_T - 6.0 * setting.trained_T, newest=0)
    assert (note.ages, note.behavior) == ({}, BehaviorCheck())
    assert note.gap.count == setting.trained_T.sum()
    assert note.gap.is_of_other_tokens
