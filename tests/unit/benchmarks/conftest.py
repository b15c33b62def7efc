# SPDX-License-Identifier: Apache-2.0
"""Benchmarks are scripts that import each other by name, not a package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
