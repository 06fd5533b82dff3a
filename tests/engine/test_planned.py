"""A real vLLM engine that takes its updates by plan, from the weight source that a trainer uses.

On a CPU over gloo, with layers that pack nothing; with TRANSPORT=nccl on a GPU.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import new_engine
from safetensors.torch import load_file
from test_vllm_refit import TIMEOUT_S, TRANSPORT, expected, sender_device
from transformers import AutoConfig

from functional.engine.errors import NOT_PROVED
from functional.engine.transports import PROOFS, RESIDENT_VARIABLE
from functional.engine.wire import Slot
from functional.runtime.refit.source import LocalWeights
from tests.packing import cpu_packs

PARAMETERS = 18
"""Of the engine, in two layers."""
pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def planned(versions: list[Path]) -> Iterator[Any]:
    """An engine whose layers keep their weights where they were loaded."""
    os.environ[RESIDENT_VARIABLE] = "1"
    llm = new_engine(versions[0], PROOFS[TRANSPORT])
    del os.environ[RESIDENT_VARIABLE]
    yield llm
    del llm


class Source(LocalWeights):
    """Sends the versions' checkpoints; `changed` is sent with its last bit flipped."""

    def __init__(self, versions: list[Path]) -> None:
        device = sender_device()
        tensors = [{n: t.to(device) for n, t in sorted(load_file(v / "model.safetensors").items())} for v in versions]
        super().__init__(
            lambda version: [Slot(n, t.dtype, tuple(t.shape)) for n, t in tensors[version].items()],
            lambda version: tensors[version].items(),
            lambda version, completions: pytest.fail("no probe here"),
            AutoConfig.from_pretrained(versions[0]),
            transport=TRANSPORT,
            device=device,
            timeout_s=TIMEOUT_S,
        )
        self.changed = ""

    def send_by_plan(self, version: int) -> Any:
        return self._send_by_plan(version, self._flipped)

    def _flipped(self, named: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            sent = tensor.clone()
            if name == self.changed:
                sent.view(-1).view(torch.int16)[-1] ^= 1
            yield name, sent


class Beside(threading.Thread):
    """The trainer's part, while the engine's is called here."""

    def __init__(self, part: Any, *arguments: Any) -> None:
        super().__init__(daemon=True)
        self.part, self.arguments = part, arguments
        self.answer: Any = None
        self.start()

    def run(self) -> None:
        self.answer = self.part(*self.arguments)

    def end(self) -> Any:
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        return self.answer


def agree(engine: Any, source: Source) -> dict[str, str]:
    """In a new group; what stands against a plan."""
    port = source.listen("127.0.0.1")
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    joined = Beside(source.connect, "127.0.0.1", port, 2)
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {**info, "timeout_s": TIMEOUT_S}})
    joined.end()
    agreed = Beside(source.agree, 0)
    engine.collective_rpc("learn_plan", kwargs={"timeout_s": TIMEOUT_S})
    problems: dict[str, str] = agreed.end()
    return problems


def call(engine: Any, source: Source, method: str, version: int) -> Any:
    """The verdict of `update_by_plan` or `prove_by_plan`."""
    beside = Beside(getattr(source, method.replace("update", "send")), version)
    engine.collective_rpc(method, kwargs={"timeout_s": TIMEOUT_S})
    return beside.end()


def completion(engine: Any) -> list[tuple[int, float]]:
    """Tokens and their log-probs, greedy."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    parameters = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True, detokenize=False)
    output = engine.generate({"prompt_token_ids": list(range(3, 19))}, parameters, use_tqdm=False)[0].outputs[0]
    return [(token, given[token].logprob) for token, given in zip(output.token_ids, output.logprobs, strict=True)]


def test_updates_by_plan_are_proved_and_wrong_ones_refused(planned: Any, versions: list[Path]) -> None:
    source = Source(versions)
    before = completion(planned)
    assert agree(planned, source) == {}
    for version in (1, 0):
        verdict = call(planned, source, "update_by_plan", version)
        assert (verdict.problems, verdict.proved) == ([], PARAMETERS)
        assert (completion(planned) == before) == (version == 0)
        kind = PROOFS[TRANSPORT]
        planned.collective_rpc("prove_weights", kwargs={"expected": expected(source._plans, versions[version], kind)})

    for changed in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        source.changed = changed
        with pytest.raises(Exception, match=f"{NOT_PROVED}.*the bytes of {changed} differ"):
            call(planned, source, "update_by_plan", 1)
    source.changed = ""
    assert call(planned, source, "update_by_plan", 1).problems == []  # in the same group
    with pytest.raises(Exception, match=NOT_PROVED):
        call(planned, source, "prove_by_plan", 2)
    assert call(planned, source, "prove_by_plan", 1).problems == []

    assert agree(planned, source) == {}  # anew, with the plan learned before
    call(planned, source, "update_by_plan", 0)
    assert completion(planned) == before
    source.close()


@pytest.mark.skipif(TRANSPORT == "nccl" or not cpu_packs(), reason="layers pack nothing here")
def test_layers_that_pack_come_to_no_plan_and_keep_their_weights(engine: Any, versions: list[Path]) -> None:
    source = Source(versions)
    problems = agree(engine, source)
    assert problems["model.layers.0.mlp.down_proj.weight"].startswith("its layer packs it")
    engine.collective_rpc("prove_weights", kwargs={"expected": expected(source._plans, versions[0])})
    source.close()
