"""A run's own part of a Ray cluster that it has joined: what it listens on there, and what it leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from functional.runtime.fleet.fleet import Fleet
from functional.runtime.fleet.placement import Placement
from functional.runtime.fleet.remains import Traces
from functional.runtime.fleet.sockets import NodeSockets


class JoinedRun:
    """Made right after the trainer's actors. What the driver listens on by then, and an actor before it has anything of
    a trainer, is Ray's, not the run's."""

    def __init__(self, placement: Placement, trainer: Sequence[Any], namespace: str) -> None:
        """trainer: the actor of each rank."""
        self._placement = placement
        self._trainer = trainer
        self._namespace = namespace
        self._rays_here = NodeSockets.here()
        self._rays_there = [rank.sockets_at_first.remote() for rank in trainer]
        self._trainer_pids = [rank.pid.remote() for rank in trainer]

    def sockets(self, fleet: Fleet) -> list[NodeSockets]:
        """What driver, trainer and the fleet's programs listen on."""
        there = [rank.__ray_call__.remote(_sockets_here) for rank in self._trainer]
        of_ranks = zip(there, self._rays_there, strict=True)
        return [
            NodeSockets.here().without(self._rays_here),
            *(ray.get(now).without(ray.get(before)) for now, before in of_ranks),
            *fleet.sockets(),
        ]

    def find_remains(self, of_workers: Mapping[str, Traces]) -> list[str]:
        """What is left once all is taken down. of_workers: as `Fleet.traces`."""
        traces = {node.ray_id: Traces(self._namespace) for node in self._placement.nodes} | dict(of_workers)
        own = self._placement.trainer_node.ray_id
        pids = tuple(pid for one in self._trainer_pids if (pid := _told(one)) is not None)
        traces[own] = replace(traces[own], pids=traces[own].pids + pids)
        return self._placement.find_remains(traces)


def _told(pid: Any) -> int | None:
    """Of a rank; None of one that did not come up."""
    ended, _ = ray.wait([pid], timeout=0)
    try:
        found: int | None = ray.get(pid) if ended else None
    except ray.exceptions.RayError:
        return None
    return found


def _sockets_here(_trainer: Any) -> NodeSockets:
    return NodeSockets.here()
