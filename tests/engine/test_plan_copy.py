"""What the sender packs arrives, on every rank, where its plan says; each slice is sent once, in chunks of any size."""

import gc
import random
import weakref

import pytest
import torch
from test_plan import random_view
from torch import Tensor

from functional.engine.errors import TransferError
from functional.engine.plan import Copy, Plan, Target, View, make_plan
from functional.engine.plan_copy import Packer, Spreader, make_buffers
from functional.engine.plan_schedule import Intake, Schedule, best_chunk_bytes, make_schedule
from functional.engine.wire import Slot

DTYPES = [torch.bfloat16, torch.float32, torch.uint8]


def random_plans(dice: random.Random) -> tuple[list[Slot], dict[int, Plan], list[tuple[str, Tensor]]]:
    """Plans of a few ranks over the same tensors: strided slices, some alike on several ranks, some cast, some shared
    by two targets."""
    slots, named = [], []
    for index in range(dice.randint(1, 5)):
        shape = tuple(dice.randint(1, 6) for _ in range(dice.randint(0, 3)))
        dtype = dice.choice(DTYPES)
        slots.append(Slot(f"s{index}", dtype, shape))
        named.append((f"s{index}", torch.randint(0, 200, shape).to(dtype)))
    plans = {}
    shared: list[tuple[Slot, View]] = []
    for rank in range(dice.randint(1, 3)):
        targets, copies = [], []
        for number in range(dice.randint(1, 5)):
            if shared and dice.random() < 0.6:
                slot, take = dice.choice(shared)
            else:
                slot = dice.choice(slots)
                numel = max(1, slot.nbytes // slot.dtype.itemsize)
                view = random_view(dice, numel, [dice.randint(1, 3) for _ in range(dice.randint(0, 3))])
                if view is None:
                    continue
                take = view
                shared.append((slot, take))
            put = random_view(dice, 400, list(take.shape))
            assert put is not None
            dtype = torch.float32 if dice.random() < 0.2 else slot.dtype
            targets.append(Target(f"t{number}", dtype, (400,), (1,)))
            copies.append(Copy(slot.name, take, f"t{number}", put))
        plans[rank] = make_plan(slots, targets, copies)
    return slots, plans, named


def wanted(plan: Plan, named: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """One copy after the other, as the plan says."""
    sources = dict(named)
    tensors = {target.name: torch.zeros(target.shape, dtype=target.dtype) for target in plan.targets}
    for copy in plan.copies:
        copy.put.on(tensors[copy.target]).copy_(copy.take.on(sources[copy.source]))
    return tensors


def deliver(schedule: Schedule, plans: dict[int, Plan], packer: Packer, named: list[tuple[str, Tensor]]) -> dict[
    int, dict[str, Tensor]
]:  # fmt: skip
    """Send an update through buffers of both sides."""
    tensors = {
        rank: {target.name: torch.zeros(target.shape, dtype=target.dtype) for target in plan.targets}
        for rank, plan in plans.items()
    }
    device = torch.device("cpu")
    intakes = {rank: Intake.from_json(intake.to_json()) for rank, intake in schedule.intakes.items()}
    spreaders = {
        rank: Spreader(intake, tensors[rank], make_buffers(schedule.largest, device))
        for rank, intake in intakes.items()
    }
    seen = dict.fromkeys(plans, 0)
    for _, chunk, buffer in packer.packed(iter(named)):
        for rank in chunk.ranks:
            spreaders[rank].buffer(seen[rank]).copy_(buffer)
            spreaders[rank].spread(seen[rank])
            seen[rank] += 1
    assert seen == {rank: len(intake.arrivals) for rank, intake in intakes.items()}
    return tensors


def test_every_rank_gets_what_its_plan_says() -> None:
    for seed in range(300):
        dice = random.Random(seed)
        torch.manual_seed(seed)
        slots, plans, named = random_plans(dice)
        chunk_bytes = dice.choice([1, 16, 40, 200, 10_000])
        schedule = make_schedule(plans, slots, chunk_bytes)
        packer = Packer(schedule, make_buffers(schedule.largest, torch.device("cpu")), resident=dice.random() < 0.5)
        for _ in range(2):
            named = [(name, torch.randint(0, 200, tensor.shape).to(tensor.dtype)) for name, tensor in named]
            got = deliver(schedule, plans, packer, named)
            for rank, plan in plans.items():
                for name, tensor in wanted(plan, named).items():
                    assert torch.equal(got[rank][name], tensor)


def test_a_slice_that_several_ranks_take_is_sent_once() -> None:
    for seed in range(100):
        slots, plans, _ = random_plans(random.Random(seed))
        schedule = make_schedule(plans, slots, 1 << 20)
        size = {slot.name: slot.dtype.itemsize for slot in slots}
        slices = {(copy.source, copy.take.merged()) for plan in plans.values() for copy in plan.copies}
        sent = [(piece.source, piece.take) for chunk in schedule.chunks for piece in chunk.pieces]
        assert sorted(map(str, sent)) == sorted(map(str, slices))
        assert all(piece.at % 16 == 0 for chunk in schedule.chunks for piece in chunk.pieces)
        useful = sum(take.numel * size[name] for name, take in sent)
        assert useful <= schedule.nbytes < useful + 16 * max(len(sent), 1)
        for slot in slots:
            taken = {
                int(i) for name, take in slices if name == slot.name for i in take.on(torch.arange(1000)).reshape(-1)
            }
            assert schedule.untaken.get(slot.name, 0) == slot.nbytes // slot.dtype.itemsize - len(taken)


def whole(slots: list[Slot]) -> Plan:
    """Each tensor has a parameter of its own."""
    targets = [Target(s.name, s.dtype, s.shape, torch.empty(s.shape).stride()) for s in slots]
    copies = [
        Copy(s.name, View(0, s.shape, target.strides), s.name, View(0, s.shape, target.strides))
        for s, target in zip(slots, targets, strict=True)
    ]
    return make_plan(slots, targets, copies)


def test_chunks_are_full_and_no_larger_than_asked() -> None:
    slots = [Slot(f"s{number}", torch.bfloat16, (number + 1, 32)) for number in range(20)]
    schedule = make_schedule({0: whole(slots)}, slots, 1000)
    assert all(chunk.nbytes <= 1000 for chunk in schedule.chunks)
    assert all(chunk.nbytes > 1000 - 32 for chunk in schedule.chunks[:-1])


def test_what_every_rank_takes_and_what_one_takes_go_apart() -> None:
    slots = [Slot("norm", torch.bfloat16, (8,)), Slot("matrix", torch.bfloat16, (4, 8))]
    plans = {}
    for rank in (0, 1):
        half = Copy("matrix", View(16 * rank, (16,), (1,)), "matrix", View(0, (16,), (1,)))
        norm = Copy("norm", View(0, (8,), (1,)), "norm", View(0, (8,), (1,)))
        targets = [Target("matrix", torch.bfloat16, (2, 8), (8, 1)), Target("norm", torch.bfloat16, (8,), (1,))]
        plans[rank] = make_plan(slots, targets, [half, norm])
    schedule = make_schedule(plans, slots, 1 << 20)
    assert {chunk.ranks: chunk.nbytes for chunk in schedule.chunks} == {(0, 1): 16, (0,): 32, (1,): 32}
    assert schedule.intakes[0].nbytes == 48
    assert schedule.intakes[0].digest == Intake.from_json(schedule.intakes[0].to_json()).digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: named[:-1], "ended before s1"),
        (lambda named: [*named, ("more", torch.zeros(1))], "more tensors given"),
        (lambda named: [named[1], named[0]], r"sending s1 .* has s0"),
        (lambda named: [(named[0][0], named[0][1].float()), named[1]], r"sending s0 torch.float32"),
    ],
)
def test_other_tensors_than_the_schedules_are_refused(change, message: str) -> None:
    slots = [Slot("s0", torch.bfloat16, (4,)), Slot("s1", torch.bfloat16, (6,))]
    schedule = make_schedule({0: whole(slots)}, slots, 8)
    packer = Packer(schedule, make_buffers(schedule.largest, torch.device("cpu")))
    named = [(slot.name, torch.zeros(slot.shape, dtype=slot.dtype)) for slot in slots]
    with pytest.raises(TransferError, match=message):
        list(packer.packed(change(named)))


def test_a_gathered_tensor_is_let_go_once_it_is_packed() -> None:
    slots = [Slot(f"s{number}", torch.bfloat16, (64,)) for number in range(6)]
    schedule = make_schedule({0: whole(slots)}, slots, 128)
    packer = Packer(schedule, make_buffers(schedule.largest, torch.device("cpu")))
    alive: list[weakref.ref[Tensor]] = []

    def gathered():
        for slot in slots:
            tensor = torch.ones(slot.shape, dtype=slot.dtype)
            alive.append(weakref.ref(tensor.untyped_storage()))
            yield slot.name, tensor

    for _ in packer.packed(gathered()):
        gc.collect()
        assert sum(reference() is not None for reference in alive) <= 2


def test_a_plan_of_other_tensors_is_refused() -> None:
    slots = [Slot("s0", torch.bfloat16, (4,))]
    with pytest.raises(ValueError, match="the plan of engine rank 3 takes"):
        make_schedule({3: whole(slots)}, [Slot("s0", torch.float32, (4,))], 8)


def test_best_chunk_bytes_is_where_the_cost_is_least() -> None:
    total, start = 16_400_000_000, 150e6
    best = best_chunk_bytes(total, start, 1 << 40)

    def cost(size: float) -> float:
        return 2 * size + total / size * start

    assert cost(best) <= min(cost(best * 0.8), cost(best * 1.25))
    assert best_chunk_bytes(total, start, 8_000_000) == 1_000_000
    assert best_chunk_bytes(100, start, 1 << 40) <= 112
