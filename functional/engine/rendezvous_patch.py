"""Patch of vLLM 0.23.0: an engine's processes meet at a file, not at a TCP store that listens on every interface.

torch's TCP store binds the wildcard address whatever address it is given. The processes of an engine share a node, so
a file does. In force where `VLLM_RENDEZVOUS_DIR` names a folder that ends with the run.
"""

import importlib
import os
import uuid
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

PATCHED_VERSION = "0.23.0"
FOLDER_VARIABLE = "VLLM_RENDEZVOUS_DIR"
_RANDOM_BYTES = 8
_EXECUTORS = ("vllm.v1.executor.uniproc_executor", "vllm.v1.executor.multiproc_executor")


def is_wanted() -> bool:
    return bool(os.environ.get(FOLDER_VARIABLE))


def apply() -> None:
    """Patch both single-node executors in this process."""
    folder = os.environ[FOLDER_VARIABLE]

    def file_init_method(_ip: str, _port: int) -> str:
        # What follows the last colon becomes, on a CPU, the beginning of a shared memory's name, which may have no
        # slash. It is left behind: by the folder's name whoever removes the folder finds it.
        return f"file://{Path(folder) / f'rendezvous:{Path(folder).name}-{uuid.uuid4().hex}'}"

    for module in _modules():
        module.get_distributed_init_method = file_init_method
    # Queues between the processes are shared memory too, which a killed process leaves behind: named after the folder.
    memory: Any = shared_memory
    memory._SHM_NAME_PREFIX = f"/{Path(folder).name}-"
    memory._SHM_SAFE_NAME_LENGTH = len(memory._SHM_NAME_PREFIX) + 2 * _RANDOM_BYTES


def is_applied() -> bool:
    return all(module.get_distributed_init_method.__name__ == "file_init_method" for module in _modules())


def _modules() -> list[Any]:
    return [importlib.import_module(name) for name in _EXECUTORS]
