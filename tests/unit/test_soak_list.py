# SPDX-License-Identifier: Apache-2.0
"""The list of tests that only `make test-soak` runs names tests that there are."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_line_names_a_test() -> None:
    missing = []
    for line in (TESTS / "soak.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        file, _, name = line.partition("::")
        function = name.rstrip("*").split("[")[0].rpartition("::")[2]
        if f"def {function}" not in (TESTS / file).read_text(encoding="utf-8"):
            missing.append(line)
    assert not missing
