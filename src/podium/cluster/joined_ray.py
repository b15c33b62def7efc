# SPDX-License-Identifier: Apache-2.0
"""Joins a Ray cluster that was started elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket

import ray

from podium.cluster.blocking import in_thread
from podium.cluster.layout import RayCluster
from podium.cluster.ray_compat import (
    AUTH_MODE,
    has_token,
    install_again,
    is_token_refused,
    loopback_only,
    outer_address,
    quiet_driver,
    set_auth_mode,
    signal_handlers,
)
from podium.errors import ClusterError

# The preface that every gRPC server expects, Ray's too, and the type of frame with which it answers.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
_HTTP2_SETTINGS = 4
_COPY_TOKEN = "Copy ~/.ray/auth_token of the cluster's head to ~/.ray/auth_token here, or set RAY_AUTH_TOKEN"
# Longest wait for this machine's other address to answer.
_OUTER_S = 0.5


async def check_joinable(address: str, deadline_s: float) -> None:
    """Raises a ClusterError unless a Ray listens at the address and accepts the token of this process, if it asks for
    one. Ray itself takes 20 s to notice."""
    if "://" in address:
        raise ClusterError(
            f"{address} is not the address of a Ray cluster but of a client or job server. Run this program as a job "
            f"there (`ray job submit --address {address} -- podium train ...`), or give the head's host:port."
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # "auto" and "local": Ray resolves them
    await _check_answers(address, host, int(port), deadline_s)
    await in_thread(_authenticate, address)


async def _check_answers(address: str, host: str, port: int, deadline_s: float) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port)
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


def _authenticate(address: str) -> None:
    """Makes this process send its token if the Ray at the address asks for one. Ray does so by itself only for `auto`.
    Raises a ClusterError if there is no token, or the wrong one."""
    mode = os.environ.get(AUTH_MODE)
    is_here = has_token()
    if mode is not None and mode.lower() == "token" and not is_here:
        raise ClusterError(f"{AUTH_MODE} is {mode}, and there is no token here. {_COPY_TOKEN}.")
    if not is_token_refused(address):
        return
    if mode is None and is_here:
        set_auth_mode("token")
        if not is_token_refused(address):
            return
        set_auth_mode(None)
    if mode is not None and mode.lower() != "token":
        advice = f"{AUTH_MODE} is {mode} here, so none is sent. Set {AUTH_MODE}=token"
    elif is_here:
        advice = (
            "The token here is another one: it is read from RAY_AUTH_TOKEN, else from the file that "
            "RAY_AUTH_TOKEN_PATH names, else from ~/.ray/auth_token. Replace it by the token of the cluster's head"
        )
    else:
        advice = f"There is none here. {_COPY_TOKEN}, and set {AUTH_MODE}=token"
    raise ClusterError(f"Ray at {address} cannot be joined: it asks for a token. {advice}.")


def join_ray(address: str, settings: RayCluster) -> None:
    """Connects to the cluster."""
    mine = signal_handlers()
    try:
        with loopback_only() if _is_on_loopback_only(address) else contextlib.nullcontext(), quiet_driver():
            ray.init(
                address=address, log_to_driver=settings.show_output, logging_level=logging.ERROR,
                namespace=settings.kept_as,
            )  # fmt: skip
    finally:
        install_again(mine)


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
