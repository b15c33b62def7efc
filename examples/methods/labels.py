# SPDX-License-Identifier: Apache-2.0
"""The two answers of a pair as two labelled rows."""

from __future__ import annotations

from typing import Any


def good(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["prompt"], "completion": row["chosen"], "label": True}


def bad(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["prompt"], "completion": row["rejected"], "label": False}
