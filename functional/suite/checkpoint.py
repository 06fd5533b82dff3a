"""Checkpoints of the suite's trainer: folders `step_N`, each whole or not there.

A folder holds `model.safetensors` (float32 master weights by the model's names), `optimizer.safetensors` (its state, as
`key/name`) and `training_info.json`. It is written under another name, synced and renamed, so a run that is killed at
any moment leaves the last whole one.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from functional.runtime.errors import ConfigError
from functional.runtime.recipe.model import CheckpointConfig

INFO, MODEL, OPTIMIZER = "training_info.json", "model.safetensors", "optimizer.safetensors"
UNFINISHED = ".unfinished-"


class TrainingInfo(BaseModel):
    """Where a run stood. optimizer_steps: taken, those of earlier runs included; engines_started: of the slot that had
    most, so that a resumed run gives its engines seeds of their own; metrics: of the step, by `train:` and `val:`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    optimizer_steps: int = 0
    seed: int
    model_name: str
    optimizer: str
    engines_started: int
    metrics: dict[str, float] = {}

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Raises ConfigError for a folder that holds none."""
        try:
            return cls.model_validate_json((folder / INFO).read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(
                f"{folder}: no checkpoint that can be read: {' '.join(str(error).split())[:200]}"
            ) from None


class Checkpoints:
    """The checkpoints under one folder, as a recipe's `checkpointing` has them."""

    def __init__(self, config: CheckpointConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder

    def path(self, step: int) -> Path:
        return self._folder / f"step_{step}"

    def newest(self) -> Path | None:
        """The checkpoint of the last step; None where there is none. What a killed run left unfinished is removed."""
        for left in self._folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        return self.path(max(steps)) if (steps := self._steps()) else None

    def is_due(self, step: int, last: int) -> bool:
        """Whether one is to be written after a step: at each period, and at the end."""
        return self._config.enabled and (step % self._config.save_period == 0 or step == last)

    def prune(self) -> None:
        """Remove all but the newest and the `keep_top_k` that are best by the metric; one without it is the worst."""
        keep = self._config.keep_top_k
        if keep is None:
            return
        steps = self._steps()
        ranked = sorted(steps, key=self._rank, reverse=True)
        for step in {*steps} - {*ranked[:keep], max(steps)}:
            unfinished = self._folder / f"{UNFINISHED}{step}"
            self.path(step).rename(unfinished)
            shutil.rmtree(unfinished)

    def _rank(self, step: int) -> tuple[float, int]:
        value = TrainingInfo.of(self.path(step)).metrics.get(self._config.metric_name or "")
        if value is None:
            return float("-inf"), step
        return value if self._config.higher_is_better else -value, step

    def _steps(self) -> list[int]:
        names = (path.name.removeprefix("step_") for path in self._folder.glob("step_*"))
        return [int(name) for name in names if name.isdigit()]


def write_checkpoint(
    folder: Path, info: TrainingInfo, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
) -> int:
    """Write a checkpoint at `folder`, in place of one that is there; returns its bytes. Raises OSError."""
    unfinished = folder.with_name(f"{UNFINISHED}{folder.name}-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(dict(model), unfinished / MODEL)
    if optimizer:
        save_file(dict(optimizer), unfinished / OPTIMIZER)
    (unfinished / INFO).write_text(info.model_dump_json(indent=2) + "\n", encoding="utf-8")
    files = list(unfinished.iterdir())
    for path in (*files, unfinished):
        sync(path)
    replaced = folder.with_name(f"{UNFINISHED}{folder.name}-replaced")
    if folder.exists():
        folder.rename(replaced)
    unfinished.rename(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return sum((folder / file.name).stat().st_size for file in files)


def read_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Master weights and optimizer state of a checkpoint; of the latter nothing where it was not kept. Raises
    ConfigError."""
    try:
        kept = folder / OPTIMIZER
        return load_file(folder / MODEL), load_file(kept) if kept.exists() else {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: {' '.join(str(error).split())}") from None


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
