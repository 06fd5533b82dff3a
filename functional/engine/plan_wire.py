"""An update by plan over a group: both sides agree once on what goes where, then every update is chunks of bytes alone.

Agreement, when the group has formed: each engine rank puts its plan, or why it has none; rank 0 makes the schedule and
puts each rank's intake. An update then has one check (that all mean the same schedule) and the chunks. Group ranks are
used throughout: 0 sends.
"""

import json
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from functional.engine.group import Group, Pending
from functional.engine.plan import Plan, PlanRefused
from functional.engine.plan_copy import BUFFERS, Packer, Spreader
from functional.engine.plan_schedule import Intake, Schedule, make_schedule
from functional.engine.wire import Slot

_AGREEING = "agreeing on a plan"


def lead_agreement(
    group: Group, slots: Sequence[Slot], chunk_bytes: Callable[[int], int], timeout_s: float
) -> Schedule:
    """Rank 0's part. chunk_bytes: of the bytes that all of an update make up, the size of a chunk.

    Raises PlanRefused, on every rank, with the tensors of all ranks that have no plan, and those of which the engine
    takes a part only; the group remains good, for the checkpoint protocol. Raises as `Group.transfer` does.
    """
    with group.agreement(timeout_s, _AGREEING):
        problems: dict[str, str] = {}
        plans: dict[int, Plan] = {}
        for rank in group.receivers:
            answer = json.loads(group.get(_plan_key(group, rank)))
            if "refused" in answer:
                problems |= {name: f"{why} (rank {rank})" for name, why in answer["refused"].items()}
            else:
                plans[rank] = Plan.from_json(answer["plan"])
        schedule = None
        if not problems:
            schedule = make_schedule(plans, slots, chunk_bytes(sum(slot.nbytes for slot in slots)))
            numel = {slot.name: slot.nbytes // slot.dtype.itemsize for slot in slots}
            problems = {
                name: f"the engine takes {numel[name] - count} of its {numel[name]} elements"
                for name, count in schedule.untaken.items()
                if count < numel[name]
            }
        sets = sorted({chunk.ranks for chunk in schedule.chunks}) if schedule else []
        for rank in group.receivers:
            intake = schedule.intakes[rank].to_json() if schedule and not problems else None
            group.put(
                _intake_key(group, rank),
                json.dumps(
                    {"refused": problems, "intake": intake, "sets": sets, "digest": schedule and schedule.digest}
                ),
            )
        group.agreements += 1
        if not problems:
            group.split(sets)
    if problems or schedule is None:
        raise PlanRefused(problems)
    return schedule


def join_agreement(group: Group, plan: Plan | PlanRefused, timeout_s: float) -> tuple[Intake, str]:
    """An engine rank's part: what it will receive, and the schedule's digest. Raises as `lead_agreement` does."""
    with group.agreement(timeout_s, _AGREEING):
        mine = {"refused": plan.problems} if isinstance(plan, PlanRefused) else {"plan": plan.to_json()}
        group.put(_plan_key(group, group.rank), json.dumps(mine))
        answer = json.loads(group.get(_intake_key(group, group.rank)))
        group.agreements += 1
        if answer["intake"] is not None:
            group.split([tuple(ranks) for ranks in answer["sets"]])
    if answer["intake"] is None:
        raise PlanRefused(answer["refused"])
    return Intake.from_json(answer["intake"]), answer["digest"]


def send_planned(
    group: Group, schedule: Schedule, packer: Packer, named: Iterable[tuple[str, Tensor]], timeout_s: float
) -> None:
    """Send an update from rank 0; returns when every byte has left. One chunk is packed while others are on the wire.

    Raises as `wire.send` does.
    """
    with group.transfer(timeout_s, schedule.digest):
        flying: list[Pending] = []
        for _, chunk, buffer in packer.packed(named, before=lambda: _land(group, flying, BUFFERS - 1)):
            flying.append(group.start(buffer, chunk.ranks))
        _land(group, flying, 0)


def receive_planned(group: Group, intake: Intake, digest: str, spreader: Spreader, timeout_s: float) -> None:
    """Receive an update into the parameters; the next chunk flies while one is spread.

    On a GPU the last copies may still run on the current stream when this returns. Raises as `wire.receive` does.
    """
    with group.transfer(timeout_s, digest):
        flying: list[Pending] = []
        count = len(intake.arrivals)
        for index in range(min(BUFFERS - 1, count)):
            flying.append(group.start(spreader.buffer(index), intake.arrivals[index].ranks))
        for index in range(count):
            following = index + BUFFERS - 1
            if following < count:
                flying.append(group.start(spreader.buffer(following), intake.arrivals[following].ranks))
            group.wait(flying.pop(0))
            spreader.spread(index)


def _land(group: Group, flying: list[Pending], left: int) -> None:
    """Wait until no more than `left` of the chunks are on the wire."""
    while len(flying) > left:
        group.wait(flying.pop(0))


def _plan_key(group: Group, rank: int) -> str:
    return f"plan/{group.agreements}/{rank}"


def _intake_key(group: Group, rank: int) -> str:
    return f"intake/{group.agreements}/{rank}"
