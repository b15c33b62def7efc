# SPDX-License-Identifier: Apache-2.0
"""Given tokens are scored as sampled ones are, and answers are shown before they are finished."""

from __future__ import annotations

import numpy as np
import pytest
from native_world import DEADLINE_S, Learner, ask, prompt_of

from podium.errors import RolloutError
from podium.rollout.engine import ScoresTokens, ShowsPartialAnswers


def test_the_scores_of_a_greedy_answer_are_its_log_probs_and_its_tokens_the_best(learner: Learner) -> None:
    engine = learner.engine()
    assert isinstance(engine, ScoresTokens)
    engine.submit([ask(0, 300 // 2, new=20, temperature=0.0)])
    (done,) = engine.results(deadline_s=DEADLINE_S)

    scores = engine.score(np.concatenate([done.prompt, done.tokens_L]))

    assert len(scores.logprobs_T) == len(scores.best_T) == len(done.prompt) + 20 - 1
    assert np.abs(scores.logprobs_T[-20:] - done.logprobs_L).max() < 1e-4
    assert scores.best_T[-20:].tolist() == done.tokens_L.tolist()
    assert np.array_equal(scores.best_logprobs_T[-20:], scores.logprobs_T[-20:])
    assert (scores.best_logprobs_T >= scores.logprobs_T).all()
    assert len(engine.score(prompt_of(1)).logprobs_T) == 0
    with pytest.raises(RolloutError, match="context"):
        engine.score(prompt_of(engine.capacity.max_length + 1))
    engine.sleep()
    with pytest.raises(RolloutError, match="asleep"):
        engine.score(prompt_of(5))


def test_partial_answers_grow_to_the_answer(learner: Learner) -> None:
    engine = learner.engine()
    assert isinstance(engine, ShowsPartialAnswers)
    requests = [ask(draw, 5, new=12) for draw in range(2)]
    engine.submit(requests)
    seen: list[list[int]] = []
    done = []
    for completion in engine.results(deadline_s=DEADLINE_S, tick_s=0.0):
        if completion is not None:
            done.append(completion)
        partial = engine.partial_answers([requests[0].id]).get(requests[0].id)
        if partial is not None:
            assert len(partial.tokens_L) == len(partial.logprobs_L) == len(partial.versions_L)
            seen.append(partial.tokens_L.tolist())

    whole = next(each for each in done if each.id == requests[0].id).tokens_L.tolist()
    assert len({len(tokens) for tokens in seen}) > 3
    assert all(tokens == whole[: len(tokens)] for tokens in seen)
    assert engine.partial_answers([requests[0].id]) == {}
