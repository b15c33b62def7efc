# SPDX-License-Identifier: Apache-2.0
"""One sandbox for all tests of a file; they are skipped where programs cannot be isolated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from podium.environments.sandbox import Sandbox, SandboxLimits
from podium.errors import SandboxError


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """A sandbox with small limits."""
    limits = SandboxLimits(wall_s=20.0, cpu_s=5, memory_mib=128, processes=16, output_kib=64, tmp_mib=8)
    box = Sandbox(limits, workers=2)
    try:
        box.require()
    except SandboxError as error:
        pytest.skip(f"programs cannot be isolated here: {error}")
    yield box
    box.close()
