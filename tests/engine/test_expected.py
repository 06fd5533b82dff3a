"""What is expected of each rank: as the plans say, whatever the order of the tensors, every byte and padding too."""

import pytest
import torch
from torch import Tensor

from functional.engine.plan import Copy, Plan, PlanRefused, Target, View, make_plan
from functional.engine.proof import EngineProof, prove_tensor
from functional.engine.transports import ProofKind
from functional.engine.wire import Slot
from functional.runtime.refit.expected import ExpectedProof, check_coverage

BF16 = torch.bfloat16
NAMED = {name: torch.randn(4, 6).to(BF16) for name in ("q", "k", "norm")}
SLOTS = [Slot(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in NAMED.items()]


def target(name: str, *shape: int, dtype: torch.dtype = BF16) -> Target:
    return Target(name, dtype, shape, tuple(torch.empty(shape, device="meta").stride()))


def plan(rank: int) -> Plan:
    """Of two: rows of q and k, joined and padded with a row; columns of the norm; and an empty shard."""
    rows = View(12 * rank, (2, 6), (6, 1))
    copies = [
        Copy("q", rows, "fused", View(0, (2, 6), (6, 1))),
        Copy("k", rows, "fused", View(12, (2, 6), (6, 1))),
        Copy("norm", View(3 * rank, (4, 3), (6, 1)), "columns", View(0, (4, 3), (3, 1))),
        Copy("norm", View(0, (4, 6), (6, 1)), "norm", View(0, (4, 6), (6, 1))),
    ]
    targets = [target("fused", 5, 6), target("columns", 4, 3), target("norm", 4, 6), target("padding", 2, 6)]
    return make_plan(SLOTS, targets, copies)


def held(rank: int) -> dict[str, Tensor]:
    rows = slice(2 * rank, 2 * rank + 2)
    return {
        "fused": torch.cat([NAMED["q"][rows], NAMED["k"][rows], torch.zeros(1, 6, dtype=BF16)]),
        "columns": NAMED["norm"][:, 3 * rank : 3 * rank + 3],
        "norm": NAMED["norm"],
        "padding": torch.zeros(2, 6, dtype=BF16),
    }


def expected(plans: list[Plan], kind: ProofKind, names: list[str]) -> EngineProof:
    with ExpectedProof(plans, kind) as proof:
        for name in names:
            proof.add(name, NAMED[name])
        return proof.result(5)


@pytest.mark.parametrize("names", [["q", "k", "norm"], ["norm", "k", "q"]])
def test_each_rank_s_part_is_expected_of_it(names: list[str]) -> None:
    found = expected([plan(0), plan(1)], "sha256", names)
    for rank in (0, 1):
        assert found.ranks[rank] == {name: prove_tensor(tensor) for name, tensor in held(rank).items()}


def test_a_keyed_proof_is_of_the_same_bytes_and_each_has_its_own_key() -> None:
    from functional.engine.proof import prove_all

    first, second = (expected([plan(0), plan(1)], "nh", list(NAMED)) for _ in range(2))
    assert first.key != second.key
    for rank in (0, 1):
        assert first.ranks[rank] == prove_all(((name, [t]) for name, t in held(rank).items()), first.key)


def test_a_cast_a_transpose_and_interleaved_copies_are_carried_out() -> None:
    targets = [target("cast", 4, 6, dtype=torch.float32), target("turned", 6, 4), target("woven", 4, 6)]
    whole = View(0, (4, 6), (6, 1))
    copies = [
        Copy("q", whole, "cast", whole),
        Copy("q", whole, "turned", View(0, (4, 6), (1, 4))),
        Copy("q", View(0, (2, 6), (6, 1)), "woven", View(0, (2, 6), (12, 1))),
        Copy("k", View(0, (2, 6), (6, 1)), "woven", View(6, (2, 6), (12, 1))),
    ]
    woven = torch.stack([NAMED["q"][0], NAMED["k"][0], NAMED["q"][1], NAMED["k"][1]])
    (found,) = expected([make_plan(SLOTS, targets, copies)], "sha256", ["q", "k"]).ranks
    wanted = {"cast": NAMED["q"].float(), "turned": NAMED["q"].t(), "woven": woven}
    assert found == {name: prove_tensor(tensor) for name, tensor in wanted.items()}


@pytest.mark.parametrize("kind", ["sha256", "nh"])
def test_missing_and_repeated_tensors_are_refused(kind: ProofKind) -> None:
    with pytest.raises(ValueError, match=r"norm was not given, of 1 tensor"):
        expected([plan(0)], kind, ["q", "k"])
    with pytest.raises(ValueError, match="q was given twice"):
        expected([plan(0)], kind, ["q", "q"])


def test_every_element_must_be_taken_by_a_rank() -> None:
    check_coverage([plan(0), plan(1)], SLOTS)
    with pytest.raises(PlanRefused, match="q: no rank of the engine takes 12 of its 24 elements"):
        check_coverage([plan(0)], SLOTS)
    head = Slot("lm_head.weight", BF16, (4, 6))
    with pytest.raises(PlanRefused, match=r"lm_head\.weight: no rank of the engine takes 24 of its 24"):
        check_coverage([plan(0), plan(1)], [*SLOTS, head])
    check_coverage([plan(0), plan(1)], [*SLOTS, head], frozenset({"lm_head.weight"}))
