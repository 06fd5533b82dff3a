"""Updates by plan over a group: both sides agree once on what goes where; an update is chunks of bytes, then a proof.

Agreement, when the group has formed: rank 0 puts what it has, each engine rank its plan, or why it has none; rank 0
makes the schedule and puts each rank's intake. An update has one check (that all mean the same schedule), the chunks,
and the proof: each rank says that all is there, rank 0 puts the key, each rank puts its digests, rank 0 compares and
puts the verdict. Group ranks are used throughout: 0 sends.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from functional.engine import nh
from functional.engine.device_rates import copied_per_s, free_bytes
from functional.engine.group import Group, Pending
from functional.engine.plan import Plan, PlanRefused
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
    """What rank 0 knows afterwards. plans: by group rank."""

    schedule: Schedule
    plans: Mapping[int, Plan]


@dataclass(frozen=True)
class Verdict:
    """How an update, or a proof alone, ended. problems: a line each, none if all ranks hold what was sent; proved: the
    parameters of all ranks. Seconds: until all had arrived; of the proof."""

    problems: list[str]
    proved: int
    transfer_s: float
    prove_s: float


def lead_agreement(group: Group, slots: Sequence[Slot], timeout_s: float, chunk_bytes: int | None = None) -> Agreement:
    """Rank 0's part. chunk_bytes: the size of a chunk; what is best between these devices, if not given.

    Raises PlanRefused, on every rank, with the tensors of all ranks that have no plan, and those of which the engine
    takes a part only; the group remains good, for the checkpoint protocol. Raises as `Group.transfer` does.
    """
    with group.agreement(timeout_s, _AGREEING):
        for rank in group.receivers:
            group.put(_slots_key(group, rank), json.dumps(Manifest(tuple(slots), packed=True).info()))
        problems: dict[str, str] = {}
        plans: dict[int, Plan] = {}
        free = free_bytes(group.device)
        for rank in group.receivers:
            answer = json.loads(group.take(_plan_key(group, rank)))
            free = min(free, answer["free"])
            if "refused" in answer:
                problems |= {name: f"{why} (rank {rank})" for name, why in answer["refused"].items()}
            else:
                plans[rank] = Plan.from_json(answer["plan"])
        schedule = None
        start_bytes = _time_start(group) * copied_per_s(group.device)
        if not problems:
            best = best_chunk_bytes(sum(slot.nbytes for slot in slots), start_bytes, free)
            schedule = make_schedule(plans, slots, chunk_bytes or best)
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
    return Agreement(schedule, plans)


def join_agreement(
    group: Group, learn: Callable[[Manifest], Plan | PlanRefused], timeout_s: float
) -> tuple[Plan, Intake, str]:
    """An engine rank's part: its plan, which `learn` makes of what the sender has; what it will receive; and the
    schedule's digest. Raises as `lead_agreement` does."""
    with group.agreement(timeout_s, _AGREEING):
        plan = learn(Manifest.from_info(**json.loads(group.take(_slots_key(group, group.rank)))))
        mine = {"refused": plan.problems} if isinstance(plan, PlanRefused) else {"plan": plan.to_json()}
        group.put(_plan_key(group, group.rank), json.dumps({**mine, "free": free_bytes(group.device)}))
        _time_start(group)
        answer = json.loads(group.take(_intake_key(group, group.rank)))
        group.agreements += 1
        if answer["intake"] is not None:
            group.split([tuple(ranks) for ranks in answer["sets"]])
    if isinstance(plan, PlanRefused) or answer["intake"] is None:
        raise PlanRefused(answer["refused"])
    return plan, Intake.from_json(answer["intake"]), answer["digest"]


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

    with group.transfer(timeout_s, agreement.schedule.digest):
        flying: list[Pending] = []
        for _, chunk, buffer in packer.packed(on_wire(watched()), before=lambda: _follow(group, flying, BUFFERS - 1)):
            flying.append(group.start(buffer, chunk.ranks))
        proof = SenderProof(agreement.plans, kept, group.device)  # while the last chunks are on the wire
        for pending in flying:
            group.wait(pending)
        return _lead_proof(group, agreement, proof, kind, began)


def prove_sender(
    group: Group, agreement: Agreement, named: Iterable[tuple[str, Tensor]], kind: ProofKind, timeout_s: float
) -> Verdict:
    """Have every rank prove that it holds these tensors, sent before or not. Otherwise as `send_planned`."""
    began = time.monotonic()
    proof = SenderProof(agreement.plans, dict(named), group.device)
    with group.transfer(timeout_s, f"proof of {agreement.schedule.digest}"):
        return _lead_proof(group, agreement, proof, kind, began)


def receive_planned(
    group: Group,
    intake: Intake,
    digest: str,
    spreader: Spreader,
    proof: RankProof,
    timeout_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[str]:
    """Receive an update into the parameters, and prove it; the next chunk flies while one is spread.

    Returns all ranks' problems. `meanwhile` runs while the wire is busy, where that takes no part of the host, and may
    raise. Raises as `wire.receive` does.
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
            group.follow(flying[index])
            spreader.spread(index)
        proof.begin()
        meanwhile()
        for pending in flying[-BUFFERS:]:
            group.wait(pending)
        if group.device.type == "cuda":
            torch.cuda.current_stream(group.device).synchronize()  # what was spread last
        return _join_proof(group, proof)


def prove_rank(group: Group, digest: str, proof: RankProof, timeout_s: float) -> list[str]:
    """An engine rank's part of `prove_sender`."""
    with group.transfer(timeout_s, f"proof of {digest}"):
        return _join_proof(group, proof)


def _lead_proof(group: Group, agreement: Agreement, proof: SenderProof, kind: ProofKind, began: float) -> Verdict:
    for rank in group.receivers:
        group.take(_key("landed", group, rank))
    landed = time.monotonic()
    key = nh.Key.draw() if kind == "nh" else None
    group.put(_key("key", group), "" if key is None else key.hex())
    expected = proof.digests(key)
    problems: list[str] = []
    for rank, plan in agreement.plans.items():
        seen = json.loads(group.take(_key("digests", group, rank)))
        found = [*differing(plan, expected[rank], seen["digests"]), *seen["problems"]]
        problems += [f"rank {rank}: {problem}" for problem in found] if len(agreement.plans) > 1 else found
    group.put(_key("verdict", group), json.dumps(problems))
    proved = sum(len(plan.targets) for plan in agreement.plans.values())
    return Verdict(problems, proved, landed - began, time.monotonic() - landed)


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


def _plan_key(group: Group, rank: int) -> str:
    return f"plan/{group.agreements}/{rank}"


def _intake_key(group: Group, rank: int) -> str:
    return f"intake/{group.agreements}/{rank}"


def _key(what: str, group: Group, rank: int | None = None) -> str:
    """Of what is put in the transfer under way."""
    return f"{what}/{group.transfers}" + ("" if rank is None else f"/{rank}")
