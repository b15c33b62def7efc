# SPDX-License-Identifier: Apache-2.0
"""Writes the rows of a taskset of verifiers: train.jsonl and heldout.jsonl, with a task's position in each row.

    python examples/verifiers/make_rows.py examples/verifiers/signs.py demo/signs --heldout 20

The first argument is a file or the id of an installed taskset.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("taskset")
    parser.add_argument("out", type=Path, help="folder to write into; made if need be")
    parser.add_argument("--heldout", type=int, default=20, help="tasks at the end that are not trained on")
    arguments = parser.parse_args()
    make_rows(arguments.taskset, arguments.out, heldout=arguments.heldout)


def make_rows(taskset: str, out: Path, *, heldout: int) -> None:
    """Writes both files."""
    size = num_tasks(taskset)
    if not 0 <= heldout < size:
        raise SystemExit(f"the taskset has {size} tasks, and {heldout} are to be held out")
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "train.jsonl", range(size - heldout))
    write_rows(out / "heldout.jsonl", range(size - heldout, size))
    print(f"{out}: {size - heldout} tasks to train on, {heldout} held out")


def num_tasks(taskset: str) -> int:
    """The size of a finite taskset with its default config."""
    from verifiers.v1 import load_taskset, taskset_config_type

    if taskset.endswith(".py"):
        sys.path.insert(0, str(Path(taskset).resolve().parent))
        taskset = Path(taskset).stem
    loaded = load_taskset(taskset_config_type(taskset)(id=taskset))
    if not loaded.bounded:
        raise SystemExit(f"{taskset} has no end: write rows with the numbers that you want")
    return sum(1 for _ in loaded)


def write_rows(path: Path, numbers: Iterable[int]) -> None:
    path.write_text("".join(json.dumps({"idx": number}) + "\n" for number in numbers), encoding="utf-8")


if __name__ == "__main__":
    main()
