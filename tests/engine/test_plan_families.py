"""Plans of real models: vLLM's own loader, layers and parallel state, on every rank of several engine layouts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import FAMILIES, VOCAB, on_ranks, write_family
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from functional.engine.extension import _parameter_proofs
from functional.engine.plan import Plan
from functional.engine.plan_check import check_plan, random_bits
from functional.engine.plan_copy import Packer, Spreader, make_buffers
from functional.engine.plan_schedule import make_schedule
from functional.engine.plan_trace import trace_plan
from functional.engine.proof import TensorProof
from functional.engine.wire import Slot
from functional.runtime.refit.expected import ExpectedProof, check_coverage
from tests.packing import cpu_packs

CPU = torch.device("cpu")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor-2": {"tensor": 2},
    "tensor-4": {"tensor": 4},
    "pipeline-2": {"pipeline": 2},
    "tensor-2-pipeline-2": {"tensor": 2, "pipeline": 2},
}
SHAPES = [(family, layout) for family in FAMILIES for layout in LAYOUTS] + [
    ("qwen3-moe", "expert-2"),
    ("qwen3-moe", "expert-4"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: write_family(family, root / family) for family in FAMILIES}


def layout_of(name: str) -> dict[str, Any]:
    return {"tensor": int(name[-1]), "expert": True} if name.startswith("expert") else LAYOUTS[name]


def slots_of(folder: Path) -> list[Slot]:
    slots = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            slots += [Slot(name, torch.bfloat16, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys()]  # noqa: SIM118
    return slots


def learn(model: Any, model_config: Any) -> tuple[str, dict[str, str], dict[str, TensorProof]]:
    """Runs in the rank. Plan, packed parameters, and the proof of what the loader has put there."""
    slots = slots_of(Path(model_config.model))
    plan = trace_plan(model, slots)
    loaded = _parameter_proofs(model, None)
    packed = check_plan(model, model_config, plan, slots, CPU)
    assert trace_plan(model, slots).digest == plan.digest
    return plan.to_json(), packed, loaded


def trace(model: Any, model_config: Any) -> tuple[str]:
    """Runs in the rank: its plan alone."""
    return (trace_plan(model, slots_of(Path(model_config.model))).to_json(),)


def expected(plan: Plan, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = {t.name: torch.zeros(t.numel, dtype=t.dtype).as_strided(t.shape, t.strides) for t in plan.targets}
    for copy in plan.copies:
        copy.put.on(tensors[copy.target]).copy_(copy.take.on(named[copy.source]))
    return tensors


@pytest.mark.parametrize(("family", "layout"), SHAPES, ids=str)
def test_a_plan_is_learned_proved_and_carried_out(folders: dict[str, Path], family: str, layout: str) -> None:
    answers = on_ranks(learn, folders[family], **layout_of(layout))
    plans = {rank: Plan.from_json(text) for rank, (text, _, _) in enumerate(answers)}
    slots = slots_of(folders[family])

    # what each rank has loaded, packed or not, is what the plans expect of it
    check_coverage(list(plans.values()), slots)
    with ExpectedProof(list(plans.values()), "sha256") as proof:
        for file in folders[family].glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                proof.add(name, tensor)
        assert proof.result(60).ranks == tuple(loaded for _, _, loaded in answers)

    schedule = make_schedule(plans, slots, 10_000)
    named = {slot.name: random_bits(slot, 3, CPU) for slot in slots}
    got = {rank: {n: t.zero_() for n, t in expected(plan, named).items()} for rank, plan in plans.items()}
    spreaders = {
        rank: Spreader(schedule.intakes[rank], got[rank], make_buffers(schedule.largest, CPU)) for rank in plans
    }
    seen = dict.fromkeys(plans, 0)
    for _, chunk, buffer in Packer(schedule, make_buffers(schedule.largest, CPU)).packed(named.items()):
        for rank in chunk.ranks:
            spreaders[rank].buffer(seen[rank]).copy_(buffer)
            spreaders[rank].spread(seen[rank])
            seen[rank] += 1
    for rank, plan in plans.items():
        for name, tensor in expected(plan, named).items():
            assert torch.equal(got[rank][name].view(torch.int16), tensor.view(torch.int16)), (rank, name)

    # every element of the checkpoint is taken by some rank, and sent once
    assert schedule.untaken == {}
    sent = {slot.name: torch.zeros(slot.shape, dtype=torch.int32) for slot in slots}
    for chunk in schedule.chunks:
        for piece in chunk.pieces:
            piece.take.on(sent[piece.source]).add_(1)
    assert all((mask == 1).all() for mask in sent.values())

    # on a CPU that packs, what linear layers hold is packed, and norms are not
    for _, packed, _ in answers:
        assert any(name.endswith("qkv_proj.weight") for name in packed) == cpu_packs()
        assert not any("norm" in name for name in packed)


def test_padding_kv_heads_and_ties_are_as_the_engine_has_them(folders: dict[str, Path]) -> None:
    four = [Plan.from_json(text) for text, *_ in on_ranks(learn, folders["llama"], tensor=4)]
    rows = [plan.padding().get("model.embed_tokens.weight", 0) // 64 for plan in four]
    assert sum(rows) == 128 - VOCAB
    keys = [[c.take for c in plan.copies if c.source.endswith("layers.0.self_attn.k_proj.weight")] for plan in four]
    assert keys[0] == keys[1] != keys[2] == keys[3]  # two KV heads, four ranks

    stages = [Plan.from_json(text) for text, *_ in on_ranks(learn, folders["llama-tied"], pipeline=2)]
    assert all("model.embed_tokens.weight" in {copy.source for copy in plan.copies} for plan in stages)


def test_an_engine_that_takes_a_part_of_a_tensor_is_found(tmp_path: Path) -> None:
    """transformers' Qwen2 obeys `head_dim`, vLLM's does not, and loads a part of q_proj without a word."""
    folder = write_family("qwen2", tmp_path / "qwen2", head_dim=32)
    plans = {rank: Plan.from_json(text) for rank, (text, *_) in enumerate(on_ranks(trace, folder))}
    untaken = make_schedule(plans, slots_of(folder), 10_000).untaken
    assert untaken["model.layers.0.self_attn.q_proj.weight"] == 64 * 64
