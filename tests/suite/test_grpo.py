"""GRPO's arithmetic against values worked out by hand."""

import math
import random
from fractions import Fraction

import pytest
import torch

from functional.runtime.recipe.model import LossConfig
from functional.suite.grpo import (
    advantages,
    batch_mean,
    clipped_loss,
    importance_weight,
    kl_estimate,
    mean_abs_difference,
    token_mult_prob_error,
)

pytestmark = pytest.mark.unit

PLAIN = LossConfig(use_importance_sampling_correction=False, truncated_importance_sampling_ratio=None)
ALL = torch.ones(1, 2, dtype=torch.bool)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values])


def test_advantages_are_the_centred_rewards_over_the_unbiased_deviation():
    # mean 0.25, deviation sqrt((0.75² + 3·0.25²) / 3) = 0.5
    assert advantages(row(1, 0, 0, 0))[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_advantages_without_normalisation():
    assert advantages(row(1, 0, 0, 0), normalize_rewards=False).tolist() == [[0.75, -0.25, -0.25, -0.25]]


def test_leave_one_out_baseline_is_the_mean_of_the_others():
    third = 1 / 3
    got = advantages(row(1, 0, 0, 0), normalize_rewards=False, use_leave_one_out_baseline=True)
    assert got[0].tolist() == pytest.approx([1, -third, -third, -third])


def test_leave_one_out_divides_by_the_others_deviation():
    # Of 1, 0, 1: the others of the first (0, 1) have mean 0.5 and deviation sqrt(0.5); of the second (1, 1) none.
    got = advantages(row(1, 0, 1), use_leave_one_out_baseline=True)
    half = 0.5 / math.sqrt(0.5)
    assert got[0].tolist() == pytest.approx([half, -1, half], abs=1e-5)


def test_groups_do_not_mix():
    got = advantages(torch.tensor([[1.0, 0.0], [5.0, 5.0]]))
    assert got[0].tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-5)
    assert got[1].tolist() == [0, 0]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_equal_rewards_give_exactly_zero(value):
    for one_out in (False, True):
        assert not advantages(torch.full((3, 7), value), use_leave_one_out_baseline=one_out).any()


def test_a_group_of_one_gets_zero():
    assert not advantages(torch.tensor([[1.0], [0.0]])).any()
    assert advantages(row(1, 0)).any()


def test_in_a_group_of_two_the_other_one_alone_has_no_deviation():
    assert advantages(row(0.9, 0.1), use_leave_one_out_baseline=True)[0].tolist() == pytest.approx([0.8, -0.8])
    assert advantages(row(0.3, 0.3), use_leave_one_out_baseline=True)[0].tolist() == [0, 0]


def exact_advantages(rewards, normalize, leave_one_out):
    """By fractions: what the deviation is, and where there is none, is beyond doubt."""
    found = []
    for own, reward in enumerate(rewards):
        peers = [r for other, r in enumerate(rewards) if not leave_one_out or other != own]
        centred = reward - sum(peers) / len(peers)
        squares = sum((peer - sum(peers) / len(peers)) ** 2 for peer in peers)
        if normalize and squares:
            found.append(float(centred) / (math.sqrt(squares / (len(peers) - 1)) + 1e-6))
        else:
            found.append(float(centred))
    return found


OFFSETS = [0.0, 0.9, -7.3, 1e4 / 3, 1e8, -1e12 / 7]
PATTERNS = {
    "all equal": lambda n, draw: [0.0] * n,
    "one apart": lambda n, draw: [draw.uniform(-1, 1), *[0.0] * (n - 1)],
    "one apart by little": lambda n, draw: [1e-3, *[0.0] * (n - 1)],
    "two values": lambda n, draw: [draw.choice([0.0, 1 / 3]) for _ in range(n)],
    "all apart": lambda n, draw: [draw.uniform(-1, 1) for _ in range(n)],
    "all apart by little": lambda n, draw: [draw.uniform(0, 1e-3) for _ in range(n)],
    "far apart": lambda n, draw: [draw.choice([0.0, 1.0, 2.0, 1e6]) for _ in range(n)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_advantages_are_exact_for_any_group(pattern, leave_one_out, dtype):
    draw = random.Random(f"{pattern}/{leave_one_out}")
    for size in (2, 3, 8, 17):
        for offset in OFFSETS:
            group = [offset + value for value in PATTERNS[pattern](size, draw)]
            draw.shuffle(group)
            rewards = torch.tensor([group], dtype=dtype)
            held = [Fraction(value) for value in rewards[0].tolist()]  # what the tensor's type kept of the values
            for normalize in (False, True):
                got = advantages(rewards, normalize, leave_one_out)[0].tolist()
                want = exact_advantages(held, normalize, leave_one_out)
                assert got == pytest.approx(want, rel=1e-5, abs=1e-12), (size, offset, normalize)


def test_a_large_group_has_no_rounding_of_its_own():
    equal, apart = torch.full((1, 1000), 0.1), torch.full((1, 1000), 0.1)
    apart[0, 7] = 0.2
    for leave_one_out in (False, True):
        assert not advantages(equal, use_leave_one_out_baseline=leave_one_out).any()
    assert advantages(apart, use_leave_one_out_baseline=True)[0, 7].item() == pytest.approx(0.1)
    # n equal ones and one apart by d: its mean difference is d·(n-1)/n, the deviation d/√n
    assert advantages(apart)[0, 7].item() == pytest.approx(999 / math.sqrt(1000), rel=1e-3)


def test_permuting_a_group_permutes_its_advantages():
    rewards = torch.rand(5, 12, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    for leave_one_out in (False, True):
        whole = advantages(rewards, use_leave_one_out_baseline=leave_one_out)
        torch.testing.assert_close(
            advantages(rewards[:, order], use_leave_one_out_baseline=leave_one_out), whole[:, order]
        )


def test_advantages_want_groups():
    with pytest.raises(ValueError, match="prompts, generations"):
        advantages(torch.ones(4))


def test_first_step_loss_is_minus_the_mean_advantage():
    logp = row(-1.0, -2.0)
    loss, metrics = clipped_loss(logp, logp, logp, torch.tensor([0.7]), ALL, PLAIN)
    assert loss.item() == pytest.approx(-0.7)
    assert metrics["ratio"] == 1
    assert metrics["clip_fraction"] == metrics["approx_kl"] == 0
    assert metrics["token_mult_prob_error"] == 1


def test_gradient_of_the_first_step_is_minus_advantage_over_tokens():
    logp = row(-1.0, -2.0).requires_grad_()
    loss, _ = clipped_loss(logp, logp.detach(), logp.detach(), torch.tensor([0.7]), ALL, PLAIN)
    loss.backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([-0.35, -0.35])


def test_clipping_cuts_only_the_side_that_would_gain():
    old = row(0.0, 0.0) - 2
    logp = old + row(math.log(1.5), math.log(0.5))
    gain, up = clipped_loss(logp, old, old, torch.tensor([1.0]), ALL, PLAIN)
    assert gain.item() == pytest.approx(-(1.2 + 0.5) / 2)  # 1.5 is cut to 1.2; 0.5 is not: it counts in full
    loss, down = clipped_loss(logp, old, old, torch.tensor([-1.0]), ALL, PLAIN)
    assert loss.item() == pytest.approx((1.5 + 0.8) / 2)
    assert up["clip_fraction"] == down["clip_fraction"] == 0.5


def test_clip_bounds_are_apart():
    old = row(-2.0, -2.0)
    logp = old + math.log(1.5)
    loss, _ = clipped_loss(logp, old, old, torch.tensor([1.0]), ALL, LossConfig(ratio_clip_max=0.28))
    assert loss.item() == pytest.approx(-1.28)


def test_a_clipped_token_has_no_gradient():
    old = row(-2.0, -2.0)
    logp = (old + row(math.log(1.5), 0.0)).requires_grad_()
    loss, _ = clipped_loss(logp, old, old, torch.tensor([1.0]), ALL, PLAIN)
    loss.backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([0, -0.5])


WEIGHTS = torch.tensor([[4.0, 0.5, 1.0, math.nan], [1.1, 0.9, 1.0, 1.0]])
"""Of two samples, the first of three tokens."""
PRESENT = torch.tensor([[True, True, True, False], [True] * 4])
CORRECTIONS = [
    # kind, low, high, weights of the first sample's tokens and of the second's, outside
    (None, None, None, [4, 0.5, 1], [1.1, 0.9, 1, 1], [False] * 3, [False] * 4),
    (None, None, 2.0, [2, 0.5, 1], [1.1, 0.9, 1, 1], [True, False, False], [False] * 4),
    ("tis", None, 2.0, [2, 0.5, 1], [1.1, 0.9, 1, 1], [True, False, False], [False] * 4),
    ("tis", 0.95, 2.0, [2, 0.95, 1], [1.1, 0.95, 1, 1], [True, True, False], [False, True, False, False]),
    ("icepop", 0.5, 2.0, [0, 0.5, 1], [1.1, 0.9, 1, 1], [True, False, False], [False] * 4),
    ("icepop", 0.95, 1.05, [0, 0, 1], [0, 0, 1, 1], [True, True, False], [True, True, False, False]),
    # geometric means: (4 × 0.5 × 1)^(1/3) = 1.26 and (1.1 × 0.9)^(1/4) = 0.9975
    ("seq-mask-tis", 0.5, 2.0, [4, 0.5, 1], [1.1, 0.9, 1, 1], False, False),
    ("seq-mask-tis", 0.99, 1.2, [0, 0, 0], [1.1, 0.9, 1, 1], True, False),
    ("seq-mask-tis", 0.999, 1.3, [4, 0.5, 1], [0, 0, 0, 0], False, True),
]


@pytest.mark.parametrize(("kind", "low", "high", "first", "second", "out_first", "out_second"), CORRECTIONS)
def test_importance_weights_by_hand(kind, low, high, first, second, out_first, out_second):
    generation = torch.full((2, 4), -1.0)
    weight, outside = importance_weight(generation + WEIGHTS.log(), generation, PRESENT, kind, low, high)
    assert weight[0, :3].tolist() == pytest.approx(first)
    assert weight[1].tolist() == pytest.approx(second)
    if kind == "seq-mask-tis":
        assert outside.tolist() == [out_first, out_second]
    else:
        assert (outside[0, :3].tolist(), outside[1].tolist()) == (out_first, out_second)


def test_an_infinite_weight_is_cut_off_or_left_out():
    old, generation = row(0.0), row(-1e4)
    assert importance_weight(old, generation, ALL[:, :1], "tis", None, 2.0)[0].tolist() == [[2.0]]
    assert importance_weight(old, generation, ALL[:, :1], "icepop", 0.5, 2.0)[0].tolist() == [[0.0]]
    assert importance_weight(old, generation, ALL[:, :1], "seq-mask-tis", 0.5, 2.0)[0].tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("kind", "loss", "outside"),
    [
        ("tis", -(2 + 0.5 + 1 + 1.1 + 0.9 + 1 + 1) / 7, 1 / 7),
        ("icepop", -5.5 / 7, 1 / 7),
        ("seq-mask-tis", -4 / 7, 0.5),
    ],
)
def test_the_loss_by_each_correction(kind, loss, outside):
    """Of the first sample's mean, 1.26, 1.2 is the bound where whole samples are left out, and 2 of tokens."""
    high = 1.2 if kind == "seq-mask-tis" else 2.0
    config = LossConfig(
        truncated_importance_sampling_type=kind,
        truncated_importance_sampling_ratio=high,
        truncated_importance_sampling_ratio_min=0.5,
    )
    generation = torch.full((2, 4), -1.0)
    old = generation + WEIGHTS.log()
    found, metrics = clipped_loss(old, old, generation, torch.ones(2), PRESENT, config)
    assert found.item() == pytest.approx(loss)
    assert metrics["importance_capped_fraction"] == pytest.approx(outside)


def test_importance_weight_is_truncated():
    old, generation = row(-1.0, -1.0), row(-1.0 - math.log(4), -1.0 + math.log(2))
    config = LossConfig(truncated_importance_sampling_ratio=2.0)
    loss, metrics = clipped_loss(old, old, generation, torch.tensor([1.0]), ALL, config)
    assert loss.item() == pytest.approx(-(2.0 + 0.5) / 2)
    assert metrics["importance_weight"] == pytest.approx(1.25)
    assert metrics["importance_capped_fraction"] == 0.5
    assert metrics["token_mult_prob_error"] == pytest.approx((4 + 2) / 2)


def test_no_gradient_through_the_importance_weight():
    logp = row(-1.0, -1.0).requires_grad_()
    generation = row(-1.5, -1.5)
    loss, _ = clipped_loss(logp, logp, generation, torch.tensor([1.0]), ALL, LossConfig())
    loss.backward()  # ratio is exp(logp - logp): no gradient there either
    assert logp.grad is not None
    assert logp.grad.abs().sum() == 0


def test_token_level_and_sample_level_means():
    values = torch.tensor([[1.0, 2.0, 3.0], [8.0, 100.0, 100.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert batch_mean(values, mask, True, None, None).item() == pytest.approx(14 / 4)
    assert batch_mean(values, mask, False, None, None).item() == pytest.approx((2 + 8) / 2)


@pytest.mark.parametrize("token_level", [True, False])
def test_micro_batches_add_up(token_level):
    torch.manual_seed(0)
    logp, old, generation = (-torch.rand(4, 5) for _ in range(3))
    mask = torch.arange(5) < torch.tensor([[5], [1], [3], [2]])
    advantage = torch.randn(4)
    config = LossConfig(token_level_loss=token_level)
    whole, metrics = clipped_loss(logp, old, generation, advantage, mask, config)
    parts = [
        clipped_loss(logp[i:j], old[i:j], generation[i:j], advantage[i:j], mask[i:j], config, None, int(mask.sum()), 4)
        for i, j in ((0, 3), (3, 4))
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item())
    for name, value in metrics.items():
        assert sum(m[name] for _, m in parts) == pytest.approx(value), name


def test_padding_is_never_read():
    mask = torch.tensor([[True, False]])
    logp = row(-1.0, math.nan).requires_grad_()
    generation = row(-1.0 - math.log(1.5), -math.inf)
    loss, metrics = clipped_loss(logp, row(-1.0, math.nan), generation, torch.tensor([2.0]), mask, LossConfig())
    loss.backward()
    assert loss.item() == pytest.approx(-3.0)
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([-3.0, 0.0])
    assert metrics["token_mult_prob_error"] == pytest.approx(1.5)


def test_a_log_prob_that_is_not_finite_is_refused_where_it_counts():
    good = row(-1.0, -1.0)
    with pytest.raises(ValueError, match="generation_logp is not finite"):
        clipped_loss(good, good, row(-1.0, math.nan), torch.tensor([1.0]), ALL, PLAIN)


def test_shapes_are_checked():
    good = row(-1.0, -1.0)
    with pytest.raises(ValueError, match=r"mask has shape \[1, 3\]"):
        clipped_loss(good, good, good, torch.tensor([1.0]), torch.ones(1, 3, dtype=torch.bool), PLAIN)


def test_kl_estimate():
    d = math.log(2)
    assert kl_estimate(row(-1.0), row(-1.0 + d)).item() == pytest.approx(2 - 1 - d)
    assert kl_estimate(row(-1.0), row(-1.0)).item() == 0


def test_reference_penalty_adds_its_share():
    logp, d = row(-1.0, -1.0), math.log(2)
    config = LossConfig(reference_policy_kl_penalty=0.1)
    loss, metrics = clipped_loss(logp, logp, logp, torch.tensor([1.0]), ALL, config, reference_logp=logp + row(d, 0))
    kl = (2 - 1 - d) / 2
    assert metrics["kl_reference"] == pytest.approx(kl)
    assert loss.item() == pytest.approx(-1 + 0.1 * kl)
    with pytest.raises(ValueError, match="reference policy"):
        clipped_loss(logp, logp, logp, torch.tensor([1.0]), ALL, config)


def test_token_mult_prob_error_and_mean_difference():
    mask = torch.tensor([[True, True, False]])
    train, generation = row(-1.0, -1.0, 5.0), row(-1.0 - math.log(2), -1.0 + math.log(4), -9.0)
    assert token_mult_prob_error(train, generation, mask).item() == pytest.approx(3.0)
    assert mean_abs_difference(train, generation, mask).item() == pytest.approx(math.log(8) / 2)
