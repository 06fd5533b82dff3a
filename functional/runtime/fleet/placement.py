"""From a recipe's plan to nodes of the Ray cluster that this process has joined, each with its owner."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from functional.runtime.errors import ConfigError, RunError
from functional.runtime.fleet.node import Node, NodeFacts, NodeOwner, node_facts
from functional.runtime.fleet.remains import Traces, find_remains
from functional.runtime.recipe.environment import LOOPBACK
from functional.runtime.recipe.model import Recipe
from functional.runtime.recipe.placement import NodePlan, plan_nodes

RESERVE_S = 30.0
OWNER_S = 120.0
"""The first actor of a node waits for a Python process there, on a busy machine."""
CALLS_PER_WORKER = 4
"""Of an owner at once: a call that hangs, and the roll call, the metrics and the watch beside it."""


@dataclass(frozen=True)
class Placement:
    """Where a run's parts are. address: of the driver's node; trainer: options of the actor of each of its ranks."""

    nodes: tuple[Node, ...]
    address: str
    trainer: dict[str, Any]
    group: Any

    @property
    def trainer_node(self) -> Node:
        return next(node for node in self.nodes if node.has_trainer)

    def close(self) -> None:
        """End the owners, and with them whatever is left of their workers, and give the devices back."""
        for node in self.nodes:
            ray.kill(node.owner)
        remove_placement_group(self.group)

    def find_remains(self, traces: Mapping[str, Traces]) -> list[str]:
        """What is left of the run on its nodes. traces: by Ray's ID of the node."""
        look: Any = ray.remote(num_cpus=0, max_retries=0)(find_remains)
        asked = [look.options(scheduling_strategy=_on(node.ray_id)).remote(traces[node.ray_id]) for node in self.nodes]
        deadline = time.monotonic() + OWNER_S
        found = []
        for node, reference in zip(self.nodes, asked, strict=True):
            try:
                left = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.RayError as error:
                left = [f"could not be looked at ({type(error).__name__})"]
            found += [f"node {node.name}: {what}" for what in left]
        return found


def place(recipe: Recipe) -> Placement:
    """Reserve the recipe's devices, and start an owner on each node that it uses.

    The driver's own node comes first, where it has devices enough, the others in the order of their addresses. Raises
    ConfigError when Ray has too few nodes with that many devices, or a node has not the address it is said to have;
    RunError when the devices are taken.
    """
    plans = plan_nodes(recipe)
    own = ray.get_runtime_context().get_node_id()
    chosen = _choose(recipe, own)
    bundles, places = _bundles(plans, chosen)
    group = placement_group(bundles)
    if not group.wait(RESERVE_S):
        remove_placement_group(group)
        raise RunError(f"Ray cannot reserve {bundles}: another job holds devices that cluster.gpus_per_node counts on")
    owners = []
    for plan, node, (_, of_engines) in zip(plans, chosen, places, strict=True):
        own_gpus = recipe.cluster.device == "cuda" and not recipe.cluster.share_gpu
        told = _devices_of(group, of_engines, plan.size) if own_gpus else []
        owners.append(_start_owner(plan, node, [device for _, devices in told for device in devices]))
    address, facts = _ask(owners, chosen, own)
    nodes = tuple(_node(*parts, own) for parts in zip(plans, chosen, owners, facts, strict=True))
    options: dict[str, Any] = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, places[0][0])}
    if recipe.cluster.device == "cuda" and (variables := dict(facts[0].collective)):
        options["runtime_env"] = {"env_vars": variables}
    return Placement(nodes, address, options, group)


def place_in_bundles(recipe: Recipe, group: Any, bundles: Sequence[int]) -> tuple[str, tuple[Node, ...]]:
    """Engines on bundles of one device each, of a placement group that a trainer made for itself and them.

    Returns the driver's address, and a node with a started owner for each that has some of the bundles. An engine takes
    bundles of one node, in the order given. Raises ConfigError where the bundles are not as many as the recipe's
    engines take, or those of a node make no whole engines; RunError when no device is told in time.
    """
    size = recipe.devices_per_engine
    wanted = recipe.num_engines * size
    if len(bundles) != wanted:
        raise ConfigError(
            f"{len(bundles)} bundles for {recipe.num_engines} engine(s) of {size} device(s): give {wanted}"
        )
    devices: dict[str, list[str]] = {}
    for ray_id, told in _devices_of(group, bundles, 1):
        devices.setdefault(ray_id, []).extend(told)
    own = ray.get_runtime_context().get_node_id()
    nodes = [node for node in _alive_nodes(own) if node["NodeID"] in devices]
    plans, owners, slot = [], [], 0
    for node in nodes:
        there = devices[node["NodeID"]]
        if len(there) % size:
            where = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            raise ConfigError(f"{where}: its {len(there)} bundle(s) make no whole engines of {size} devices")
        engines = tuple(range(slot, slot + len(there) // size))
        slot += len(engines)
        plans.append(NodePlan(0, engines, len(there), size, 0))
        owners.append(_start_owner(plans[-1], node, there))
    address, facts = _ask(owners, nodes, own)
    return address, tuple(_node(*parts, own) for parts in zip(plans, nodes, owners, facts, strict=True))


def _devices_of(group: Any, bundles: Sequence[int], size: int) -> list[tuple[str, list[str]]]:
    """Of each bundle, which has so many devices: Ray's ID of its node, and of its devices there. Raises RunError."""
    tell: Any = ray.remote(num_cpus=0, num_gpus=size, max_retries=0)(_own_devices)
    asked = [
        tell.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote() for bundle in bundles
    ]
    try:
        told: list[tuple[str, list[str]]] = ray.get(asked, timeout=OWNER_S)
    except ray.exceptions.RayError as error:
        raise RunError(f"bundles {list(bundles)}: no device was told ({type(error).__name__})") from error
    return told


def _own_devices() -> tuple[str, list[str]]:
    """Of the bundle that this runs in."""
    return ray.get_runtime_context().get_node_id(), list(map(str, ray.get_gpu_ids()))


def _node(plan: NodePlan, node: dict[str, Any], owner: Any, told: NodeFacts, own: str) -> Node:
    return Node(
        name=told.name or node["NodeManagerHostname"],
        address=told.address,
        ray_id=node["NodeID"],
        engines=plan.engines,
        has_trainer=plan.trainers > 0,
        is_drivers=node["NodeID"] == own,
        owner=owner,
    )


def _alive_nodes(own: str) -> list[dict[str, Any]]:
    """Of Ray's, the driver's own first, the others in the order of their addresses."""
    alive = (node for node in ray.nodes() if node["Alive"])
    return sorted(alive, key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"]))


def _choose(recipe: Recipe, own: str) -> list[dict[str, Any]]:
    """As many of Ray's nodes as the recipe has, each with the devices that it counts on."""
    wanted, devices = recipe.cluster.num_nodes, recipe.cluster.gpus_per_node
    alive = _alive_nodes(own)
    fit = [node for node in alive if node["Resources"].get("GPU", 0) >= devices]
    if len(fit) >= wanted:
        return fit[:wanted]
    found = ", ".join(f"{node['NodeManagerAddress']} has {node['Resources'].get('GPU', 0):g}" for node in alive)
    raise ConfigError(
        f"cluster.num_nodes={wanted}: needs as many nodes with cluster.gpus_per_node={devices} GPU(s); of Ray's "
        f"{len(alive)} node(s) {found}"
    )


def _bundles(
    plans: Iterable[NodePlan], nodes: list[dict[str, Any]]
) -> tuple[list[dict[str, float]], list[tuple[int, list[int]]]]:
    """Ray's bundles, one for the trainer and one for each engine, whose devices so are on one node; and of each node
    the trainer's, or −1, and its engines'."""
    bundles: list[dict[str, float]] = []
    places = []

    def add(devices: int, node: dict[str, Any]) -> int:
        if not devices:
            return -1
        bundles.append({"GPU": devices, f"node:{node['NodeManagerAddress']}": 0.001})
        return len(bundles) - 1

    for plan, node in zip(plans, nodes, strict=True):
        places.append((add(plan.trainers, node), [add(plan.size, node) for _ in plan.engines]))
    return bundles, places


def _start_owner(plan: NodePlan, node: dict[str, Any], devices: Sequence[str]) -> Any:
    """devices: of the node's engines, one after the other; none where they are virtual, or shared."""
    owner: Any = NodeOwner
    return owner.options(
        max_concurrency=CALLS_PER_WORKER * (len(plan.engines) + 1),
        scheduling_strategy=_on(node["NodeID"]),
    ).remote(tuple(devices))


def _on(ray_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray_id, soft=False)


def _ask(owners: list[Any], nodes: list[dict[str, Any]], drivers: str) -> tuple[str, list[NodeFacts]]:
    """The address of the driver's node, loopback where it is the only one, and what each node says of itself."""
    if [node["NodeID"] for node in nodes] == [drivers]:
        return LOOPBACK, [NodeFacts("", LOOPBACK, {}, None)]
    facts = []
    for owner, node in zip(owners, nodes, strict=True):
        try:
            facts.append(ray.get(owner.facts.remote(node["NodeManagerAddress"]), timeout=OWNER_S))
        except ray.exceptions.RayError as error:
            where = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            raise RunError(f"{where}: no owner came up ({type(error).__name__}); see Ray's logs there") from error
    own = node_facts(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == drivers))
    for told in (own, *facts):
        if told.problem:
            raise ConfigError(f"node {told.name}: {told.problem}")
    return own.address, facts
