# SPDX-License-Identifier: Apache-2.0
"""Keys that have another name now. They are refused with it."""

from __future__ import annotations

from collections.abc import Mapping

RETIRED_KEYS: Mapping[str, str] = {
    "rollout.page_tokens": "rollout.block_size",
}


def new_name(key: str) -> str | None:
    """What a key is called now, also inside of a pipeline's stage or defaults; None where it never had another name."""
    for old, new in RETIRED_KEYS.items():
        if key == old or key.endswith(f".{old}"):
            return key.removesuffix(old) + new
    return None
