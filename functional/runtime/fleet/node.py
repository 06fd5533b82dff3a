"""One node of a run, and the Ray actor on it that owns the node's workers."""

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from functional.runtime.errors import RunError
from functional.runtime.fleet.http_server import HttpServer, Reply
from functional.runtime.fleet.interfaces import interface_name, stream_interface
from functional.runtime.fleet.ports import PortRange
from functional.runtime.fleet.remains import Traces
from functional.runtime.fleet.settings import FleetSettings
from functional.runtime.fleet.sockets import NodeSockets
from functional.runtime.fleet.worker import WorkerAddress, WorkerProcess
from functional.runtime.recipe.environment import (
    ADDRESS_VARIABLE,
    LOOPBACK_INTERFACE,
    collective_variables,
    node_variables,
    worker_defaults,
)
from functional.runtime.recipe.placement import device_of

SMALL_FILE = 1 << 20
"""Files of a model up to this size are compared by content, larger ones by size."""


@dataclass(frozen=True)
class Node:
    """A node in use. address: what other nodes call, loopback in a run of one node; engines: slots of its workers.

    owner: handle of its NodeOwner.
    """

    name: str
    address: str
    ray_id: str
    engines: tuple[int, ...]
    has_trainer: bool
    is_drivers: bool
    owner: Any


@dataclass(frozen=True)
class NodeFacts:
    """What a node says of itself. address: the job's on it; collective: variables that NCCL lacks there; problem: why
    it cannot be used."""

    name: str
    address: str
    collective: Mapping[str, str]
    problem: str | None


@ray.remote(num_cpus=0, num_gpus=0, max_restarts=0)
class NodeOwner:
    """Starts, watches and ends the workers of its node, and calls their control servers, which nobody else can reach.

    Its calls run side by side. When it ends, however that may be, its workers' guards end them.
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        """devices: the workers' GPUs, which Ray has reserved for the run, one engine's after the other's; none where
        they are virtual, or shared with the trainer."""
        self._own = devices
        self._workers: dict[int, WorkerProcess] = {}
        self._servers: dict[int, HttpServer] = {}
        self._ports: PortRange | None = None
        self._folders: list[Path] = []

    def facts(self, rays_address: str) -> NodeFacts:
        return node_facts(rays_address)

    def find_problem(self, settings: FleetSettings, model_digest: str, canary: Path) -> str | None:
        """What this node lacks of what the driver's has, in one line; None if nothing."""
        if not os.access(settings.programs.dynamo_python, os.X_OK):
            return f"{settings.programs.dynamo_python} is missing: every node runs the same image"
        if folder_digest(settings.model_dir) != model_digest:
            return f"{settings.model_dir} is missing or another model: put it on a folder that all nodes share"
        if not is_canary(canary, settings.namespace):
            return f"{settings.log_dir} is not the driver's folder: put --out on a folder that all nodes share"
        return None

    def start(
        self,
        settings: FleetSettings,
        node: "NodeSite",
        inherited: Mapping[str, str],
        control_plane: Mapping[str, str],
    ) -> list[WorkerAddress]:
        """Launch the node's workers; returns where each will serve."""
        self._ports = PortRange(node.address)
        interface = interface_name(node.address) or LOOPBACK_INTERFACE
        ranks = len(node.engines) * settings.recipe.devices_per_engine
        below = collective_variables(interface) | worker_defaults(settings.recipe.cluster.device, ranks)
        below |= inherited
        above = dict(control_plane) | node_variables(node.address, stream_interface(node.address))
        for index, devices in zip(node.engines, self._devices(settings, len(node.engines)), strict=True):
            self._workers[index] = WorkerProcess(settings, index, (below, above), self._ports, devices, node.base)
        return [self._noted(index, worker.start()) for index, worker in self._workers.items()]

    def restart(self, index: int) -> WorkerAddress:
        return self._noted(index, self._workers[index].restart())

    def ask(self, index: int, method: str, path: str, body: bytes | None, timeout_s: float) -> Reply:
        """As `ControlServer.ask`, of one worker."""
        return self._servers[index].ask(method, path, body, timeout_s)

    def problems(self) -> dict[int, str]:
        """What became of each worker that does not run any more."""
        found = {index: worker.problem() for index, worker in self._workers.items()}
        return {index: problem for index, problem in found.items() if problem is not None}

    def pids(self) -> dict[int, list[int]]:
        return {index: worker.pids() for index, worker in self._workers.items()}

    def flush_logs(self) -> None:
        """Bring the workers' logs to where other nodes read them: a network file system may keep them here for long."""
        for worker in self._workers.values():
            with suppress(OSError), worker.log.open("rb") as log:
                os.fsync(log.fileno())

    def sockets(self) -> NodeSockets:
        """What the workers listen on."""
        return NodeSockets.here([pid for pids in self.pids().values() for pid in pids])

    def stop(self, namespace: str) -> Traces:
        """End the workers, and let none start any more. Returns by what their remains would be known."""
        for worker in list(self._workers.values()):  # others may be starting and replacing them meanwhile
            worker.stop()
        for server in list(self._servers.values()):
            server.close()
        ports = self._ports.given if self._ports else []
        return Traces(namespace, (os.getpid(),), tuple(ports), tuple(self._folders))

    def _noted(self, index: int, address: WorkerAddress) -> WorkerAddress:
        worker = self._workers[index]
        if worker.folder is not None:
            self._folders.append(worker.folder)
        if index in self._servers:
            self._servers[index].close()
        self._servers[index] = HttpServer(address.control_url)
        return address

    def _devices(self, settings: FleetSettings, engines: int) -> list[tuple[str, ...]]:
        """GPUs by worker: this owner's own, or the machine's in turn where the trainer shares them; none on CPU."""
        recipe, size = settings.recipe, settings.recipe.devices_per_engine
        if recipe.cluster.device == "cpu":
            return [()] * engines
        shared = [device_of(number, settings.gpus) for number in range(engines * size)] if settings.gpus else None
        ids = list(map(str, self._own if shared is None else shared))
        return [tuple(ids[number * size : (number + 1) * size]) for number in range(engines)]


@dataclass(frozen=True)
class NodeSite:
    """Where a node's workers live. base: a folder of the node, in which each makes its own."""

    address: str
    engines: tuple[int, ...]
    base: Path


class OwnedServer:
    """The way to a worker's control server from another node: through the owner of the worker's node."""

    GRACE_S = 10.0

    def __init__(self, node: Node, index: int) -> None:
        self._node = node
        self._index = index

    def ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Reply:
        try:
            asked = self._node.owner.ask.remote(self._index, method, path, body, timeout_s)
            reply: Reply = ray.get(asked, timeout=timeout_s + self.GRACE_S)
        except ray.exceptions.GetTimeoutError:
            return Reply(0, timed_out=True)
        except ray.exceptions.RayError as error:
            return Reply(0, problem=f"node {self._node.name}: its owner is gone ({type(error).__name__})")
        return reply

    def close(self) -> None:
        pass  # the owner has the connections


def node_facts(rays_address: str) -> NodeFacts:
    """Of the node that this runs on, which Ray knows by `rays_address`."""
    given = os.environ.get(ADDRESS_VARIABLE)
    address, source = (given, ADDRESS_VARIABLE) if given else (rays_address, "Ray's address of it")
    interface, name = interface_name(address), socket.gethostname()
    if interface is None:
        return NodeFacts(name, address, {}, f"{source} is {address}, which no interface has")
    try:
        stream_interface(address)
    except RunError as error:
        return NodeFacts(name, address, {}, str(error))
    collective = {key: value for key, value in collective_variables(interface).items() if key not in os.environ}
    return NodeFacts(name, address, collective, None)


def folder_digest(folder: Path) -> str:
    """Of names, sizes, and the content of small files; of a folder that is missing, of nothing."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(json.dumps([str(path.relative_to(folder)), size]).encode())
        if size <= SMALL_FILE:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def is_canary(path: Path, content: str) -> bool:
    with suppress(OSError):
        return path.read_text(encoding="utf-8") == content
    return False
