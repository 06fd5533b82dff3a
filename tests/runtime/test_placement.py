"""Which node of a run holds what, and that Ray's nodes are refused where they do not fit."""

from types import SimpleNamespace

import pytest

from functional.runtime.errors import ConfigError
from functional.runtime.fleet import placement
from functional.runtime.fleet.node import NodeOwner
from functional.runtime.recipe.load import RecipeError
from functional.runtime.recipe.placement import plan_nodes, possible_layouts

ONE_EACH = ("cluster.gpus_per_node=2", "G.colocated.resources.gpus_per_node=1")


@pytest.mark.parametrize(
    ("overrides", "plan"),
    [
        (("cluster.gpus_per_node=5",), ["trainer on device 0, engines 0–3 on devices 1–4"]),
        (ONE_EACH, ["trainer on device 0, engine 0 on device 1"]),
        ((*ONE_EACH, "cluster.num_nodes=2"), ["trainer on device 0, engine 0 on device 1", "engine 1 on device 0"]),
        (
            (*ONE_EACH, "cluster.num_nodes=2", "G.colocated.resources.num_nodes=1"),
            ["trainer on devices 0–1", "engine 0 on device 0"],
        ),
        (
            ("cluster.num_nodes=3", "G.colocated.resources.num_nodes=2"),
            ["trainer on devices 0–7", "engines 0–3 on devices 0–3", "engines 4–7 on devices 0–3"],
        ),
        (
            ("G.vllm_cfg.tensor_parallel_size=2",),
            ["trainer on devices 0–3, engine 0 on devices 4–5, engine 1 on devices 6–7"],
        ),
        (
            ("G.vllm_cfg.pipeline_parallel_size=4", "cluster.device=cuda", "cluster.share_gpu=true"),
            ["trainer on devices 0–3, engine 0 on devices 0–3"],
        ),
    ],
)
def test_plan(load, overrides, plan):
    recipe = load(*overrides)
    planned = plan_nodes(recipe)
    assert list(map(str, planned)) == plan
    assert [index for node in planned for index in node.engines] == list(range(recipe.num_engines))


def test_a_trainer_has_what_engines_leave(load):
    def ranks(*overrides):
        return load(*overrides).trainer_ranks

    assert ranks() == 4
    assert ranks("cluster.gpus_per_node=5") == 1
    assert ranks("G.colocated.resources.gpus_per_node=null") == 1, "these take all but one"
    assert ranks("cluster.num_nodes=2") == 4
    assert ranks("cluster.num_nodes=2", "G.colocated.resources.num_nodes=1") == 8, "a node of its own"
    assert ranks("cluster.gpus_per_node=6", "cluster.device=cuda", "cluster.share_gpu=true") == 2


def test_shared_gpus_are_taken_in_turn(load):
    owner = NodeOwner.__ray_metadata__.modified_class(())
    recipe = load("G.vllm_cfg.tensor_parallel_size=2", "cluster.device=cuda", "cluster.share_gpu=true")

    def devices(gpus):
        return owner._devices(SimpleNamespace(recipe=recipe, gpus=gpus), 2)

    assert devices(4) == [("0", "1"), ("2", "3")]
    assert devices(2) == [("0", "1"), ("0", "1")]
    assert devices(1) == [("0", "0"), ("0", "0")]
    assert devices(3) == [("0", "1"), ("2", "0")]


def test_layouts_that_devices_and_model_allow(load):
    def layouts(config, *overrides):
        return {str(layout): engines for layout, engines in possible_layouts(load(*overrides), config)}

    assert layouts({}) == {
        "one device": 4, "pipeline 2": 2, "tensor 2": 2, "pipeline 4": 1, "tensor 2 × pipeline 2": 1, "tensor 4": 1
    }  # fmt: skip
    dense = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    assert layouts(dense) == {"one device": 4, "pipeline 2": 2, "tensor 2": 2, "tensor 2 × pipeline 2": 1}
    moe = {"num_experts": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    assert layouts(moe, "cluster.device=cuda") == {"one device": 4, "tensor 2": 2, "tensor 2 × expert 2": 2}
    assert layouts(moe) == {"one device": 4, "tensor 2": 2}
    assert layouts(moe, "cluster.device=cuda") == layouts(
        {"num_local_experts" if key == "num_experts" else key: value for key, value in moe.items()},
        "cluster.device=cuda",
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("cluster.gpus_per_node=4", "cluster.num_nodes=2"), "one trainer and 4 .* on the first node, with engines on"),
        (("G.colocated.resources.num_nodes=2",), r"resources.num_nodes=2: the cluster has 1 \(cluster.num_nodes\)"),
        (
            ("cluster.num_nodes=4", "G.colocated.resources.num_nodes=2"),
            "cluster.num_nodes=4: the trainer takes one node and engines 2 .* set at most 3",
        ),
        (
            ("cluster.num_nodes=2", "G.colocated.resources.num_nodes=1", "G.colocated.resources.gpus_per_node=9"),
            r"resources.gpus_per_node=9: a node has 8 device\(s\)",
        ),
        (("cluster.num_nodes=2", "cluster.device=cuda", "cluster.share_gpu=true"), "is for one node"),
    ],
)
def test_plans_that_do_not_fit(load, overrides, message):
    with pytest.raises(RecipeError, match=message):
        load(*overrides)


def node(name, devices, alive=True):
    address = f"10.0.0.{name}"
    return {
        "NodeID": f"id{name}",
        "NodeManagerAddress": address,
        "Alive": alive,
        "Resources": {"GPU": devices, f"node:{address}": 1.0},
    }


def test_the_drivers_node_comes_first_if_it_has_the_devices(load, monkeypatch):
    recipe = load(*ONE_EACH, "cluster.num_nodes=2")
    monkeypatch.setattr(placement.ray, "nodes", lambda: [node(1, 2), node(2, 2), node(3, 2), node(4, 8, alive=False)])
    assert [chosen["NodeID"] for chosen in placement._choose(recipe, "id3")] == ["id3", "id1"]
    monkeypatch.setattr(placement.ray, "nodes", lambda: [node(3, 0), node(2, 2), node(1, 4)])
    assert [chosen["NodeID"] for chosen in placement._choose(recipe, "id3")] == ["id1", "id2"]


def test_too_few_nodes_with_the_devices(load, monkeypatch):
    monkeypatch.setattr(placement.ray, "nodes", lambda: [node(1, 2), node(2, 1), node(3, 2, alive=False)])
    with pytest.raises(ConfigError) as caught:
        placement._choose(load(*ONE_EACH, "cluster.num_nodes=2"), "id1")
    assert str(caught.value) == (
        "cluster.num_nodes=2: needs as many nodes with cluster.gpus_per_node=2 GPU(s); "
        "of Ray's 2 node(s) 10.0.0.1 has 2, 10.0.0.2 has 1"
    )


def test_a_bundle_for_the_trainer_and_one_for_each_engine(load):
    overrides = ("cluster.gpus_per_node=6", "cluster.num_nodes=2", "G.vllm_cfg.tensor_parallel_size=2")
    plans, nodes = plan_nodes(load(*overrides)), [node(1, 6), node(2, 6)]
    bundles, places = placement._bundles(plans, nodes)
    assert [(bundle["GPU"], [key for key in bundle if key != "GPU"]) for bundle in bundles] == [
        (2, ["node:10.0.0.1"]),
        (2, ["node:10.0.0.1"]),
        (2, ["node:10.0.0.1"]),
        (2, ["node:10.0.0.2"]),
        (2, ["node:10.0.0.2"]),
    ]
    assert places == [(0, [1, 2]), (-1, [3, 4])]


@pytest.fixture(scope="module")
def virtual_devices():
    """Ray on this machine, with virtual devices."""
    import ray

    ray.init(address="local", num_cpus=2, num_gpus=6, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def four_bundles(virtual_devices):
    """A placement group of four bundles of one virtual device each."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"GPU": 1}] * 4)
    assert group.wait(30)
    yield group
    remove_placement_group(group)


def devices_of(node, recipe):
    settings = SimpleNamespace(recipe=recipe, gpus=0)
    told = node.owner.__ray_call__.remote(lambda owner: owner._devices(settings, len(node.engines)))
    return placement.ray.get(told)


def test_engines_have_the_devices_of_their_bundles(load, virtual_devices):
    """A trainer of two ranks, and two engines of two."""

    class Holder:  # has a device as long as it lives, as a rank of the trainer has
        def device(self):
            return str(placement.ray.get_gpu_ids()[0])

    recipe = load("cluster.gpus_per_node=6", "G.vllm_cfg.tensor_parallel_size=2", "cluster.device=cuda")
    placed = placement.place(recipe)
    try:
        (node,) = placed.nodes
        assert (node.engines, node.has_trainer) == ((0, 1), True)
        holder = placement.ray.remote(num_cpus=0, num_gpus=1)(Holder)
        ranks = [holder.options(**placed.trainer).remote() for _ in range(recipe.trainer_ranks)]
        taken = [*placement.ray.get([rank.device.remote() for rank in ranks])]
        engines = devices_of(node, recipe)
        assert list(map(len, engines)) == [2, 2]
        taken += [device for devices in engines for device in devices]
        assert sorted(taken) == list("012345"), "each once"
    finally:
        placed.close()


def test_engines_over_bundles_of_one_device_each(load, four_bundles):
    recipe = load("G.vllm_cfg.tensor_parallel_size=2", "cluster.device=cuda")
    with pytest.raises(ConfigError, match=r"3 bundles for 2 engine\(s\) of 2 device\(s\): give 4"):
        placement.place_in_bundles(recipe, four_bundles, [0, 1, 2])
    address, nodes = placement.place_in_bundles(recipe, four_bundles, [2, 3, 0, 1])
    ((node,), told) = nodes, placement.ray.get([_gpu_of(four_bundles, bundle) for bundle in (2, 3, 0, 1)])
    assert (address, node.engines, node.is_drivers, node.has_trainer) == ("127.0.0.1", (0, 1), True, False)
    assert devices_of(node, recipe) == [tuple(told[:2]), tuple(told[2:])]
    assert len(set(told)) == 4


def _gpu_of(group, bundle):
    strategy = placement.PlacementGroupSchedulingStrategy(group, bundle)
    task = placement.ray.remote(num_cpus=0, num_gpus=1)(lambda: str(placement.ray.get_gpu_ids()[0]))
    return task.options(scheduling_strategy=strategy).remote()
