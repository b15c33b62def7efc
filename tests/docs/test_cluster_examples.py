# SPDX-License-Identifier: Apache-2.0
"""Files in examples/cluster: what can be checked without the systems that they are for."""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"


def test_the_script_for_slurm_is_a_shell_script() -> None:
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sh")], check=True, timeout=20)


def test_the_job_for_kubernetes_has_the_devices_that_it_trains_on() -> None:
    job: dict[str, Any] = yaml.safe_load((FOLDER / "rayjob.yml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    groups = [(1, cluster["headGroupSpec"]), *((each["replicas"], each) for each in cluster["workerGroupSpecs"])]
    devices = 0
    for replicas, group in groups:
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        devices += replicas * int(limits["nvidia.com/gpu"])
        assert group["rayStartParams"]["num-cpus"] == limits["cpu"]
    command = shlex.split(job["spec"]["entrypoint"])
    assert command[:2] == ["podium", "train"]
    assert int(command[command.index("--devices") + 1]) == devices
    assert "placement.launcher=ray" in command
    assert cluster["rayVersion"] == version("ray")
    assert re.search(r"run\.folder=/shared/", job["spec"]["entrypoint"])
