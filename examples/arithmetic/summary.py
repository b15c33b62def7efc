# SPDX-License-Identifier: Apache-2.0
"""What a run on the arithmetic task came to: accuracy before and after, and some answers side by side.

python examples/arithmetic/summary.py demo/runs/arithmetic-sft
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from podium.observe import read_metrics

_SHOWN = 6


def main(run: Path) -> None:
    scored = [each for each in read_metrics(run / "metrics.jsonl") if "heldout_score" in each.values]
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    first, last = scored[0], scored[-1]
    before, after = first.values["heldout_score"], last.values["heldout_score"]
    final = [row for row in rows if row["step"] == last.step]
    print(f"\nheld-out accuracy on {len(final)} questions: {before:.1%} before, {after:.1%} after {last.step} steps")
    untrained = {row["prompt"]: row["answer"].strip()[:12] for row in rows if row["step"] == first.step}
    for row in final[:_SHOWN]:
        verdict = "right" if row["score"] == 1 else f"wrong, it is {row['reference']}"
        print(f"  {row['prompt']:<32} before: {untrained[row['prompt']]!r:<15} after: {row['answer']!r} ({verdict})")
    print(f"run folder: {run}    exported model: {run.parent.parent / 'export'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
