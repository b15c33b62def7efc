# SPDX-License-Identifier: Apache-2.0
"""Kills processes of on-policy runs on Ray at seeded random moments, and compares what the runs computed with one that
nobody killed.

    .venv/bin/python benchmarks/kills.py --trials 60 --folder kills             all layouts and victims, kill -9
    .venv/bin/python benchmarks/kills.py --trials 20 --folder kills --signal STOP       freezes them instead
    .venv/bin/python benchmarks/kills.py --trial 17 --folder kills              trial 17 once more, alone
    .venv/bin/python benchmarks/kills.py --trials 30 --folder kills --layouts sft --victims rank    SFT on two ranks

A run is 12 steps of GRPO with a tiny model on 2 Ray workers, with a checkpoint every 3. Layouts: colocated, split,
elastic, environment (colocated, episodes of three turns), ppo and lora (both colocated). On request: sft, SFT on two
ranks of the local launcher with `placement.restarts`.

Each layout runs once unbroken. Then every trial starts `podium train`, waits for its moment (any from the victim's
appearance to the end, start-up twice in five), hits the victim, waits for the end of the command, and counts the
processes that are left. Every second trial is hit once more: in its recovery, or some steps later. Where the command
did not go on by itself, `podium resume` (`podium train` where no checkpoint was written yet) follows until the run is
complete.

The folder keeps the recipes, all runs with what they printed, and a JSON line for each trial in trials.jsonl. The same
command goes on where it was interrupted. Exit code 1: a command hung, a process was left, or a number differs.
"""

from __future__ import annotations

import argparse
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from itertools import islice
from pathlib import Path

from kills_run import Bench, Limits, Unbroken, source_fingerprint
from kills_task import FIXED_DATA, LAYOUTS, make_task
from kills_trials import CONTROL, RANK, VICTIMS, Row, Trial, cells, drawn, recoveries_line, table, victims_table


def main() -> None:
    asked = parsed()
    planned = plan(asked)
    # Also where a shell runs this in the background, and where a job is ended politely: nothing stays behind.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if asked.folder is not None:
        sys.exit(measure(asked, asked.folder.resolve(), planned))
    with tempfile.TemporaryDirectory(prefix="kills-runs-") as scratch:
        sys.exit(measure(asked, Path(scratch), planned))


def plan(asked: argparse.Namespace) -> list[Trial]:
    """Trials of this call: all of them, or the one that is asked for alone."""
    endless = drawn(asked.seed, asked.layouts, asked.victims, asked.signal)
    if asked.trial is not None:
        return [next(islice(endless, asked.trial, None))]
    if asked.start_up:
        endless = (trial for trial in endless if trial.moment.steps is None)
    return list(islice(endless, asked.trials))


def measure(asked: argparse.Namespace, folder: Path, planned: Sequence[Trial]) -> int:
    """Makes the trials that the folder does not have yet, and prints the table of all that were planned."""
    claim(folder)
    bench = Bench(
        task=make_task(folder / "task"), folder=folder, limits=Limits(end_s=asked.hang_s, left_s=asked.left_s)
    )
    file = folder / "trials.jsonl"
    known = {row.trial: row for row in read_rows(file)} if asked.trial is None else {}
    rows = [known[trial] for trial in planned if trial in known]
    missing = [trial for trial in planned if trial not in known]
    try:
        made = run_all(bench, missing, asked.parallel, file)
    except KeyboardInterrupt:
        print("interrupted: all processes are ended; the same command goes on", file=sys.stderr)
        return 130
    rows += made
    print(f"\n{platform.machine()}, seed {asked.seed}, SIG{asked.signal}, hang after {asked.hang_s:.0f} s\n")
    for line in table(rows):
        print(line)
    print()
    for line in victims_table(rows):
        print(line)
    print(f"\n{recoveries_line(rows)}")
    bad = sorted(row.trial.number for row in rows if not row.good)
    if bad:
        print(f"\nnot as it should be: trials {', '.join(map(str, bad))}. Repeat one alone with --trial N.")
    return int(bool(bad))


def run_all(bench: Bench, planned: Sequence[Trial], parallel: int, file: Path) -> list[Row]:
    """Unbroken runs first, one at a time: they are the measure of time, too."""
    pool = ThreadPoolExecutor(max_workers=parallel)
    rows: list[Row] = []
    try:
        unbroken: dict[str, Unbroken] = {}
        for layout in sorted({trial.layout for trial in planned}):
            unbroken[layout] = pool.submit(bench.unbroken, layout).result()
            print(f"unbroken {layout}: {unbroken[layout].wall_s:.0f} s", flush=True)
        pending: list[Future[Row]] = [pool.submit(bench.run, trial, unbroken[trial.layout]) for trial in planned]
        for future in as_completed(pending):
            row = future.result()
            rows.append(row)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(row.line() + "\n")
            print(summary(row), flush=True)
    except BaseException:
        # The threads end their processes before they return.
        bench.stop.set()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
    return rows


def summary(row: Row) -> str:
    """One line for a trial as it is done."""
    trial, parts = row.trial, []
    for attempt in row.attempts:
        ended = "hung" if attempt.hung else f"exit {attempt.code}"
        was_hit = (
            ""
            if attempt.end_s is None
            else f" at {attempt.hit_at_s:.1f} s ({attempt.hit_while}), +{attempt.end_s:.1f} s"
        )
        left = f", left: {', '.join(attempt.left)}" if attempt.left else ""
        parts.append(f"{attempt.verb}{was_hit} {ended}{left}")
    apart = "" if row.first_difference is None else f", differs from step {row.first_difference}"
    missed = f", {row.num_missed} of {len(trial.moments)} kills hit nobody" if row.num_missed else ""
    verdict = "ok" if row.good else f"BAD (weights {row.weights_equal}, ledger {row.ledger_equal}{apart})"
    return (
        f"trial {trial.number}: {trial.layout} {trial.victim}, {trial.moment}: {'; '.join(parts)}: {verdict}"
        f"{missed}, {row.wall_s:.0f} s"
    )


def claim(folder: Path) -> None:
    """A folder belongs to one state of the code: numbers of another are no measure."""
    folder.mkdir(parents=True, exist_ok=True)
    mark, now = folder / "code", source_fingerprint()
    if mark.exists() and mark.read_text(encoding="utf-8") != now:
        raise SystemExit(f"{folder} holds runs of other code. Give another --folder, or remove it.")
    mark.write_text(now, encoding="utf-8")


def read_rows(file: Path) -> list[Row]:
    """The newest row of each trial; a line that was cut off is none."""
    found: dict[Trial, Row] = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                row = Row.read(line)
                found[row.trial] = row
    return list(found.values())


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def of(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return names

    return of


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=len(cells(LAYOUTS, VICTIMS, "KILL")))
    parser.add_argument("--trial", type=int, help="only the trial of this number, once more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", type=_names((*LAYOUTS, *FIXED_DATA)), default=LAYOUTS, help="separated by commas")
    parser.add_argument(
        "--victims", type=_names((*VICTIMS, RANK, CONTROL)), default=VICTIMS,
        help=f"separated by commas, of {', '.join((*VICTIMS, RANK))}; {CONTROL}: nobody, as a control",
    )  # fmt: skip
    parser.add_argument("--signal", default="KILL", choices=["KILL", "STOP"])
    parser.add_argument("--start-up", action="store_true", help="only trials that hit first during start-up")
    parser.add_argument("--folder", type=Path, help="for runs and rows; default: a temporary one")
    parser.add_argument("--parallel", type=int, default=1, help="trials at the same time")
    parser.add_argument("--hang-s", type=float, default=180.0, help="after a hit, before a command counts as hanging")
    parser.add_argument("--left-s", type=float, default=15.0, help="after its end, before a process counts as left")
    found = parser.parse_args()
    if not cells(found.layouts, found.victims, found.signal):
        parser.error("these layouts have none of these victims")
    return found


if __name__ == "__main__":
    main()
