# SPDX-License-Identifier: Apache-2.0
"""One HTML file about a run or pipeline: the page with its data inside. It needs no server and loads nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from podium.errors import PodiumError, RunFolderError
from podium.runs.folder import is_pipeline_folder
from podium.ui.answers import Query, json_text
from podium.ui.bundling import single_page
from podium.ui.catalogue import RunEntry
from podium.ui.rollout_reading import step_files, summary_rows
from podium.ui.server import assets
from podium.ui.site import Site

# Of one run: values of all curves, points of the timeline, steps with rollouts, and characters of those.
_MOST_VALUES, _MOST_POINTS, _TIMELINE_POINTS = 40_000, 500, 1000
_MOST_STEPS, _MOST_CHARACTERS = 12, 6_000_000
_MOST_HELDOUT = 2_000_000
_DIGITS = 6
# Looking for what stands out.
_FINDINGS_S = 60.0
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSummary:
    """What a report has, and what of the run it does not have."""

    file: Path
    num_bytes: int
    left_out: tuple[str, ...]


def write_report(run: Path, file: Path) -> ReportSummary:
    """Writes the report of a run, or of a pipeline with all its stages."""
    if not (run / "run.json").is_file() and not is_pipeline_folder(run):
        raise RunFolderError(f"{run} is not the folder of a run or pipeline. Give one, for example runs/NAME.")
    site = Site(run)
    answers: dict[str, Json] = {}
    left_out: list[str] = []
    try:
        answers["/api/runs"] = site.answer("/api/runs", Query())
        for entry in site.catalogue.entries():
            try:
                answers.update(_answers(site, entry, left_out))
            except PodiumError as error:
                left_out.append(f"{entry.id}: {error}")
    finally:
        site.close()
    if len(answers) == 1:
        raise RunFolderError(f"{run} cannot be read: {'; '.join(left_out) or 'it has nothing'}")
    page = single_page(assets(), json_text(answers), left_out or ["nothing"])
    temporary = file.with_name(file.name + ".tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunFolderError(
            f"{file} cannot be written: {error.strerror or error}. Name a file in a folder that exists with --out."
        ) from error
    return ReportSummary(file=file, num_bytes=len(page.encode()), left_out=tuple(left_out))


def _answers(site: Site, entry: RunEntry, left_out: list[str]) -> Iterator[tuple[str, Json]]:
    """Addresses and their answers, for one run."""
    base = f"/api/runs/{quote(entry.id, safe='')}"
    facts = site.answer(base, Query())
    if facts.pop("texts_pending", False):
        facts["texts"] = site.answer(f"{base}/texts", Query())["texts"]
    yield base, facts
    if entry.is_pipeline:
        return
    names = facts["metric_names"]
    points = max(20, min(_MOST_POINTS, _MOST_VALUES // max(1, len(names))))
    curves = site.answer(f"{base}/metrics", Query({"points": str(points)}))
    yield f"{base}/metrics", {"series": {name: _rounded(each) for name, each in curves["series"].items()}}
    if facts["step"] > points:
        left_out.append(f"{entry.id}: curves have {points} points of {facts['step']} steps (mean, least and greatest)")
    machine = site.answer(f"{base}/system", Query({"points": str(points)}))
    yield f"{base}/system", {"series": {name: _rounded(each) for name, each in machine["series"].items()}}
    if not site.data(entry.id).timeline.read_rest():
        left_out.append(f"{entry.id}: timeline and accounting are of the newest part; reading all took too long")
    # No server reads the rest while one looks at a report.
    whole = {"is_whole": True}
    yield f"{base}/timeline", site.answer(f"{base}/timeline", Query({"points": str(_TIMELINE_POINTS)})) | whole
    yield f"{base}/accounting", site.answer(f"{base}/accounting", Query()) | whole
    yield f"{base}/findings", site.data(entry.id).findings.view(wait_s=_FINDINGS_S) | {"pending": False}
    yield f"{base}/heldout", _heldout(site, base, entry, left_out)
    yield f"{base}/examples", site.answer(f"{base}/examples", Query())
    yield from _rollouts(site, base, entry, left_out)


def _heldout(site: Site, base: str, entry: RunEntry, left_out: list[str]) -> Json:
    found = site.answer(f"{base}/heldout", Query())
    prompts, size = [], 0
    for each in found["prompts"]:
        size += len(json_text(each))
        if size > _MOST_HELDOUT:
            break
        prompts.append(each)
    missing = found["left_out"] + len(found["prompts"]) - len(prompts)
    if missing:
        left_out.append(f"{entry.id}: held-out answers of {missing} prompts")
    return {**found, "prompts": prompts, "left_out": missing}


def _rollouts(site: Site, base: str, entry: RunEntry, left_out: list[str]) -> Iterator[tuple[str, Json]]:
    """Of some steps the groups with the best, the worst and the longest answer."""
    files = step_files(entry.path)
    if not files:
        return
    steps = list(files)
    count = min(_MOST_STEPS, len(steps))
    chosen = sorted({steps[round(at * (len(steps) - 1) / max(1, count - 1))] for at in range(count)})
    rows: list[Json] = []
    size = 0
    for step in reversed(chosen):  # the newest are the most interesting, should there not be room for all
        try:
            of_step = summary_rows(files[step], step)
            groups = sorted(_telling_groups(of_step))
            wholes = [site.answer(f"{base}/rollouts/{step}/{group}", Query()) for group in groups]
        except (PodiumError, TypeError) as error:  # a damaged file, or one of other types
            left_out.append(f"{entry.id}: rollouts of step {step}: {error}")
            continue
        for group, whole in zip(groups, wholes, strict=True):
            size += len(json_text(whole))
            if size > _MOST_CHARACTERS:
                continue
            rows += [row for row in of_step if row["group"] == group]
            yield f"{base}/rollouts/{step}/{group}", whole
    shown = sorted({row["step"] for row in rows})
    yield f"{base}/rollouts", {
        "total": len(rows), "page": 1, "size": len(rows), "rows": sorted(rows, key=lambda row: row["step"]),
        "steps": [min(shown), max(shown)] if shown else [], "is_whole": True,
        "sources": sorted({row["source"] for row in rows if row["source"] is not None}),
        "index": {"done": len(rows), "of": len(rows)},
    }  # fmt: skip
    left_out.append(
        f"{entry.id}: rollouts of {len(shown)} of {len(files)} steps are here, of each the groups with the best, the "
        "worst and the longest answer"
    )


def _telling_groups(rows: list[Json]) -> set[int]:
    graded = [row for row in rows if row["reward"] is not None]
    chosen = [max(graded, key=lambda row: row["reward"]), min(graded, key=lambda row: row["reward"])] if graded else []
    if rows:
        chosen.append(max(rows, key=lambda row: row["length"] or 0))
    return {row["group"] for row in chosen}


def _rounded(curve: Mapping[str, Any]) -> Json:
    """Six digits are more than a screen shows."""
    rounded: Json = dict(curve)
    for name in ("value", "low", "high"):
        rounded[name] = [None if each is None else float(f"{each:.{_DIGITS}g}") for each in curve[name]]
    rounded["time_s"] = [round(each, 2) for each in curve["time_s"]]
    return rounded
