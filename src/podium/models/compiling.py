# SPDX-License-Identifier: Apache-2.0
"""Compiled layers, run as they are for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_LOCK = threading.Lock()
_INSIDE = 0  # how many are inside `uncompiled`, in all threads
_STANCE = ExitStack()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Runs compiled layers as they are.

    Torch's stance is one for all threads, and each `set_stance` gives back what it found: of two that overlap, the
    later one would leave the whole process uncompiled. So the first one in takes the stance and the last one out gives
    it back. Compiled layers of other threads run as they are meanwhile."""
    global _INSIDE
    with _LOCK:
        if _INSIDE == 0:
            _STANCE.enter_context(torch.compiler.set_stance("force_eager"))
        _INSIDE += 1
    try:
        yield
    finally:
        with _LOCK:
            _INSIDE -= 1
            if _INSIDE == 0:
                _STANCE.close()
