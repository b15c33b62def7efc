# SPDX-License-Identifier: Apache-2.0
"""What is said of an exception in the user's code."""

from __future__ import annotations

import functools

import pytest

from podium.errors import counted, defined_at, type_phrase, what_raised


def _raise(error: BaseException) -> None:
    raise error


class _MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_the_deepest_line_in_the_users_file_is_named() -> None:
    with pytest.raises(KeyError) as raised:
        _raise(KeyError("x"))
    assert what_raised(raised.value) == f"raised KeyError: 'x' ({__file__}, line 14)"


def test_an_exception_without_text_or_place_is_named_by_its_type() -> None:
    assert what_raised(ValueError()) == "raised ValueError"


def test_an_exception_that_cannot_be_printed_is_named_all_the_same() -> None:
    assert "_MuteError: (" in what_raised(_MuteError())


class _Called:
    def __call__(self) -> None: ...


def test_a_definition_is_found_behind_partials_decorators_and_instances() -> None:
    @functools.wraps(_raise)
    def decorated(error: BaseException) -> None: ...

    place = f"{__file__}, line {_raise.__code__.co_firstlineno}"
    assert [defined_at(each) for each in (_raise, functools.partial(_raise, None), decorated)] == [place] * 3
    assert defined_at(_Called()) == f"{__file__}, line {_Called.__call__.__code__.co_firstlineno}"
    assert [defined_at(each) for each in (len, None, what_raised)] == [""] * 3  # of C, of nobody, of Podium


def test_a_long_text_is_cut() -> None:
    assert len(what_raised(ValueError("x" * 10_000))) < 600


def test_counts_and_types_are_written_as_in_a_sentence() -> None:
    assert [counted(count, "row") for count in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert [type_phrase(value) for value in (3, [], None, ValueError())] == ["an int", "a list", "None", "a ValueError"]
