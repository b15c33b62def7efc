# SPDX-License-Identifier: Apache-2.0
"""verl's side of the splitting benchmark: its own balancing functions, called as its trainer calls them.

    .venv-bench-verl/bin/python benchmarks/splitting_verl.py FOLDER       (started by splitting.py)

FOLDER has cases.json and an .npy file of lengths for each case. For every case one line of JSON goes to stdout, and the
rank, mini-batch and micro-step of each row to FOLDER. What takes more CPU time than the case's limit is given up.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils.seqlen_balancing import (
    calculate_workload,
    get_group_balanced_partitions,
    get_seqlen_balanced_partitions,
    rearrange_micro_batches,
)

Plan = tuple[np.ndarray, np.ndarray, np.ndarray]  # rank, mini-batch, micro-step of each row


def main() -> None:
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGPROF, _give_up)
    torch.set_num_threads(1)
    for case in json.loads((folder / "cases.json").read_text(encoding="utf-8")):
        lengths_N = np.load(folder / f"{case['lengths']}.npy")
        print(json.dumps(run(case, lengths_N, folder)), flush=True)


def _give_up(number: int, frame: Any) -> None:
    raise TimeoutError


def run(case: dict[str, Any], lengths_N: np.ndarray, folder: Path) -> dict[str, Any]:
    way: Callable[[dict[str, Any], np.ndarray], Plan] = WAYS[case["way"]]
    times = []
    signal.setitimer(signal.ITIMER_PROF, case["limit_s"])
    try:
        while len(times) < case["repeats"] and sum(times) < 1.0:
            began = time.process_time()
            rank_N, mini_batch_N, micro_step_N = way(case, lengths_N)
            times.append(time.process_time() - began)
    except TimeoutError:
        if not times:
            return {"name": case["name"], "error": f"not done after {case['limit_s']} CPU seconds"}
    except (AssertionError, ValueError) as error:
        return {"name": case["name"], "error": f"refused: {str(error).split('. ')[0]}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    np.savez(folder / f"{case['name']}.npz", rank_N=rank_N, mini_batch_N=mini_batch_N, micro_step_N=micro_step_N)
    return {"name": case["name"], "ms": 1000 * min(times)}


def work_of(case: dict[str, Any], lengths_N: np.ndarray) -> torch.Tensor:
    """Its quadratic cost is its own; where the cost is linear it is given the lengths."""
    lengths = torch.from_numpy(lengths_N)
    return calculate_workload(lengths) if case["quadratic"] else lengths


def default(case: dict[str, Any], lengths_N: np.ndarray) -> Plan:
    """The default trainer: the whole batch is balanced once, from a tensor; a rank's mini-batches are slices of what it
    got."""
    return _sliced(case, get_seqlen_balanced_partitions(work_of(case, lengths_N), case["num_ranks"], equal_size=True))


def as_list(case: dict[str, Any], lengths_N: np.ndarray) -> Plan:
    """The same, given plain numbers instead of a tensor: quicker, though not how the trainer calls it."""
    work = work_of(case, lengths_N).tolist()
    return _sliced(case, get_seqlen_balanced_partitions(work, case["num_ranks"], equal_size=True))


def legacy(case: dict[str, Any], lengths_N: np.ndarray) -> Plan:
    """The legacy trainer (trainer.use_v1=false): the same, with a rank's rows by work, the cheap at both ends."""
    work = work_of(case, lengths_N).tolist()
    parts = []
    for part in get_seqlen_balanced_partitions(work, case["num_ranks"], equal_size=True):
        by_work = sorted(part, key=lambda row: (work[row], row))
        parts.append(by_work[::2] + by_work[1::2][::-1])
    return _sliced(case, parts)


def _sliced(case: dict[str, Any], parts: list[list[int]]) -> Plan:
    num = sum(len(part) for part in parts)
    rank_N, mini_batch_N = np.zeros(num, np.int64), np.zeros(num, np.int64)
    for rank, part in enumerate(parts):
        rank_N[part] = rank
        mini_batch_N[part] = np.arange(len(part)) * case["mini_batches"] // len(part)
    return rank_N, mini_batch_N, np.zeros(num, np.int64)


def keep_mini_batches(case: dict[str, Any], lengths_N: np.ndarray) -> Plan:
    """The legacy trainer's other way, which no caller switches on: each mini-batch balanced for itself."""
    work = work_of(case, lengths_N).tolist()
    rank_N = np.zeros_like(lengths_N)
    mini_batch_N = np.arange(len(work)) * case["mini_batches"] // len(work)
    size = len(work) // case["mini_batches"]
    for first in range(0, len(work), size):
        parts = get_seqlen_balanced_partitions(work[first : first + size], case["num_ranks"], equal_size=True)
        for rank, part in enumerate(parts):
            rank_N[np.array(part) + first] = rank
    return rank_N, mini_batch_N, np.zeros_like(lengths_N)


def groups(case: dict[str, Any], lengths_N: np.ndarray) -> Plan:
    names = (np.arange(len(lengths_N)) // case["group"]).tolist()
    rank_N = np.zeros_like(lengths_N)
    for rank, part in enumerate(get_group_balanced_partitions(lengths_N.tolist(), names, case["num_ranks"])):
        rank_N[part] = rank
    return rank_N, np.zeros_like(lengths_N), np.zeros_like(lengths_N)


def micro_batches(case: dict[str, Any], lengths_N: np.ndarray) -> Plan:
    """Ranks first, then each rank's micro-batches under the limit, until all ranks have equally many: what they agree
    on by a collective is done here one rank after the other."""
    rank_N, mini_batch_N, micro_step_N = as_list(case, lengths_N)
    mine = [np.flatnonzero(rank_N == rank) for rank in range(case["num_ranks"])]
    batches = [_batch(lengths_N[rows]) for rows in mine]
    found: list[Any] = [[] for _ in mine]
    while len({len(parts) for parts in found}) > 1 or not found[0]:
        fewest = max(len(parts) for parts in found) or None
        for rank, batch in enumerate(batches):
            if len(found[rank]) != fewest:
                _, found[rank] = rearrange_micro_batches(batch, case["max_tokens"], min_num_micro_batch=fewest)
    for rows, parts in zip(mine, found, strict=True):
        for step, part in enumerate(parts):
            micro_step_N[rows[part]] = step
    return rank_N, mini_batch_N, micro_step_N


def _batch(lengths: np.ndarray) -> TensorDict:
    rows = [torch.zeros(int(length), dtype=torch.int8) for length in lengths]
    return TensorDict(
        {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=[len(rows)]
    )  # fmt: skip


WAYS = {
    "default": default, "as list": as_list, "legacy": legacy, "keep mini-batches": keep_mini_batches, "groups": groups,
    "micro-batches": micro_batches,
}  # fmt: skip

if __name__ == "__main__":
    main()
