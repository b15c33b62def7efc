# SPDX-License-Identifier: Apache-2.0
"""Every use of Ray that is not its public API: private modules, names of its processes, and the wording of its errors.

Ray promises none of this between versions. It was tested with TESTED_VERSIONS; with another one, run tests/cluster and
read each function here beside Ray's source.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.cluster.layout import RayCluster
from podium.cluster.starting import MOST_AT_ONCE
from podium.errors import ClusterError

TESTED_VERSIONS = ("2.60.0",)

GCS_SERVER, RAYLET = "gcs_server", "raylet"
# Ray needs both: gcs_server keeps the cluster's state, the raylet starts workers and stores objects.
VITAL_PROCESSES = (GCS_SERVER, RAYLET)
# The driver must not wait for idle workers: the raylet waits forever for one that died before it registered. Workers
# start together, however few cores there are.
_SYSTEM_CONFIG = {"prestart_worker_first_driver": False, "worker_maximum_startup_concurrency": MOST_AT_ONCE}
# Processes that the raylet starts besides workers, by the titles that they set.
_SERVER_TITLES = (
    b"ray::DashboardAgent",
    b"ray::RuntimeEnvAgent",
    b"ray::IDLE_",
    b"ray::SPILL_",
    b"ray::RESTORE_",
    b"ray::DELETE_",
)
_HELPER_OPTION = b"--worker-type="
_PORT_LOOK_S = 0.01
AUTH_MODE, _AUTH_TOKEN, _AUTH_TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
# Of every Ray that this process starts: Ray reads the token of a process once.
TOKEN = secrets.token_hex(32)
# Of actors that outlive their controller.
NAMESPACE = "podium"
# What a server answers to a missing or wrong token; an id that no cluster has; how long the answer may take.
_TOKEN_REFUSED, _NO_CLUSTER, _TOKEN_S = "InvalidAuthToken", "00" * 28, 3.0
# Asks in a process of its own, so that nothing of it stays in this one.
_ASK_FOR_TOKEN = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1], cluster_id=sys.argv[2]).internal_kv_get(b"podium", None, timeout=float(sys.argv[3]))
"""
_ASK_S = 30.0


def init_local(
    settings: RayCluster, *, setup_worker: Path | None, is_wanted: Callable[[], bool], outlives: bool = False
) -> None:
    """Starts a cluster on this machine and connects to it. If `setup_worker` is given, this script starts the workers.
    Gives up with a ClusterError once it is not `is_wanted`. `outlives`: its processes do not end with this one."""
    import ray

    with (
        _outliving() if outlives else contextlib.nullcontext(),
        loopback_only(),
        _needed_processes(),
        _interruptible_start(is_wanted),
        quiet_driver(),
        _worker_script(setup_worker),
    ):
        ray.init(
            address="local",  # not a cluster that another user has started on this machine
            num_cpus=settings.cpus or os.cpu_count(),
            num_gpus=settings.gpus,
            object_store_memory=settings.object_store_bytes,
            include_dashboard=False,
            log_to_driver=settings.show_output,
            logging_level=logging.ERROR,
            namespace=NAMESPACE,
            _system_config=dict(_SYSTEM_CONFIG),
        )


def signal_handlers() -> dict[int, Any]:
    """The program's own handlers of SIGINT and SIGTERM."""
    usual = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None)
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {number: handler for number, handler in found.items() if handler not in usual}


def install_again(handlers: Mapping[int, Any]) -> None:
    """Installs handlers before which a driver's start has put those of Ray. After a SIGTERM that of Ray calls the
    earlier one, but also sets an alarm that aborts the process 3 s later."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def join_local(settings: RayCluster, address: str) -> None:
    """Connects to a cluster on this machine that another process has started, and prints what its workers print."""
    import ray

    with loopback_only(), quiet_driver():
        ray.init(address=address, log_to_driver=settings.show_output, logging_level=logging.ERROR, namespace=NAMESPACE)
    ray._private.worker.global_worker._filter_logs_by_job = False


def package_folder() -> bytes:
    """The folder of Ray's package: commands of Ray's processes name files in it."""
    package = importlib.util.find_spec("ray")
    assert package is not None
    assert package.origin is not None
    return os.path.dirname(package.origin).encode() + b"/"


def may_be_worker(command: bytes) -> bool:
    """Whether a child of the raylet is a worker or may become one, by its command line. An unknown kind may become one,
    so that no worker is wrongly reported as missing."""
    return not command.startswith(_SERVER_TITLES) and _HELPER_OPTION not in command


def available_resources_per_node() -> Mapping[str, Mapping[str, float]]:
    """Free resources by node id. Ray's public function sums them over the nodes."""
    import ray

    free: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()
    return free


def draining_nodes() -> Collection[str]:
    """Ids of nodes that are being drained: by `ray drain-node`, by an autoscaler, or by a cloud that takes them back.
    Ray's public functions do not say."""
    import ray

    draining: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
    return draining.keys()


@dataclass(frozen=True, slots=True)
class ActorProcess:
    """Where an actor is."""

    pid: int
    node: str  # its id


def actor_processes() -> Mapping[str, ActorProcess]:
    """Processes of actors by name. Ray's public function asks a server that a run does not start."""
    import ray

    return {
        each["Name"]: ActorProcess(int(each["Pid"]), str(each["Address"]["NodeID"]))
        for each in ray._private.state.actors().values()
        if each["State"] != "DEAD"
    }


def outer_address() -> str:
    """The address of this machine that Ray uses in place of a loopback address."""
    import ray

    return str(ray._private.services.node_ip_address_from_perspective())


def is_token_refused(address: str) -> bool:
    """Whether the Ray at this address asks for a token, and this process sends none or another one. Ray itself reports
    a failed connection after 20 s."""
    command = [sys.executable, "-c", _ASK_FOR_TOKEN, address, _NO_CLUSTER, str(_TOKEN_S)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except subprocess.TimeoutExpired:
        return False  # anything else is reported when Ray connects
    return _TOKEN_REFUSED in answer.stderr


def has_token() -> bool:
    """Whether RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token gives a token. Ray is not asked: it would keep
    the token, and send it to a cluster that wants none."""
    if os.environ.get(_AUTH_TOKEN):
        return True
    named = os.environ.get(_AUTH_TOKEN_PATH)
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return file.is_file() and bool(file.read_bytes().strip())


def set_auth_mode(mode: str | None) -> None:
    """Sets RAY_AUTH_MODE for this process and its children; None: as if it had never been set. Ray reads it once, so
    its settings are read again."""
    import ray

    os.environ.pop(AUTH_MODE, None)
    if mode is not None:
        os.environ[AUTH_MODE] = mode
    ray._raylet.Config.initialize("")


def ask_for_token(token: str = TOKEN) -> Callable[[], None]:
    """Lets a Ray that this process starts answer only to those who have its token: the ports of a machine are open to
    all of its users. It is a new one, and in memory only: Ray lets everybody read ~/.ray/auth_token who can enter the
    home folder. Nothing changes where the user's environment has settings of its own. Returns how to undo it."""
    if not {AUTH_MODE, _AUTH_TOKEN, _AUTH_TOKEN_PATH}.isdisjoint(os.environ):
        return lambda: None
    os.environ[_AUTH_TOKEN] = token
    set_auth_mode("token")

    def undo() -> None:
        os.environ.pop(_AUTH_TOKEN, None)
        set_auth_mode(None)

    return undo


def forget_token() -> None:
    """Removes the token from the environment of a worker that is connected, where user code would find it."""
    os.environ.pop(_AUTH_TOKEN, None)


def death_reason(error: BaseException) -> str:
    """Why a worker is gone, in one sentence extracted from the text of Ray's error."""
    import ray

    text = str(error)
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "its node or the connection to it is gone"
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        used = re.search(r"was ([^)]*)\)?", text)
        return f"Ray ended it because its node ran out of memory ({used.group(1) if used else 'see `ray logs`'})"
    phrases = ("Worker exit detail:", "The actor is dead because")
    matches = (re.search(rf"{phrase} (.*?)\.(?:\s|$)", text) for phrase in phrases)
    detail = next((match for match in matches if match), None)
    pid = re.search(r"pid: (\d+)", text)
    reason = detail.group(1).rstrip(".") if detail else text.split("\n", 1)[0].rstrip(".")
    return f"process {pid.group(1)} is gone ({reason})" if pid else reason


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """Makes Ray use the loopback address for its node, as it does by default on macOS, and listen only there: a cluster
    of one machine needs no open port."""
    import ray

    with _replaced(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False):
        yield


@contextlib.contextmanager
def quiet_driver() -> Iterator[None]:
    """Prints only the output of workers. Ray's driver would also print complaints of Ray's processes, with whole logs
    of those that died. Podium reports deaths itself."""
    import ray

    worker = ray._private.worker
    print_output = worker.print_to_stdstream

    def print_workers(data: dict[str, Any], ignore_prefix: bool) -> None:
        if data.get("pid") not in VITAL_PROCESSES:
            print_output(data, ignore_prefix)

    with (
        _replaced(worker, "listen_error_messages", lambda worker, threads_stopped: None),
        _replaced(worker, "print_to_stdstream", print_workers),
    ):
        yield


@contextlib.contextmanager
def _needed_processes() -> Iterator[None]:
    """Skips the autoscaler and the dashboard's server, which Ray starts even without a dashboard. A cluster of one run
    does not use them, and the raylet starts only after them."""
    import ray

    node = ray._private.node.Node
    with (
        _replaced(node, "start_monitor", lambda self: None),
        _replaced(node, "start_api_server", lambda self, **_: None),
    ):
        yield


@contextlib.contextmanager
def _outliving() -> Iterator[None]:
    """Ray's processes do not end with this one: the kernel would kill them, or a process that watches it."""
    import ray

    with (
        _replaced(ray._private.utils, "detect_fate_sharing_support", lambda: False),
        _replaced(ray._private.node.Node, "start_reaper_process", lambda self: None),
    ):
        yield


@contextlib.contextmanager
def _worker_script(file: Path | None) -> Iterator[None]:
    """Makes the raylet run this script for each worker. Ray's own script imports Ray and then becomes a second Python
    process that imports it again."""
    import ray

    if file is None:
        yield
        return
    services = ray._private.services
    start = services.start_raylet

    def start_raylet(*arguments: Any, **named: Any) -> Any:
        bound = inspect.signature(start).bind(*arguments, **named)
        bound.arguments["setup_worker_path"] = str(file)
        return start(*bound.args, **bound.kwargs)

    with _replaced(services, "start_raylet", start_raylet):
        yield


@contextlib.contextmanager
def _interruptible_start(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Waits for the port file of gcs_server in Python first, as long as it `is_wanted`. Ray waits for it in a call that
    holds the GIL, for half a minute if gcs_server is dead."""
    import ray

    node = ray._private.node
    wait = node.wait_for_persisted_port

    def wait_for_port(folder: str, node_id: str, name: str, timeout_ms: int = 0) -> int:
        file = os.path.join(folder, node.get_port_filename(node_id, name))
        end_s = time.monotonic() + timeout_ms / 1000
        while not os.path.exists(file) and time.monotonic() < end_s:
            if not is_wanted():
                raise ClusterError("Ray's start was broken off.")
            time.sleep(_PORT_LOOK_S)
        port: int = wait(folder, node_id, name, timeout_ms=max(0, int(1000 * (end_s - time.monotonic()))))
        return port

    with _replaced(node, "wait_for_persisted_port", wait_for_port):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
