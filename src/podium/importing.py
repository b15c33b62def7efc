# SPDX-License-Identifier: Apache-2.0
"""Imports of large packages, which are most of a start-up, at less cost."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Without the garbage collector, which finds nothing in what is being imported: a sixth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def import_all(modules: Iterable[str]) -> None:
    """Imports modules by name."""
    with collector_off():
        for module in modules:
            importlib.import_module(module)


def load_object(place: str) -> object:
    """What "module:name" says."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def import_transformers_without_torch() -> None:
    """For a process that needs tokenizers only: importing torch would take longer than all else that it does. From then
    on transformers has no models in this process, so nothing may ask it for one. Does nothing where either is there
    already."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # transformers says that it found no torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # as Python writes down what cannot be imported
    try:
        with collector_off():
            importlib.import_module("transformers").utils.is_torch_available()  # which it remembers
    finally:
        del sys.modules["torch"]
        logging.disable(before)
