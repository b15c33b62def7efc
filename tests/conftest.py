# SPDX-License-Identifier: Apache-2.0
"""For all tests: one torch thread without oneDNN, restored after each test, and a tiny checkpoint folder."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import settings

from helpers.disks import mounted
from helpers.processes import user_processes, wait_until
from helpers.tiny import save_tiny_folder, write_chats
from helpers.workspace import Workspace
from podium.models.exact_products import make_products_exact

# How long an example takes depends on what else the machine does. A property with more cases says so itself.
settings.register_profile("podium", deadline=None, max_examples=50)
settings.load_profile("podium")
# Two busy cores share these tests: hand-offs between threads, and oneDNN's cost per call, are most of a tiny model.
assert make_products_exact()  # before anything multiplies
torch.set_num_threads(1)
torch.backends.mkldnn.set_flags(False)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
_TESTS = Path(__file__).parent


# Folders whose files take longest: they begin first, so that both processes of `make test` end at the same time.
_LONGEST_FIRST = ("golden", "spmd", "e2e", "newcomer", "rollout", "unit/rollout", "unit/models", "unit/environments")


_BEGAN_S = time.monotonic()
_HAS_BEGUN = pytest.StashKey[bool]()  # whether any test has


def pytest_addoption(parser: pytest.Parser) -> None:
    """CI has a limit of time, and its machines differ by half."""
    text = "skip what has not begun after so many seconds; files begin at another place for every commit"
    parser.addoption("--begin-within-s", type=float, help=text)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Pytest's bytecode of the tests is kept, also where PYTHONDONTWRITEBYTECODE is set: the next processes of
    `make test` and `make test-slow` need not rewrite all assertions again."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only serial tests are asked for, files that cannot have one are not imported (see `_starts_ray`)."""
    if not str(config.getoption("markexpr")).endswith(" and serial") or collection_path.suffix != ".py":
        return None
    may_have = collection_path.is_relative_to(_TESTS / "cluster") or re.search(
        r"\bserial\b|\bray", collection_path.read_text(encoding="utf-8")
    )
    return None if may_have else True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test, before its fixtures, that comes too late."""
    limit_s = item.config.getoption("--begin-within-s")
    if limit_s is not None and time.monotonic() - _BEGAN_S > limit_s:
        pytest.skip(f"the {limit_s:.0f} s of this run are over: `make test-slow` runs everything")
    item.config.stash[_HAS_BEGUN] = True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run whose time was over before its first test has tested nothing."""
    config = session.config
    is_limited = config.getoption("--begin-within-s") is not None and not config.getoption("numprocesses", None)
    if is_limited and exitstatus == pytest.ExitCode.OK and not config.stash.get(_HAS_BEGUN, False):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that start Ray are serial: it uses all processors. Those in soak.txt are for `make test-soak`. Files that
    take long come first, or, where time is limited, those of another place for every commit."""
    soaked = _soaked_tests()
    for item in items:
        if _starts_ray(item):
            item.add_marker(pytest.mark.serial)
        if _is_soaked(item.nodeid.removeprefix("tests/"), soaked) and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.soak)
    items.sort(key=lambda item: _rank(item.path))
    if config.getoption("--begin-within-s") is not None and items:
        files = list(dict.fromkeys(item.path for item in items))
        first = _commit_number() % len(files)
        place = {path: at for at, path in enumerate([*files[first:], *files[:first]])}
        items.sort(key=lambda item: place[item.path])


def _commit_number() -> int:
    """A number that every commit has another one of; 0 without git."""
    command = ["git", "-C", str(_TESTS), "rev-parse", "HEAD"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout[:8], 16)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def _soaked_tests() -> tuple[frozenset[str], tuple[str, ...]]:
    """The ids in soak.txt, and the beginnings of ids."""
    lines = [line for line in (_TESTS / "soak.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    return frozenset(lines), tuple(line[:-1] for line in lines if line.endswith("*"))


def _is_soaked(id: str, soaked: tuple[frozenset[str], tuple[str, ...]]) -> bool:
    return id in soaked[0] or id.startswith(soaked[1])


def _starts_ray(item: pytest.Item) -> bool:
    """As far as folder, fixtures and parameters tell; other tests carry the mark."""
    launcher = item.callspec.params.get("launcher") if hasattr(item, "callspec") else None
    has_folder = "ray_folder" in getattr(item, "fixturenames", ())
    return item.path.is_relative_to(_TESTS / "cluster") or has_folder or launcher == "ray"


def _rank(file: Path) -> int:
    folders = (index for index, folder in enumerate(_LONGEST_FIRST) if file.is_relative_to(_TESTS / folder))
    return next(folders, len(_LONGEST_FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, with the modules of tests/spmd as one file: they share one start of ranks."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "tests/spmd" if nodeid.startswith("tests/spmd/") else str(super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def _cpu_settings() -> Iterator[None]:
    """A run in this process chooses threads and oneDNN for itself; the next test starts from ours again."""
    yield
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)


@pytest.fixture(autouse=True, scope="module")
def _no_user_process_is_left() -> Iterator[None]:
    """Runs in this process end those of their user code: each idle one wakes twenty times a second."""
    yield
    wait_until(lambda: not user_processes(), "the end of all processes of user code", deadline_s=20)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB that a test may fill."""
    with mounted(tmp_path / "small-disk") as folder:
        yield folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded tiny Qwen3 checkpoint with tied embeddings, a character tokenizer and a chat template. Read only."""
    return save_tiny_folder(tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.fixture
def workspace(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Workspace:
    """A folder as a user has it: data, a model, and the command line to type into."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write_chats(tmp_path / "train.jsonl", count=64)
    write_chats(tmp_path / "heldout.jsonl", count=8, seed=1)
    return Workspace(path=tmp_path, model=tiny_folder, capture=capsys, monkeypatch=monkeypatch)
