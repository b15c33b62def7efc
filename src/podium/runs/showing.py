# SPDX-License-Identifier: Apache-2.0
"""Describes a run, a pipeline or an exported folder as lines of text. Torch-free and fast."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from podium.errors import RunFolderError
from podium.observe import read_metrics
from podium.observe.console import aligned
from podium.observe.formats import duration, table, three_digits
from podium.observe.timeline import read_newest
from podium.runs.accounting import time_lines, worker_times
from podium.runs.events import membership_changes, recoveries
from podium.runs.folder import RunFolder, is_pipeline_folder
from podium.runs.lineage import inputs_of, read_note, short
from podium.runs.pipeline_folder import PipelineFolder
from podium.runs.standing import HELDOUT, RunStanding, changed_s, mapping_in, moment, standing_of, status_of
from podium.runs.time_table import part_text

_SHOWN_METRICS = 8
# Of the timeline: an hour of a large run, read in a second.
_TIMELINE_BYTES = 8 << 20
_AGES = "staleness/tokens/"
_LENT = ("lending/tokens", "rollout/generated_tokens")


def show_lines(path: Path) -> list[str]:
    """Lines for a folder of any of these kinds."""
    if is_pipeline_folder(path):
        return _pipeline_lines(PipelineFolder.open(path))
    note = read_note(path)
    if note is not None and not (path / "run.json").is_file():
        return aligned([f"exported model: {path}", *_facts(note)]) + _descent(note)
    return _run_lines(RunFolder.open(path))


def _run_lines(run: RunFolder) -> list[str]:
    state, recipe, standing = mapping_in(run), run.recipe(needs_environment=False), standing_of(run)
    lineage = _mapping(state.get("lineage"))
    head = [
        f"run: {run.path}",
        f"program: {recipe.program}",
        f"status: {_run_status(run, standing)}",
        f"changed: {moment(changed_s(run.path))}",
        *_standing_lines(standing),
        *_code_lines(lineage.get("code", ()), state.get("versions", {})),
        f"fingerprint: {short(lineage.get('fingerprint'))} (of what makes the weights: recipe, data, parent weights)",
        *_changed_data_lines(lineage),
        *_overlap_lines(run),
        *_time_lines(run),
        *_recovery_lines(run),
        *_membership_lines(run),
        *_heldout_lines(run),
        f"checkpoints: {_checkpoints(run)}",
        *_next_lines(run, standing),
    ]
    return aligned(head) + _descent(lineage)


def _time_lines(run: RunFolder) -> Iterator[str]:
    """What each kind of worker did, by the newest part of the timeline."""
    newest = read_newest(run.path, most_bytes=_TIMELINE_BYTES)
    part = part_text(newest)
    if part is not None:
        yield f"times: of {part}"
    for line in time_lines(worker_times(newest.spans)):
        yield f"time of {line}"


def _pipeline_lines(folder: PipelineFolder) -> list[str]:
    state = folder.state()
    head = [
        f"pipeline: {folder.path}",
        f"status: {_pipeline_status(folder.path, state)}",
    ]
    rows = [("stage", "program", "status", "steps", "fingerprint", "weights", "parents")]
    details: list[str] = []
    stages = folder.recipe(needs_environment=False).stages
    for name in state["order"]:
        run, record = folder.run(name), folder.record(name)
        begun = run.recipe_file.is_file() and (run.path / "run.json").is_file()
        standing = standing_of(run) if begun else None
        steps = "-" if standing is None else f"{standing.step}/{standing.num_steps}"
        parents = ", ".join(state["parents"].get(name, ())) or "-"
        program = str(stages[name].get("program")) if name in stages else "-"
        rows.append((name, program, record.status, steps, short(record.fingerprint), short(record.weights), parents))
        if standing is not None:
            state_of_run = mapping_in(run)
            lineage = _mapping(state_of_run.get("lineage"))
            facts = [
                *_standing_lines(standing),
                *_code_lines(lineage.get("code", ()), state_of_run.get("versions", {})),
                *_heldout_lines(run),
                f"checkpoints: {_checkpoints(run)}",
            ]
            details += [f"stage {name}: {run.path}"]
            details += [f"  {line}" for line in [*aligned(facts), *_descent(lineage, deep=False)]]
    return [*aligned(head), *table(rows), *details]


def _facts(note: Mapping[str, Any]) -> list[str]:
    return [
        f"made by: {note.get('program')}, step {note.get('step')} of {note.get('run')}",
        f"fingerprint: {short(note.get('fingerprint'))} (of what makes the weights: recipe, data, parent weights)",
        *_code_lines(note.get("code", ()), {}),
        *_changed_data_lines(note),
    ]


def _descent(lineage: Mapping[str, Any], *, deep: bool = True) -> list[str]:
    """Inputs of a run and, for weights that came from another run, of that run, back to the first."""
    return list(_branch(lineage, _mapping(lineage.get("ancestors")), "", set(), deep=deep))


def _branch(
    made_of: Mapping[str, Any], ancestors: Mapping[str, Any], indent: str, seen: set[str], *, deep: bool
) -> Iterator[str]:
    for kind, title in (("data", "data"), ("weights", "weights"), ("code", "code of yours"), ("file", "file")):
        for each in inputs_of(made_of, kind):
            weights = each["fingerprint"]
            yield f"{indent}{title} {each['key']}: {each['path']} (fingerprint {short(weights)})"
            maker = ancestors.get(weights) if kind == "weights" else None
            if not isinstance(maker, Mapping):
                continue
            again = weights in seen
            seen.add(weights)
            yield (
                f"{indent}  made by {maker.get('program')}, step {maker.get('step')} of {maker.get('run')} "
                f"(fingerprint {short(maker.get('fingerprint'))}){', as above' if again else ''}"
            )
            if deep and not again:
                yield from _branch(maker, ancestors, indent + "    ", seen, deep=True)


def _code_lines(codes: Sequence[Mapping[str, Any]], versions: Mapping[str, str]) -> Iterator[str]:
    whole = [code for code in codes if isinstance(code, Mapping)]
    versions_of_code = [f"podium {code.get('podium')}, source {code.get('source')}" + _since(code) for code in whole]
    if versions_of_code:
        yield f"code: {'; '.join(versions_of_code)}"
    others = [f"{name} {number}" for name, number in versions.items() if name != "podium"]
    if others:
        yield f"versions: {', '.join(others)}"


def _changed_data_lines(lineage: Mapping[str, Any]) -> Iterator[str]:
    """Training data that was replaced during the run."""
    for each in lineage.get("changed_data", ()):
        if isinstance(each, Mapping):
            yield (
                f"changed data: {each.get('key')} after step {each.get('after_step')}: fingerprint "
                f"{short(each.get('old'))} -> {short(each.get('new'))}"
            )


def _since(code: Mapping[str, Any]) -> str:
    return f" after step {code['after_step']}" if code.get("after_step") else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    """A recorded lineage may be incomplete or of another version: unreadable parts are not shown."""
    return value if isinstance(value, Mapping) else {}


def _pipeline_status(path: Path, state: Mapping[str, Any]) -> str:
    status = status_of(path, state)
    return f"dead (continue with: podium resume {path})" if status == "dead" else status


def _run_status(run: RunFolder, standing: RunStanding) -> str:
    """The status, and for a killed run how to go on."""
    status = standing.status
    if status == "dead":
        resume = f"continue with: podium resume {run.path}"
        status += f" ({resume if run.saved_steps() else f'no checkpoint: remove {run.path} and train again'})"
    elif status == "failed" and "error" in (state := mapping_in(run)):
        status += f" ({state['error']})"
    return f"{status}, step {standing.step} of {standing.num_steps}"


def _standing_lines(standing: RunStanding) -> Iterator[str]:
    """The last step's figures, the speed, and how long a running one still takes."""
    for figure in standing.figures:
        yield f"{figure.name}: {figure.value:.4g} at step {figure.step}"
    seconds = standing.seconds_per_step
    if seconds:
        speed = f"{three_digits(seconds)} s/step" if seconds >= 1 else f"{three_digits(1 / seconds)} steps/s"
        eta = "" if standing.eta_s is None else f", ETA {duration(standing.eta_s)}"
        yield f"speed: {speed}{eta}"


def _next_lines(run: RunFolder, standing: RunStanding) -> Iterator[str]:
    """Commands that a run in this state is good for."""
    if not run.saved_steps():
        return
    if standing.status in ("stopped", "failed"):
        yield f"continue: podium resume {run.path}"
    if run.recipe(needs_environment=False).data.heldout:
        yield f"evaluate: podium evaluate {run.path}"
    yield f"export: podium export {run.path} OUT"


def _checkpoints(run: RunFolder) -> str:
    steps = run.saved_steps()
    if not steps:
        return "none"
    written = moment((run.checkpoints / f"step-{steps[-1]:08d}").stat().st_mtime)
    return f"step {', '.join(map(str, steps))} (the newest of {written})"


def _heldout_lines(run: RunFolder) -> list[str]:
    """The first and the last value of every held-out metric."""
    measured: dict[str, list[tuple[int, float]]] = {}
    for line in _metrics(run):
        for name, value in line.values.items():
            if name.startswith(HELDOUT) and not name.endswith("_s"):
                measured.setdefault(name, []).append((line.step, value))
    lines = []
    for name, values in list(measured.items())[:_SHOWN_METRICS]:
        first = f", {values[0][1]:.4g} at step {values[0][0]}" if len(values) > 1 else ""
        lines.append(f"{name}: {values[-1][1]:.4g} at step {values[-1][0]}{first}")
    return lines


def _overlap_lines(run: RunFolder) -> Iterator[str]:
    """How old the trained tokens were and what devices did, over all steps of a run whose generation overlaps its
    updates."""
    steps = [line.values for line in _metrics(run) if "staleness/queue" in line.values]
    if not steps:
        return
    tokens: defaultdict[int, float] = defaultdict(float)
    for values in steps:
        shares = {name.rpartition("/")[2]: share for name, share in values.items() if name.startswith(_AGES)}
        for age, share in (shares or {"0": 1.0}).items():
            tokens[int(age)] += share * values.get("trained_tokens", 0.0)
    total, seconds = sum(tokens.values()) or 1.0, sum(values["step_s"] for values in steps) or 1.0

    def part(name: str) -> str:
        return f"{sum(values.get(name, 0.0) for values in steps) / seconds:.1%}"

    oldest = max(values.get("staleness/max", 0.0) for values in steps)
    ages = ", ".join(f"age {age} {count / total:.1%}" for age, count in sorted(tokens.items()))
    yield f"trained tokens: {ages} (oldest {oldest:.0f} versions)"
    yield from _length_lines(steps)
    waits = f"wait for episodes {part('time/wait_s')}, for rewards {part('time/grade_s')}"
    waits += f", publish {part('time/publish_s')}"
    yield f"learners: update {part('time/update_s')}, {waits}"
    yield f"generators: idle {part('rollout/idle_s')}, install weights {part('rollout/install_s')}"
    lent = [values for values in steps if "lending/tokens" in values]
    if lent:
        lent_tokens, all_tokens = (sum(values[name] for values in lent) for name in _LENT)
        yield (
            f"lent devices: generate {part('lending/lent_s')}, change sides {part('lending/switch_s')}; "
            f"{lent_tokens / (all_tokens or 1.0):.1%} of the generated tokens"
        )


def _length_lines(steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Whether long answers were trained on as often as they were generated."""
    known = [values for values in steps if "response/trained_p50" in values]
    if known:
        parts = []
        for name in ("offered", "trained"):
            means = [fmean(values[f"response/{name}_p{quantile}"] for values in known) for quantile in (50, 90, 99)]
            parts.append("{} {:.0f}, {:.0f}, {:.0f}".format(name, *means))
        yield f"tokens of an answer, p50, p90, p99 (means over steps): {'; '.join(parts)}"


def _recovery_lines(run: RunFolder) -> Iterator[str]:
    """Which workers died and were replaced, and how long that took."""
    all_of_them = list(recoveries(run.path))
    if not all_of_them:
        return
    counts = Counter(each.part for each in all_of_them)
    parts = ", ".join(f"{part} {count}" for part, count in sorted(counts.items()))
    seconds, last = duration(sum(each.seconds for each in all_of_them)), all_of_them[-1]
    yield f"recoveries: {len(all_of_them)} ({parts}) in {seconds}; the last after step {last.step}: {last.cause}"


def _metrics(run: RunFolder) -> Sequence[Any]:
    try:
        return read_metrics(run.metrics_file) if run.metrics_file.is_file() else ()
    except RunFolderError:
        return ()


def _membership_lines(run: RunFolder) -> Iterator[str]:
    """Generators that joined and left while the run went on."""
    changes = list(membership_changes(run.path))
    if changes:
        joined, last = sum(each.change == "joined" for each in changes), changes[-1]
        yield (
            f"generators: {joined} joined, {len(changes) - joined} left; {last.generators} after the last change, at "
            f"step {last.step}: {last.generator} has {last.change} ({last.cause})"
        )
