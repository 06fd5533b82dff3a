"""The policy against transformers' own forward pass, and its step against what a step must do."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from functional.runtime.recipe.model import LossConfig, OptimizerConfig
from functional.suite.grpo import mean_abs_difference
from functional.suite.models import ARITHMETIC_DIR
from functional.suite.policy import Policy, Sample, collate

pytestmark = pytest.mark.unit

SAMPLES = [
    ((23, 16, 24, 34), (27, 2), 1.0),
    ((23, 16, 24, 34), (21, 20, 2), -1.0),
    ((1, 90, 4, 29, 18, 25, 34, 2, 4), (24,), 0.5),
    ((20, 16, 20, 34), (20, 2, 0, 0, 5), -0.5),
]

ROUNDING = 4 * 2.0**-8 * 16
"""Nats: a few steps of bfloat16 at the largest logit. Other shapes and processors sum in another order."""
SAME = 0.05
"""Relative: figures of one batch, computed with gradients or without, in one part or two, differ by less."""


@pytest.fixture(scope="module")
def model_dir():
    return ARITHMETIC_DIR


@pytest.fixture(scope="module")
def samples(model_dir):
    """With the log-probs that the model itself gives, so that the engine is noiseless."""
    blank = [Sample(p, c, [0.0] * len(c), a) for p, c, a in SAMPLES]
    logp = Policy(model_dir).logprobs(collate(blank))
    return [
        Sample(s.prompt_ids, s.completion_ids, logp[i, : len(s.completion_ids)].tolist(), s.advantage)
        for i, s in enumerate(blank)
    ]


def test_collate_pads_right_and_masks(samples):
    batch = collate(samples)
    assert batch.input_ids.shape == (4, 10)
    assert batch.completion_ids.shape == batch.mask.shape == (4, 5)
    assert batch.mask.sum(1).tolist() == [2, 3, 1, 5]
    assert batch.prompt_lengths.tolist() == [4, 4, 9, 4]
    assert batch.input_ids[0].tolist() == [23, 16, 24, 34, 27, 2, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        (Sample((), (1,), (0.0,)), "empty"),
        (Sample((1,), (), ()), "empty"),
        (Sample((1,), (1, 2), (0.0,)), "2 completion tokens, 1 log-probs"),
    ],
)
def test_collate_refuses_samples_that_do_not_fit(sample, complaint):
    with pytest.raises(ValueError, match=complaint):
        collate([sample])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_the_model_s_own_whatever_the_padding(model_dir, samples, temperature):
    got = Policy(model_dir, temperature=temperature).logprobs(collate(samples))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    for row, (prompt, completion, _) in enumerate(SAMPLES):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0].float() / temperature
        want = [float(torch.log_softmax(logits[len(prompt) - 1 + t], -1)[i]) for t, i in enumerate(completion)]
        assert got[row, : len(completion)].tolist() == pytest.approx(want, abs=ROUNDING / temperature)
        assert got[row, len(completion) :].tolist() == [0.0] * (got.shape[1] - len(completion))


def test_named_tensors_are_the_checkpoint_s(model_dir):
    saved = load_file(model_dir / "model.safetensors")
    named = dict(Policy(model_dir).named_tensors())
    assert named.keys() == saved.keys()
    for name, tensor in named.items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous()
        assert torch.equal(tensor, saved[name]), name


def test_a_step_moves_the_samples_the_way_of_their_advantages(model_dir, samples):
    policy, batch = Policy(model_dir, optimizer=OptimizerConfig(lr=1e-3)), collate(samples)
    before = policy.logprobs(batch)
    metrics = policy.train_step(batch, LossConfig())
    after = policy.logprobs(batch)
    moved = (after - before).sum(1) * batch.advantages
    assert moved.sum() > 0
    assert metrics["logp_shift"] == pytest.approx(mean_abs_difference(after, before, batch.mask).item(), rel=1e-5)
    assert metrics["logp_shift"] > 0.01
    assert metrics["logp_noise"] < 0.01
    assert metrics["logp_shift"] > 10 * metrics["logp_noise"]
    assert metrics["tokens"] == 11
    assert metrics["ratio"] == pytest.approx(1, abs=SAME)
    assert math.isfinite(metrics["grad_norm"])
    assert metrics["grad_norm"] > 0


def test_forward_weights_are_the_masters_rounded(model_dir, samples):
    policy = Policy(model_dir, optimizer=OptimizerConfig(lr=1e-3))
    policy.train_step(collate(samples), LossConfig())
    for name, tensor in policy.named_tensors():
        assert torch.equal(tensor, policy.master[name].bfloat16()), name
    assert any(not torch.equal(t.float(), policy.master[n]) for n, t in policy.named_tensors())


def test_moves_too_small_for_bfloat16_add_up_in_the_masters(model_dir, samples):
    policy = Policy(model_dir, optimizer=OptimizerConfig(name="sgd", lr=1e-6), max_grad_norm=1e9)
    first = {n: t.clone() for n, t in policy.master.items()}
    for _ in range(2):
        policy.train_step(collate(samples), LossConfig())
    assert any(not torch.equal(t, first[n]) for n, t in policy.master.items())


def test_zero_advantages_leave_the_weights(model_dir, samples):
    policy = Policy(model_dir)
    before = policy.snapshot()
    still = [Sample(s.prompt_ids, s.completion_ids, s.generation_logprobs, 0.0) for s in samples]
    metrics = policy.train_step(collate(still), LossConfig())
    assert metrics["grad_norm"] == metrics["logp_shift"] == 0
    assert all(torch.equal(before[n], t) for n, t in policy.named_tensors())


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steps_are_deterministic(model_dir, samples, optimizer):
    ends = []
    for _ in range(2):
        policy = Policy(model_dir, optimizer=OptimizerConfig(name=optimizer, lr=1e-2))
        policy.train_step(collate(samples), LossConfig())
        ends.append(policy.snapshot())
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


@pytest.mark.parametrize("token_level", [True, False])
def test_micro_batches_make_the_same_step(model_dir, samples, token_level):
    config = LossConfig(token_level_loss=token_level)
    whole, parts = Policy(model_dir), Policy(model_dir, micro_batch_size=3)
    one, other = (p.train_step(collate(samples), config) for p in (whole, parts))
    assert other["loss"] == pytest.approx(one["loss"], rel=SAME)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=SAME)


def test_snapshot_and_restore(model_dir, samples):
    policy, batch = Policy(model_dir, optimizer=OptimizerConfig(lr=1e-2)), collate(samples)
    start, before = policy.snapshot(), policy.logprobs(batch)
    policy.train_step(batch, LossConfig())
    assert not torch.equal(policy.logprobs(batch), before)
    policy.restore(start)
    assert torch.equal(policy.logprobs(batch), before)
    again = policy.train_step(batch, LossConfig())
    assert again == Policy(model_dir, optimizer=OptimizerConfig(lr=1e-2)).train_step(batch, LossConfig())
    with pytest.raises(ValueError, match="does not fit"):
        policy.restore({})


def test_reference_stays_and_its_penalty_counts(model_dir, samples):
    policy, batch = Policy(model_dir, optimizer=OptimizerConfig(lr=1e-2), keep_reference=True), collate(samples)
    before = policy.logprobs(batch)
    config = LossConfig(reference_policy_kl_penalty=0.1)
    assert policy.train_step(batch, config)["kl_reference"] == pytest.approx(0, abs=SAME**2)
    assert torch.equal(policy.reference_logprobs(batch), before)
    assert policy.train_step(batch, config)["kl_reference"] > SAME
    with pytest.raises(ValueError, match="keep_reference"):
        Policy(model_dir).reference_logprobs(batch)
    with pytest.raises(ValueError, match="reference policy"):
        Policy(model_dir).train_step(batch, config)


def test_gradients_that_are_not_finite_leave_the_weights(model_dir, samples):
    policy = Policy(model_dir)
    before = policy.snapshot()
    broken = [Sample(s.prompt_ids, s.completion_ids, s.generation_logprobs, math.inf) for s in samples]
    with pytest.raises(ValueError, match="not finite"):
        policy.train_step(collate(broken), LossConfig())
    assert all(torch.equal(before[n], t) for n, t in policy.named_tensors())


def test_greedy_temperature_is_refused(model_dir):
    with pytest.raises(ValueError, match="temperature"):
        Policy(model_dir, temperature=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_a_gpu(model_dir, samples):
    policy, batch = Policy(model_dir, "cuda", optimizer=OptimizerConfig(lr=1e-3)), collate(samples)
    assert mean_abs_difference(policy.logprobs(batch), batch.generation_logprobs, batch.mask) < ROUNDING
    metrics = policy.train_step(batch, LossConfig())
    assert metrics["logp_shift"] > 0.01
    assert all(tensor.is_cuda for _, tensor in policy.named_tensors())
    assert all(not tensor.is_cuda for tensor in policy.snapshot().values())
