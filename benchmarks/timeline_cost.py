# SPDX-License-Identifier: Apache-2.0
"""What the timeline of a run costs: microseconds of CPU time for everything that is recorded, and its share of the
steps of a finished run.

    .venv/bin/python benchmarks/timeline_cost.py --run runs/my-grpo

Each figure is the median of `--turns` turns. The share of a step is computed: what its spans cost to record, send and
write, with the looks of the engines' summaries (one every 5 ms while an engine generates), over the step's time.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from podium.cluster.identity import WorkerId
from podium.cluster.spans import SpanRecorder
from podium.observe import Stopwatch, read_metrics
from podium.observe.timeline import TimelineFile, TimelineSpan, engine_steps, read_timeline, timeline_file
from podium.rollout.engine import Load

COUNT = 5_000
LOOK_EVERY_S = 0.005
LOAD = Load(
    waiting=1, running=8, cache_tokens=0, cache_tokens_used=0, cache_tokens_kept=0, finished=0, generated_tokens=0,
    prefilled_tokens=0, reused_tokens=0, preemptions=0,
)  # fmt: skip


class _Context:
    """Takes spans as a worker's context does."""

    def __init__(self) -> None:
        self.recorder = SpanRecorder()

    def add_span(self, *span: object) -> None:
        self.recorder.add(*span)  # type: ignore[arg-type]


def microseconds(work: Callable[[], object], turns: int) -> float:
    """CPU time of one of COUNT calls."""
    found = []
    for _ in range(turns):
        began = time.process_time()
        work()
        found.append((time.process_time() - began) / COUNT * 1e6)
    return statistics.median(found)


def costs(turns: int) -> dict[str, float]:
    """Microseconds by what is done."""
    from podium.roles.engine_summaries import EngineSummaries

    worker, recorder, watch = WorkerId("train", 0, "node", "cpu"), SpanRecorder(), Stopwatch()

    def record() -> None:
        for _ in range(COUNT):
            with recorder.span("policy.update"):
                pass

    def send() -> None:
        record()
        pickle.loads(pickle.dumps(recorder.drain(worker)))

    def direct() -> None:
        for _ in range(COUNT):
            with watch.span("update"):
                pass

    def look() -> None:
        clock = iter(range(10**9))
        summaries = EngineSummaries(_Context(), lambda: LOAD, clock=lambda: next(clock) * 0.01)  # type: ignore[arg-type]
        summaries.begin()
        for _ in range(COUNT):
            summaries.look()

    def write() -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = TimelineFile(timeline_file(Path(folder)))
            for at in range(COUNT):
                file.append([TimelineSpan("train[0]@node/cpu#0", "generator.stream > steps", at, at + 0.5)])
            file.close()

    return {
        "a span of a worker": microseconds(record, turns),
        "a span of a worker, sent and received": microseconds(send, turns),
        "a span of the controller": microseconds(direct, turns),
        "a look at an engine, with its summaries": microseconds(look, turns),
        "a span written to the timeline": microseconds(write, turns),
    }


def log_s(run: Path, found: dict[str, float]) -> float:
    """Seconds of processor time that the spans of a step of a finished run have cost."""
    spans = list(read_timeline(run))
    generating_s = sum(each.end_s - each.begin_s for each in engine_steps(spans))
    each_us = found["a span of a worker, sent and received"] + found["a span written to the timeline"]
    looks_us = generating_s / LOOK_EVERY_S * found["a look at an engine, with its summaries"]
    return (len(spans) * each_us + looks_us) / 1e6 / len(steps_s(run))


def steps_s(run: Path) -> list[float]:
    """Seconds of its steps."""
    return [line.values["step_s"] for line in read_metrics(run / "metrics.jsonl") if "step_s" in line.values]


def share_of_step(run: Path, found: dict[str, float]) -> str:
    """Of a finished run: spans in a step, and their share of its time."""
    steps, num_spans = steps_s(run), sum(1 for _ in read_timeline(run))
    step_s, cost_s = statistics.median(steps), log_s(run, found)
    return (
        f"{run}: {num_spans / len(steps):.0f} spans in a step of {step_s * 1e3:.0f} ms (median of {len(steps)}): "
        f"{cost_s * 1e6:.0f} us, {cost_s / step_s:.3%} of it"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a finished run")
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    found = costs(arguments.turns)
    for what, cost in found.items():
        print(f"{what:<42} {cost:6.1f} us")
    if arguments.run is not None:
        print(share_of_step(arguments.run, found))


if __name__ == "__main__":
    main()
