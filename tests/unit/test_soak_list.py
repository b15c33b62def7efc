# SPDX-License-Identifier: Apache-2.0
"""The list of tests that only `make test-soak` runs names tests that there are."""

from __future__ import annotations

from pathlib import Path

from conftest import soaked_tests

TESTS = Path(__file__).parents[1]


def test_every_line_names_a_test() -> None:
    missing = []
    for line in soaked_tests():
        file, _, name = line.partition("::")
        function = name.split("[")[0].rpartition("::")[2]
        if f"def {function}(" not in (TESTS / file).read_text(encoding="utf-8"):
            missing.append(line)
    assert not missing
