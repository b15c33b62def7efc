# SPDX-License-Identifier: Apache-2.0
"""Which ends of the tests `make` tries again, in a small project with this Makefile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
MARKS = ("fast", "slow", "soak", "serial", "gpu", "trl", "trackers", "jobs", "browser")

FILES = {"fast": "test_fast.py", "serial": "test_in_turn.py", "slow": "test_slow.py", "browser": "browser/test_page.py"}
TARGETS = pytest.mark.parametrize("target", ["test-parallel", "test-serial", "test-slow", "test-browser"])

# What each test does, by files that are there. `once`: it fails the first time that it runs.
TESTS = """
import time
from pathlib import Path
import pytest

@pytest.mark.{mark}
def test_first():
    if (once := Path("once")).exists():
        once.unlink()
        assert False

@pytest.mark.{mark}
def test_second():
    if Path("hang").exists():
        time.sleep(60)

@pytest.mark.{mark}
def test_third():
    assert not Path("broken").exists()

@pytest.mark.slow
@pytest.mark.serial
def test_serial():
    pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (tmp_path / "Makefile").write_text(makefile.replace("--timeout 600", "--timeout 5"), encoding="utf-8")
    marks = ", ".join(f'"{each}"' for each in MARKS)
    options = f'[tool.pytest.ini_options]\ntimeout = 5\ntimeout_method = "thread"\nmarkers = [{marks}]\n'
    (tmp_path / "pyproject.toml").write_text(options)
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "tests" / "browser").mkdir(parents=True)
    for mark, file in FILES.items():
        (tmp_path / "tests" / file).write_text(TESTS.format(mark=mark))
    (tmp_path / "tests" / "browser" / "requirements.txt").touch()
    (tmp_path / "src").mkdir()
    for venv in (".venv", ".venv-browser"):
        python = tmp_path / venv / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        (tmp_path / venv / ".installed").touch()
    return tmp_path


def make(project: Path, target: str, *happens: str) -> bool:
    """Whether the target passes if this happens."""
    for each in happens:
        (project / each).touch()
    # nothing of the `make` that runs this test, whose variables, like SLOW_SECONDS, are in the environment as well
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
    done = subprocess.run(["make", target], cwd=project, env=environment, capture_output=True, timeout=280)
    for each in happens:
        (project / each).unlink(missing_ok=True)
    return done.returncode == 0


@TARGETS
def test_a_test_that_fails_once_is_forgiven_and_one_that_fails_again_is_not(project: Path, target: str) -> None:
    assert make(project, target, "once")
    assert not make(project, target, "broken")
    assert make(project, target)


@TARGETS
def test_tests_that_end_before_all_have_run_are_no_success(project: Path, target: str) -> None:
    """Also after a run that has noted what failed in it, which passes now."""
    assert not make(project, target, "broken")
    assert not make(project, target, "hang")
