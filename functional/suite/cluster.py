"""Ray for one run: a local cluster with its own folder, and one placement group per device."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from functional.runtime.errors import ConfigError, RunError
from functional.runtime.recipe.model import Recipe

OBJECT_STORE_BYTES = 200 * 1024 * 1024


def ray_environment() -> dict[str, str]:
    """Variables a driver needs from its start on: Ray reads some of them when it is imported."""
    return {
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else workers start by `uv run` again
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's switch for machines whose node address is the loopback: then it listens on no other.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_raylet_start_wait_time_s": "120",  # 30 s are too few on a busy two-core machine
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray leaves one in the home folder
    }


def check_devices(recipe: Recipe) -> None:
    """Raises ConfigError when this machine shows fewer GPUs than the recipe takes."""
    cluster = recipe.cluster
    if cluster.device == "cpu":
        return
    import torch

    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cluster.share_gpu and shown is not None:
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={shown}: cluster.share_gpu takes the machine's first GPU; unset it")
    needed = 1 if cluster.share_gpu else cluster.gpus_per_node * cluster.num_nodes
    found = torch.cuda.device_count()
    if found < needed:
        where = "this machine has" if shown is None else f"CUDA_VISIBLE_DEVICES={shown} shows"
        raise ConfigError(f"cluster.gpus_per_node={cluster.gpus_per_node}: {needed} GPU(s) needed, {where} {found}")


@contextmanager
def local_ray(run_dir: Path, recipe: Recipe) -> Iterator[None]:
    """A Ray cluster of this machine alone. On CPU, and where one GPU is shared, Ray's GPUs are virtual devices."""
    import ray

    devices = recipe.cluster.gpus_per_node * recipe.cluster.num_nodes
    if recipe.cluster.device == "cpu":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray would hold the virtual devices against it
    ray.init(
        address="local",
        num_cpus=max(2, os.cpu_count() or 2),
        num_gpus=devices,
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


def reserve(sizes: list[int]) -> list[Any]:
    """One placement group per entry, of that many devices of one node. Raises RunError when Ray cannot place them."""
    from ray.util.placement_group import placement_group

    groups = [placement_group([{"GPU": size}], strategy="STRICT_PACK") for size in sizes]
    for index, group in enumerate(groups):
        if not group.wait(30):
            raise RunError(f"Ray cannot place group {index + 1} of {sizes} devices: see cluster.gpus_per_node")
    return groups
