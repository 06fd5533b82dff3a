"""Texts by which a cause is known, as the suite, Dynamo, vLLM, Ray, etcd and the kernel write them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A cause: a word for programs, what it is, and the next step."""

    word: str
    pattern: re.Pattern[str]
    meaning: str
    next_step: str


def _cause(word: str, pattern: str, meaning: str, next_step: str) -> Cause:
    return Cause(word, re.compile(pattern, re.IGNORECASE), meaning, next_step)


STARTING = (
    _cause(
        "gpu-memory",
        r"CUDA out of memory|OutOfMemoryError|Free memory on device .* is less than|No available memory for the cache",
        "the GPU has too little memory free",
        "nvidia-smi shows what holds it; lower vllm_cfg.gpu_memory_utilization or max_model_len, or take a larger GPU",
    ),
    _cause(
        "cache-memory",
        r"larger than the (available|maximum number of tokens)|KV cache is needed|VLLM_CPU_KVCACHE_SPACE",
        "the KV cache does not hold one sequence of the context's length",
        "lower vllm_cfg.max_model_len, or give the cache more memory (on CPU VLLM_CPU_KVCACHE_SPACE in env_vars)",
    ),
    _cause(
        "no-gpu",
        r"No CUDA GPUs are available|driver version is insufficient|Found no NVIDIA driver|no CUDA-capable device",
        "the worker sees no usable GPU",
        "./build.py doctor on the node: driver, devices, and the driver's version against CUDA's",
    ),
    _cause(
        "engine-option",
        r"unrecognized arguments|error: argument |ValidationError: \d+ validation error|invalid choice",
        "the engine refuses an option",
        "functional config RECIPE --engine asks the engine's own parser",
    ),
    _cause(
        "model-files",
        r"safetensors_rust|SafetensorError|HeaderTooLarge|does not appear to have a file named|Git LFS pointer"
        r"|has no parameter|size mismatch|Error while deserializing",
        "the model's files are missing, damaged, or of another shape than its config.json says",
        "compare the model's folder with its source (sha256), and policy.model_name with that folder",
    ),
    _cause(
        "missing-module",
        r"ModuleNotFoundError|ImportError: .*\.so",
        "a Python package or a library is missing in the image",
        "./build.py verify NAME; outside the image, see DYNAMO_VENV",
    ),
    _cause(
        "port-taken", r"Address already in use|EADDRINUSE", "a port is taken",
        "ss -ltnp shows by what; a leftover of an earlier run is ended by its guard, else by hand",
    ),
    _cause(
        "startup-timeout",
        r"did not come within dynamo_cfg|gave no answer within|did not listen before",
        "it took longer than dynamo_cfg.startup_timeout_s",
        "worker-*.log and frontend.log; raise the limit only if a log shows progress, or the machine is busy",
    ),
)  # fmt: skip
"""Why a worker or a service did not come up; the first that matches its log counts."""

MACHINE = (
    _cause(
        "disk-full", r"No space left on device|Errno 28|mvcc: database space exceeded", "a disk is full",
        "df -h for the run's folder, /tmp and /dev/shm; free space, and run again",
    ),
    _cause(
        "lease-lost", r"requested lease not found|lease (has )?expired|failed to keep.?alive",
        "the machine stalled for longer than Dynamo's lease of 10 s, so that a worker was taken off the list",
        "run fewer workers or fewer other programs on this machine",
    ),
    _cause(
        "file-limit", r"Too many open files|Errno 24", "the limit of open files is too low",
        "raise ulimit -n, or set dynamo_cfg.max_inflight_requests lower",
    ),
    _cause(
        "shared-memory", r"/dev/shm.*(too small|No space)|unable to (open|allocate) shared memory|Bus error",
        "shared memory (/dev/shm) is too small",
        "give the container more (--shm-size; enroot and pyxis take the host's)",
    ),
)  # fmt: skip
"""Causes outside the run, known from any log."""

REFIT = (
    _cause(
        "sender-lost", r"trainer( rank \d+ of \d+)?: its process is gone|sender of the weights is lost",
        "the trainer died in the update",
        "logs of the trainer and of Ray; the kernel's log if it was killed. There is nothing to send: start again",
    ),
    _cause(
        "transfer-deadline", r"no answer within the deadline|missed its deadline|transfer .*timed out",
        "a worker did not finish its part of the transfer in time, and counts as dead",
        "its log, and whether its process is stopped or its node slow; the deadline is dynamo_cfg.control_timeout_s",
    ),
    _cause(
        "worker-lost", r"ConnectionRefused|Connection refused|RemoteDisconnected|disconnected without|Connection reset"
        r"|was killed by|exited with status",
        "a worker's process ended", "the worker's log; out of memory shows in the kernel's log (dmesg)",
    ),
    _cause(
        "weights-not-proved", r"weights not proved|prove_weights|do not hash|problem\(s\) among",
        "a worker does not hold the trainer's weights: a tensor is named",
        "NCCL the same in both environments? this vLLM's patches applied (/opt/release/build.json)? then report it",
    ),
    _cause(
        "clear-refused",
        r"flush_cache: ",
        "a worker refused to clear its cache",
        "its log at that time; admission stays closed until a clear is seen",
    ),
    _cause(
        "cache-not-cleared", r"cache was not cleared|did not hit the prefix cache",
        "a cache clear could not be seen",
        "prefix caching on? probe longer than a block? else stale prefixes may be served: keep admission closed",
    ),
    _cause(
        "old-weights-served", r"probe fits the other version|fits neither", "the engine computes with other weights",
        "nothing of this update may be sampled; compare the worker's proof and its log",
    ),
    _cause(
        "send-failed", r"injected|the schedule has|the send fails|sending ", "the transfer failed and was tried again",
        "the first failed worker's log, and the trainer's",
    ),
)  # fmt: skip
"""Why an attempt at an update failed, known from the transition's reason."""


def first(causes: Iterable[Cause], text: str) -> Cause | None:
    """The first of the causes that the text shows."""
    return next((cause for cause in causes if cause.pattern.search(text)), None)
