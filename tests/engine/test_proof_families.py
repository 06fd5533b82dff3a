"""Proofs on every rank of real models: what vLLM's own loader put there, packed or not, is what the plans expect."""

from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks, write_family
from safetensors.torch import load_file
from test_plan_families import SHAPES, layout_of, slots_of

from functional.engine.extension import _parameter_proofs
from functional.engine.plan import Plan
from functional.engine.plan_trace import trace_plan
from functional.engine.proof import TensorProof
from functional.runtime.refit.expected import ExpectedProof, check_coverage


def prove(model: Any, model_config: Any) -> tuple[str, dict[str, TensorProof]]:
    """Runs in the rank, on what it loaded."""
    return trace_plan(model, slots_of(Path(model_config.model))).to_json(), _parameter_proofs(model, None)


@pytest.mark.parametrize(("family", "layout"), SHAPES, ids=str)
def test_what_each_rank_loads_is_what_is_expected_of_it(tmp_path: Path, family: str, layout: str) -> None:
    folder = write_family(family, tmp_path / family)
    answers = on_ranks(prove, folder, **layout_of(layout))
    plans = [Plan.from_json(text) for text, _ in answers]
    check_coverage(plans, slots_of(folder))
    with ExpectedProof(plans, "sha256") as expected:
        for file in folder.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                expected.add(name, tensor)
        found = expected.result(60)
    for rank, (_, held) in enumerate(answers):
        assert held == found.ranks[rank], f"rank {rank}"
