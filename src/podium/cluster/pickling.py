# SPDX-License-Identifier: Apache-2.0
"""Objects of a notebook or a script as bytes that another process can read, with the pickler that Ray ships."""

from __future__ import annotations

from typing import Any


def pickled(value: Any) -> bytes:
    """Functions and classes without an import path are written whole, with what they use; those of modules by name.
    Raises what the pickler raises. Plain `pickle` reads the bytes."""
    from ray import cloudpickle  # heavy: only for objects that have no import path

    return bytes(cloudpickle.dumps(value))
