"""A worker of the fleet as others see it, and the Ray actor that owns its process."""

from dataclasses import dataclass

import ray

from functional.runtime.errors import ProcessDiedError
from functional.runtime.fleet.control import WorkerControl
from functional.runtime.fleet.ports import PortRange
from functional.runtime.fleet.process import ManagedProcess
from functional.runtime.fleet.settings import FleetSettings
from functional.runtime.recipe.argv import WorkerPlace, worker_arguments
from functional.runtime.recipe.environment import WorkerSite, program_environment, worker_variables
from functional.runtime.recipe.seeds import engine_seed


@dataclass(frozen=True)
class Worker:
    """A registered worker: `instance_id` is the one Dynamo's answers name in `nvext.worker_id`."""

    index: int
    instance_id: int
    control: WorkerControl


@dataclass(frozen=True)
class WorkerAddress:
    """Where one worker serves: control URL, and «host:port» of its request plane. seed: its engine's."""

    index: int
    control_url: str
    request_plane: str
    ports: tuple[int, ...]
    seed: int


@ray.remote(num_cpus=0, num_gpus=1, max_restarts=0)
class WorkerOwner:
    """Owns one `dynamo.vllm` worker on the node and device Ray reserved."""

    def __init__(
        self, settings: FleetSettings, inherited: dict[str, str], control_plane: dict[str, str], index: int
    ) -> None:
        self.settings = settings
        self.inherited = inherited
        self.control_plane = control_plane
        self.index = index
        self._launched = 0
        self._process: ManagedProcess | None = None
        self._ports = PortRange(settings.address)

    def restart(self) -> WorkerAddress:
        """End whatever is left of the worker at once, and launch a new one, on ports that no worker here had before."""
        if self._process is not None:
            self._process.kill()
        return self.start()

    def start(self) -> WorkerAddress:
        """Launch the worker and return where it will serve."""
        settings, ports = self.settings, self._ports
        ports.given = []
        rpc, stream, system, engine = ports.take(), ports.take(), ports.take(), ports.take(4)
        site = WorkerSite(
            settings.recipe,
            settings.address,
            settings.run_dir,
            rpc_port=rpc,
            stream_port=stream,
            system_port=system,
            engine_port=engine,
            devices=self._devices(),
        )
        seed = engine_seed(settings.recipe.grpo.seed, self.index, self._launched)
        self._launched += 1
        place = WorkerPlace(settings.model_dir, settings.namespace, settings.run_dir / f"kv{self.index}", seed)
        command = [str(settings.programs.dynamo_python), "-m", "dynamo.vllm"]
        command += worker_arguments(settings.recipe, place)
        log = settings.log_dir / f"worker-{self.index}.log"
        environment = program_environment(
            settings.address,
            self.inherited,
            settings.generation.vllm_cfg.env_vars,
            self.control_plane,
            worker_variables(site),
        )
        self._process = ManagedProcess(f"worker {self.index}", command, log, environment)
        return WorkerAddress(
            self.index, f"http://{settings.address}:{system}", f"{settings.address}:{rpc}", tuple(ports.given), seed
        )

    def _devices(self) -> tuple[str, ...]:
        """GPUs that Ray reserved for this worker; none where it has no GPU, or one that the trainer has too."""
        cluster = self.settings.recipe.cluster
        return () if cluster.device == "cpu" or cluster.share_gpu else tuple(map(str, ray.get_gpu_ids()))

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
        if self._process is not None:
            self._process.stop()
