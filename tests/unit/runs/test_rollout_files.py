# SPDX-License-Identifier: Apache-2.0
"""Files of rollouts as any reader of Parquet sees them, and what is said about those that cannot be read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podium.errors import RunFolderError
from podium.runs.rollout_files import (
    KeptEpisode,
    RolloutColumns,
    forget_rollouts_after,
    read_rollouts,
    rollout_facts,
    rollout_path,
    rollout_steps,
    write_rollouts,
)

NONE = np.nan
PAGE = Path(__file__).parents[3] / "docs" / "rollouts.md"
# The contract with readers: other files may have further columns.
TYPES = {
    "step": pa.int32(), "group": pa.int64(), "sample": pa.int32(), "source": pa.string(), "row": pa.int64(),
    "reference": pa.string(), "messages": pa.string(), "prompt_tokens": pa.int32(), "tokens": pa.list_(pa.int32()),
    "texts": pa.list_(pa.string()), "loss_mask": pa.list_(pa.bool_()), "versions": pa.list_(pa.int32()),
    "log_probs": pa.list_(pa.float32()), "advantages": pa.list_(pa.float32()),
    "reference_log_probs": pa.list_(pa.float32()), "teacher_log_probs": pa.list_(pa.float32()),
    "values": pa.list_(pa.float32()), "returns": pa.list_(pa.float32()), "reward": pa.float64(),
    "rewards": pa.map_(pa.string(), pa.float64()), "ending": pa.string(), "trained": pa.bool_(), "state": pa.string(),
    "error": pa.string(),
}  # fmt: skip


def columns(step: int = 7) -> RolloutColumns:
    """Two episodes: a prompt of one token with an answer of two, and a prompt of two that got none."""
    return RolloutColumns(
        step=step,
        facts={"version": 6, "lr": 0.5},
        group_N=np.array([3, 3]),
        sample_N=np.array([0, 1]),
        sources=["sums", "sums"],
        rows=[41, None],
        references=["4", None],
        messages=['[{"role": "user", "content": "<b>2+2</b>\\u00e9"}]', None],
        prompt_N=np.array([1, 2]),
        offsets=np.array([0, 3, 5]),
        tokens_T=np.array([9, 8, 9, 9, 7], np.int32),
        token_texts=(["x", " y", "\ufffd"], np.array([2, 1, 2, 2, 0])),
        loss_mask_T=np.array([False, True, True, False, False]),
        sampled_T=np.array([False, True, True, False, False]),
        versions_T=np.array([-1, 5, 6, -1, -1], np.int32),
        values_T={
            "log_probs": np.array([NONE, -0.5, -0.25, NONE, NONE], np.float32),
            "advantages": np.array([NONE, 1.5, 1.5, NONE, NONE], np.float32),
        },
        rewards_N=np.array([0.5, NONE]),
        rewards=[{"exact": 1.0, "length": -0.5}, {}],
        endings=["stop", "error"],
        trained_N=np.array([True, False]),
        states=["consumed", "failed"],
        errors=[None, "no answer"],
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_rollouts(tmp_path / "rollouts", columns())
    return tmp_path


def test_an_episode_comes_back_as_it_was_written(run: Path) -> None:
    first, second = read_rollouts(run)

    assert first == KeptEpisode(
        step=7, group=3, sample=0, source="sums", row=41, reference="4",
        messages=({"role": "user", "content": "<b>2+2</b>é"},), prompt_tokens=1, tokens=(9, 8, 9),
        texts=("\ufffd", " y", "\ufffd"), loss_mask=(False, True, True), log_probs=(None, -0.5, -0.25),
        versions=(None, 5, 6), advantages=(None, 1.5, 1.5), reference_log_probs=(), teacher_log_probs=(), values=(),
        returns=(), reward=0.5, rewards={"exact": 1.0, "length": -0.5}, ending="stop", trained=True, state="consumed",
        error=None,
    )  # fmt: skip
    assert (second.reward, second.rewards, second.error, second.messages) == (None, {}, "no answer", ())
    assert (second.row, second.log_probs, second.versions) == (None, (None, None), (None, None))


def test_half_an_emoji_costs_no_file(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts", replace(columns(), references=["\ud83d", "4"], errors=["\ude00!", None]))

    assert [(each.reference, each.error) for each in read_rollouts(tmp_path)] == [("?", "?!"), ("4", None)]


def test_the_types_of_the_columns(run: Path) -> None:
    schema = pq.read_schema(rollout_path(run / "rollouts", 7))

    assert dict(zip(schema.names, schema.types, strict=True)) == TYPES
    assert rollout_facts(run, 7) == {"format": 1, "step": 7, "kept": 2, "version": 6, "lr": 0.5}


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def documented(run: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """By reader, the line in docs/rollouts.md that reads all steps of a run. There is such a run, and half a file."""
    write_rollouts(run / "rollouts", columns(step=8))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_rollouts(run / "rollouts", columns(step=9))
    assert len(list((run / "rollouts").iterdir())) == 3
    monkeypatch.chdir(run)
    Path("runs").mkdir()
    Path("runs/my-grpo").symlink_to(run)
    return dict(re.findall(r"^\| (pandas|polars|DuckDB) \| `(.*)` \|$", PAGE.read_text(), re.MULTILINE))


def test_pandas_reads_a_run_in_one_line(documented: dict[str, str]) -> None:
    table = eval(documented["pandas"], {"pd": pytest.importorskip("pandas")})

    assert table["step"].tolist() == [7, 7, 8, 8]
    assert table["tokens"][0].tolist() == [9, 8, 9]
    assert table.groupby("step")["reward"].mean().to_dict() == {7: 0.5, 8: 0.5}
    assert dict(table["rewards"][0]) == {"exact": 1.0, "length": -0.5}


def test_polars_reads_a_run_in_one_line(documented: dict[str, str]) -> None:
    polars = pytest.importorskip("polars")
    table = eval(documented["polars"], {"pl": polars})

    assert table["step"].to_list() == [7, 7, 8, 8]
    assert table["tokens"].to_list()[0] == [9, 8, 9]
    assert table["log_probs"].to_list()[:2] == [[None, -0.5, -0.25], [None, None]]
    assert table.group_by("step").agg(polars.col("reward").mean()).sort("step").rows() == [(7, 0.5), (8, 0.5)]


def test_duckdb_reads_a_run_in_one_line(documented: dict[str, str]) -> None:
    duckdb = pytest.importorskip("duckdb")

    assert sorted(duckdb.sql(documented["DuckDB"]).fetchall()) == [(7, 0.5), (8, 0.5)]
    first = duckdb.sql("SELECT tokens, rewards FROM 'runs/my-grpo/rollouts/*.parquet' ORDER BY step LIMIT 1").fetchall()
    assert first[0] == ([9, 8, 9], {"exact": 1.0, "length": -0.5})


def test_later_steps_are_forgotten_and_half_files_too(run: Path) -> None:
    folder = run / "rollouts"
    for step in (8, 12):
        write_rollouts(folder, columns(step=step))
    (folder / ".tmp-step-00000013").write_bytes(b"half a file")
    (folder / "notes.txt").write_text("mine")

    forget_rollouts_after(folder, 8)

    assert rollout_steps(folder) == [7, 8]
    assert sorted(path.name for path in folder.iterdir()) == [
        "notes.txt", "step-00000007.parquet", "step-00000008.parquet",
    ]  # fmt: skip
    forget_rollouts_after(run / "none", 0)


def test_a_folder_whose_run_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_rollouts(tmp_path / "gone" / "rollouts", columns())
    assert not (tmp_path / "gone").exists()


def test_what_cannot_be_read_is_named(run: Path) -> None:
    with pytest.raises(RunFolderError, match=r"other has no rollouts\. .*run\.rollouts\.keep none"):
        list(read_rollouts(run / "other"))
    with pytest.raises(RunFolderError, match=r"no step 8: it has 1 from 7 to 7"):
        list(read_rollouts(run, 8))
    rollout_path(run / "rollouts", 8).write_bytes(b"PAR1 and nothing else")
    with pytest.raises(RunFolderError, match=r"step-00000008\.parquet cannot be read"):
        list(read_rollouts(run, 8))
    with pytest.raises(RunFolderError, match=r"step-00000009\.parquet cannot be read"):
        rollout_facts(run, 9)


def test_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for name in ("step-5.parquet", "step-²³45678.parquet", "step-00000002.parquet", "step-00000004.parquet"):
        (folder / name).touch()

    assert rollout_steps(folder) == [2, 4]
    forget_rollouts_after(folder, 2)
    assert sorted(each.name for each in folder.iterdir()) == [
        "step-00000002.parquet", "step-5.parquet", "step-²³45678.parquet",
    ]  # fmt: skip
