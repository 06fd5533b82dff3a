"""A recipe that takes more GPUs than there are is refused before anything starts."""

import pytest

from functional.runtime.errors import ConfigError
from functional.suite.cluster import check_devices

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


def test_virtual_devices_need_no_gpu(load, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_devices(load("cluster.device=cpu"))
