# SPDX-License-Identifier: Apache-2.0
"""Mailboxes of episode runners at a generator."""

from __future__ import annotations

import numpy as np

from podium.data.trajectories import TrajectoryId
from podium.roles.mailboxes import Mailboxes
from podium.rollout.requests import Completion, Request, Sampling, given_back

ID = TrajectoryId(3, 0)


def _answer() -> Completion:
    return given_back(Request(id=ID, prompt=np.zeros(2, np.int32), sampling=Sampling(max_new_tokens=4)))


def test_a_runner_gets_no_answer_that_it_has_not_fetched_from_an_earlier_serving() -> None:
    """A run that goes back asks for the same episode under the same id: the first answer may be of another turn."""
    boxes, answer = Mailboxes(), _answer()
    boxes.open()
    assert boxes.expect("runner", [ID])
    boxes.close()  # its stream is abandoned
    boxes.deliver(_answer())

    boxes.open()

    assert boxes.expect("runner", [ID])
    assert boxes.fetch("runner", 0.0) == []
    boxes.deliver(answer)
    assert boxes.fetch("runner", 0.0) == [answer]
