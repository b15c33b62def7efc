# SPDX-License-Identifier: Apache-2.0
"""Steps are nearly full, no document waits for ever, and packed arrays are what they say."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from podium.data.documents import Document, pack
from podium.data.packing import compose_step


def documents(lengths):
    return [Document(tokens=np.zeros(n + 1, np.int32), trained=np.ones(n + 1, np.bool_)) for n in lengths]


def test_documents_are_taken_in_order_until_one_does_not_fit_then_the_longest_that_fits():
    # 4 + 3 leaves 3: the 5 does not fit, of the rest the 2 is the longest that does, then the 1.
    assert compose_step(documents([4, 3, 5, 1, 2]), 10) == (0, 1, 3, 4)


def test_among_equally_long_documents_the_oldest_is_taken():
    assert compose_step(documents([8, 5, 2, 2]), 10) == (0, 2)


def test_an_exact_fit_ends_the_step():
    assert compose_step(documents([6, 4, 1]), 10) == (0, 1)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 200))
def test_the_budget_holds_the_oldest_goes_first_and_nothing_that_fits_is_left(lengths, budget):
    chosen = compose_step(documents(lengths), budget)
    total = sum(lengths[index] for index in chosen)
    assert total <= budget
    assert list(chosen) == sorted(set(chosen))
    assert not lengths or chosen[0] == 0
    left = [length for index, length in enumerate(lengths) if index not in chosen]
    assert all(total + length > budget for length in left)


def test_steps_of_skewed_documents_are_99_percent_full():
    lengths = np.random.default_rng(0).lognormal(np.log(550), 0.8, 8000).clip(4, 4096).astype(int).tolist()
    incoming = iter(documents(lengths))
    waiting = [next(incoming) for _ in range(512)]
    filled = []
    for _ in range(100):
        chosen = set(compose_step(waiting, 16_384))
        filled.append(sum(waiting[index].num_inputs for index in chosen) / 16_384)
        waiting = [document for index, document in enumerate(waiting) if index not in chosen]
        waiting += [next(incoming) for _ in range(512 - len(waiting))]
    assert np.mean(filled) > 0.99


def test_packed_documents_restart_positions_and_never_predict_each_other():
    first = Document(tokens=np.array([1, 2, 3], np.int32), trained=np.array([False, False, True]))
    second = Document(tokens=np.array([4, 5], np.int32), trained=np.array([False, True]))
    batch = pack([first, second])
    assert batch.tokens_T.tolist() == [1, 2, 4]
    assert batch.targets_T.tolist() == [2, 3, 5]
    assert batch.weights_T.tolist() == [0, 1, 1]
    assert batch.positions_T.tolist() == [0, 1, 0]
    assert batch.offsets.tolist() == [0, 2, 3]
    assert (batch.num_tokens, batch.num_trained) == (3, 2)


def test_a_rank_without_documents_gets_one_token_of_no_weight():
    batch = pack([])
    assert (batch.num_tokens, batch.num_trained) == (1, 0)
