"""What the fleet's programs find in their environment, and that none of them ends by what the caller has set."""

import ast
import inspect
import os
import re
import ssl
import time
from pathlib import Path

import httpx
import pytest

from functional.runtime.errors import ProcessDiedError
from functional.runtime.fleet import fleet, node, worker
from functional.runtime.fleet import stores as stores_module
from functional.runtime.fleet.fleet import Fleet
from functional.runtime.fleet.ports import PortRange
from functional.runtime.fleet.programs import Programs, find_programs
from functional.runtime.fleet.settings import FleetSettings
from functional.runtime.fleet.worker import WorkerProcess
from functional.runtime.recipe.environment import (
    MANAGED_PREFIXES,
    MANAGED_VARIABLES,
    SHARED_GPU,
    Credentials,
    WorkerSite,
    collective_variables,
    control_plane_variables,
    frontend_variables,
    inherited_environment,
    is_inherited,
    left_out,
    node_variables,
    parser_environment,
    program_environment,
    worker_defaults,
    worker_variables,
)
from functional.runtime.recipe.model import FrontendArgs, Recipe
from functional.runtime.recipe.seeds import engine_seed

FOREIGN = {
    "ETCD_NAME": "node7",
    "ETCD_PORT": "tcp://10.96.0.9:2379",  # what Kubernetes gives each pod beside a service called etcd
    "ETCD_SERVICE_HOST": "10.96.0.9",
    "ETCD_DATA_DIR": "/var/lib/etcd",
    "ETCD_LISTEN_CLIENT_URLS": "http://10.0.0.5:2379",
    "ETCD_INITIAL_CLUSTER_STATE": "existing",
    "ETCD_INITIAL_CLUSTER": "node7=http://10.0.0.5:2380",
    "ETCD_CERT_FILE": "/etc/etcd/server.pem",
    "ETCD_CLIENT_CERT_AUTH": "true",
    "ETCD_CONFIG_FILE": "/etc/etcd/etcd.conf.yml",
    "ETCD_ENDPOINTS": "http://10.0.0.5:2379",
    "NATS_SERVER": "nats://10.0.0.5:4222",
    "NATS_PORT": "tcp://10.96.0.9:4222",
    "DYN_NAMESPACE": "theirs",
    "DYN_SYSTEM_PORT": "8081",
    "VLLM_PORT": "tcp://10.96.0.9:8000",
    "VLLM_HOST_IP": "10.96.0.9",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_TEST_FORCE_LOAD_FORMAT": "auto",
    "PROMETHEUS_MULTIPROC_DIR": "/nowhere",
    "MODEL_EXPRESS_URL": "http://10.0.0.5:1",
    "HF_HUB_OFFLINE": "0",
    "TORCH_COMPILE_DISABLE": "0",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.5",
}
KEPT = {
    "HF_HOME": "/models/hub",
    "VLLM_CACHE_ROOT": "/cache/vllm",
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "CUDA_CACHE_PATH": "/cache/cuda",
    "NCCL_SOCKET_IFNAME": "eth0",
    "GLOO_SOCKET_IFNAME": "lo",
    "HTTPS_PROXY": "http://proxy.example.com:3128",
    "LD_LIBRARY_PATH": "/opt/lib",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}


def recipe_of(cluster=None, **vllm_cfg):
    policy = {"model_name": "tiny", "optimizer": {"lr": 0.1}, "generation": {"vllm_cfg": vllm_cfg}}
    return Recipe.model_validate({"policy": policy, "cluster": cluster or {}})


def settings(folder, programs, **vllm_cfg):
    (folder / "run").mkdir()
    (folder / "logs").mkdir()
    return FleetSettings(
        namespace="ours",
        recipe=recipe_of(**vllm_cfg),
        model_dir=Path("/models/tiny"),
        run_dir=folder / "run",
        log_dir=folder / "logs",
        programs=programs,
    )


@pytest.mark.parametrize("name", FOREIGN)
def test_other_peoples_settings_of_managed_programs_are_left_out(monkeypatch, name):
    monkeypatch.setenv(name, FOREIGN[name])
    assert name not in inherited_environment()
    assert name in left_out()


@pytest.mark.parametrize("name", KEPT)
def test_the_sites_settings_are_handed_on(monkeypatch, name):
    monkeypatch.setenv(name, KEPT[name])
    assert inherited_environment()[name] == KEPT[name]
    assert name not in left_out()


def test_ours_and_rays_are_neither_handed_on_nor_spoken_of(monkeypatch):
    for name in ("RAY_ADDRESS", "PYTHONPATH", "DYNAMO_VENV", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "x")
        assert not is_inherited(name)
        assert name not in left_out()
    monkeypatch.setenv("DYNAMO_PYTHONPATH", "/theirs")
    assert inherited_environment()["PYTHONPATH"] == "/theirs"


def test_a_later_part_wins():
    first, second = {"A": "caller", "B": "caller"}, {"B": "recipe", "C": "recipe"}
    merged = program_environment("127.0.0.1", first, second, {"C": "managed"})
    assert (merged["A"], merged["B"], merged["C"]) == ("caller", "recipe", "managed")


def test_a_proxy_never_stands_between_the_fleets_programs():
    merged = program_environment("10.1.2.3", {"NO_PROXY": "example.com"}, {"no_proxy": "10.1.2.3"})
    assert merged["NO_PROXY"] == "example.com,localhost,127.0.0.1,10.1.2.3"
    assert merged["no_proxy"] == "10.1.2.3,localhost,127.0.0.1"


def site(recipe, *devices):
    return WorkerSite(recipe, Path("/run"), 20001, 20002, 20003, 20004, devices)


WORKERS = {
    "cpu": site(recipe_of()),
    "cuda": site(recipe_of({"device": "cuda"}), "3", "4"),
    "shared GPU": site(recipe_of({"device": "cuda", "share_gpu": True}), "3", "4"),
    "two ranks on a GPU": site(recipe_of({"device": "cuda", "share_gpu": True}), "3", "3"),
}


@pytest.mark.parametrize("where", WORKERS)
def test_every_variable_the_fleet_sets_is_managed(where):
    """Whatever a worker is given, `env_vars` may not replace."""
    given = control_plane_variables("ours", "https://10.0.0.1:1", "nats://10.0.0.1:2", Credentials("a", "b", "c", "d"))
    given |= node_variables("10.0.0.1", "eth0")
    given |= frontend_variables(FrontendArgs(tokenizer_cache=True), 1, 2) | worker_variables(WORKERS[where])
    free = {name for name in given if not name.startswith(MANAGED_PREFIXES) and name not in MANAGED_VARIABLES}
    shares = WORKERS[where].recipe.cluster.share_gpu
    assert free == ({"NCCL_CUMEM_ENABLE"} if shares else set())  # managed where a GPU is shared


def test_the_fleet_names_no_variable_itself():
    """All are listed in `environment`."""
    for module in (fleet, node, stores_module, worker):
        tree = ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8"))
        literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not {text for text in literals if isinstance(text, str) and re.fullmatch(r"[A-Z]+(_[A-Z0-9]+)+", text)}


def test_a_workers_variables_on_each_device():
    cpu, cuda, shared = (worker_variables(WORKERS[name]) for name in ("cpu", "cuda", "shared GPU"))
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}
    own |= {"VLLM_WEIGHTS_PROOF": "sha256"}
    assert {name: value for name, value in cpu.items() if name not in cuda or cuda[name] != value} == own
    assert cuda == {
        "DYN_TCP_RPC_PORT": "20001",
        "DYN_TCP_RESPONSE_STREAM_PORT": "20002",
        "DYN_SYSTEM_PORT": "20003",
        "DYN_RL_INIT_WEIGHTS_TIMEOUT_S": "615",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "VLLM_PORT": "20004",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_RPC_BASE_PATH": "/run",
        "VLLM_RENDEZVOUS_DIR": "/run",
        "VLLM_WEIGHTS_PROOF": "nh",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "3,4",
    }
    assert shared == SHARED_GPU | cuda
    assert "TORCH_COMPILE_DISABLE" not in worker_variables(site(recipe_of(enforce_eager=False)))


def test_nccl_is_told_the_interface_between_nodes_only():
    assert collective_variables("eth1") == {"NCCL_SOCKET_IFNAME": "=eth1"}
    assert collective_variables("lo") == {}


def test_threads_are_divided_among_engines_on_cpu_only(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert worker_defaults("cpu", 2) == {"OMP_NUM_THREADS": "2"}
    assert worker_defaults("cpu", 8) == {"OMP_NUM_THREADS": "1"}
    assert worker_defaults("cuda", 2) == {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def test_parsers_are_quiet_unless_the_caller_or_the_recipe_says_otherwise(monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    quiet = parser_environment("cpu", {"A": "recipe"})
    assert (quiet["A"], quiet["VLLM_LOGGING_LEVEL"], quiet["CUDA_VISIBLE_DEVICES"]) == ("recipe", "ERROR", "")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert parser_environment("cuda", {})["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "CUDA_VISIBLE_DEVICES" not in parser_environment("cuda", {})


@pytest.fixture
def echo(tmp_path):
    """A worker's program that logs its words and its environment, and stays."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "WORDS $*"\nenv | sed "s/^/ENV /"\necho END\nexec sleep 60\n')
    program.chmod(0o755)
    return Programs(dynamo_python=program, etcd=program, nats_server=program)


def launches(log, count):
    """Each launch's words, and its environment."""
    deadline = time.monotonic() + 20
    while not log.exists() or log.read_text().count("END\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for part in log.read_text().split("END\n")[:count]:
        lines = part.splitlines()
        variables = dict(line[4:].split("=", 1) for line in lines if line.startswith("ENV "))
        yield next(line.split()[1:] for line in lines if line.startswith("WORDS ")), variables


def test_a_workers_environment_and_its_seeds(tmp_path, echo):
    inherited = {"A": "caller", "B": "caller", "OMP_NUM_THREADS": "2", "PATH": os.environ["PATH"]}
    managed = {"ETCD_ENDPOINTS": "ours", "B": "control plane", "C": "control plane"}
    recipe = {"A": "recipe", "B": "recipe", "OMP_NUM_THREADS": "1"}
    base = tmp_path / "base"
    base.mkdir()
    fleet_settings = settings(tmp_path, echo, env_vars=recipe)
    owner = WorkerProcess(fleet_settings, 3, (inherited, managed), PortRange(), (), base)
    log = tmp_path / "logs" / "worker-3.log"
    try:
        addresses = [owner.start()]
        for launch in range(1, 4):
            seen = list(launches(log, launch))  # each has said all before the next replaces it
            addresses.append(owner.restart())
    finally:
        owner.stop()
    assert not list(base.iterdir()), "a worker's folder stays"
    seeds = [engine_seed(42, 3, launch) for launch in range(4)]
    assert [address.seed for address in addresses] == seeds
    assert [words[words.index("--seed") + 1] for words, _ in seen] == [str(seed) for seed in seeds[:3]]
    assert len(set(seeds)) == 4
    for _, variables in seen:
        assert variables["A"] == "recipe", "the recipe's env_vars lose to the caller's shell"
        assert variables["OMP_NUM_THREADS"] == "1"
        assert (variables["B"], variables["C"]) == ("control plane", "control plane")
        assert variables["ETCD_ENDPOINTS"] == "ours"
        assert variables["VLLM_HOST_IP"] == "127.0.0.1"
        assert variables["HF_HUB_OFFLINE"] == "1"


@pytest.fixture
def real_fleet(tmp_path):
    """A fleet of the real programs, not started yet."""
    made = Fleet(settings(tmp_path, find_programs()), [], print)
    yield made
    made.shutdown()


@pytest.mark.parametrize("proxy", [False, True], ids=["plain", "behind a proxy"])
def test_etcd_and_nats_come_up_whatever_the_caller_has_set(real_fleet, monkeypatch, proxy):
    """The real programs, started as every fleet starts them."""
    for name, value in FOREIGN.items():
        monkeypatch.setenv(name, value)
    if proxy:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
    stores = real_fleet._start_stores(inherited_environment(), time.monotonic() + 60)
    secrets = stores_module.secrets_folder(real_fleet.settings)
    tls = ssl.create_default_context(cafile=secrets / "ca.pem")
    tls.load_cert_chain(secrets / "cert.pem", secrets / "key.pem")
    with httpx.Client(base_url=stores.etcd_url, trust_env=False, timeout=20, verify=tls) as client:
        assert client.get("/health").json()["health"] == "true"
        (member,) = client.post("/v3/cluster/member/list", json={}).json()["members"]
    assert member["name"] == "default"
    assert member["clientURLs"] == [stores.etcd_url]
    real_fleet.check_control_plane()


@pytest.mark.parametrize("name", ["ETCD_NAME", "ETCD_INITIAL_CLUSTER_STATE", "ETCD_CONFIG_FILE"])
def test_one_such_variable_would_end_etcd(real_fleet, name):
    """So the test above can fail."""
    with pytest.raises(ProcessDiedError, match="etcd exited with status"):
        real_fleet._start_stores({name: FOREIGN[name]}, time.monotonic() + 60)


def test_ranks_on_one_gpu_are_told_which():
    told = worker_variables(WORKERS["two ranks on a GPU"])
    assert (told["CUDA_VISIBLE_DEVICES"], told["VLLM_RANK_DEVICES"]) == ("3", "0,0")
    assert "VLLM_RANK_DEVICES" not in worker_variables(WORKERS["shared GPU"])
    assert worker_variables(site(WORKERS["cuda"].recipe, "5", "2", "5"))["VLLM_RANK_DEVICES"] == "0,1,0"
