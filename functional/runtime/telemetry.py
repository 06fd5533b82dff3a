"""Worker and frontend metrics, polled into the run's own files: `metrics.jsonl`, TensorBoard, and Weights & Biases.

Names are the Prometheus names under `generation_metrics/worker-<index>/` and `generation_metrics/frontend/`; label sets
of one name are summed, histogram buckets left out.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import httpx
from prometheus_client.parser import text_string_to_metric_families

from functional.runtime.errors import ConfigError
from functional.runtime.fleet.control import ControlError
from functional.runtime.fleet.fleet import Fleet
from functional.runtime.jsonlines import JsonLines
from functional.runtime.recipe.model import GenerationConfig, LoggerConfig


class Sink(Protocol):
    """Where scalars go."""

    def write(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def select(text: str, prefixes: Iterable[str], without: Iterable[str] = ()) -> dict[str, float]:
    """Values of the metrics whose names begin with one of `prefixes` and none of `without`, over all labels."""
    starts, left_out = tuple(prefixes), tuple(without)
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(starts) or family.name.startswith(left_out):
            continue
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created", "_info")):
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


class JsonLinesSink:
    """One line a write: time, step, values."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._lines.append({"time": time.time(), "step": step, **values})

    def close(self) -> None:
        self._lines.close()


class TensorBoardSink:
    """Event files in a folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run. Raises ConfigError when its package is not installed."""

    def __init__(self, project: str, name: str | None, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "logger.wandb_enabled=true: this environment has no wandb package (install it, or set it to false)"
            ) from error
        self._run: Any = wandb.init(project=project, name=name, dir=str(folder))

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


def open_sinks(config: LoggerConfig, out: Path) -> list[Sink]:
    """The sinks a recipe's `logger` asks for."""
    sinks: list[Sink] = [JsonLinesSink(out / "metrics.jsonl")]
    if config.tensorboard_enabled:
        sinks.append(TensorBoardSink(Path(config.log_dir) if config.log_dir else out / "tensorboard"))
    if config.wandb_enabled:
        sinks.append(WandbSink(config.wandb.project, config.wandb.name, out))
    return sinks


class Telemetry:
    """Polls a fleet on an interval, in a thread of its own, and takes a trainer's scalars; both reach every sink.

    A poll that fails is counted and left out: telemetry never ends a run.
    """

    def __init__(self, fleet: Fleet, config: GenerationConfig, sinks: list[Sink], step: Callable[[], int]) -> None:
        self._fleet = fleet
        self._config = config.dynamo_cfg
        self._interval_s = config.metrics_interval_s
        self._sinks = sinks
        self._step = step
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self.polls = 0
        self.failed_polls = 0

    def __enter__(self) -> "Telemetry":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(15)
        for sink in self._sinks:
            sink.close()

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Hand scalars to every sink."""
        with self._lock:
            for sink in self._sinks:
                sink.write(values, step)

    def poll(self) -> None:
        """Read every worker and the frontend once."""
        values: dict[str, float] = {}
        try:
            without = self._config.metrics_exclude_prefixes or ()
            for worker in self._fleet.workers:
                found = select(worker.control.metrics(), self._config.read_of_workers, without)
                values |= {f"generation_metrics/worker-{worker.index}/{name}": value for name, value in found.items()}
            found = select(self._fleet.frontend.metrics(), self._config.read_of_frontend, without)
            values |= {f"generation_metrics/frontend/{name}": value for name, value in found.items()}
        except (ControlError, httpx.HTTPError, RuntimeError):
            self.failed_polls += 1
            return
        self.polls += 1
        self.write(values, self._step())

    def _run(self) -> None:
        if self._interval_s is None:
            return
        while not self._stop.wait(self._interval_s):
            self.poll()
