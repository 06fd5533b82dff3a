"""Ray for one run: the cluster that RAY_ADDRESS names, else one of this machine alone, with its own folder."""

import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.model import Recipe

OBJECT_STORE_BYTES = 200 * 1024 * 1024
ADDRESS_VARIABLE = "RAY_ADDRESS"
CONNECT_S = 30.0
"""For a TCP connection, of which a busy network may lose the first tries."""


def cluster_address() -> str | None:
    """Of a Ray cluster that is there already and is to be joined; None where the run starts its own."""
    given = os.environ.get(ADDRESS_VARIABLE, "")
    return None if given in ("", "local") else given


def ray_environment() -> dict[str, str]:
    """Variables a driver needs from its start on: Ray reads some of them when it is imported.

    The token of a cluster that is joined is the caller's: RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH.
    """
    common = {
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else workers start by `uv run` again
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if cluster_address() is not None:
        return common
    return common | {
        # Ray's switch for machines whose node address is the loopback: then it listens on no other.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_raylet_start_wait_time_s": "120",  # 30 s are too few on a busy two-core machine
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray leaves one in the home folder
    }


def check_devices(recipe: Recipe) -> None:
    """Raises ConfigError when a run that joins no cluster takes more than this machine has."""
    cluster = recipe.cluster
    if cluster_address() is not None:
        return  # Ray says what its nodes have
    if cluster.num_nodes > 1:
        message = f"join a Ray cluster of as many ({ADDRESS_VARIABLE}); alone, a run has this machine"
        raise ConfigError(f"cluster.num_nodes={cluster.num_nodes}: {message}")
    if cluster.device == "cpu":
        return
    import torch

    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cluster.share_gpu and shown is not None:
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={shown}: cluster.share_gpu takes the machine's first GPU(s); unset it")
    needed = 1 if cluster.share_gpu else cluster.gpus_per_node
    found = torch.cuda.device_count()
    if found < needed:
        where = "this machine has" if shown is None else f"CUDA_VISIBLE_DEVICES={shown} shows"
        raise ConfigError(f"cluster.gpus_per_node={cluster.gpus_per_node}: {needed} GPU(s) needed, {where} {found}")


def shared_gpus(recipe: Recipe) -> int:
    """How many GPUs trainer and engines take turns on; 0 where they share none."""
    if not recipe.cluster.share_gpu:
        return 0
    import torch

    return min(torch.cuda.device_count(), recipe.engine_devices)


@contextmanager
def joined_ray(run_dir: Path, recipe: Recipe) -> Iterator[None]:
    """This process in a Ray cluster. On CPU, and where one GPU is shared, Ray's GPUs are virtual devices.

    A cluster that was there before is left as it is, without the run's actors. Raises ConfigError where RAY_ADDRESS
    names none that this process can join.
    """
    import ray

    if recipe.cluster.device == "cpu":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray would hold the virtual devices against it
    if (address := cluster_address()) is not None:
        _join(address)
    else:
        ray.init(
            address="local",
            num_cpus=max(2, os.cpu_count() or 2),
            num_gpus=recipe.cluster.gpus_per_node,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(run_dir / "ray"),
        )
    try:
        yield
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    import ray

    check_address(address)
    try:
        # Whichever environment's Ray started the cluster: in an image with NeMo RL it is not this one's.
        ours = {"py_executable": sys.executable}
        ray.init(address=address, runtime_env=ours, log_to_driver=False, configure_logging=False)
    except (ray.exceptions.RayError, RuntimeError, OSError, ValueError) as error:
        raise _cannot_join(address, error) from error


def check_address(address: str) -> None:
    """Raises ConfigError where RAY_ADDRESS is no host:port that answers: Ray itself would try for minutes."""
    if "://" in address:
        raise ConfigError(f"{ADDRESS_VARIABLE}={address}: the driver runs on a node of the cluster; give host:port")
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # a name of Ray's own, such as "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _cannot_join(address, error) from error


def _cannot_join(address: str, error: Exception) -> ConfigError:
    why = " ".join(str(error).split())[:300]
    return ConfigError(f"{ADDRESS_VARIABLE}={address}: cannot join ({type(error).__name__}: {why})")
