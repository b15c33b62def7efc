# SPDX-License-Identifier: Apache-2.0
"""Keys that were renamed. The error for an old key gives the new name."""

from __future__ import annotations

from collections.abc import Mapping

RETIRED_KEYS: Mapping[str, str] = {
    "rollout.page_tokens": "rollout.block_size",
}


def new_name(key: str) -> str | None:
    """The new name of a key, also inside a pipeline's stage or defaults; None if it was never renamed."""
    for old, new in RETIRED_KEYS.items():
        if key == old or key.endswith(f".{old}"):
            return key.removesuffix(old) + new
    return None
