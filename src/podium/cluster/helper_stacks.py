# SPDX-License-Identifier: Apache-2.0
"""Stacks of the processes that a rank or worker has started, for instance its tokenizers."""

from __future__ import annotations

import math
import time

from podium.cluster.processes import descendants
from podium.stack_dumps import dumped_stacks, dumper_name

# For asking them where the answer has a deadline of some seconds.
SHORT_S = 0.5


def stacks_of_helpers(pid: int, *, within_s: float = math.inf) -> tuple[tuple[str, str], ...]:
    """Names and stacks of the processes that a process has started and that allow it. After `within_s` no more of them
    are asked; one that does not answer takes a second."""
    found, begun_s = list[tuple[str, str]](), time.monotonic()
    for helper in descendants([pid]):
        if time.monotonic() - begun_s >= within_s:
            break
        name = dumper_name(helper)
        dump = None if name is None else dumped_stacks(helper)
        if name is not None and dump is not None:
            found.append((name, dump))
    return tuple(found)
