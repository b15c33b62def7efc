# SPDX-License-Identifier: Apache-2.0
"""Runs over two nodes that have addresses of their own, with Ray, gloo and weights between them. A node dies and comes
back; SLURM is played by scripts that start what it is asked for on these nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from golden.runs import fingerprint, make_task, recipe, train
from helpers.namespaces import Node, two_nodes
from helpers.processes import wait_until
from podium.observe import read_metrics
from podium.runs.events import recoveries

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(420)]

REPOSITORY = Path(__file__).parents[2]
PORT = 6379
RUN_S, RAY_S = 200, 90
# What SLURM's commands do for the script: names of nodes, a command on one of them, the address of the first one.
SLURM = {
    "scontrol": 'printf "%s\\n" $SLURM_JOB_NODELIST',
    "srun": """
for argument in "$@"; do
    case $argument in
        --nodelist=*) node=${argument#--nodelist=}; shift ;;
        --*) shift ;;
        *) break ;;
    esac
done
exec ip netns exec "$node" "$@" --node-ip-address="$OTHER_ADDRESS"
""",
    "ray": 'exec "$RAY" "$@" --num-cpus=1',  # so that two devices are on two nodes
    "hostname": "echo $HEAD_ADDRESS 192.0.2.1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Two nodes, a folder that both see, and Ray on both, with one device each."""

    head: Node
    other: Node
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])
        return own | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": f"{self.head.address}:{PORT}"}

    def start_ray(self, node: Node) -> None:
        environment = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        log = self.folder / f"{node.name}.log"
        before = log.read_text().count("Ray runtime started") if log.exists() else 0
        started = node.start_ray(self.head, cpus=1, port=PORT, environment=environment, folder=self.folder)
        wait_until(
            lambda: log.read_text().count("Ray runtime started") > before or started.poll() is not None,
            f"Ray on {node.address}", deadline_s=RAY_S,
        )  # fmt: skip
        assert started.poll() is None, log.read_text()

    def write(self, name: str, **placement: Any) -> str:
        """Writes a recipe of six steps whose only checkpoint is the last one."""
        values = recipe("grpo")
        values |= {
            "steps": 6, "checkpoint": {"every": 6, "background": False},
            "placement": {**values["placement"], "launcher": "ray", **placement},
            "run": {"name": name, "folder": "runs"},
        }  # fmt: skip
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
        return f"{name}.yaml"

    def begin(self, name: str, **placement: Any) -> subprocess.Popen[bytes]:
        """Starts a run on the head."""
        file = self.write(name, **placement)
        return self.head.start(
            sys.executable, "-m", "podium", "train", file, environment=self.environment, log=self.folder / f"{name}.out"
        )

    def end(self, name: str, process: subprocess.Popen[bytes]) -> Path:
        """Waits for the end of a run; its folder."""
        code = process.wait(RUN_S)
        assert code == 0, (self.folder / f"{name}.out").read_text()[-4000:]
        return self.folder / "runs" / name


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    # Short, because Ray keeps sockets there.
    folder = Path(tempfile.mkdtemp(prefix="pn", dir="/tmp"))
    try:
        with two_nodes() as (head, other):
            site = Site(head=head, other=other, folder=folder)
            make_task(folder)
            for node in (head, other):
                site.start_ray(node)
            yield site
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> dict[str, Any]:
    """Two learners, one on each node: gradients meet over gloo between their addresses."""
    run = site.end("undisturbed", site.begin("undisturbed", layout="colocated", devices=2))
    return fingerprint(run, step=6)


def num_steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return sum("step_s" in line.values for line in read_metrics(file)) if file.exists() else 0


def test_a_learner_and_a_generator_on_two_nodes_compute_what_one_process_does(site: Site) -> None:
    values = yaml.safe_load((site.folder / site.write("alone")).read_text())
    values["placement"] |= {"launcher": "inline"}
    expected = fingerprint(train(values, site.folder), step=6)

    run = site.end("split", site.begin("split", layout="split", devices=2))

    assert fingerprint(run, step=6)["weights"] == expected["weights"]
    assert len(list(run.glob("checkpoints/*"))) == 1


def test_a_node_dies_and_comes_back_and_the_run_goes_on(site: Site, undisturbed: dict[str, Any]) -> None:
    process = site.begin("disturbed", layout="colocated", devices=2)
    run = site.folder / "runs" / "disturbed"
    wait_until(lambda: num_steps(run) >= 2 or process.poll() is not None, "two steps", deadline_s=RUN_S)
    site.other.die()
    site.start_ray(site.other)
    site.end("disturbed", process)

    assert fingerprint(run, step=6)["weights"] == undisturbed["weights"]
    (recovery,) = recoveries(run)
    assert recovery.part == "learner"
    assert site.other.address in recovery.cause


def test_the_script_for_slurm_trains_on_all_nodes_and_leaves_nothing(site: Site, undisturbed: dict[str, Any]) -> None:
    folder = site.folder / "commands"
    folder.mkdir()
    for name, text in SLURM.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    if not (Path(sys.executable).parent / "podium").exists():
        pytest.skip("podium is not installed as a command beside this Python")
    file = site.write("slurm", layout="colocated", devices=2)
    before = {node.name: set(node.processes()) for node in (site.head, site.other)}
    process = site.head.start(
        "bash", str(REPOSITORY / "examples" / "cluster" / "slurm.sh"), "train", file,
        environment={
            **{name: value for name, value in site.environment.items() if name != "RAY_ADDRESS"},
            "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "RAY_TMPDIR": str(site.folder / "slurm-ray"), "RAY": str(Path(sys.executable).parent / "ray"),
            "SLURM_JOB_NODELIST": f"{site.head.name} {site.other.name}", "SLURM_JOB_ID": "41234",
            "HEAD_ADDRESS": site.head.address, "OTHER_ADDRESS": site.other.address,
        },
        log=site.folder / "slurm.out",
    )  # fmt: skip
    run = site.end("slurm", process)

    assert fingerprint(run, step=6)["weights"] == undisturbed["weights"]
    for node in (site.head, site.other):
        wait_until(lambda node=node: set(node.processes()) <= before[node.name], "the end of Ray", deadline_s=60)
    assert "RAY_AUTH_TOKEN" not in (site.folder / "slurm.out").read_text()
