# SPDX-License-Identifier: Apache-2.0
"""Ranks of an engine that are processes of their own already, each on its device beside a learner: connects them, and
lets those behind the first follow it.

They exchange commands over a socket of the node, and values over a group of the learners' process group."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from podium.engine.mesh import Mesh
from podium.errors import RolloutError
from podium.models.tensor_axis import TensorAxis
from podium.rollout.native.follower import Follower
from podium.rollout.native.tensor_group import Problem
from podium.weights.whole_copy import WholeCopy


def joined_ranks(mesh: Mesh, axis: TensorAxis, *, timeout_s: float) -> Sequence[Connection]:
    """Rank 0 of the axis gets a connection to each other rank, in order of ranks; another rank gets that to rank 0.
    Waits `timeout_s` at most for each other. Collective over the mesh."""
    folder = Path(tempfile.mkdtemp(prefix="podium-ranks-")) if axis.rank == 0 else None  # for this user alone
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            if folder is not None:
                listener.bind(str(folder / "socket"))
                listener.listen(axis.size)
            folders = mesh.gather(folder)
            if folder is None:
                return [_connected(folders[mesh.rank - axis.rank] / "socket", axis.rank, timeout_s)]
            return _accepted(listener, axis.size, timeout_s)
    except OSError as error:
        raise RolloutError(
            f"the {axis.size} ranks of an engine do not reach each other (rank {axis.rank}: {error}). They must be "
            "processes of one node with the same folder for temporary files."
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _connected(path: Path, rank: int, timeout_s: float) -> Connection:
    with socket.socket(socket.AF_UNIX) as mine:
        mine.settimeout(timeout_s)
        mine.connect(str(path))
        mine.settimeout(None)
        connection = Connection(mine.detach())
    connection.send(rank)
    return connection


def _accepted(listener: socket.socket, size: int, timeout_s: float) -> Sequence[Connection]:
    listener.settimeout(timeout_s)
    by_rank: dict[int, Connection] = {}
    while len(by_rank) < size - 1:
        other, _ = listener.accept()
        with other:
            other.settimeout(None)
            connection = Connection(other.detach())
        if not connection.poll(timeout_s):
            raise TimeoutError(f"a rank has connected and not said which one it is in {timeout_s:.0f} s")
        by_rank[connection.recv()] = connection
    return [by_rank[rank] for rank in range(1, size)]


def follow_on_thread(copy: WholeCopy, device: torch.device, connection: Connection) -> None:
    """Carries out rank 0's commands on a thread, until rank 0 closes or is gone. What fails here is reported to it."""
    threading.Thread(target=_follow, args=(copy, device, connection), name="engine rank", daemon=True).start()


def _follow(copy: WholeCopy, device: torch.device, connection: Connection) -> None:
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        Follower(copy.model, device, receive=connection.recv, answer=connection.send, copy=copy).serve()
    except EOFError:
        return  # rank 0 is gone, and with it the engine
    except BaseException as error:
        try:
            connection.send(Problem(text=f"{type(error).__name__}: {error}", trace=traceback.format_exc()))
        except OSError:
            return
    finally:
        connection.close()
