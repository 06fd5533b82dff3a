"""What every process of a fleet is told."""

import uuid
from dataclasses import dataclass
from pathlib import Path

from functional.runtime.fleet.programs import Programs
from functional.runtime.recipe.model import GenerationConfig, Recipe


@dataclass(frozen=True)
class FleetSettings:
    """A recipe, and where its fleet lives. Folders are absolute; `address` is of the driver's node, where etcd and NATS
    listen: loopback in a run of one node. earlier_engines: how many a slot has had in the runs that this one goes on
    from, at most: their seeds are not used again. gpus: how many trainer and engines share, if any."""

    namespace: str
    recipe: Recipe
    model_dir: Path
    run_dir: Path
    log_dir: Path
    programs: Programs
    address: str = "127.0.0.1"
    earlier_engines: int = 0
    gpus: int = 0

    @property
    def generation(self) -> GenerationConfig:
        return self.recipe.policy.generation


def new_namespace() -> str:
    """A Dynamo namespace no other run has."""
    return f"rl{uuid.uuid4().hex[:10]}"
