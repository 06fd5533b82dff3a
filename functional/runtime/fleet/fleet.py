"""The managed fleet of one run: etcd, NATS JetStream, the frontend, and `dynamo.vllm` workers that their nodes' owners
hold."""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from functional.runtime.errors import ConfigError, ProcessDiedError, RunError
from functional.runtime.fleet.control import FrontendControl, WorkerControl
from functional.runtime.fleet.http_server import HttpServer
from functional.runtime.fleet.interfaces import stream_interface
from functional.runtime.fleet.node import Node, NodeSite, OwnedServer, folder_digest
from functional.runtime.fleet.ports import PortRange, is_listening
from functional.runtime.fleet.process import ManagedProcess
from functional.runtime.fleet.remains import Traces
from functional.runtime.fleet.settings import FleetSettings
from functional.runtime.fleet.sockets import NodeSockets
from functional.runtime.fleet.stores import Stores, make_credentials, start_etcd, start_nats
from functional.runtime.fleet.worker import Worker, WorkerAddress
from functional.runtime.recipe.argv import frontend_arguments
from functional.runtime.recipe.environment import (
    LOOPBACK,
    control_plane_variables,
    frontend_variables,
    inherited_environment,
    left_out,
    node_variables,
    program_environment,
)
from functional.runtime.recipe.model import FrontendArgs

POLL_INTERVAL_S = 0.25  # each poll of an unready worker is a line in its log
OWNER_ANSWER_S = 20.0
RESTART_S = 60.0
CHECK_S = 120.0
"""Another node reads all of a model's small files, from a folder that may be slow."""
FOREIGN_BASE = Path("/tmp")
"""Where workers on other nodes than the driver's have their folders of sockets, whose paths must be short."""


class Fleet:
    """Starts, watches and ends the fleet. `shutdown` may be called at any time, any number of times."""

    def __init__(self, settings: FleetSettings, nodes: Sequence[Node], progress: Callable[[str], None]) -> None:
        """`nodes`: those of the run's placement, with a started owner each."""
        self.settings = settings
        self.ports = PortRange(settings.address)
        self.workers: list[Worker] = []
        self.phases: dict[str, float] = {}
        self.seeds: dict[int, list[int]] = {}  # by slot, of every engine it has had
        self.traces: dict[str, Traces] = {}
        """By Ray's ID of a node, once shut down: by what the remains of its workers would be known."""
        self._others = [node for node in nodes if not node.is_drivers]
        self._nodes = [node for node in nodes if node.engines]
        self._node_of = {index: node for node in nodes for index in node.engines}
        self._progress = progress
        self._watched: list[Callable[[], None]] = []
        self._processes: list[ManagedProcess] = []
        self._addresses: dict[int, WorkerAddress] = {}
        self._controls: dict[int, WorkerControl] = {}
        self._launched = False
        self._frontend: FrontendControl | None = None
        self._frontend_base: tuple[dict[str, str], dict[str, str]] = {}, {}

    @property
    def frontend(self) -> FrontendControl:
        if self._frontend is None:
            raise RunError("the fleet's frontend is not started")
        return self._frontend

    def start(self) -> None:
        """Start everything and return when every worker is registered, ready and routed.

        Raises ProcessDiedError with the first dead process's last lines, or RunError at `startup_timeout_s`.
        """
        began = time.monotonic()
        deadline = began + self.settings.generation.dynamo_cfg.startup_timeout_s
        if names := left_out():
            self._progress(f"not handed on to the fleet: {', '.join(names)}")
        self._check_nodes()
        inherited = inherited_environment()
        control_plane = self._start_control_plane(inherited, deadline)
        self.phases["control plane"] = time.monotonic() - began
        self._launched = True
        started = [
            node.owner.start.remote(self.settings, self._site(node), inherited, control_plane) for node in self._nodes
        ]
        for addresses in answers(self._nodes, started, deadline - time.monotonic()):
            for address in addresses:
                self._note(address)
        self.phases["workers launched"] = time.monotonic() - began
        self._wait_until_serving(began, deadline)

    def replace(self, lost: Mapping[int, str]) -> list[Worker]:
        """End the lost workers (slot → why it counts as lost), start new ones in their slots; returns all workers.

        A worker that dies meanwhile is replaced too, once. Returns when the new membership, and no other, is registered
        and routed. Raises as `start` does.
        """
        began = time.monotonic()
        deadline = began + self.settings.generation.dynamo_cfg.startup_timeout_s
        ended = self.lost_workers()
        for index, reason in sorted(lost.items()):
            self._progress(f"replacing worker {index}: {ended.get(index, reason).split('; last lines')[0]}")
        self._restart(lost)
        try:
            self._wait_until_serving(began, deadline)
        except ProcessDiedError:
            self.check_control_plane()
            self._restart(self.lost_workers())
            self._wait_until_serving(began, deadline)
        return self.workers

    def _restart(self, indices: Collection[int]) -> None:
        nodes = [self._node_of[index] for index in indices]
        restarted = [node.owner.restart.remote(index) for node, index in zip(nodes, indices, strict=True)]
        for address in answers(nodes, restarted, RESTART_S):
            self._note(address)

    def _note(self, launched: WorkerAddress) -> None:
        index, node = launched.index, self._node_of[launched.index]
        if index in self._controls:
            self._controls[index].close()
        server = HttpServer(launched.control_url) if node.is_drivers else OwnedServer(node, index)
        self._controls[index] = WorkerControl(index, server, self.settings.generation.dynamo_cfg.control_timeout_s)
        self._addresses[index] = launched
        if node.is_drivers:
            self.ports.given += launched.ports
        self.seeds.setdefault(index, []).append(launched.seed)

    def _site(self, node: Node) -> NodeSite:
        return NodeSite(node.address, node.engines, self.settings.run_dir if node.is_drivers else FOREIGN_BASE)

    def _check_nodes(self) -> None:
        """Raises ConfigError for the first node that lacks what the driver's has: model, programs, the run's folder."""
        if not self._others:
            return
        canary = self.settings.log_dir / f".shared-{self.settings.namespace}"
        canary.write_text(self.settings.namespace, encoding="utf-8")
        try:
            digest = folder_digest(self.settings.model_dir)
            asked = [node.owner.find_problem.remote(self.settings, digest, canary) for node in self._others]
            for node, problem in zip(self._others, answers(self._others, asked, CHECK_S), strict=True):
                if problem:
                    raise ConfigError(f"node {node.name} ({node.address}): {problem}")
        finally:
            canary.unlink(missing_ok=True)

    def _start_control_plane(self, inherited: dict[str, str], deadline: float) -> dict[str, str]:
        """Start etcd, NATS and the frontend. Returns the variables by which Dynamo's programs find them."""
        settings = self.settings
        stores = self._start_stores(inherited, deadline)
        control_plane = control_plane_variables(
            settings.namespace, stores.etcd_url, stores.nats_url, stores.credentials
        )
        self._frontend_base = inherited, control_plane
        self._frontend = self.add_frontend("frontend", settings.generation.dynamo_cfg.frontend_args)
        return control_plane

    def add_frontend(self, name: str, arguments: FrontendArgs) -> FrontendControl:
        """Start a frontend for the fleet's workers, beside those that there are; `name` is its log's."""
        settings, take = self.settings, self.ports.take
        http = take()
        command = [str(settings.programs.dynamo_python), "-m", "dynamo.frontend"]
        # Loopback in a run of several nodes too: it knows no credentials, and only the driver calls it.
        command += frontend_arguments(arguments, LOOPBACK, http, settings.namespace)
        own = frontend_variables(arguments, stream_port=take(), system_port=take())
        own |= node_variables(settings.address, stream_interface(settings.address))
        environment = program_environment(settings.address, *self._frontend_base, own)
        self._processes.append(ManagedProcess(name, command, settings.log_dir / f"{name}.log", environment))
        return FrontendControl(f"http://{LOOPBACK}:{http}")

    def _start_stores(self, inherited: dict[str, str], deadline: float) -> Stores:
        """Start etcd and NATS, and wait until they listen."""
        settings, take, host = self.settings, self.ports.take, self.settings.address
        client, peer, nats = take(), take(), take()
        stores = Stores(f"https://{host}:{client}", f"nats://{host}:{nats}", make_credentials(settings))
        base = program_environment(host, inherited)
        self._processes.append(start_etcd(settings, stores.etcd_url, f"https://{LOOPBACK}:{peer}", base))
        self._processes.append(start_nats(settings, nats, stores.credentials, base))
        self._wait_for_ports("etcd and NATS", [client, nats], deadline)
        return stores

    def _wait_for_ports(self, what: str, ports: list[int], deadline: float) -> None:
        while not all(is_listening(port) for port in ports):
            self.check()
            if time.monotonic() > deadline:
                raise RunError(f"{what} did not listen before dynamo_cfg.startup_timeout_s ran out")
            time.sleep(0.02)

    def _wait_until_serving(self, began: float, deadline: float) -> None:
        addresses = [self._addresses[index] for index in sorted(self._addresses)]
        expected = {address.request_plane for address in addresses}
        conditions: dict[str, Callable[[], bool]] = {
            "engines ready": lambda: all(self._controls[address.index].is_ready() for address in addresses),
            "generate registered": lambda: set(self.frontend.instances("generate")) == expected,
            "rl registered": lambda: set(self.frontend.instances("rl")) == expected,
            "model routed": lambda: self.frontend.has_model(self.settings.recipe.policy.model_name),
        }
        for what, holds in conditions.items():
            while not holds():
                self.check()
                if time.monotonic() > deadline:
                    raise RunError(
                        f"fleet start-up: «{what}» did not come within dynamo_cfg.startup_timeout_s="
                        f"{self.settings.generation.dynamo_cfg.startup_timeout_s:g}; see {self.settings.log_dir}"
                    )
                time.sleep(POLL_INTERVAL_S)
            self.phases[what] = time.monotonic() - began
            self._progress(f"{what} after {self.phases[what]:.1f} s")
        ids = self.frontend.instances("generate")
        self.workers = [Worker(a.index, ids[a.request_plane], self._controls[a.index]) for a in addresses]

    def check(self) -> None:
        """Raise ProcessDiedError for the first process of the fleet that has ended."""
        self.check_control_plane()
        for problem in self.lost_workers().values():
            raise ProcessDiedError(problem)

    def watch(self, check: Callable[[], None]) -> None:
        """Have `check`, which raises ProcessDiedError for something else that nothing replaces, called with the control
        plane's."""
        self._watched.append(check)

    def check_control_plane(self) -> None:
        """Raise ProcessDiedError when etcd, NATS or the frontend has ended: nothing replaces these."""
        for check in self._watched:
            check()
        for process in self._processes:
            process.check()

    def lost_workers(self) -> dict[int, str]:
        """Slot → last words, of the workers that have ended. Raises ProcessDiedError when an owner, or its node, is
        gone."""
        if not self._launched:
            return {}
        found: dict[int, str] = {}
        for problems in self._of_owners("problems"):
            found |= problems
        return found

    def _of_owners(self, method: str) -> list[Any]:
        return answers(self._nodes, [getattr(node.owner, method).remote() for node in self._nodes], OWNER_ANSWER_S)

    def check_membership(self) -> None:
        """Raise RunError unless exactly the workers of start-up are registered at `generate` and `rl`."""
        self.check()
        expected = sorted(worker.instance_id for worker in self.workers)
        for endpoint in ("generate", "rl"):
            found = sorted(self.frontend.instances(endpoint).values())
            if found != expected:
                raise RunError(f"fleet membership changed at {endpoint!r}: expected {expected}, found {found}")

    def pids(self) -> dict[str, list[int]]:
        """Process ids by name, for the run's record and for tests that inject faults."""
        found = {process.name: process.pids() for process in self._processes}
        if self._launched:
            for node, owned in zip(self._nodes, self._of_owners("pids"), strict=True):
                where = "" if node.is_drivers else f" on {node.name}"
                found |= {f"worker-{index}{where}": pids for index, pids in owned.items()}
        return found

    def flush_logs(self) -> None:
        """Bring the workers' logs of other nodes to where this process reads them."""
        self._of_owners("flush_logs")

    def sockets(self) -> list[NodeSockets]:
        """What the workers listen on, node by node."""
        return self._of_owners("sockets")

    def listening_ports(self) -> list[int]:
        """Ports given to this fleet's processes on the driver's node."""
        return sorted(self.ports.given)

    def shutdown(self) -> None:
        """End workers, then the frontend, NATS and etcd."""
        for control in self._controls.values():
            control.close()
        stopping = [(node, node.owner.stop.remote(self.settings.namespace)) for node in self._nodes]
        for node, reference in stopping:
            # An owner that is gone took its lifeline with it, and the worker's guard ended the worker.
            with contextlib.suppress(ray.exceptions.RayError):
                self.traces[node.ray_id] = ray.get(reference, timeout=40)
        self._nodes, self._launched = [], False
        for process in reversed(self._processes):
            process.stop()
        self._processes = []
        if self._frontend is not None:
            self._frontend.close()
            self._frontend = None


def answers(nodes: Sequence[Node], asked: Sequence[Any], timeout_s: float) -> list[Any]:
    """What the nodes' owners answer to what each was asked.

    Raises RunError with what an owner raised; ProcessDiedError, which names the node, where an owner is gone or silent.
    """
    deadline = time.monotonic() + timeout_s
    found = []
    for node, reference in zip(nodes, asked, strict=True):
        where = f"node {node.name} ({node.address})"
        try:
            found.append(ray.get(reference, timeout=max(0.0, deadline - time.monotonic())))
        except ray.exceptions.RayTaskError as error:
            raise RunError(f"{where}: {' '.join(str(error.cause).split())}") from error
        except ray.exceptions.RayError as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ProcessDiedError(f"{where}: the owner of its workers is gone ({why})") from error
    return found
