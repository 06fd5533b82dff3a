"""A plan in a running engine: learned in its worker, and on a GPU carried out in its parameters.

On a CPU, or with PLAN_DEVICE=cuda on a GPU; PLAN_MODEL names a folder in place of the small model, and PLAN_TENSOR the
tensor parallel size. What it prints are the times at that size.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from functional.engine.plan import Plan
from functional.engine.plan_check import check_plan, random_bits, same_bytes
from functional.engine.plan_copy import Packer, Spreader, make_buffers
from functional.engine.plan_schedule import make_schedule
from functional.engine.plan_trace import Places, trace_plan
from functional.engine.wire import Slot
from tests.packing import cpu_packs

DEVICE = os.environ.get("PLAN_DEVICE", "cpu")
PROMPT = list(range(3, 19))


def slots_of(folder: str) -> list[Slot]:
    slots = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            slots += [Slot(name, torch.bfloat16, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys()]  # noqa: SIM118
    return slots


def learn(worker: Any, folder: str) -> dict[str, Any]:
    """Runs in the worker: `worker` is vLLM's."""
    model, config, device = worker.model_runner.model, worker.model_config, worker.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        used = torch.cuda.memory_allocated(device)
    began = time.monotonic()
    slots = slots_of(folder)
    plan = trace_plan(model, slots)
    traced = time.monotonic()
    packed = check_plan(model, config, plan, slots, device)
    checked = time.monotonic()
    more = torch.cuda.max_memory_allocated(device) - used if device.type == "cuda" else 0
    figures = {"trace_s": traced - began, "check_s": checked - traced, "more_bytes": more}
    return {"plan": plan.to_json(), "packed": packed, "copies": len(plan.copies), **figures}


def load_in_place(worker: Any, folder: str) -> dict[str, Any]:
    """Runs in the worker, of one rank: its model's weights, by plan, into the parameters that it computes with."""
    model, device = worker.model_runner.model, worker.device
    slots = slots_of(folder)
    plan = trace_plan(model, slots)
    tensors = Places.of(model).tensors
    where = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    total = sum(slot.nbytes for slot in slots)
    schedule = make_schedule({1: plan}, slots, total // 16)
    buffers = make_buffers(schedule.largest, device)
    spreader = Spreader(schedule.intakes[1], tensors, buffers)
    packer = Packer(schedule, buffers)

    def once(named: Iterator[tuple[str, torch.Tensor]]) -> float:
        began = time.monotonic()
        for index, _, _ in packer.packed(named):
            spreader.spread(index)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic() - began

    once((slot.name, random_bits(slot, 3, device)) for slot in slots)
    for copy in plan.copies:
        bits = random_bits(next(slot for slot in slots if slot.name == copy.source), 3, device)
        taken = copy.take.on(bits)
        if taken.dtype == tensors[copy.target].dtype:
            assert same_bytes(taken, copy.put.on(tensors[copy.target].detach())), copy
    loaded = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            loaded |= {name: stored.get_tensor(name).to(device) for name in stored.keys()}  # noqa: SIM118
    seconds = min(once((slot.name, loaded[slot.name]) for slot in slots) for _ in range(5))
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == where
    return {"nbytes": total, "seconds": seconds, "chunks": len(schedule.chunks)}


@pytest.fixture(scope="module")
def folder(versions: list[Path]) -> str:
    return os.environ.get("PLAN_MODEL") or str(versions[0])


@pytest.fixture(scope="module")
def planned_engine(folder: str) -> Iterator[Any]:
    """Its workers take functions: only here."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM

    llm = LLM(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=128, max_num_seqs=4, seed=0,
        enforce_eager=DEVICE == "cpu", gpu_memory_utilization=0.5,
        tensor_parallel_size=int(os.environ.get("PLAN_TENSOR", "1")),
    )  # fmt: skip
    yield llm
    del llm, os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"]


def completion(engine: Any) -> list[tuple[int, float]]:
    """Tokens and their log-probs, greedy."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    parameters = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False)
    output = engine.generate({"prompt_token_ids": PROMPT}, parameters, use_tqdm=False)[0].outputs[0]
    return [
        (token, given[token].logprob)
        for token, given in zip(output.token_ids, output.logprobs, strict=True)
    ]  # fmt: skip


def test_a_worker_learns_a_plan_and_on_a_gpu_carries_it_out(planned_engine: Any, folder: str) -> None:
    before = completion(planned_engine)
    learned = planned_engine.collective_rpc(learn, args=(folder,))
    for rank, answer in enumerate(learned):
        plan = Plan.from_json(answer["plan"])
        print(
            f"{DEVICE} rank {rank}: {plan.nbytes / 1e9:.3f} GB, {answer['copies']} copies, traced in "
            f"{answer['trace_s']:.3f} s, checked in {answer['check_s']:.2f} s, {answer['more_bytes'] / 1e9:.2f} GB more"
        )
        assert (answer["packed"] == {}) == (DEVICE == "cuda" or not cpu_packs())
    if DEVICE == "cuda" and len(learned) == 1:
        assert completion(planned_engine) != before  # the check left random weights
        (figures,) = planned_engine.collective_rpc(load_in_place, args=(folder,))
        size, seconds = figures["nbytes"] / 1e9, figures["seconds"]
        print(f"packed and spread {size:.3f} GB in {seconds:.4f} s, {figures['chunks']} chunks")
        assert completion(planned_engine) == before
