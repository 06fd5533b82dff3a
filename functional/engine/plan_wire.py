"""Updates by plan over a group: both sides agree once on what goes where; an update is chunks of bytes, then a proof.

Agreement, when the group has formed: rank 0 puts what it has, each engine rank its plan and what stands against using
it; rank 0 makes the schedule and puts each rank's intake. An update has one check, that all mean the same schedule;
the chunks; and the proof: each rank says that all is there, rank 0 puts the key, each rank puts its digests, rank 0
compares and puts the verdict. Group ranks are used throughout: 0 sends.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional.engine import nh
from functional.engine.device_rates import copied_per_s, free_bytes
from functional.engine.group import Group, Pending
from functional.engine.plan import Learned, Plan, PlanRefused
from functional.engine.plan_copy import BUFFERS, Packer, Spreader
from functional.engine.plan_proof import RankProof, SenderProof, differing
from functional.engine.plan_schedule import Intake, Schedule, best_chunk_bytes, make_schedule
from functional.engine.transports import ProofKind
from functional.engine.wire import Manifest, Slot

_AGREEING = "agreeing on a plan"
_TIMED = 8
_TINY_BYTES = 16


@dataclass(frozen=True)
class Agreement:
    """What rank 0 knows afterwards. plans: by group rank; problems: tensor → why updates are not by plan, and schedule:
    None then."""

    plans: Mapping[int, Plan]
    ranks_per_engine: int
    problems: Mapping[str, str]
    schedule: Schedule | None

    @property
    def of_engine(self) -> list[Plan]:
        """Plans of an engine's ranks, in order: all engines are alike."""
        return [self.plans[rank] for rank in range(1, 1 + self.ranks_per_engine)]

    @property
    def parts(self) -> tuple[Schedule, Mapping[int, Plan]]:
        """For updates by plan. Raises PlanRefused where there are none."""
        if self.schedule is None:
            raise PlanRefused(self.problems)
        return self.schedule, self.plans


@dataclass(frozen=True)
class Agreed:
    """What an engine rank knows that updates by plan. digest: the schedule's."""

    plan: Plan
    intake: Intake
    digest: str


@dataclass(frozen=True)
class Verdict:
    """How an update, or a proof alone, ended. problems: a line each, none if all ranks hold what was sent; proved,
    proved_bytes: parameters of an engine, and bytes of each of its ranks. Seconds: until all had arrived; of the proof.
    """

    problems: list[str]
    proved: int
    proved_bytes: list[int]
    transfer_s: float
    prove_s: float


def lead_agreement(group: Group, slots: Sequence[Slot], timeout_s: float, chunk_bytes: int | None = None) -> Agreement:
    """Rank 0's part. chunk_bytes: the size of a chunk; what is best between these devices, if not given.

    Raises PlanRefused, on every rank, with the tensors of which a rank cannot say what it does with them, or if engines
    differ; the group remains good. Raises as `Group.transfer` does otherwise.
    """
    with group.agreement(timeout_s, _AGREEING):
        for rank in group.receivers:
            group.put(_slots_key(group, rank), json.dumps(Manifest(tuple(slots), packed=True).info()))
        answers = {rank: json.loads(group.take(_answer_key(group, rank))) for rank in group.receivers}
        size = answers[1]["ranks"]
        plans = {rank: Plan.from_json(one["plan"]) for rank, one in answers.items() if one["plan"] is not None}
        refused = _refused(answers, plans, size)
        problems = _named({rank: one["problems"] for rank, one in answers.items()}, size)
        start_bytes = _time_start(group) * copied_per_s(group.device)
        schedule = None
        if not refused and not problems:
            free = min(free_bytes(group.device), *(one["free"] for one in answers.values()))
            best = best_chunk_bytes(sum(slot.nbytes for slot in slots), start_bytes, free)
            schedule = make_schedule(plans, slots, chunk_bytes or best)
        sets = sorted({chunk.ranks for chunk in schedule.chunks}) if schedule else []
        for rank in group.receivers:
            told = {"refused": refused, "sets": sets}
            if schedule is not None:
                told |= {"intake": schedule.intakes[rank].to_json(), "digest": schedule.digest}
            group.put(_intake_key(group, rank), json.dumps(told))
        group.agreements += 1
        group.split(sets)
    if refused:
        raise PlanRefused(refused)
    return Agreement(plans, size, problems, schedule)


def join_agreement(
    group: Group, learn: Callable[[Manifest], Learned], ranks_per_engine: int, timeout_s: float
) -> Agreed | None:
    """An engine rank's part. learn: what it can say of what the sender has. None where updates are not by plan.

    Raises as `lead_agreement` does.
    """
    with group.agreement(timeout_s, _AGREEING):
        learned = learn(Manifest.from_info(**json.loads(group.take(_slots_key(group, group.rank)))))
        answer = {
            "plan": learned.plan and learned.plan.to_json(),
            "problems": dict(learned.problems),
            "ranks": ranks_per_engine,
            "free": free_bytes(group.device),
        }
        group.put(_answer_key(group, group.rank), json.dumps(answer))
        _time_start(group)
        told = json.loads(group.take(_intake_key(group, group.rank)))
        group.agreements += 1
        group.split([tuple(ranks) for ranks in told["sets"]])
    if told["refused"]:
        raise PlanRefused(told["refused"])
    if learned.plan is None or "intake" not in told:
        return None
    return Agreed(learned.plan, Intake.from_json(told["intake"]), told["digest"])


def _refused(answers: Mapping[int, Any], plans: Mapping[int, Plan], size: int) -> dict[str, str]:
    """What stands against saying what each rank holds."""
    refused = _named({rank: one["problems"] for rank, one in answers.items() if rank not in plans}, size)
    for rank, plan in plans.items():
        first = plans.get(1 + (rank - 1) % size)
        if first is not None and first.digest != plan.digest:
            where = _where(rank, size)
            refused["the engine's parameters"] = f"{where} holds other parts of the tensors than that of engine 0"
    return refused


def _named(problems: Mapping[int, Mapping[str, str]], size: int) -> dict[str, str]:
    """Tensor → why, and on which rank first."""
    found: dict[str, str] = {}
    for rank, own in problems.items():
        for name, why in own.items():
            found.setdefault(name, f"{why} ({_where(rank, size)})")
    return found


def _where(rank: int, size: int) -> str:
    engine, own = divmod(rank - 1, size)
    return f"rank {own} of engine {engine}"


def send_planned(
    group: Group,
    agreement: Agreement,
    packer: Packer,
    named: Iterable[tuple[str, Tensor]],
    kind: ProofKind,
    timeout_s: float,
    on_wire: Callable[[Iterable[tuple[str, Tensor]]], Iterable[tuple[str, Tensor]]] = lambda named: named,
) -> Verdict:
    """Send an update from rank 0, and have every rank prove it. One chunk is packed while others are on the wire.

    A tensor is kept until the proof has ended, and must not change. on_wire: what is sent of them; a fault test tampers
    there. Raises as `wire.send` does; a proof that fails is no error, and the group remains good.
    """
    began = time.monotonic()
    kept: dict[str, Tensor] = {}

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            kept[name] = tensor
            yield name, tensor

    schedule, plans = agreement.parts
    with group.transfer(timeout_s, schedule.digest):
        flying: list[Pending] = []
        for _, chunk, buffer in packer.packed(on_wire(watched()), before=lambda: _follow(group, flying, BUFFERS - 1)):
            flying.append(group.start(buffer, chunk.ranks))
        proof = SenderProof(plans, kept, group.device)  # while the last chunks are on the wire
        for pending in flying:
            group.wait(pending)
        return _lead_proof(group, agreement, proof, kind, began)


def prove_sender(
    group: Group, agreement: Agreement, named: Iterable[tuple[str, Tensor]], kind: ProofKind, timeout_s: float
) -> Verdict:
    """Have every rank prove that it holds these tensors, sent before or not. Otherwise as `send_planned`."""
    began = time.monotonic()
    schedule, plans = agreement.parts
    proof = SenderProof(plans, dict(named), group.device)
    with group.transfer(timeout_s, f"proof of {schedule.digest}"):
        return _lead_proof(group, agreement, proof, kind, began)


def receive_planned(
    group: Group,
    agreed: Agreed,
    spreader: Spreader,
    proof: RankProof,
    timeout_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[str]:
    """Receive an update into the parameters, and prove it; the next chunk flies while one is spread.

    Returns all ranks' problems. `meanwhile` runs while the wire is busy, where that takes no part of the host, and may
    raise. Raises as `wire.receive` does.
    """
    arrivals = agreed.intake.arrivals
    with group.transfer(timeout_s, agreed.digest):
        flying: list[Pending] = []
        count = len(arrivals)
        for index in range(min(BUFFERS - 1, count)):
            flying.append(group.start(spreader.buffer(index), arrivals[index].ranks))
        for index in range(count):
            following = index + BUFFERS - 1
            if following < count:
                flying.append(group.start(spreader.buffer(following), arrivals[following].ranks))
            group.follow(flying[index])
            spreader.spread(index)
        proof.begin()
        meanwhile()
        for pending in flying[-BUFFERS:]:
            group.wait(pending)
        if group.device.type == "cuda":
            torch.cuda.current_stream(group.device).synchronize()  # what was spread last
        return _join_proof(group, proof)


def prove_rank(group: Group, agreed: Agreed, proof: RankProof, timeout_s: float) -> list[str]:
    """An engine rank's part of `prove_sender`."""
    with group.transfer(timeout_s, f"proof of {agreed.digest}"):
        return _join_proof(group, proof)


def _lead_proof(group: Group, agreement: Agreement, proof: SenderProof, kind: ProofKind, began: float) -> Verdict:
    for rank in group.receivers:
        group.take(_key("landed", group, rank))
    landed = time.monotonic()
    key = nh.Key.draw() if kind == "nh" else None
    group.put(_key("key", group), "" if key is None else key.hex())
    expected = proof.digests(key)
    problems: list[str] = []
    size = agreement.ranks_per_engine
    for rank, plan in agreement.plans.items():
        seen = json.loads(group.take(_key("digests", group, rank)))
        found = [*differing(plan, expected[rank], seen["digests"]), *seen["problems"]]
        problems += [f"{_where(rank, size)}: {one}" for one in found] if len(agreement.plans) > 1 else found
    group.put(_key("verdict", group), json.dumps(problems))
    held = [[target.nbytes for target in plan.targets] for plan in agreement.of_engine]
    return Verdict(problems, sum(map(len, held)), list(map(sum, held)), landed - began, time.monotonic() - landed)


def _join_proof(group: Group, proof: RankProof) -> list[str]:
    group.put(_key("landed", group, group.rank), "")
    text = group.get(_key("key", group))
    digests = proof.digests(nh.Key.parse(text) if text else None)
    answer = {"digests": digests, "problems": proof.problems()}
    group.put(_key("digests", group, group.rank), json.dumps(answer))
    problems: list[str] = json.loads(group.get(_key("verdict", group)))
    return problems


def _follow(group: Group, flying: list[Pending], left: int) -> None:
    """What is packed next comes after all but the last `left` of the chunks begun."""
    if len(flying) > left:
        group.follow(flying[len(flying) - left - 1])


def _time_start(group: Group) -> float:
    """Seconds that a broadcast of next to nothing takes, copies on either side included. All ranks call it."""
    buffer = torch.zeros(_TINY_BYTES, dtype=torch.uint8, device=group.device)
    began = time.monotonic()
    for index in range(_TIMED + 1):
        torch._foreach_copy_([buffer[:8]], [buffer[8:]])
        group.wait(group.start(buffer))
        if index == 0:  # the first waits for whoever comes last
            began = time.monotonic()
    return (time.monotonic() - began) / _TIMED


def _slots_key(group: Group, rank: int) -> str:
    return f"slots/{group.agreements}/{rank}"


def _answer_key(group: Group, rank: int) -> str:
    return f"answer/{group.agreements}/{rank}"


def _intake_key(group: Group, rank: int) -> str:
    return f"intake/{group.agreements}/{rank}"


def _key(what: str, group: Group, rank: int | None = None) -> str:
    """Of what is put in the transfer under way."""
    return f"{what}/{group.transfers}" + ("" if rank is None else f"/{rank}")
