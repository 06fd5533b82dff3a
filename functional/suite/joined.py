"""A run's own part of a Ray cluster that it has joined: what it listens on there, and what it leaves."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from functional.runtime.fleet.fleet import Fleet
from functional.runtime.fleet.placement import Placement
from functional.runtime.fleet.remains import Traces
from functional.runtime.fleet.sockets import NodeSockets


class JoinedRun:
    """Made right after the trainer's actor: what driver and trainer listen on by then is Ray's, not the run's."""

    def __init__(self, placement: Placement, trainer: Any, namespace: str) -> None:
        self._placement = placement
        self._trainer = trainer
        self._namespace = namespace
        self._rays_here = NodeSockets.here()
        self._rays_there = trainer.__ray_call__.remote(_sockets_here)
        self._trainer_pid = trainer.pid.remote()

    def sockets(self, fleet: Fleet) -> list[NodeSockets]:
        """What driver, trainer and the fleet's programs listen on."""
        there = ray.get(self._trainer.__ray_call__.remote(_sockets_here))
        return [
            NodeSockets.here().without(self._rays_here),
            there.without(ray.get(self._rays_there)),
            *fleet.sockets(),
        ]

    def find_remains(self, of_workers: Mapping[str, Traces]) -> list[str]:
        """What is left once all is taken down. of_workers: as `Fleet.traces`."""
        traces = {node.ray_id: Traces(self._namespace) for node in self._placement.nodes} | dict(of_workers)
        own = self._placement.trainer_node.ray_id
        ended, _ = ray.wait([self._trainer_pid], timeout=0)
        try:
            pids = tuple(map(ray.get, ended))
        except ray.exceptions.RayError:  # the trainer did not come up
            pids = ()
        traces[own] = replace(traces[own], pids=traces[own].pids + pids)
        return self._placement.find_remains(traces)


def _sockets_here(_trainer: Any) -> NodeSockets:
    return NodeSockets.here()
