"""Scoring of what top-k and top-p leave, with tokens that rounding has moved over the edge."""

import pytest
import torch

from functional.runtime.recipe.model import LossConfig, Thresholds
from functional.suite.checklist import Checklist
from functional.suite.checks import check_agreement, check_flips
from functional.suite.models import ARITHMETIC_DIR
from functional.suite.policy import WHOLE, Policy, Sample, collate
from functional.suite.sampling_filter import Flips, SamplingFilter, find_flips, logprobs

HALF_CUT = SamplingFilter(top_k=3)


def test_a_token_outside_is_scored_as_a_member_with_its_gradient():
    logits = torch.tensor([[2.0, 1.9, 1.0, 0.5]], requires_grad=True)
    logp = logprobs(logits, torch.tensor([2]), SamplingFilter(top_k=2))
    expected = torch.log_softmax(torch.tensor([2.0, 1.9, 1.0]), 0)[2]
    assert float(logp) == pytest.approx(float(expected))
    (gradient,) = torch.autograd.grad(logp.sum(), logits)
    assert gradient[0, 3] == 0
    assert gradient[0, 2] > 0


def test_how_far_outside_of_top_k_is_half_of_the_gap():
    flips = Flips()
    logits = torch.tensor([[2.0, 1.9, 1.85, 0.5], [2.0, 1.9, 1.0, 0.5]])
    find_flips(logits, torch.tensor([2, 1]), SamplingFilter(top_k=2), flips)
    assert flips.tokens == 1
    assert flips.furthest == pytest.approx(0.025, abs=1e-6)


def test_how_far_outside_of_top_p_is_in_log_odds_of_the_mass_before():
    logits = torch.tensor([[0.951, 0.03, 0.019]]).log()
    flips = Flips()
    find_flips(logits, torch.tensor([1]), SamplingFilter(top_p=0.95), flips)
    before, p = torch.tensor([0.951, 0.95]).logit()
    assert flips.tokens == 1
    assert flips.furthest == pytest.approx(float(before - p) / 2, abs=1e-5)


def test_near_equals_that_change_places_are_not_far_outside():
    logits = torch.tensor([[1.0] * 40 + [0.999] * 5 + [0.998] * 5])
    flips = Flips()
    find_flips(logits, torch.tensor([49]), SamplingFilter(top_p=0.85), flips)
    assert flips.tokens == 1
    assert flips.furthest <= 0.001
    find_flips(logits, torch.tensor([0]), SamplingFilter(top_p=0.85), flips)
    assert flips.tokens == 1


@pytest.fixture(scope="module")
def sampled():
    """Samples of three tokens from a policy's own filtered distribution, scored by it as an engine would."""
    policy = Policy(ARITHMETIC_DIR, temperature=3.0, kept=HALF_CUT, keep_reference=True)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for first in range(12):
        ids, logps = [first % 9 + 3, 4], []
        for _ in range(3):
            with torch.no_grad():
                logits = policy.model(torch.tensor([ids])).logits[0, -1].float() / policy.temperature
            values, tokens = logits.topk(3)
            choice = int(torch.multinomial(values.softmax(0), 1, generator=generator))
            logps.append(float(values.log_softmax(0)[choice]))
            ids.append(int(tokens[choice]))
        samples.append(Sample(ids[:2], ids[2:], logps, advantage=(-1.0) ** first))
    return policy, collate(samples)


def verdicts(policy, batch):
    checks = Checklist()
    metrics = policy.train_step(batch, LossConfig(reference_policy_kl_penalty=0.1))
    check_agreement(checks, "step1", metrics, Thresholds())
    if "filter_flips" in metrics:
        check_flips(checks, "step1", metrics)
    return metrics, {check.name.partition(".")[2]: check.passed for check in checks.checks}


def test_a_trainer_that_ignores_the_filter_fails_the_checks(sampled):
    policy, batch = sampled
    agree, _ = policy.logprobs(batch), policy.logprobs(batch, WHOLE)
    cut = (policy.logprobs(batch) - policy.logprobs(batch, WHOLE))[batch.mask].exp()
    assert (1 - 1 / cut).mean() > 0.1, "the filter cuts a good part of the mass"
    assert torch.isfinite(agree).all()
    _, ignoring = verdicts(Policy(ARITHMETIC_DIR, temperature=3.0, keep_reference=True), batch)
    assert ignoring == {"token_mult_prob_error": False, "logprobs_agree": False}
    metrics, following = verdicts(policy, batch)
    assert following == {"token_mult_prob_error": True, "logprobs_agree": True, "filters_agree": True}
    assert metrics["ratio"] == pytest.approx(1)
    assert metrics["kl_reference"] == pytest.approx(0, abs=1e-6)


def test_a_trainer_with_another_filter_is_told_by_how_far_tokens_lie_outside(sampled):
    _, batch = sampled
    metrics, found = verdicts(
        Policy(ARITHMETIC_DIR, temperature=3.0, kept=SamplingFilter(top_k=1), keep_reference=True), batch
    )
    assert not found["filters_agree"]
    assert metrics["filter_flips"] > 0
