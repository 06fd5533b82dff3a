"""A worker of the fleet as others see it, and its process as its node's owner sees it."""

import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from functional.runtime.errors import ProcessDiedError, RunError
from functional.runtime.fleet.control import WorkerControl
from functional.runtime.fleet.ports import PortRange
from functional.runtime.fleet.process import ManagedProcess
from functional.runtime.fleet.settings import FleetSettings
from functional.runtime.recipe.argv import WorkerPlace, worker_arguments, write_template
from functional.runtime.recipe.environment import LOOPBACK, WorkerSite, program_environment, worker_variables
from functional.runtime.recipe.seeds import engine_seed

SHARED_RANKS_FLAGS = ("--distributed-executor-backend", "mp", "--disable-custom-all-reduce")
"""Of an engine whose ranks share a GPU: without the first vLLM asks for as many GPUs, and its own all-reduce for one a
rank."""


@dataclass(frozen=True)
class Worker:
    """A registered worker: `instance_id` is the one Dynamo's answers name in `nvext.worker_id`."""

    index: int
    instance_id: int
    control: WorkerControl


@dataclass(frozen=True)
class WorkerAddress:
    """Where one worker serves: control URL on its node's loopback, and «host:port» of its request plane.

    seed: its engine's.
    """

    index: int
    control_url: str
    request_plane: str
    ports: tuple[int, ...]
    seed: int


class WorkerProcess:
    """One slot of the fleet: the `dynamo.vllm` process that is in it, on this node.

    Thread-safe: `stop` waits for a launch under way, and none follows it.
    """

    def __init__(
        self,
        settings: FleetSettings,
        index: int,
        environment: tuple[Mapping[str, str], Mapping[str, str]],
        ports: PortRange,
        devices: tuple[str, ...],
        base: Path,
    ) -> None:
        """environment: what the recipe's `env_vars` win over, and what wins over them. ports: of the address that other
        nodes call; devices: GPUs that are its own; base: where its folder of sockets is made."""
        self._settings = settings
        self._index = index
        self._below, self._above = environment
        self._ports = ports
        self._devices = devices
        self._base = base
        self._launched = settings.earlier_engines
        self._process: ManagedProcess | None = None
        self._changing = threading.Lock()
        self._is_stopped = False
        self.folder: Path | None = None
        self.log = settings.log_dir / f"worker-{index}.log"

    def restart(self) -> WorkerAddress:
        """End whatever is left of the worker at once, and launch a new one, on ports that no worker here had before.

        Raises RunError once it was stopped.
        """
        with self._changing:
            if self._process is not None:
                self._process.kill()
            return self._launch()

    def start(self) -> WorkerAddress:
        """Launch the worker and return where it will serve. Raises RunError once it was stopped."""
        with self._changing:
            return self._launch()

    def _launch(self) -> WorkerAddress:
        if self._is_stopped:
            raise RunError(f"worker {self._index}: not started, the fleet is being taken down")
        settings = self._settings
        rpc, stream, system, engine = (self._ports.take(span) for span in (1, 1, 1, 4))
        self.folder = Path(tempfile.mkdtemp(prefix="w", dir=self._base))  # short: a socket's path has 107 bytes
        site = WorkerSite(
            settings.recipe,
            self.folder,
            rpc_port=rpc,
            stream_port=stream,
            system_port=system,
            engine_port=engine,
            devices=self._devices,
        )
        seed = engine_seed(settings.recipe.grpo.seed, self._index, self._launched)
        self._launched += 1
        place = WorkerPlace(settings.model_dir, settings.namespace, self.folder / "kv", seed)
        write_template(settings.generation.dynamo_cfg.worker_args, place)
        command = [str(settings.programs.dynamo_python), "-m", "dynamo.vllm"]
        command += worker_arguments(settings.recipe, place)
        command += SHARED_RANKS_FLAGS if site.shares_devices else ()
        own, env_vars = worker_variables(site), settings.generation.vllm_cfg.env_vars
        environment = program_environment(settings.address, self._below, env_vars, self._above, own)
        self._process = ManagedProcess(f"worker {self._index}", command, self.log, environment, folder=self.folder)
        ports = (rpc, stream, system, *range(engine, engine + 4))
        plane = f"{self._ports.address}:{rpc}"
        return WorkerAddress(self._index, f"http://{LOOPBACK}:{system}", plane, ports, seed)

    def problem(self) -> str | None:
        """None while the worker runs, else what became of it."""
        try:
            if self._process is not None:
                self._process.check()
        except ProcessDiedError as died:
            return str(died)
        return None

    def pids(self) -> list[int]:
        return self._process.pids() if self._process else []

    def stop(self) -> None:
        with self._changing:
            self._is_stopped = True
            if self._process is not None:
                self._process.stop()
