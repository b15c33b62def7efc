# SPDX-License-Identifier: Apache-2.0
"""What a sandbox is made of: the command line of bubblewrap, and what of the machine is visible inside."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from podium.environments.sandbox.seccomp import seccomp_filter
from podium.errors import SandboxError

CODE_ROOT = "/code"
"""Where the part of Podium that runs inside is visible."""
INSIDE = "podium/environments/sandbox/inside"
MAIN = "import sys; sys.path[0] = {root!r}; from podium.environments.sandbox.inside.main import main; main({control})"
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip
INNER_USER = 1
"""Under root, programs run as this user of the sandbox, which is NOBODY outside."""
NOBODY = 65534

# Programs and libraries of the system, without /usr/local, /usr/src and /usr/share.
_SYSTEM = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share/zoneinfo")
_ROOT_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_OF_ETC = ("/etc/ld.so.cache", "/etc/alternatives")
_INSTALL = (
    "Install bubblewrap (tested with 0.8; Debian and Ubuntu: apt-get install bubblewrap; Fedora: dnf install "
    "bubblewrap), or allow programs without isolation with sandbox.allow_unsafe: true."
)
_ALLOW = (
    "The system has to allow user namespaces: see docs/sandbox.md. sandbox.allow_unsafe: true allows programs "
    "without isolation."
)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python that runs programs: its file, the folders that it needs, and whether it has site-packages."""

    file: str
    folders: tuple[str, ...]
    has_packages: bool

    @property
    def arguments(self) -> tuple[str, ...]:
        """How it is started: without the user's own packages, and without any if it has none."""
        return (self.file, "-s") if self.has_packages else (self.file, "-s", "-S")


@functools.cache
def interpreter(python: str | None) -> Interpreter:
    """The Python that runs Podium, with the standard library alone; or `python`, with its packages."""
    if python is None:
        base = os.path.realpath(sys.base_prefix)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        names = (os.path.join(base, "bin", version), os.path.realpath(sys.executable))
        file = next((name for name in names if os.path.exists(name)), sys.executable)
        return Interpreter(file, tuple(_parts_of(base)), has_packages=False)
    code = "import json, sys; print(json.dumps([sys.version_info[:2], sys.prefix, sys.base_prefix]))"
    try:
        found = subprocess.run([python, "-I", "-c", code], capture_output=True, timeout=30.0, check=True).stdout
        version_info, prefix, base = json.loads(found)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxError(
            f"sandbox.python: {python} cannot be run ({error}). Name an interpreter of Python."
        ) from None
    if tuple(version_info) < (3, 11):
        raise SandboxError(f"sandbox.python: {python} is Python {version_info[0]}.{version_info[1]}; 3.11 is needed.")
    folders = [*_parts_of(prefix), *_parts_of(os.path.realpath(base))]
    folders.append(os.path.join(prefix, "pyvenv.cfg"))
    file = os.path.abspath(python)
    if os.path.islink(file):  # of a venv: the interpreter that it names must be visible under that name
        folders.append(os.path.dirname(os.path.realpath(file)))
    return Interpreter(file, tuple(dict.fromkeys(folders)), has_packages=True)


def _parts_of(prefix: str) -> Iterator[str]:
    return (os.path.join(prefix, part) for part in ("bin", "lib", "lib64"))


def _ancestors(path: str) -> list[str]:
    return [str(each) for each in reversed(Path(path).parents)][1:]


def bubblewrap() -> str:
    """The path of bwrap. Raises a SandboxError where this machine cannot have it."""
    if sys.platform != "linux":
        raise SandboxError(
            "sandbox: programs can be isolated on Linux only. sandbox.allow_unsafe: true runs them without isolation."
        )
    if seccomp_filter(platform.machine()) is None:
        raise SandboxError(
            f"sandbox: the system calls of {platform.machine()} are not known here, so they cannot be filtered. "
            "sandbox.allow_unsafe: true allows programs without isolation."
        )
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError(f"sandbox: bubblewrap (bwrap) is not installed on this machine. {_INSTALL}")
    return found


def not_started(stderr: bytes) -> SandboxError:
    """The error about a sandbox that does not start, with what bubblewrap or Python said."""
    said = " ".join(stderr.decode(errors="replace").split())[-400:] or "it said nothing"
    return SandboxError(f"sandbox: no sandbox can be started here ({said}). {_ALLOW}")


def arguments(
    python: Interpreter, *, tmp_bytes: int, paths: Sequence[str], control_fd: int, filter_fd: int, info_fd: int,
    block_fd: int | None,
) -> list[str]:  # fmt: skip
    """The command line of one sandbox. `block_fd`: under root, where bwrap waits for its map of users."""
    line = [
        bubblewrap(), "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
        "--unshare-cgroup-try", "--hostname", "sandbox", "--die-with-parent", "--new-session",
        "--seccomp", str(filter_fd), "--info-fd", str(info_fd), "--cap-drop", "ALL",
    ]  # fmt: skip
    if block_fd is not None:  # to leave root, which is the first that the program inside does
        line += ["--userns-block-fd", str(block_fd), "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    visible = (*_SYSTEM, *_OF_ETC, *python.folders, *paths)
    line += _own_folder("/tmp", tmp_bytes)  # first: an interpreter may be in the machine's /tmp
    # bwrap would make the folders on the way for root only.
    on_the_way = dict.fromkeys(each for name in (*visible, f"{CODE_ROOT}/{INSIDE}") for each in _ancestors(name))
    for folder in on_the_way:
        if folder != "/tmp":
            line += ["--perms", "0755", "--dir", folder]
    for name in visible:
        line += ["--ro-bind-try", name, name]
    for link in _ROOT_LINKS:
        if os.path.islink(link):
            line += ["--symlink", os.readlink(link), link]
        else:
            line += ["--ro-bind-try", link, link]
    code = Path(__file__).parent / "inside"
    line += ["--ro-bind", str(code), f"{CODE_ROOT}/{INSIDE}", "--proc", "/proc", "--dev", "/dev"]
    line += _own_folder("/dev/shm", tmp_bytes)
    line += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in ENVIRONMENT.items():
        line += ["--setenv", name, value]
    return [*line, "--", *python.arguments, "-c", MAIN.format(root=CODE_ROOT, control=control_fd)]


def _own_folder(folder: str, num_bytes: int) -> list[str]:
    """Empty, writable and of limited size."""
    return ["--perms", "1777", "--size", str(num_bytes), "--tmpfs", folder]
