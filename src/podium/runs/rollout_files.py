# SPDX-License-Identifier: Apache-2.0
"""Episodes of a run on disk: one Parquet file per step, with a row for each episode. Torch-free; pyarrow is imported
only when a file is written or read.

docs/rollouts.md says what the columns mean."""

# N episodes · T tokens of all of them · U different tokens

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from podium.data.trajectories import Ints
from podium.errors import RunFolderError

if TYPE_CHECKING:
    import pyarrow

FOLDER = "rollouts"
_FORMAT = 1
_KEY = b"podium"
_NAME = re.compile(r"step-([0-9]{8,})\.parquet")
# Readers of a whole folder leave out names that begin with a dot (pandas) or end otherwise (polars, DuckDB).
_TEMPORARY = ".tmp-"
_PER_TOKEN = ("log_probs", "advantages", "reference_log_probs", "teacher_log_probs", "values", "returns")
# Columns with few different values have a dictionary. For floats one would be built and thrown away, which takes as
# long as all the rest. Readers skip files by the statistics of columns with one value per episode.
_REPEATED = ("source", "ending", "state", "texts.list.element")
_FILTERED = ("step", "group", "sample", "source", "row", "prompt_tokens", "reward", "ending", "trained", "state")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutColumns:
    """The episodes of one step. A value per token that an episode has not is NaN; in the file it is null."""

    step: int
    facts: Mapping[str, Any]  # about the step, as JSON values
    group_N: Ints
    sample_N: Ints
    sources: Sequence[str]
    rows: Sequence[int | None]
    references: Sequence[str | None]
    messages: Sequence[str | None]  # JSON
    prompt_N: Ints
    offsets: Ints
    tokens_T: NDArray[np.int32]
    token_texts: tuple[Sequence[str], Ints] | None  # of the different tokens, and which of them each token is
    loss_mask_T: NDArray[np.bool_]
    sampled_T: NDArray[np.bool_]
    versions_T: NDArray[np.int32]
    values_T: Mapping[str, NDArray[np.float32]]  # by column; those that are missing are null
    rewards_N: NDArray[np.float64]
    rewards: Sequence[Mapping[str, float]]
    endings: Sequence[str]
    trained_N: NDArray[np.bool_]
    states: Sequence[str]
    errors: Sequence[str | None]

    def __len__(self) -> int:
        return len(self.group_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEpisode:
    """An episode as its file has it. Values per token have one entry for each of `tokens`; None: there is none."""

    step: int
    group: int
    sample: int
    source: str
    row: int | None
    reference: str | None
    messages: tuple[Mapping[str, Any], ...]
    prompt_tokens: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    loss_mask: tuple[bool, ...]
    log_probs: tuple[float | None, ...]
    versions: tuple[int | None, ...]
    advantages: tuple[float | None, ...]
    reference_log_probs: tuple[float | None, ...]
    teacher_log_probs: tuple[float | None, ...]
    values: tuple[float | None, ...]
    returns: tuple[float | None, ...]
    reward: float | None
    rewards: Mapping[str, float]
    ending: str
    trained: bool
    state: str
    error: str | None


def rollout_path(folder: Path, step: int) -> Path:
    """The file of a step. `folder`: that of the rollouts."""
    return folder / f"step-{step:08d}.parquet"


def rollout_steps(folder: Path) -> list[int]:
    """Steps that have a file, in ascending order."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("step-*.parquet"))
    return sorted(int(name[1]) for name in found if name is not None)


def write_rollouts(folder: Path, columns: RolloutColumns) -> None:
    """Writes the file of a step, which is whole when it has its name, and replaces one that is there. The folder's own
    folder must exist: it is not made again where somebody removed it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()  # so that faults of the disk are Python's own errors
    pq.write_table(
        _table(columns), buffer, compression="zstd", use_dictionary=list(_REPEATED), write_statistics=list(_FILTERED)
    )
    folder.mkdir(exist_ok=True)
    path = rollout_path(folder, columns.step)
    temporary = path.with_name(f"{_TEMPORARY}{path.stem}")
    try:
        temporary.write_bytes(buffer.getvalue())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def forget_rollouts_after(folder: Path, step: int) -> None:
    """Removes the files of later steps, and what a killed process left."""
    for later in rollout_steps(folder):
        if later > step:
            rollout_path(folder, later).unlink()
    for path in folder.glob(f"{_TEMPORARY}*"):
        path.unlink()


def read_rollouts(run: str | Path, step: int | None = None) -> Iterator[KeptEpisode]:
    """Episodes of a run folder in order, of one step or of all that have a file. Reads a file when its first episode is
    asked for. Raises a RunFolderError if there is no such file, or one that cannot be read."""
    folder = Path(run) / FOLDER
    steps = rollout_steps(folder)
    if not steps:
        raise RunFolderError(
            f"{run} has no rollouts. On-policy runs keep some unless their recipe has run.rollouts.keep none."
        )
    if step is not None and step not in steps:
        raise RunFolderError(f"{folder} has no step {step}: it has {len(steps)} from {steps[0]} to {steps[-1]}.")
    for number in steps if step is None else (step,):
        yield from _episodes(rollout_path(folder, number))


def rollout_facts(run: str | Path, step: int) -> dict[str, Any]:
    """What a file says about its whole step: `version` of the weights before the update, `lr`, `kl_coefficient`,
    `episodes` of the step and how many of them are `kept`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = rollout_path(Path(run) / FOLDER, step)
    try:
        facts: dict[str, Any] = json.loads(pq.read_schema(path).metadata[_KEY])
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error
    return facts


def _episodes(path: Path) -> Iterator[KeptEpisode]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.ParquetFile(path).read().to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    for row in rows:
        messages = None if row["messages"] is None else json.loads(row["messages"])
        lists = {name: tuple(row[name] or ()) for name in ("tokens", "texts", "loss_mask", "versions", *_PER_TOKEN)}
        yield KeptEpisode(**{**row, **lists, "messages": tuple(messages or ()), "rewards": dict(row["rewards"] or ())})


def _unreadable(path: Path, error: BaseException) -> RunFolderError:
    return RunFolderError(f"{path} cannot be read as rollouts of a step ({error}). Remove it, or restore it.")


def _encodable(texts: Sequence[str | None]) -> list[str | None]:
    """Half an emoji, which JSON can have as an escape, is a question mark: UTF-8 has no such thing."""
    return [None if text is None else text.encode("utf-8", "replace").decode("utf-8") for text in texts]


def _table(columns: RolloutColumns) -> pyarrow.Table:
    import pyarrow as pa

    offsets = pa.array(columns.offsets, pa.int32())

    def listed(values: Any) -> Any:
        return pa.ListArray.from_arrays(offsets, values)

    def floats(name: str) -> Any:
        values_T = columns.values_T.get(name)
        if values_T is None:
            return pa.nulls(len(columns), pa.list_(pa.float32()))
        return listed(pa.array(values_T, pa.float32(), mask=np.isnan(values_T)))

    texts = pa.nulls(len(columns), pa.list_(pa.string()))
    if columns.token_texts is not None:
        text_U, which_T = columns.token_texts
        texts = listed(pa.array(text_U, pa.string()).take(pa.array(which_T)))
    missing_N = np.isnan(columns.rewards_N)
    arrays: dict[str, Any] = {
        "step": pa.array(np.full(len(columns), columns.step), pa.int32()),
        "group": pa.array(columns.group_N, pa.int64()),
        "sample": pa.array(columns.sample_N, pa.int32()),
        "source": pa.array(_encodable(columns.sources), pa.string()),
        "row": pa.array(columns.rows, pa.int64()),
        "reference": pa.array(_encodable(columns.references), pa.string()),
        "messages": pa.array(_encodable(columns.messages), pa.string()),
        "prompt_tokens": pa.array(columns.prompt_N, pa.int32()),
        "tokens": listed(pa.array(columns.tokens_T, pa.int32())),
        "texts": texts,
        "loss_mask": listed(pa.array(columns.loss_mask_T, pa.bool_())),
        "versions": listed(pa.array(columns.versions_T, pa.int32(), mask=~columns.sampled_T)),
        **{name: floats(name) for name in _PER_TOKEN},
        "reward": pa.array(columns.rewards_N, pa.float64(), mask=missing_N),
        "rewards": pa.array([list(each.items()) for each in columns.rewards], pa.map_(pa.string(), pa.float64())),
        "ending": pa.array(columns.endings, pa.string()),
        "trained": pa.array(columns.trained_N, pa.bool_()),
        "state": pa.array(columns.states, pa.string()),
        "error": pa.array(_encodable(columns.errors), pa.string()),
    }
    facts = {"format": _FORMAT, "step": columns.step, "kept": len(columns), **columns.facts}
    return pa.table(arrays).replace_schema_metadata({_KEY: json.dumps(facts).encode()})
