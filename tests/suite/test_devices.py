"""A recipe that takes more GPUs than there are is refused before anything starts."""

import pytest

from functional.runtime.errors import ConfigError
from functional.suite.cluster import check_devices, joined_ray, ray_environment

ON_GPUS = ("cluster.device=cuda",)


@pytest.mark.parametrize("shown", [None, "", "0"])
def test_fewer_gpus_than_the_recipe_takes(load, monkeypatch, shown):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    where = "this machine has" if shown is None else f"CUDA_VISIBLE_DEVICES={shown} shows"
    with pytest.raises(ConfigError, match=rf"cluster.gpus_per_node=1000: 1000 GPU\(s\) needed, {where} \d"):
        check_devices(load(*ON_GPUS, "cluster.gpus_per_node=1000"))


def test_a_shared_gpu_is_the_first(load, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES=3: .* takes the machine.s first GPU"):
        check_devices(load(*ON_GPUS, "cluster.share_gpu=true"))


def test_several_nodes_take_a_ray_cluster(load, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"^cluster.num_nodes=2: join a Ray cluster of as many \(RAY_ADDRESS\)"):
        check_devices(load("cluster.num_nodes=2", "cluster.gpus_per_node=9"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_devices(load("cluster.num_nodes=2", "cluster.gpus_per_node=9"))


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "127.0.0.1:9"])
def test_a_cluster_that_cannot_be_joined(load, monkeypatch, tmp_path, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"^RAY_ADDRESS={address}: ") as caught, joined_ray(tmp_path, load()):
        pass
    assert "\n" not in str(caught.value)


def test_the_token_of_a_cluster_that_is_joined_is_the_callers(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not [name for name in ray_environment() if name.startswith("RAY_AUTH")]
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert ray_environment()["RAY_AUTH_MODE"] == "token"


def test_virtual_devices_need_no_gpu(load, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_devices(load("cluster.device=cpu"))
