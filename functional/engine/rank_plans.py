"""How the sender learns what each rank of an engine holds of a checkpoint's tensors: the ranks tell it, over the group.

All engines of a group are alike, so the first engine's ranks tell their plans, and the ranks of the others the digests
of theirs. Group ranks are used throughout: 0 hears, the engines follow in order.
"""

import json
from collections.abc import Callable, Sequence

from functional.engine.group import Group
from functional.engine.plan import Plan, PlanRefused, dtype_name, parse_dtype
from functional.engine.wire import Slot

_TELLING = "telling plans"


def tell_plan(group: Group, trace: Callable[[Sequence[Slot]], Plan], ranks_per_engine: int, timeout_s: float) -> None:
    """An engine rank's part. trace: makes its plan for tensors of these names and shapes, or raises PlanRefused, which
    is told too. Raises as `Group.transfer` does."""
    with group.agreement(timeout_s, _TELLING):
        slots = [
            Slot(name, parse_dtype(dtype), tuple(shape)) for name, dtype, shape in json.loads(group.get(_key(group, 0)))
        ]
        told: dict[str, object] = {"ranks": ranks_per_engine}
        try:
            plan = trace(slots)
            told |= {"digest": plan.digest} if group.rank > ranks_per_engine else {"plan": plan.to_json()}
        except PlanRefused as refused:
            told["refused"] = refused.problems
        group.put(_key(group, group.rank), json.dumps(told))
        group.told += 1


def hear_plans(group: Group, slots: Sequence[Slot], timeout_s: float) -> list[Plan]:
    """The sender's part: the plans of an engine's ranks, in order, for tensors of these names and shapes.

    Raises PlanRefused, by tensor, where a rank has none, or where engines differ; as `Group.transfer` does otherwise.
    """
    with group.agreement(timeout_s, _TELLING):
        asked = [[slot.name, dtype_name(slot.dtype), list(slot.shape)] for slot in slots]
        group.put(_key(group, 0), json.dumps(asked))
        told = {rank: json.loads(group.get(_key(group, rank))) for rank in group.receivers}
        group.told += 1
    problems: dict[str, str] = {}
    plans: list[Plan] = []
    size = told[1]["ranks"]
    for rank, answer in told.items():
        engine, own = divmod(rank - 1, size)
        where = f"rank {own} of engine {engine}"
        for name, why in answer.get("refused", {}).items():
            problems.setdefault(name, f"{why} ({where})")
        if "plan" in answer:
            plans.append(Plan.from_json(answer["plan"]))
        elif "digest" in answer and not problems and answer["digest"] != plans[own].digest:
            problems["the engine's parameters"] = f"{where} holds other parts of the tensors than that of engine 0"
    if problems:
        raise PlanRefused(problems)
    return plans


def _key(group: Group, rank: int) -> str:
    """Under which a rank tells something; the sender, for which tensors."""
    return f"told/{group.told}/{rank}"
