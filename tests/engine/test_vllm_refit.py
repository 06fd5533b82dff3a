"""Refit of a real vLLM engine by a real sender process: proved when right, refused when not, in time when broken.

On a CPU over gloo; with TRANSPORT=nccl on a GPU (on two, the sender has one of its own).
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from functional.engine.plan import Plan
from functional.engine.transports import PROOF_VARIABLE
from functional.engine.wire import Manifest
from functional.runtime.refit.expected import ExpectedProof
from functional.runtime.refit.source import Sender
from tests.packing import cpu_packs

TRANSPORT = os.environ.get("TRANSPORT", "gloo")
TIMEOUT_S = 8.0 if TRANSPORT == "gloo" else 15.0
SLACK_S = 4.0
CHANGED = "model.layers.1.mlp.gate_proj.weight"
PLANS: dict[Any, list[Plan]] = {}
"""Of the engine under test."""
pytestmark = pytest.mark.faults


def sender_device() -> str:
    return "cpu" if TRANSPORT == "gloo" else f"cuda:{torch.cuda.device_count() - 1}"


@pytest.fixture(autouse=True)
def plans(engine: Any, versions: list[Path]) -> list[Plan]:
    if engine not in PLANS:
        PLANS.clear()
        PLANS[engine] = learn(engine, versions[0])
    return PLANS[engine]


def learn(engine: Any, model: Path, ranks: int = 1) -> list[Plan]:
    """What the engine's ranks tell a sender."""
    sender = Sender(TRANSPORT, sender_device(), TIMEOUT_S)
    port = sender.listen("127.0.0.1")
    slots = Manifest.of(load_file(model / "model.safetensors").items(), packed=True).slots
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(lambda: sender.connect("127.0.0.1", port, 1 + ranks) or sender.agree(slots))
        join(engine, port, ranks)
        engine.collective_rpc("learn_plan", kwargs={"timeout_s": TIMEOUT_S})
        found = heard.result(TIMEOUT_S).of_engine
    sender.close()
    return found


def expected(plans: list[Plan], model: Path, kind: Any = None) -> dict[str, Any]:
    """By what the engine under test is asked for, or by `kind`."""
    with ExpectedProof(plans, kind or os.environ[PROOF_VARIABLE]) as proof:
        for name, tensor in load_file(model / "model.safetensors").items():
            proof.add(name, tensor)
        return proof.result(60).as_dict()


def prove(engine: Any, model: Path) -> None:
    engine.collective_rpc("prove_weights", kwargs={"expected": expected(PLANS[engine], model)})


@contextlib.contextmanager
def sending(model: Path, **plan: Any) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    plan = {"packed": True, "timeout_s": TIMEOUT_S, "transport": TRANSPORT, "device": sender_device(), **plan}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("sending.py")), str(model), json.dumps(plan)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def join(engine: Any, port: int, ranks: int = 1) -> None:
    init_info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 1 + ranks}
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {**init_info, "timeout_s": TIMEOUT_S}})


def receive(engine: Any, hello: dict[str, Any], ranks: int = 1) -> None:
    """The worker's part of a refit, without finish."""
    join(engine, hello["port"], ranks)
    engine.collective_rpc("reset_reload")
    engine.collective_rpc("start_weight_update", kwargs={"is_checkpoint_format": True})
    engine.collective_rpc("update_weights", kwargs={"update_info": hello["info"]})


def refit(engine: Any, model: Path, ranks: int = 1, **plan: Any) -> None:
    with sending(model, world_size=1 + ranks, **plan) as (process, hello):
        receive(engine, hello, ranks)
        engine.collective_rpc("finish_weight_update")
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"sent": True}


def test_first_load_is_proved_and_stale_weights_are_not(engine: Any, versions: list[Path]) -> None:
    if not cpu_packs():  # there what was loaded first is gone since a plan was learned: see plan_check
        refit(engine, versions[0])
    prove(engine, versions[0])
    with pytest.raises(Exception, match="weights not proved"):
        prove(engine, versions[1])


@pytest.mark.parametrize("packed", [True, False])
def test_refit_is_proved(engine: Any, versions: list[Path], packed: bool) -> None:
    for model in (versions[1], versions[0]):
        refit(engine, model, packed=packed)
        prove(engine, model)
    with pytest.raises(Exception, match="weights not proved"):
        prove(engine, versions[1])


@pytest.mark.parametrize(
    "change",
    [
        ["flip", CHANGED],
        ["flip", "model.norm.weight"],
        ["flip", "model.embed_tokens.weight"],
        ["swap", CHANGED, CHANGED.replace("gate", "up")],
        ["swap", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight"],
        ["skip", CHANGED],
        ["skip", "model.layers.0.input_layernorm.weight"],
        ["twice", CHANGED],
        ["twice", "model.norm.weight"],
    ],
    ids="-".join,
)
def test_wrong_bytes_are_refused(engine: Any, versions: list[Path], plans: list[Plan], change: list[str]) -> None:
    with pytest.raises(Exception, match=r"weights not proved|failed") as refusal:  # noqa: PT012
        refit(engine, versions[1], change=change)  # vLLM's loader itself refuses some of a tensor sent twice
        prove(engine, versions[1])
    names = [*change[1:], *(copy.target for plan in plans for copy in plan.copies if copy.source in change)]
    assert change[0] == "twice" or any(name in str(refusal.value) for name in names)
    refit(engine, versions[0])
    prove(engine, versions[0])


@pytest.mark.parametrize("after", [1, 5, 12, 20])
def test_sender_killed_mid_transfer(engine: Any, versions: list[Path], after: int) -> None:
    started = time.monotonic()
    with sending(versions[2], after=after, signal="SIGKILL") as (_, hello), pytest.raises(Exception, match="failed"):
        receive(engine, hello)
    assert time.monotonic() - started < TIMEOUT_S + SLACK_S
    refit(engine, versions[2])
    prove(engine, versions[2])


def test_sender_stopped_mid_transfer(engine: Any, versions: list[Path]) -> None:
    with sending(versions[1], after=5, signal="SIGSTOP") as (_, hello):
        started = time.monotonic()
        with pytest.raises(Exception, match="deadline"):
            receive(engine, hello)
        assert time.monotonic() - started < TIMEOUT_S + SLACK_S
    refit(engine, versions[1])
    prove(engine, versions[1])


def test_sender_never_comes(engine: Any) -> None:
    started = time.monotonic()
    hello = {"port": 1, "info": {"names": [], "dtype_names": [], "shapes": []}}
    with pytest.raises(Exception, match="no sender"):
        receive(engine, hello)
    assert time.monotonic() - started < TIMEOUT_S + SLACK_S


def test_update_info_that_differs_is_refused_before_a_byte(engine: Any, versions: list[Path]) -> None:
    with sending(versions[2]) as (process, hello):
        hello["info"]["names"][:2] = hello["info"]["names"][1::-1]
        with pytest.raises(Exception, match="manifest"):
            receive(engine, hello)
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        assert answer["kind"] == "TransferError"
        assert "manifest" in answer["error"]


def test_expected_names_must_be_complete(engine: Any, versions: list[Path], plans: list[Plan]) -> None:
    refit(engine, versions[0])
    complete = expected(plans, versions[0])
    (tensors,) = complete["ranks"]
    one_less = {**complete, "ranks": [{name: tensors[name] for name in tensors if name != "model.norm.weight"}]}
    with pytest.raises(Exception, match=r"model\.norm\.weight: in the engine, but not expected"):
        engine.collective_rpc("prove_weights", kwargs={"expected": one_less})
    one_more = {**complete, "ranks": [{**tensors, "lm_head.weight": tensors["model.norm.weight"]}]}
    with pytest.raises(Exception, match=r"lm_head\.weight: missing"):
        engine.collective_rpc("prove_weights", kwargs={"expected": one_more})


@pytest.mark.skipif(TRANSPORT != "gloo" or not cpu_packs(), reason="layers pack nothing here")
def test_a_proof_for_which_nothing_was_kept_is_refused_by_name(
    engine: Any, versions: list[Path], plans: list[Plan]
) -> None:
    other = "sha256" if os.environ[PROOF_VARIABLE] == "nh" else "nh"
    with pytest.raises(Exception, match=f"start the engine with {PROOF_VARIABLE}={other}"):
        engine.collective_rpc("prove_weights", kwargs={"expected": expected(plans, versions[0], other)})


def test_without_reset_a_failed_update_would_leave_garbage(engine: Any, versions: list[Path]) -> None:
    """The vLLM behaviour that reset_reload is for: should it be gone one day, so may reset_reload."""
    with sending(versions[2], after=12, signal="SIGKILL") as (_, hello), pytest.raises(Exception, match="failed"):
        receive(engine, hello)
    with sending(versions[2]) as (_, hello):
        init_info = {"master_address": "127.0.0.1", "master_port": hello["port"], "rank_offset": 1, "world_size": 2}
        engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})
        engine.collective_rpc("start_weight_update", kwargs={"is_checkpoint_format": True})
        engine.collective_rpc("update_weights", kwargs={"update_info": hello["info"]})
        engine.collective_rpc("finish_weight_update")
    with pytest.raises(Exception, match="weights not proved"):
        prove(engine, versions[2])
    refit(engine, versions[2])
    prove(engine, versions[2])


def test_abort_ends_a_blocked_sender() -> None:
    from functional.engine.errors import TransferError

    sender = Sender("gloo", "cpu", 60)
    sender.listen("127.0.0.1")
    threading.Timer(0.5, sender.abort, ("worker 1 is dead",)).start()
    started = time.monotonic()
    with pytest.raises(TransferError, match="worker 1 is dead"):
        sender.connect("127.0.0.1", 0, 2)
    assert time.monotonic() - started < 5
