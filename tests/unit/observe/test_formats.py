# SPDX-License-Identifier: Apache-2.0
"""Numbers and model output in one line."""

import math

import pytest

from podium.observe.formats import duration, one_line, rate


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (950.4, "950"),
        (999.6, "1.00k"),
        (45_123, "45.1k"),
        (999_700, "1.00M"),
        (1.2e9, "1.20G"),
        (math.nan, "?"),
    ],
)
def test_a_rate_has_three_digits(value: float, shown: str) -> None:
    assert rate(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (8.6, "0:09"),
        (59.7, "1:00"),
        (754, "12:34"),
        (3723, "1:02:03"),
        (183_840, "2d 03:04"),
        (-1, "0:00"),
        (math.inf, "?"),
    ],
)
def test_a_duration_shows_its_two_or_three_largest_parts(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_control_characters_of_a_model_never_reach_the_terminal() -> None:
    assert one_line("a\nb\x1b[31mc") == r"a\nb\x1b[31mc"


def test_a_long_text_is_cut_at_the_limit() -> None:
    assert one_line("abcdef", limit=4) == "abc…"
    assert one_line("abcd", limit=4) == "abcd"
