"""A real vLLM engine of two ranks: each is proved, none answers for another, and the engine dies with any of them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import new_engine
from test_vllm_refit import TIMEOUT_S, TRANSPORT, expected, join, learn, refit

from functional.engine.plan import Plan
from tests.packing import cpu_packs

RANKS = 2
pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def two_ranks(versions: list[Path]) -> Iterator[Any]:
    llm = new_engine(versions[0], "sha256", tensor_parallel_size=RANKS, distributed_executor_backend="mp")
    yield llm
    del llm


@pytest.fixture(scope="module")
def of_ranks(two_ranks: Any, versions: list[Path]) -> list[Plan]:
    return learn(two_ranks, versions[0], RANKS)


def prove(engine: Any, proof: dict[str, Any]) -> None:
    engine.collective_rpc("prove_weights", kwargs={"expected": proof})


def test_each_rank_is_proved_and_a_refusal_by_one_is_not_the_next_call_s(
    two_ranks: Any, of_ranks: list[Plan], versions: list[Path]
) -> None:
    first, second = (expected(of_ranks, model) for model in versions[:2])
    if not cpu_packs():  # there what was loaded first is gone since a plan was learned: see plan_check
        refit(two_ranks, versions[0], RANKS)
    prove(two_ranks, first)
    for wrong_rank in range(RANKS):
        mixed = {
            "key": None,
            "ranks": [(second if rank == wrong_rank else first)["ranks"][rank] for rank in range(RANKS)],
        }
        with pytest.raises(Exception, match=f"rank {wrong_rank}: weights not proved"):
            prove(two_ranks, mixed)
        prove(two_ranks, first)
    with pytest.raises(Exception, match="rank 0: weights not proved"):
        prove(two_ranks, second)
    prove(two_ranks, first)
    with pytest.raises(Exception, match=r"the proof is of 1 rank\(s\), the engine has 2"):
        prove(two_ranks, {"key": None, "ranks": first["ranks"][:1]})
    prove(two_ranks, first)


def test_a_refit_reaches_both_ranks(two_ranks: Any, of_ranks: list[Plan], versions: list[Path]) -> None:
    refit(two_ranks, versions[1], RANKS)
    prove(two_ranks, expected(of_ranks, versions[1]))
    with pytest.raises(Exception, match="weights not proved"):
        prove(two_ranks, expected(of_ranks, versions[0]))
    refit(two_ranks, versions[1], RANKS, change=["flip", "model.layers.1.mlp.down_proj.weight"])
    problems = 1 if cpu_packs() else 2  # unpacked, it is named twice
    with pytest.raises(Exception, match=rf"rank 1: weights not proved, {problems} problem"):
        prove(two_ranks, expected(of_ranks, versions[1]))


@pytest.mark.skipif(TRANSPORT != "gloo", reason="the trainer's ranks are on the CPU")
def test_a_trainer_of_two_ranks_gathers_once_an_update(two_ranks: Any, versions: list[Path], tmp_path: Path) -> None:
    """FSDP2 over gloo: what the ranks of the engine hold afterwards is the trainer's whole weights."""
    program, store = Path(__file__).with_name("fsdp_trainer.py"), tmp_path / "store"
    trainers = [
        subprocess.Popen(
            [sys.executable, str(program), str(versions[0]), str(rank), "2", str(store), str(RANKS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert trainers[0].stdout is not None
        hello = json.loads(trainers[0].stdout.readline())
        join(two_ranks, hello["port"], RANKS)
        two_ranks.collective_rpc("learn_plan", kwargs={"timeout_s": TIMEOUT_S})
        for passes in (1, 2):
            two_ranks.collective_rpc("reset_reload")
            two_ranks.collective_rpc("start_weight_update", kwargs={"is_checkpoint_format": True})
            two_ranks.collective_rpc("update_weights", kwargs={"update_info": hello["info"]})
            two_ranks.collective_rpc("finish_weight_update")
            answer = json.loads(trainers[0].stdout.readline())
            assert answer["passes"] == passes
            prove(two_ranks, answer["proof"])
        assert [trainer.wait(30) for trainer in trainers] == [0, 0]
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.wait()


def test_the_engine_dies_with_one_of_its_ranks(two_ranks: Any) -> None:
    """The last test of this engine."""
    workers = [p for p in psutil.Process().children(recursive=True) if "Worker_TP" in " ".join(p.cmdline())]
    assert len(workers) == RANKS
    workers[-1].kill()
    began = time.monotonic()
    with pytest.raises(Exception, match=r"(?i)dead|failed|cancel"):  # noqa: PT012 (at some call)
        while time.monotonic() - began < 30:
            two_ranks.collective_rpc("reset_reload")
    assert time.monotonic() - began < 20
