"""Which node of a run holds what: the trainer is on the first node, engines on the last nodes that they take."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from functional.runtime.recipe.architectures import Layout, count_experts, find_layout_problems
from functional.runtime.recipe.model import Recipe


@dataclass(frozen=True)
class NodePlan:
    """One node. trainers: ranks of the trainer; engines: slots of its workers; devices: how many of its devices are
    taken; size: of them, by an engine.

    first: the number of the engines' first device there, from 0.
    """

    trainers: int
    engines: tuple[int, ...]
    devices: int
    size: int
    first: int

    def __str__(self) -> str:
        words = [f"trainer on {_devices(0, self.trainers)}"] if self.trainers else []
        if self.engines and self.size == 1:
            taken = _devices(self.first, len(self.engines))
            words.append(f"{_span('engine', self.engines[0], len(self.engines))} on {taken}")
        else:
            starts = range(self.first, self.first + self.size * len(self.engines), self.size)
            pairs = zip(self.engines, starts, strict=True)
            words += [f"engine {index} on {_devices(start, self.size)}" for index, start in pairs]
        return ", ".join(words) or "nothing"


def plan_nodes(recipe: Recipe) -> tuple[NodePlan, ...]:
    """A plan for each of `cluster.num_nodes` nodes."""
    return tuple(_plan(recipe))


def possible_layouts(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[tuple[Layout, int]]:
    """Layouts of an engine that the devices of a node and a model with this config.json allow, and how many such
    engines a node then has. An expert parallel group is as large as the tensor parallel one."""
    devices = recipe.engine_devices
    for ranks in (count for count in range(1, devices + 1) if devices % count == 0):
        for tensor in (count for count in range(1, ranks + 1) if ranks % count == 0):
            for expert in sorted({1, tensor}) if count_experts(config) else (1,):
                layout = Layout(tensor, ranks // tensor, expert)
                if not any(find_layout_problems(config, layout, recipe.cluster.device)):
                    yield layout, devices // ranks


def device_of(number: int, gpus: int) -> int:
    """The GPU that a device of a run is, where the run's devices take turns on so many."""
    return number % gpus


def _plan(recipe: Recipe) -> Iterator[NodePlan]:
    nodes, size = recipe.cluster.num_nodes, recipe.devices_per_engine
    engines_per_node = recipe.engine_devices // size
    first = nodes - recipe.engine_nodes
    for number in range(nodes):
        start = (number - first) * engines_per_node
        engines = tuple(range(start, start + engines_per_node)) if number >= first else ()
        trainers = recipe.trainer_ranks if number == 0 else 0
        beside = 0 if recipe.cluster.share_gpu else trainers
        yield NodePlan(trainers, engines, trainers + len(engines) * size, size, beside)


def _devices(first: int, count: int) -> str:
    return _span("device", first, count)


def _span(what: str, first: int, count: int) -> str:
    return f"{what} {first}" if count == 1 else f"{what}s {first}–{first + count - 1}"
