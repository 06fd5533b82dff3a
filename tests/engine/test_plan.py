"""Plans as data: merged without a change of meaning, told apart from overlapping ones, the same after a round trip."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from functional.engine.plan import Copy, Plan, PlanRefused, Target, View, join_all, make_plan, normal, overlap
from functional.engine.wire import Slot

CASES = range(300)


def random_view(dice: random.Random, numel: int, shape: list[int]) -> View | None:
    """A view of that shape whose elements lie apart, in a tensor of `numel` elements."""
    strides, step = [], dice.choice([1, 1, 2, 3])
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size * dice.choice([1, 1, 2])
    order = list(range(len(shape)))
    dice.shuffle(order)  # which dimension lies innermost
    placed = [0] * len(shape)
    step = strides[-1] if shape else 1
    for index in order:
        placed[index] = step
        step *= shape[index] * dice.choice([1, 1, 2])
    last = sum((size - 1) * stride for size, stride in zip(shape, placed, strict=True))
    if last >= numel:
        return None
    return View(dice.randrange(numel - last), tuple(shape), tuple(placed))


def random_copies(dice: random.Random) -> Iterator[Copy]:
    shape = [dice.randint(1, 4) for _ in range(dice.randint(0, 3))]
    take, put = random_view(dice, 200, shape), random_view(dice, 300, shape)
    if take is not None and put is not None:
        yield Copy("s", take, "t", put)


def carry_out(copies: list[Copy], source: Tensor, numel: int = 300) -> Tensor:
    target = torch.zeros(numel, dtype=source.dtype)
    for copy in copies:
        copy.put.on(target).copy_(copy.take.on(source))
    return target


def test_normal_copies_the_same() -> None:
    for seed in CASES:
        source = torch.arange(1, 201)
        for copy in random_copies(random.Random(seed)):
            simple = normal(copy)
            assert torch.equal(carry_out([simple], source), carry_out([copy], source))
            assert len(simple.put.shape) <= len(copy.put.shape)
            assert simple.put.strides == tuple(sorted(simple.put.strides, reverse=True))


def test_parts_make_the_whole() -> None:
    for seed in CASES:
        dice, source = random.Random(seed), torch.arange(1, 201)
        for copy in random_copies(dice):
            take, put = copy.take.merged(), normal(copy).put
            assert torch.equal(take.on(source).reshape(-1), copy.take.on(source).reshape(-1))
            cut = dice.randint(0, put.numel // put.block) * put.block if put.shape else put.numel
            parts = [put.part(0, cut), put.part(cut, put.numel)] if put.shape else [put]
            assert torch.equal(
                torch.cat([part.on(torch.arange(300)).reshape(-1) for part in parts]),
                put.on(torch.arange(300)).reshape(-1),
            )


def test_pieces_of_one_copy_are_joined() -> None:
    """A copy of a matrix, cut into rows or into columns and shuffled, is one copy again."""
    for seed in CASES:
        dice = random.Random(seed)
        rows, columns = dice.randint(1, 6), dice.randint(1, 6)
        cuts: list[list[int]] = [[], []]
        axis = dice.randrange(2)
        size = (rows, columns)[axis]
        cuts[axis] = sorted(dice.sample(range(1, size), dice.randint(0, size - 1)))
        grid = [
            list(zip([0, *cut], [*cut, size], strict=True)) for cut, size in zip(cuts, (rows, columns), strict=True)
        ]
        turned = dice.random() < 0.3
        pieces = []
        for top, bottom in grid[0]:
            for left, right in grid[1]:
                shape = (bottom - top, right - left)
                take = (
                    View(top + left * rows, shape, (1, rows))
                    if turned
                    else View(top * columns + left, shape, (columns, 1))
                )
                pieces.append(Copy("s", take, "t", View(5 + top * columns + left, shape, (columns, 1))))
        dice.shuffle(pieces)
        joined = join_all(map(normal, pieces))
        source = torch.arange(1, 201)
        assert torch.equal(carry_out(joined, source), carry_out(pieces, source))
        assert len(joined) == 1


def test_overlap_is_seen() -> None:
    for seed in CASES:
        dice = random.Random(seed)
        views = [copy.put for _ in range(dice.randint(1, 3)) for copy in random_copies(dice)]
        counts = torch.zeros(300, dtype=torch.int64)
        for view in views:
            counts.view(-1).index_add_(
                0, view.on(torch.arange(300)).reshape(-1), torch.ones(view.numel, dtype=torch.int64)
            )
        assert overlap(300, views) == bool((counts > 1).any())


def small_plan() -> Plan:
    sources = [Slot("a", torch.bfloat16, (4, 3)), Slot("b", torch.float32, (2,)), Slot("unused", torch.bfloat16, (9,))]
    targets = [Target("ab", torch.bfloat16, (5, 3), (3, 1)), Target("b2", torch.float32, (2,), (1,))]
    copies = [
        Copy("a", View(0, (2, 3), (3, 1)), "ab", View(0, (2, 3), (3, 1))),
        Copy("a", View(6, (2, 3), (3, 1)), "ab", View(6, (2, 3), (3, 1))),
        Copy("b", View(0, (2,), (1,)), "b2", View(0, (2,), (1,))),
    ]
    return make_plan(sources, targets, copies)


def test_a_plan_is_merged_and_survives_json() -> None:
    plan = small_plan()
    assert plan.copies[0] == Copy("a", View(0, (12,), (1,)), "ab", View(0, (12,), (1,)))
    assert [slot.name for slot in plan.sources] == ["a", "b"]
    assert plan.padding() == {"ab": 3}
    assert plan.nbytes == 12 * 2 + 2 * 4
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest
    assert len({plan.digest, make_plan(plan.sources, plan.targets, plan.copies[:1]).digest}) == 2


def test_what_is_written_twice_is_refused_and_written_over_is_not() -> None:
    source, target = Slot("a", torch.bfloat16, (8,)), Target("t", torch.bfloat16, (8,), (1,))
    first = Copy("a", View(0, (4,), (1,)), "t", View(0, (4,), (1,)))
    again = Copy("a", View(4, (4,), (1,)), "t", View(0, (4,), (1,)))
    beside = Copy("a", View(4, (4,), (1,)), "t", View(3, (4,), (1,)))
    assert make_plan([source], [target], [first, again]).copies == (again,)
    with pytest.raises(PlanRefused, match="t: the loader writes some of its elements twice"):
        make_plan([source], [target], [first, beside])


def test_a_refusal_names_the_first_and_counts_the_rest() -> None:
    refusal = PlanRefused({f"p{number}": "odd" for number in range(5)})
    assert str(refusal) == "no plan: p0: odd; p1: odd; p2: odd; and 2 more"
