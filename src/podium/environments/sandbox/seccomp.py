# SPDX-License-Identifier: Apache-2.0
"""The system calls that sandboxed programs may not make, as a filter that the kernel runs.

Namespaces do not hold everything: sockets of virtual machines (AF_VSOCK) reach the host, memory of `memfd_create` and
of System V belongs to no process that could be measured, and many calls exist only for administrators or debuggers."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; both machines are little-endian
_FIRST_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: all of them are empty in a new network namespace


@dataclass(frozen=True, slots=True)
class _Machine:
    architecture: int
    clone: int
    clone3: int
    socket: int
    refused: tuple[int, ...]
    has_x32: bool = False


# Since Linux 5.1 all machines number new calls alike: open_tree, move_mount, fsopen, fsconfig, fsmount, fspick,
# io_uring (3), pidfd_getfd, mount_setattr, memfd_secret.
_NEWER = (428, 429, 430, 431, 432, 433, 425, 426, 427, 438, 442, 447)
# fmt: off
_X86_64 = (
    101, 310, 311, 312,            # ptrace, process_vm_readv, process_vm_writev, kcmp
    319, 29, 30, 31, 64, 68, 240,  # memfd_create, shmget, shmat, shmctl, semget, msgget, mq_open
    272, 308, 165, 166, 155, 161,  # unshare, setns, mount, umount2, pivot_root, chroot
    298, 321, 323, 300, 278,       # perf_event_open, bpf, userfaultfd, fanotify_init, vmsplice
    248, 249, 250,                 # add_key, request_key, keyctl
    175, 313, 176, 246, 320, 169,  # init_module, finit_module, delete_module, kexec (2), reboot
    167, 168, 103, 163, 179, 135,  # swapon, swapoff, syslog, acct, quotactl, personality
    164, 227, 305, 159, 172, 173,  # settimeofday, clock_settime, clock_adjtime, adjtimex, iopl, ioperm
    303, 304, 212,                 # name_to_handle_at, open_by_handle_at, lookup_dcookie
)
_AARCH64 = (  # the same calls, but for iopl and ioperm, which it does not have
    117, 270, 271, 272,
    279, 194, 196, 195, 190, 186, 180,
    97, 268, 40, 39, 41, 51,
    241, 280, 282, 262, 75,
    217, 218, 219,
    105, 273, 106, 104, 294, 142,
    224, 225, 116, 89, 60, 92,
    170, 112, 266, 171,
    264, 265, 18,
)
# fmt: on
_MACHINES = {
    "x86_64": _Machine(
        architecture=0xC000003E, clone=56, clone3=435, socket=41, refused=(*_X86_64, *_NEWER), has_x32=True
    ),
    "aarch64": _Machine(architecture=0xC00000B7, clone=220, clone3=435, socket=198, refused=(*_AARCH64, *_NEWER)),
}


def seccomp_filter(machine: str) -> bytes | None:
    """The filter for bwrap's `--seccomp`; None for a machine (`platform.machine()`) whose calls are not listed here."""
    known = _MACHINES.get(machine)
    return None if known is None else b"".join(_instructions(known))


def _instructions(machine: _Machine) -> Iterator[bytes]:
    yield _instruction(_LOAD, _ARCHITECTURE)
    yield _instruction(_JUMP_EQUAL, machine.architecture, 1, 0)
    yield _instruction(_RETURN, _KILL)
    yield _instruction(_LOAD, _NUMBER)
    if machine.has_x32:
        yield from _returned(_JUMP_AT_LEAST, _FIRST_X32, _FAIL | errno.ENOSYS)
    # Its flags are in memory, which a filter cannot read. The C library falls back to clone.
    yield from _returned(_JUMP_EQUAL, machine.clone3, _FAIL | errno.ENOSYS)
    for number in machine.refused:
        yield from _returned(_JUMP_EQUAL, number, _FAIL | errno.EPERM)
    yield _instruction(_JUMP_EQUAL, machine.clone, 0, 4)
    yield _instruction(_LOAD, _FIRST_ARGUMENT)
    yield from _returned(_JUMP_ANY_BIT, _NEW_NAMESPACES, _FAIL | errno.EPERM)
    yield _instruction(_RETURN, _ALLOW)
    yield _instruction(_JUMP_EQUAL, machine.socket, 0, 2 + len(_FAMILIES))
    yield _instruction(_LOAD, _FIRST_ARGUMENT)
    for index, family in enumerate(_FAMILIES):
        yield _instruction(_JUMP_EQUAL, family, len(_FAMILIES) - index, 0)
    yield _instruction(_RETURN, _FAIL | errno.EAFNOSUPPORT)
    yield _instruction(_RETURN, _ALLOW)


def _returned(jump: int, value: int, result: int) -> tuple[bytes, bytes]:
    return _instruction(jump, value, 0, 1), _instruction(_RETURN, result)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
