# SPDX-License-Identifier: Apache-2.0
"""Patterns for what a message must say, whatever words it says it in."""

from __future__ import annotations

import re


def facts(*parts: str) -> str:
    """A pattern for `match=` and `re.search`: these parts in this order and in one line, with any text around them. The
    console wraps long lines: what follows is indented, and counts as the same line."""
    return r"(?:[^\n]|\n  )*".join(re.escape(part).replace(r"\ ", r"\s+") for part in parts)
