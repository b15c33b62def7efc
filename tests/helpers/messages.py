# SPDX-License-Identifier: Apache-2.0
"""Patterns for what a message must say, whatever words it says it in."""

from __future__ import annotations

import re


def facts(*parts: str) -> str:
    """A pattern for `match=` and `re.search`: these parts in this order and in one line, with any text around them."""
    return ".*".join(re.escape(part) for part in parts)
