"""The patches of vLLM: each with its name, the vLLM that it was written for, and where it is in force."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from functional.engine import (
    cpu_experts_patch,
    pause_patch,
    prompt_logprobs_patch,
    reload_patch,
    rendezvous_patch,
    reply_patch,
    shared_device_patch,
)


@dataclass(frozen=True)
class Patch:
    """module: has PATCHED_VERSION, `apply`, which does nothing the second time, and `is_applied`, both for this
    process; upstream: where vLLM itself has repaired it; where: engines that it is for, None for all, and `is_wanted`
    whether this process is of one."""

    name: str
    module: ModuleType
    upstream: str | None = None
    where: str | None = None
    is_wanted: Callable[[], bool] = lambda: True

    def applies_to(self, vllm_version: str) -> bool:
        """Whether it was written for this vLLM. Local parts (`+cpu`) do not matter."""
        written_for: str = self.module.PATCHED_VERSION
        return vllm_version.split("+")[0] == written_for

    def is_for_here(self, vllm_version: str) -> bool:
        return self.applies_to(vllm_version) and self.is_wanted()

    def describe(self, vllm_version: str) -> dict[str, Any]:
        """What is known of it without a running engine."""
        return {
            "name": self.name,
            "upstream": self.upstream,
            "for": self.module.PATCHED_VERSION,
            "where": self.where,
            "installed": vllm_version,
            "applies": self.applies_to(vllm_version),
        }


PATCHES = (
    Patch("vllm-layerwise-reload", reload_patch, upstream="vLLM pull request 44814"),
    Patch(
        "vllm-file-rendezvous",
        rendezvous_patch,
        where="VLLM_RENDEZVOUS_DIR names a folder",
        is_wanted=rendezvous_patch.is_wanted,
    ),
    Patch("vllm-pause-sleep", pause_patch),
    Patch("vllm-replies-of-ranks", reply_patch),
    Patch("vllm-prompt-logprobs-of-cached-tokens", prompt_logprobs_patch),
    Patch("vllm-experts-on-cpu", cpu_experts_patch, where="on a CPU", is_wanted=cpu_experts_patch.is_wanted),
    Patch(
        "vllm-ranks-that-share-a-gpu",
        shared_device_patch,
        where="VLLM_RANK_DEVICES names a device for each rank",
        is_wanted=shared_device_patch.is_wanted,
    ),
)
