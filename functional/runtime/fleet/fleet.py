"""The managed fleet of one run: etcd, NATS JetStream, the frontend, and `dynamo.vllm` workers owned by Ray actors."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray

from functional.runtime.errors import ProcessDiedError, RunError
from functional.runtime.fleet.control import FrontendControl, WorkerControl
from functional.runtime.fleet.ports import PortRange, is_listening
from functional.runtime.fleet.process import ManagedProcess
from functional.runtime.fleet.settings import FleetSettings
from functional.runtime.fleet.worker import Worker, WorkerAddress, WorkerOwner
from functional.runtime.recipe.argv import frontend_arguments
from functional.runtime.recipe.environment import (
    control_plane_variables,
    frontend_variables,
    inherited_environment,
    left_out,
    program_environment,
    worker_defaults,
)
from functional.runtime.recipe.model import FrontendArgs

POLL_INTERVAL_S = 0.25  # each poll of an unready worker is a line in its log


class Fleet:
    """Starts, watches and ends the fleet. `shutdown` may be called at any time, any number of times."""

    def __init__(self, settings: FleetSettings, placements: list[Any], progress: Callable[[str], None]) -> None:
        """`placements`: one Ray placement group per worker, each reserving its devices."""
        self.settings = settings
        self.ports = PortRange(settings.address)
        self.workers: list[Worker] = []
        self.phases: dict[str, float] = {}
        self.seeds: dict[int, list[int]] = {}  # by slot, of every engine it has had
        self._placements = placements
        self._progress = progress
        self._processes: list[ManagedProcess] = []
        self._owners: list[Any] = []
        self._addresses: list[WorkerAddress] = []
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
        inherited = inherited_environment()
        control_plane = self._start_control_plane(inherited, deadline)
        self.phases["control plane"] = time.monotonic() - began
        inherited = worker_defaults(self.settings.recipe.cluster.device, len(self._placements)) | inherited
        owner_class: Any = WorkerOwner
        for index, placement in enumerate(self._placements):
            options = {"placement_group": placement, "num_gpus": placement.bundle_specs[0]["GPU"]}
            self._owners.append(owner_class.options(**options).remote(self.settings, inherited, control_plane, index))
        self._addresses = ray.get([owner.start.remote() for owner in self._owners])
        for address in self._addresses:
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

    def _restart(self, indices: Iterable[int]) -> None:
        restarted: list[WorkerAddress] = ray.get([self._owners[index].restart.remote() for index in indices])
        for address in restarted:
            self.workers[address.index].control.close()
            self._addresses[address.index] = address
            self._note(address)

    def _note(self, launched: WorkerAddress) -> None:
        self.ports.given += launched.ports
        self.seeds.setdefault(launched.index, []).append(launched.seed)

    def _start_control_plane(self, inherited: dict[str, str], deadline: float) -> dict[str, str]:
        """Start etcd, NATS and the frontend. Returns the variables by which Dynamo's programs find them."""
        settings, host = self.settings, self.settings.address
        etcd_url, nats_url = self._start_stores(inherited, deadline)
        control_plane = control_plane_variables(settings.namespace, host, etcd_url, nats_url)
        self._frontend_base = inherited, control_plane
        self._frontend = self.add_frontend("frontend", settings.generation.dynamo_cfg.frontend_args)
        return control_plane

    def add_frontend(self, name: str, arguments: FrontendArgs) -> FrontendControl:
        """Start a frontend for the fleet's workers, beside those that there are; `name` is its log's."""
        settings, take, host = self.settings, self.ports.take, self.settings.address
        http = take()
        command = [str(settings.programs.dynamo_python), "-m", "dynamo.frontend"]
        command += frontend_arguments(arguments, host, http, settings.namespace)
        own = frontend_variables(arguments, stream_port=take(), system_port=take())
        self._spawn(name, command, program_environment(host, *self._frontend_base, own))
        return FrontendControl(f"http://{host}:{http}")

    def _start_stores(self, inherited: dict[str, str], deadline: float) -> tuple[str, str]:
        """Start etcd and NATS, and wait until they listen. Returns the URL of each."""
        settings, take, host = self.settings, self.ports.take, self.settings.address
        client, peer, nats = take(), take(), take()
        etcd_url = f"http://{host}:{client}"
        base = program_environment(host, inherited)
        self._spawn(
            "etcd",
            [
                str(settings.programs.etcd),
                f"--data-dir={settings.run_dir / 'etcd'}",
                f"--listen-client-urls={etcd_url}",
                f"--advertise-client-urls={etcd_url}",
                f"--listen-peer-urls=http://{host}:{peer}",
                f"--initial-advertise-peer-urls=http://{host}:{peer}",
                f"--initial-cluster=default=http://{host}:{peer}",
            ],
            base,
        )
        self._spawn(
            "nats-server",
            [
                str(settings.programs.nats_server),
                "-a",
                host,
                "-p",
                str(nats),
                "-js",
                "-sd",
                str(settings.run_dir / "nats"),
            ],
            base,
        )
        self._wait_for_ports("etcd and NATS", [client, nats], deadline)
        return etcd_url, f"nats://{host}:{nats}"

    def _spawn(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        log = self.settings.log_dir / f"{name}.log"
        self._processes.append(ManagedProcess(name, command, log, environment))

    def _wait_for_ports(self, what: str, ports: list[int], deadline: float) -> None:
        while not all(is_listening(port) for port in ports):
            self.check()
            if time.monotonic() > deadline:
                raise RunError(f"{what} did not listen before dynamo_cfg.startup_timeout_s ran out")
            time.sleep(0.02)

    def _wait_until_serving(self, began: float, deadline: float) -> None:
        control_timeout = self.settings.generation.dynamo_cfg.control_timeout_s
        known = {worker.control.url: worker.control for worker in self.workers}
        controls = [
            known.get(a.control_url) or WorkerControl(a.index, a.control_url, control_timeout) for a in self._addresses
        ]
        expected = {address.request_plane for address in self._addresses}
        conditions: dict[str, Callable[[], bool]] = {
            "engines ready": lambda: all(control.is_ready() for control in controls),
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
        self.workers = [
            Worker(a.index, ids[a.request_plane], control) for a, control in zip(self._addresses, controls, strict=True)
        ]

    def check(self) -> None:
        """Raise ProcessDiedError for the first process of the fleet that has ended."""
        self.check_control_plane()
        for problem in self.lost_workers().values():
            raise ProcessDiedError(problem)

    def check_control_plane(self) -> None:
        """Raise ProcessDiedError when etcd, NATS or the frontend has ended: nothing replaces these."""
        for process in self._processes:
            process.check()

    def lost_workers(self) -> dict[int, str]:
        """Slot → last words, of the workers that have ended. Raises ProcessDiedError when an owner is gone."""
        if not self._owners:
            return {}
        try:
            problems = ray.get([owner.problem.remote() for owner in self._owners], timeout=20)
        except ray.exceptions.RayError as error:
            raise ProcessDiedError(f"a worker's owner is gone: {' '.join(str(error).split())[:300]}") from error
        return {index: problem for index, problem in enumerate(problems) if problem is not None}

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
        if self._owners:
            owned = ray.get([owner.pids.remote() for owner in self._owners], timeout=20)
            found |= {f"worker-{index}": pids for index, pids in enumerate(owned)}
        return found

    def listening_ports(self) -> list[int]:
        """Ports given to this fleet's processes."""
        return sorted(self.ports.given)

    def shutdown(self) -> None:
        """End workers, then the frontend, NATS and etcd."""
        for worker in self.workers:
            worker.control.close()
        for owner in self._owners:
            # An owner that is gone took its lifeline with it, and the worker's guard ended the worker.
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(owner.stop.remote(), timeout=40)
            ray.kill(owner)
        self._owners = []
        for process in reversed(self._processes):
            process.stop()
        self._processes = []
        if self._frontend is not None:
            self._frontend.close()
            self._frontend = None
