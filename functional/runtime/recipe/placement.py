"""Which node of a run holds what: the trainer has a device of the first node, engines the last nodes that they take."""

from collections.abc import Iterator
from dataclasses import dataclass

from functional.runtime.recipe.model import Recipe


@dataclass(frozen=True)
class NodePlan:
    """One node. engines: slots of its workers; devices: how many of its devices are taken."""

    has_trainer: bool
    engines: tuple[int, ...]
    devices: int

    def __str__(self) -> str:
        words = ["trainer"] if self.has_trainer else []
        if self.engines:
            first, last = self.engines[0], self.engines[-1]
            words.append(f"engine {first}" if first == last else f"engines {first}–{last}")
        return ", ".join(words) or "nothing"


def plan_nodes(recipe: Recipe) -> tuple[NodePlan, ...]:
    """A plan for each of `cluster.num_nodes` nodes."""
    return tuple(_plan(recipe))


def _plan(recipe: Recipe) -> Iterator[NodePlan]:
    nodes, size = recipe.cluster.num_nodes, recipe.devices_per_engine
    engines_per_node = recipe.policy.generation.colocated.resources.gpus_per_node // size
    first = nodes - recipe.engine_nodes
    for number in range(nodes):
        start = (number - first) * engines_per_node
        engines = tuple(range(start, start + engines_per_node)) if number >= first else ()
        yield NodePlan(number == 0, engines, (number == 0) + len(engines) * size)
