# SPDX-License-Identifier: Apache-2.0
"""The example of docs/rollout.md and docs/weights.md runs, and the pages quote it as it is."""

from __future__ import annotations

import re
import runpy
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "rollout" / "answers.py"


@pytest.mark.parametrize(("page", "count"), [("rollout.md", 3), ("weights.md", 2)])
def test_the_page_quotes_the_example_word_for_word(page: str, count: int) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    quoted = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(quoted) == count
    code = EXAMPLE.read_text(encoding="utf-8")
    for block in quoted:
        assert textwrap.indent(block, " " * 4) in code or block in code


def test_the_example_names_versions_and_raises_no_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of 20 and 7 tokens are computed once, and three samples of each feed the last token again: 33 tokens. The
    six answers under way at the update have three tokens each and are computed anew: 3 x 23 and 3 x 10."""
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert "0.0#0: 4 tokens, length, versions [1, 1, 1, 1]" in said
    assert "1.3#0: 10 tokens, length, versions [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]" in said
    assert "prompt tokens: 132 computed, 75 found in the cache" in said
    assert "canary of 20 tokens: no alarm" in said
    assert said.strip() in (ROOT / "docs" / "rollout.md").read_text(encoding="utf-8")
