# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of ranks: a store over a file or over TCP, a process group on it, and a check that it carries data."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from podium.engine.addresses import DeviceKind, FileMeeting, Meeting, TcpMeeting
from podium.errors import RendezvousError

_SIOCGIFADDR = 0x8915
_LEAST_WAIT_S = 1.0
# How often torchrun has restarted the ranks; it sets this for every one.
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


class MeetingServer:
    """The store behind a TcpMeeting. Listens only on the given address; torch's own would listen on all."""

    def __init__(self, host: str) -> None:
        with socket.create_server((host, 0), backlog=1024) as listener:
            port = listener.getsockname()[1]
            # The store closes the descriptor that it is given.
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
            )
        self.meeting = TcpMeeting(host=host, port=port)


def open_store(meeting: Meeting, world: int, timeout_s: float) -> Store:
    """Connects to the store."""
    if isinstance(meeting, FileMeeting):
        return dist.FileStore(str(meeting.path), world)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_s)
    store: Store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return store


def await_all(store: Store, *, rank: int, world: int, timeout_s: float, what: str) -> None:
    """Returns when every rank has reached the store. After the deadline, the error names the missing ranks."""
    names = [f"here/{each}" for each in range(world)]
    store.set(names[rank], "1")
    try:
        store.wait(names, timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistError) as error:
        absent = [each for each, name in enumerate(names) if not store.check([name])]
        raise RendezvousError(
            f"{what}: rank {rank} of {world} waited {timeout_s:.0f} s and ranks {absent} did not come. "
            "Look whether those were started, and what they were doing."
        ) from error


def join_default_group(
    meeting: Meeting | None,
    *,
    kind: DeviceKind,
    rank: int,
    world: int,
    device: torch.device,
    deadline_s: float,
    timeout_s: float,
) -> None:
    """Forms the default process group (gloo on CPU, NCCL beside it on CUDA) within `deadline_s` and sends a small
    number around it. `timeout_s` is the longest wait of later collectives. Without a meeting, torchrun's environment is
    used."""
    what = f"the process group of {world} ranks"
    began = time.monotonic()
    try:
        store = None
        if meeting is not None:
            store = open_store(meeting, world, deadline_s)
            await_all(store, rank=rank, world=world, timeout_s=deadline_s, what=what)
            store = PrefixStore("default", store)
        elif _ATTEMPT in os.environ:
            # Agents of torchrun keep their store over restarts, and the addresses of dead ranks are still in it.
            store, rank, world = next(
                dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=deadline_s))  # type: ignore[attr-defined]
            )
            store = PrefixStore(f"attempt-{os.environ[_ATTEMPT]}", store)
        left_s = max(_LEAST_WAIT_S, deadline_s - (time.monotonic() - began))
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=left_s))
        _probe(device, rank, world)
        for group_device in {torch.device("cpu"), torch.device(device.type)}:
            backend_group = dist.group.WORLD._get_backend(group_device)  # type: ignore[union-attr]
            backend_group._set_default_timeout(timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError, dist.DistError) as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise RendezvousError(
            f"{what} was not formed: rank {rank} gave up after {time.monotonic() - began:.0f} s "
            f"(deadline {deadline_s:.0f} s) on interface {chosen_interface()}: {first_line(error)} "
            "Look whether all ranks were started and whether their hosts reach each other over that interface."
        ) from error


def _probe(device: torch.device, rank: int, world: int) -> None:
    """Runs a real collective: an interface that connects and then drops data is detected here, not in the first
    step."""
    number = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(number)
    if number.item() != world * (world + 1) / 2:
        raise RuntimeError(f"the probe all-reduce gave {number.item()} instead of {world * (world + 1) / 2}.")


def use_interface_of(host: str) -> str:
    """Points gloo and NCCL (through their documented variables) at the interface that has this address, unless the
    user has chosen one; returns its name."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is not None:
        return chosen
    name = interface_of(host)
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    return name


def chosen_interface() -> str:
    """The interface that gloo uses: its environment variable, or torch's choice."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "(torch's choice)")


def interface_of(host: str) -> str:
    """The network interface that has the address."""
    names_by_address: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            names_by_address[socket.inet_ntoa(packed[20:24])] = name
    if host not in names_by_address:
        raise RendezvousError(
            f"no network interface of this node has the address {host}; there are "
            f"{', '.join(f'{name} ({address})' for address, name in names_by_address.items())}. Start Ray here with "
            "--node-ip-address set to one of them, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
        )
    return names_by_address[host]


def first_line(error: BaseException) -> str:
    """The first line of torch's errors, which has the reason; C++ stacks follow it."""
    return str(error).split("\n", 1)[0].rstrip(".") + "."
