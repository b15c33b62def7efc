# SPDX-License-Identifier: Apache-2.0
"""The example of docs/orchestration.md runs, and the page quotes it as it is."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from helpers.processes import finished

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "orchestration" / "relay.py"


def test_the_page_quotes_the_example_word_for_word() -> None:
    page = (ROOT / "docs" / "orchestration.md").read_text(encoding="utf-8")
    page, _, _ = page.partition("## On a virtual clock")  # the example has no simulation
    quoted = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(quoted) == 4
    code = EXAMPLE.read_text(encoding="utf-8")
    for block in quoted:
        assert block in code


def test_the_example_recovers_from_a_death_in_one_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--inline"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert "rebuilt as train[0]@inline/cpu#1" in said
    assert "step 2: 16 trajectories, 103 tokens, policy 10.507" in said


@pytest.mark.slow
@pytest.mark.serial
def test_the_example_gives_the_same_policy_on_two_ranks_of_ray(tmp_path: Path) -> None:
    said = finished([str(EXAMPLE)], tmp_path / "said.txt")
    assert "rebuilt as train[0]@127.0.0.1/cpu#1, train[1]@127.0.0.1/cpu#1" in said
    assert "step 2: 16 trajectories, 103 tokens, policy 10.507" in said
