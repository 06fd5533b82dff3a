"""A policy of several ranks, real processes over gloo, against one of one rank: same losses, weights, checkpoints."""

import pytest
import torch

from functional.runtime.recipe.model import LossConfig, OptimizerConfig
from functional.suite.model import random_model
from functional.suite.models import ARITHMETIC_DIR
from functional.suite.policy import Policy, collate
from functional.suite.sampling_filter import SamplingFilter
from tests.suite.sharded import act, by_ranks
from tests.suite.test_policy import SAME, SAMPLES, Sample

ADAMW = OptimizerConfig(lr=1e-3)
SGD = OptimizerConfig(name="sgd", lr=0.05, momentum=0.9)
OF_ROUNDING = ("logp_rounding", "logp_noise_bound", "token_mult_prob_error_bound", "filter_flip_nats_bound")
"""Figures that the first rank alone has, and that are rounding themselves."""
NOISE = ("logp_noise", "generation_kl", "approx_kl", "filter_flip_nats")
"""Figures of how far apart two computations of one number are."""


def samples(*rows):
    """With the log-probs that the model itself gives."""
    blank = [Sample(p, c, [0.0] * len(c), a) for p, c, a in rows]
    logp = Policy(ARITHMETIC_DIR).logprobs(collate(blank)).tolist()
    return [Sample(p, c, logp[i][: len(c)], a) for i, (p, c, a) in enumerate(rows)]


def compare(figures, expected):
    """Metrics of a step; rounding of bfloat16 gradients and other shapes is all that may differ."""
    assert figures.keys() == expected.keys()
    for name, value in expected.items():
        if name in (*OF_ROUNDING, *NOISE):
            assert 0 <= figures[name] <= 4 * value + SAME
            continue
        assert figures[name] == pytest.approx(value, rel=SAME, abs=SAME**2), name


def compare_weights(moved, expected, first):
    """The ranks' weights lie where one rank's do: the distance is small beside the step."""
    assert list(moved) == list(expected)
    apart = sum(float((moved[name].float() - expected[name].float()).square().sum()) for name in expected)
    step = sum(float((expected[name].float() - first[name].float()).square().sum()) for name in expected)
    assert apart <= SAME**2 * step, (apart, step)
    assert step > 0


@pytest.mark.parametrize(
    ("count", "options", "loss", "rows"),
    [
        (2, {"optimizer": SGD}, LossConfig(), SAMPLES),
        (2, {"optimizer": SGD, "micro_batch_size": 1}, LossConfig(token_level_loss=False), SAMPLES[:3]),
        (
            3,
            {"optimizer": SGD, "keep_reference": True, "kept": SamplingFilter(20, 0.9)},
            LossConfig(reference_policy_kl_penalty=0.1),
            SAMPLES,
        ),
    ],
    ids=["two ranks", "an odd batch in micro-batches", "three ranks, one without a sample"],
)
def test_several_ranks_make_the_step_of_one(tmp_path, count, options, loss, rows):
    batch = collate(samples(*rows))
    probe = collate(samples(*SAMPLES[:2]))
    actions = [("train_step", (batch, loss))] * 2 + [
        ("logprobs", (probe,)),
        ("prompt_logprobs", ([5, 17, 40, 2, 7],)),
    ]
    own = Policy(ARITHMETIC_DIR, **options)
    start = {name: tensor.clone() for name, tensor in own.named_tensors()}
    one = act(own, actions)
    ranks = by_ranks(count, tmp_path, ARITHMETIC_DIR, options, actions)
    for number, found in enumerate(ranks):
        for step in (0, 1):
            wanted = one[step] if number == 0 else {k: v for k, v in one[step].items() if k not in OF_ROUNDING}
            compare(found[step], wanted)
        compare_weights(found[-1], one[-1], start)
        for index in (2, 3):
            assert torch.allclose(found[index], one[index], atol=0.1), index
        assert all(torch.equal(found[-1][name], ranks[0][-1][name]) for name in found[-1]), "ranks differ"
        assert torch.equal(found[2], ranks[0][2])


def test_a_checkpoint_of_several_ranks_is_one_of_one_and_goes_on(tmp_path):
    batch, loss = collate(samples(*SAMPLES)), LossConfig()
    options = {"optimizer": ADAMW}
    own = Policy(ARITHMETIC_DIR, **options)
    start = {name: tensor.clone() for name, tensor in own.named_tensors()}
    own.train_step(batch, loss)
    weights, state = own.checkpoint()
    first, other = by_ranks(2, tmp_path, ARITHMETIC_DIR, options, [("train_step", (batch, loss)), ("checkpoint", ())])
    assert other[1] == ({}, {})
    assert {n: t.shape for n, t in first[1][0].items()} == {n: t.shape for n, t in weights.items()}
    assert {n: t.shape for n, t in first[1][1].items()} == {n: t.shape for n, t in state.items()}
    compare_weights(first[1][0], weights, start)

    own.train_step(batch, loss)
    on = [("resume", (*first[1], 1)), ("train_step", (batch, loss))]
    resumed, _ = by_ranks(2, tmp_path, ARITHMETIC_DIR, options, on)
    compare_weights(resumed[-1], act(own, [])[0], start)
    alone = Policy(ARITHMETIC_DIR, **options)
    compare_weights(act(alone, on)[-1], act(own, [])[0], start)


def test_experts_that_the_checkpoint_has_one_by_one(tmp_path):
    """transformers keeps them in one tensor, of which each rank has some."""
    model = tmp_path / "model"
    random_model(model, "Qwen3-MoE-small")
    options = {"optimizer": OptimizerConfig(name="sgd", lr=0.5)}
    actions = [("train_step", (collate(samples(*SAMPLES)), LossConfig()))]
    own = Policy(model, **options)
    start = {name: tensor.clone() for name, tensor in own.named_tensors()}
    one = act(own, actions)
    for found in by_ranks(2, tmp_path, model, options, actions):
        compare_weights(found[-1], one[-1], start)
