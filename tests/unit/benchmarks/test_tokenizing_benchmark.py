# SPDX-License-Identifier: Apache-2.0
"""The benchmark of tokenizing on several ranks: its text, and one run of everything in small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tokenizing


def test_text_is_seeded_and_common_words_come_often() -> None:
    text = tokenizing.Words(seed=1, size=500).text(4000)
    assert text == tokenizing.Words(seed=1, size=500).text(4000)
    assert text != tokenizing.Words(seed=2, size=500).text(4000)
    words = text.lower().split()
    counts = sorted((words.count(word) for word in set(words)), reverse=True)
    assert counts[0] > 20 * counts[len(counts) // 2]


@pytest.mark.slow
def test_ranks_that_share_have_the_steps_of_ranks_that_do_not(tmp_path: Path) -> None:
    tokenizing.make_data(tmp_path, rows=2500, median=60, vocabulary=800)
    case = tokenizing.Case(folder=tmp_path, ranks=2, shares=True, tokens=2048, steps=6)
    shared, alone = tokenizing.run_case(case), tokenizing.run_case(replace(case, shares=False))
    assert len({figure.digests for figure in (*shared, *alone)}) == 1
    assert min(figure.sent_bytes for figure in shared) > 4 * 2048 * 0.5
    assert all(figure.sent_bytes == 0 for figure in alone)
    assert all(figure.cpu_ms > 0 for figure in (*shared, *alone))  # beside other work it says nothing
