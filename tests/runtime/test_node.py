"""What a node says of itself, and what it lacks of what the driver's has."""

import socket
from pathlib import Path

import pytest

from functional.runtime.fleet import node
from functional.runtime.fleet.node import NodeOwner, folder_digest, node_facts
from functional.runtime.fleet.programs import Programs
from functional.runtime.fleet.settings import FleetSettings
from functional.runtime.recipe.model import Recipe


def test_facts(monkeypatch):
    monkeypatch.setenv("FUNCTIONAL_NODE_IP", "127.0.0.1")
    facts = node_facts("192.0.2.1")
    assert (facts.name, facts.address, facts.problem) == (socket.gethostname(), "127.0.0.1", None)
    monkeypatch.delenv("FUNCTIONAL_NODE_IP")
    assert node_facts("127.0.0.1").address == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("192.0.2.7", "FUNCTIONAL_NODE_IP is 192.0.2.7, which no interface has"),
        ("node7", "FUNCTIONAL_NODE_IP is node7, which no interface has"),
        ("", "Ray's address of it is 192.0.2.1, which no interface has"),
    ],
)
def test_an_address_that_is_not_here(monkeypatch, given, problem):
    monkeypatch.setenv("FUNCTIONAL_NODE_IP", given)
    assert node_facts("192.0.2.1").problem == problem


def test_the_sites_choice_of_interface_stays(monkeypatch):
    monkeypatch.setenv("FUNCTIONAL_NODE_IP", "10.0.0.1")
    monkeypatch.setattr(node, "interface_name", lambda address: "ib0")
    monkeypatch.setattr(node, "stream_interface", lambda address: None)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert node_facts("").collective == {"NCCL_SOCKET_IFNAME": "=ib0"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert node_facts("").collective == {}


@pytest.fixture
def driver(tmp_path):
    """The driver's side of a check: settings, digest of the model, the file that tells the folder of logs."""
    for name in ("model", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "python").write_text("")
    (tmp_path / "python").chmod(0o755)
    program = tmp_path / "python"
    policy = {"model_name": "tiny", "optimizer": {"lr": 0.1}, "generation": {}}
    settings = FleetSettings(
        namespace="ours",
        recipe=Recipe.model_validate({"policy": policy}),
        model_dir=tmp_path / "model",
        run_dir=tmp_path / "run",
        log_dir=tmp_path / "logs",
        programs=Programs(program, program, program),
    )
    canary = tmp_path / "logs" / ".shared"
    canary.write_text("ours")
    return settings, folder_digest(settings.model_dir), canary


def problem(driver):
    return NodeOwner.__ray_metadata__.modified_class(()).find_problem(*driver)


def test_a_node_that_has_everything(driver):
    assert problem(driver) is None


def test_another_model(driver):
    (driver[0].model_dir / "config.json").write_text("[]")
    assert (
        problem(driver) == f"{driver[0].model_dir} is missing or another model: put it on a folder that all nodes share"
    )


def test_a_model_with_a_file_less(driver):
    (driver[0].model_dir / "config.json").rename(driver[0].model_dir / "config.old")
    assert "is missing or another model" in problem(driver)


@pytest.mark.parametrize("content", [None, "another run's"])
def test_another_folder_of_logs(driver, content):
    driver[2].unlink()
    if content:
        driver[2].write_text(content)
    assert problem(driver).endswith("is not the driver's folder: put --out on a folder that all nodes share")


def test_another_image(driver):
    Path(driver[0].programs.dynamo_python).unlink()
    assert problem(driver).endswith("is missing: every node runs the same image")
