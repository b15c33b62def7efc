# SPDX-License-Identifier: Apache-2.0
"""Run folders that are damaged, foreign or changing: one of them never takes the page from the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

Serve = Callable[..., Any]


def test_a_name_that_is_no_utf8_is_an_id_that_can_be_asked_for(browser: Any, runs: Path) -> None:
    os.rename(os.fsencode(runs / "two"), os.fsencode(runs) + b"/caf\xe9")

    assert {row["id"] for row in browser.get("/api/runs")["runs"]} == {"one", "caf\\xe9"}
    assert browser.get(f"/api/runs/{quote('caf' + chr(92) + 'xe9')}")["step"] == 6


def test_half_an_emoji_is_a_question_mark(browser: Any, runs: Path) -> None:
    with (runs / "one" / "samples.jsonl").open("a") as file:
        file.write('{"step": 1, "prompt": "half", "answer": "\\ud83d!"}\n')

    prompts = {each["prompt"]: each["answers"] for each in browser.get("/api/runs/one/heldout")["prompts"]}
    assert prompts["half"][0]["answer"] == "?!"
