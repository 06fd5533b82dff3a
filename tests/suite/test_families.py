"""Small models of every family: the trainer computes as transformers does, and its tensors are the checkpoint's."""

import pytest
import torch
from safetensors.torch import load_file

from functional.runtime.recipe.architectures import Layout, find_layout_problems, find_model_problem, read_config
from functional.runtime.recipe.model import LossConfig, OptimizerConfig
from functional.suite.model import random_model
from functional.suite.policy import Policy, Sample, collate
from functional.suite.shapes import MADE, SHAPES

SMALL = sorted(name for name, shape in MADE.items() if shape.endswith("-small"))


@pytest.fixture(scope="module", params=SMALL)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("families") / "model"
    random_model(folder, MADE[request.param])
    return folder


@pytest.fixture
def policy(folder):
    return Policy(folder, optimizer=OptimizerConfig(name="sgd", lr=0.5))


def samples():
    ids = [[5, 17, 90, 133], [40, 2, 7], [100, 101, 102, 103, 104]]
    return [
        Sample(prompt[:2], prompt[2:], [-4.9] * (len(prompt) - 2), sign)
        for prompt, sign in zip(ids, (1.0, -1.0, 0.5), strict=True)
    ]


def test_the_folder_is_a_model_that_can_be_trained(folder):
    assert find_model_problem(folder / "config.json") is None
    tensors = load_file(folder / "model.safetensors")
    assert all(tensor.dtype is torch.bfloat16 for tensor in tensors.values())
    flat = [tensor for tensor in tensors.values() if tensor.ndim == 1]
    assert len({tuple(tensor.tolist()) for tensor in flat}) == len(flat), "two norms or biases are alike"


def test_experts_are_found_in_the_config_as_it_is_written(folder):
    problems = dict(find_layout_problems(read_config(folder / "config.json"), Layout(2, 1, 2), "cuda"))
    has_experts = "moe" in str(read_config(folder / "config.json")["architectures"]).lower()
    assert problems.keys() == (set() if has_experts else {"expert_parallel_size"})


def test_log_probs_are_those_of_the_models_own_forward(policy):
    batch = collate(samples())
    logits = policy.model(input_ids=batch.input_ids).logits.float()
    found = policy.logprobs(batch)
    for row, sample in enumerate(samples()):
        start, count = len(sample.prompt_ids) - 1, len(sample.completion_ids)
        expected = torch.log_softmax(logits[row, start : start + count], -1)
        expected = expected.gather(-1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
        assert torch.allclose(found[row, :count], expected, atol=0.05)
    prompt = torch.tensor([5, 17, 40, 2])
    whole = torch.log_softmax(policy.model(input_ids=prompt[None]).logits[0, :-1].float(), -1)
    assert torch.allclose(policy.prompt_logprobs(prompt.tolist()), whole.gather(-1, prompt[1:, None])[:, 0], atol=0.05)


def test_tensors_have_the_names_and_shapes_of_the_checkpoint_and_follow_a_step(folder, policy):
    saved = load_file(folder / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in policy.named_tensors()}
    assert before.keys() == saved.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in saved.items())
    snapshot = policy.snapshot()
    metrics = policy.train_step(collate(samples()), LossConfig())
    assert metrics["logp_shift"] > 0
    after = dict(policy.named_tensors())
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > len(before) / 2
    policy.restore(snapshot)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.named_tensors())


def test_every_small_shape_is_of_another_family():
    assert len({SHAPES[MADE[name]].family for name in SMALL}) == len(SMALL) == 7
