"""The environment of the fleet's programs: every variable that the runtime sets or leaves out is listed here, once.

One order, of which a later part wins: inherited from the caller, then the recipe's `env_vars` (workers only), then the
control plane's addresses, then what the runtime manages. Of what is inherited, other people's settings of the programs
that the runtime manages are left out. docs/configuration.md says why each is.

It is a module of the recipe, and not of the fleet, because `rules` judges a recipe's `env_vars` by these names, and
`parser_check` gives the engine's parsers the environment that a worker will have.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from functional.engine.transports import PROOF_VARIABLE, RANK_DEVICES_VARIABLE
from functional.runtime.recipe.model import FrontendArgs, Recipe

MANAGED_PREFIXES = ("DYN_", "DYNAMO_", "ETCD_", "NATS_", "RAY_", "PYTHON")
"""Settings of managed programs, and a cluster's service variables of the same names: not inherited, not a recipe's."""


@dataclass(frozen=True)
class WorkerSite:
    """What one worker's variables are made of. run_dir: folder of its sockets, which only its node has.

    engine_port: the first of four; devices: its ranks' GPUs, none on CPU.
    """

    recipe: Recipe
    run_dir: Path
    rpc_port: int
    stream_port: int
    system_port: int
    engine_port: int
    devices: tuple[str, ...]

    @property
    def is_on_cpu(self) -> bool:
        return self.recipe.cluster.device == "cpu"

    @property
    def shares_devices(self) -> bool:
        """Whether several of its ranks are on one GPU."""
        return len({*self.devices}) < len(self.devices)

    @property
    def rank_devices(self) -> str:
        """Of each rank, its device among those that the worker sees."""
        seen = [*dict.fromkeys(self.devices)]
        return ",".join(str(seen.index(device)) for device in self.devices)


LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"

WORKER_VARIABLES: dict[str, Callable[[WorkerSite], str | None]] = {
    "DYN_TCP_RPC_PORT": lambda site: str(site.rpc_port),
    "DYN_TCP_RESPONSE_STREAM_PORT": lambda site: str(site.stream_port),
    "DYN_SYSTEM_PORT": lambda site: str(site.system_port),
    "DYN_RL_INIT_WEIGHTS_TIMEOUT_S": lambda site: str(_control_timeout_s(site) + 15),
    # By the time a worker is told to stop, nothing is under way.
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": lambda _: "0",
    "VLLM_PORT": lambda site: str(site.engine_port),
    "VLLM_HOST_IP": lambda _: LOOPBACK,  # the processes of an engine share a node
    "VLLM_RPC_BASE_PATH": lambda site: str(site.run_dir),  # a killed worker leaves its sockets there
    "VLLM_RENDEZVOUS_DIR": lambda site: str(site.run_dir),
    PROOF_VARIABLE: lambda site: site.recipe.proof,
    "VLLM_NO_USAGE_STATS": lambda _: "1",
    "VLLM_CPU_KVCACHE_SPACE": lambda site: "1" if site.is_on_cpu else None,
    "VLLM_CPU_OMP_THREADS_BIND": lambda site: "nobind" if site.is_on_cpu else None,
    "HF_HUB_OFFLINE": lambda _: "1",
    # Start-up time for kernels that an eager engine never runs.
    "TORCH_COMPILE_DISABLE": lambda site: "1" if site.recipe.policy.generation.vllm_cfg.enforce_eager else None,
    "CUDA_VISIBLE_DEVICES": lambda site: ",".join(dict.fromkeys(site.devices)),
    RANK_DEVICES_VARIABLE: lambda site: site.rank_devices if site.shares_devices else None,
}
"""What the runtime gives each worker; None where it sets nothing."""

SHARED_GPU = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_CUMEM_ENABLE": "0"}
"""Variables of trainer and workers when a GPU has NCCL ranks of both (needs NCCL 2.30.7); which GPUs a rank of the
trainer, or a worker, sees is its own."""

NEVER_SET = frozenset(
    {
        "VLLM_PLUGINS",  # a list without ours would leave the transfer backends out
        "PROMETHEUS_MULTIPROC_DIR",  # one folder for several engines would add up their metrics
        "MODEL_EXPRESS_URL",  # Dynamo would load the model from there
    }
)
"""Variables that no program of the fleet may have."""

MANAGED_VARIABLES = (WORKER_VARIABLES.keys() | SHARED_GPU.keys() | NEVER_SET) - {"NCCL_CUMEM_ENABLE"}
"""Variables that are neither inherited nor a recipe's to set, beside those with a managed prefix.

NCCL_CUMEM_ENABLE is the site's or the recipe's wherever no GPU is shared.
"""

KEPT_OF_VLLM = frozenset(
    {
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "VLLM_ASSETS_CACHE",
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
        "VLLM_LOGGING_LEVEL",
        "VLLM_LOGGING_COLOR",
    }
)
"""What is inherited of vLLM's settings: folders and logs. The others change what is computed: a recipe's to set."""

LAUNCHER = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""The caller's own place among ranks (torchrun, Kubernetes): no engine is one of them."""


def is_inherited(name: str) -> bool:
    """Whether the fleet's programs get this variable from the caller."""
    name = name.upper()
    if name.startswith("VLLM_"):
        return name in KEPT_OF_VLLM
    return not name.startswith(MANAGED_PREFIXES) and name not in MANAGED_VARIABLES and name not in LAUNCHER


def left_out() -> list[str]:
    """Variables of this process that an engine, etcd or NATS would have read, and that the fleet does not get."""
    trainers = ("RAY_", "PYTHON", "DYNAMO_")
    of_others = {"CUDA_VISIBLE_DEVICES", "ETCD_BIN", "NATS_SERVER_BIN"}  # by Ray, and by `fleet.programs`
    return sorted(
        name
        for name in os.environ
        if not is_inherited(name) and not name.startswith(trainers) and name not in of_others
    )


def inherited_environment() -> dict[str, str]:
    """What the fleet's programs get from the caller. `DYNAMO_PYTHONPATH` becomes their PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if is_inherited(name)}
    if path := os.environ.get("DYNAMO_PYTHONPATH"):
        kept["PYTHONPATH"] = path
    return kept


def worker_variables(site: WorkerSite) -> dict[str, str]:
    """What the runtime manages of one worker's environment."""
    made = {name: value for name, make in WORKER_VARIABLES.items() if (value := make(site)) is not None}
    return SHARED_GPU | made if site.recipe.cluster.share_gpu and not site.is_on_cpu else made


def _control_timeout_s(site: WorkerSite) -> float:
    return site.recipe.policy.generation.dynamo_cfg.control_timeout_s


@dataclass(frozen=True)
class Credentials:
    """By which etcd and NATS know the programs of a run: PEM texts, the key's too, and a password."""

    ca: str = field(repr=False)
    certificate: str = field(repr=False)
    key: str = field(repr=False)
    password: str = field(repr=False)


ADDRESS_VARIABLE = "FUNCTIONAL_NODE_IP"
"""The job's address of a node, where whoever started Ray there has set it; else it is Ray's own."""

NATS_USER = "run"
NAMESPACE_VARIABLE = "DYN_NAMESPACE"


def control_plane_variables(namespace: str, etcd_url: str, nats_url: str, credentials: Credentials) -> dict[str, str]:
    """By which workers and frontend find etcd, NATS and each other."""
    return {
        "ETCD_ENDPOINTS": etcd_url,
        "ETCD_AUTH_CA": credentials.ca,  # texts, not paths
        "ETCD_AUTH_CLIENT_CERT": credentials.certificate,
        "ETCD_AUTH_CLIENT_KEY": credentials.key,
        "NATS_SERVER": nats_url,
        "NATS_AUTH_USERNAME": NATS_USER,
        "NATS_AUTH_PASSWORD": credentials.password,
        NAMESPACE_VARIABLE: namespace,
        "DYN_DISCOVERY_BACKEND": "etcd",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "nats",
        "DYN_HEALTH_CHECK_ENABLED": "false",
        "DYN_ENABLE_EXPERIMENTAL_PARSERS_V2": "1",  # without it the tool parser drops nvext.engine_data
    }


def node_variables(address: str, interface: str | None) -> dict[str, str]:
    """Where the Dynamo programs of one node listen: what other nodes call on its address, all else on its loopback.

    interface: the one by whose name Dynamo finds the address; None where it does so without a name.
    """
    hosts = {"DYN_SYSTEM_HOST": LOOPBACK, "DYN_TCP_RPC_HOST": address}
    return hosts if interface is None else hosts | {"DYN_TCP_RESPONSE_STREAM_HOST": interface}


def collective_variables(interface: str) -> dict[str, str]:
    """Interface of NCCL between the nodes of a run, where neither the site nor the recipe names one."""
    return {} if interface == LOOPBACK_INTERFACE else {"NCCL_SOCKET_IFNAME": f"={interface}"}


def frontend_variables(arguments: FrontendArgs, stream_port: int, system_port: int) -> dict[str, str]:
    """The frontend's ports, and what its options become.

    It gets no DYN_TCP_RPC_PORT: with one it fails to add a discovered model.
    """
    ports = {"DYN_TCP_RESPONSE_STREAM_PORT": str(stream_port), "DYN_SYSTEM_PORT": str(system_port)}
    if not arguments.tokenizer_cache:
        return ports
    return ports | {
        "DYN_TOKENIZER_CACHE": "1",
        "DYN_TOKENIZER_CACHE_BYTES": str(arguments.tokenizer_cache_bytes),
    }


def worker_defaults(device: str, ranks: int) -> dict[str, str]:
    """What an engine gets where neither caller nor recipe says otherwise.

    On CPU its threads: the cores divided among the ranks of all engines, as processes that together have more threads
    than cores wait for each other. On a GPU no FlashInfer sampler: vLLM samples with it only where no log-probs are
    asked for, which rollouts always are, but would compile it at the start.
    """
    if device == "cpu":
        return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    return {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def parser_environment(device: str, env_vars: Mapping[str, str]) -> dict[str, str]:
    """What a worker gets from caller and recipe, for programs that only read its arguments; no devices on CPU."""
    quiet = {"DYN_LOG": "error", "VLLM_LOGGING_LEVEL": "ERROR"}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return program_environment("127.0.0.1", quiet, inherited_environment(), env_vars, hidden)


def program_environment(address: str, *parts: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a program that talks to `address`, from parts of which a later one wins.

    A proxy stays the caller's or the recipe's, but never stands between two programs of the fleet.
    """
    merged = {name: value for part in parts for name, value in part.items()} | {"PYTHONUNBUFFERED": "1"}
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [*filter(None, merged.get(name, "").split(",")), "localhost", "127.0.0.1", address]
        merged[name] = ",".join(dict.fromkeys(hosts))
    return merged
