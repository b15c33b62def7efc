# SPDX-License-Identifier: Apache-2.0
"""Joins a Ray cluster that was started elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading

import ray

from podium.cluster.layout import RayCluster
from podium.cluster.ray_compat import loopback_only, outer_address, quiet_driver
from podium.errors import ClusterError

# The preface that every gRPC server expects, Ray's too, and the type of frame with which it answers.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
_HTTP2_SETTINGS = 4
# Longest wait for this machine's other address to answer.
_OUTER_S = 0.5


async def check_reachable(address: str, deadline_s: float) -> None:
    """Raises a ClusterError unless a Ray listens at the address. Ray itself takes 20 s to notice."""
    if "://" in address:
        raise ClusterError(
            f"{address} is not the address of a Ray cluster but of a client or job server. Run this program as a job "
            f"there (`ray job submit --address {address} -- podium train ...`), or give the head's host:port."
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # "auto" and "local": Ray resolves them
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            if "RAY_USE_TLS" not in os.environ:  # then it would wait for a handshake first
                writer.write(_HTTP2_HELLO)
                if (await reader.readexactly(9))[3] != _HTTP2_SETTINGS:
                    raise OSError("what listens there is not Ray")
        writer.close()
    except asyncio.IncompleteReadError as error:
        raise ClusterError(f"what listens at {address} is not Ray: it hung up on a greeting.") from error
    except (OSError, TimeoutError) as error:
        why = str(error) or f"no answer in {deadline_s:.0f} s"
        raise ClusterError(
            f"no Ray cluster answers at {address} ({why}). Start one there with `ray start --head`, correct the "
            "address, or leave it (and RAY_ADDRESS) away for a local one."
        ) from error


def join_ray(address: str, settings: RayCluster) -> None:
    """Connects to the cluster. Ray installs signal handlers; the program's own handlers are restored."""
    usual = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None)
    mine = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with loopback_only() if _is_on_loopback_only(address) else contextlib.nullcontext(), quiet_driver():
            ray.init(address=address, log_to_driver=settings.show_output, logging_level=logging.ERROR)
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in mine.items():
                if handler not in usual:
                    signal.signal(number, handler)


def _is_on_loopback_only(address: str) -> bool:
    """Whether the cluster listens on loopback only. Ray replaces a loopback address by the machine's outer one, where a
    local cluster of Podium does not listen."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdigit():
        return False
    try:
        socket.create_connection((outer_address(), int(port)), timeout=_OUTER_S).close()
    except OSError:
        return True
    return False
