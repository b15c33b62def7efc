# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of bytes and the chat templates of the environments' tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "environments"))
