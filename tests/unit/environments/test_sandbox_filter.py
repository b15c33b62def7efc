# SPDX-License-Identifier: Apache-2.0
"""The filter of system calls, run by a small interpreter of the kernel's instructions."""

from __future__ import annotations

import errno
import struct

import pytest

from podium.environments.sandbox.seccomp import seccomp_filter

_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7


def run(machine: str, architecture: int, number: int, argument: int = 0) -> int:
    """What the kernel would answer to a call."""
    code = seccomp_filter(machine)
    assert code is not None
    steps = list(struct.iter_unpack("<HBBI", code))
    data = {0: number, 4: architecture, 16: argument}
    value = at = 0
    while True:
        operation, if_true, if_false, constant = steps[at]
        at += 1
        match operation:
            case 0x20:
                value = data[constant]
            case 0x15:
                at += if_true if value == constant else if_false
            case 0x35:
                at += if_true if value >= constant else if_false
            case 0x45:
                at += if_true if value & constant else if_false
            case 0x06:
                return int(constant)
            case other:
                raise AssertionError(f"no such instruction: {other:#x}")


def fails(code: int) -> int:
    """The filter's answer for an error number."""
    return 0x00050000 | code


@pytest.mark.parametrize(
    ("number", "argument", "expected"),
    [
        (0, 0, _ALLOW),  # read
        (57, 0, _ALLOW),  # fork
        (56, 17, _ALLOW),  # clone with SIGCHLD
        (56, 0x10000000 | 17, fails(errno.EPERM)),  # clone with CLONE_NEWUSER
        (56, 0x00020000, fails(errno.EPERM)),  # clone with CLONE_NEWNS
        (435, 0, fails(errno.ENOSYS)),  # clone3
        (41, 1, _ALLOW),  # socket(AF_UNIX)
        (41, 2, _ALLOW),  # socket(AF_INET)
        (41, 10, _ALLOW),  # socket(AF_INET6)
        (41, 16, fails(errno.EAFNOSUPPORT)),  # socket(AF_NETLINK)
        (41, 40, fails(errno.EAFNOSUPPORT)),  # socket(AF_VSOCK)
        (101, 0, fails(errno.EPERM)),  # ptrace
        (319, 0, fails(errno.EPERM)),  # memfd_create
        (425, 0, fails(errno.EPERM)),  # io_uring_setup
        (0x40000000, 0, fails(errno.ENOSYS)),  # read by the x32 interface
    ],
)
def test_calls_of_x86_64(number: int, argument: int, expected: int) -> None:
    assert run("x86_64", _X86_64, number, argument) == expected


@pytest.mark.parametrize(
    ("number", "argument", "expected"),
    [
        (63, 0, _ALLOW),  # read
        (220, 17, _ALLOW),  # clone
        (220, 0x10000000, fails(errno.EPERM)),
        (198, 1, _ALLOW),  # socket
        (198, 40, fails(errno.EAFNOSUPPORT)),
        (117, 0, fails(errno.EPERM)),  # ptrace
    ],
)
def test_calls_of_aarch64(number: int, argument: int, expected: int) -> None:
    assert run("aarch64", _AARCH64, number, argument) == expected


def test_calls_by_another_interface_of_the_machine_end_the_program() -> None:
    i386 = 0x40000003
    assert run("x86_64", i386, 4) == _KILL


def test_other_machines_have_no_filter() -> None:
    assert seccomp_filter("riscv64") is None
