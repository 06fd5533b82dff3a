"""What a trainer has ready before an update: its copy on the host, and its scores of what the probe may sample."""

import pytest
import torch

from functional.runtime.rollout.completion import Completion
from functional.suite.host_copy import HostCopy
from functional.suite.models import ARITHMETIC_DIR
from functional.suite.policy import Policy, Sample, collate
from functional.suite.trainer_rank import Foreseen

PROMPTS = [(1, 2, 3, 4, 5), (9, 8, 7, 6, 5), (23, 16, 24, 34, 27)]
ROUNDING = 0.02


@pytest.fixture
def policy():
    return Policy(ARITHMETIC_DIR)


def completion(prompt, *tokens):
    return Completion("r", prompt, tokens, (0.0,) * len(tokens), 1, 0, None, 0.0, 0.0, None)


def scored(policy, tokens):
    batch = collate([Sample(prompt, (token,), (0.0,)) for prompt, token in zip(PROMPTS, tokens, strict=True)])
    return policy.logprobs(batch)[batch.mask].tolist()


def moved(policy):
    generator = torch.Generator().manual_seed(0)
    return {
        name: (tensor.detach() + 0.05 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in policy.weights.items()
    }


def test_foreseen_scores_are_those_of_both_versions(policy):
    foreseen, tokens = Foreseen(policy), (11, 2, 30)
    asked = [completion(prompt, token) for prompt, token in zip(PROMPTS, tokens, strict=True)]
    foreseen.look(0)
    assert foreseen.scores(0, asked) is None, "nothing was asked for"
    foreseen.prompts = {prompt: row for row, prompt in enumerate(PROMPTS)}
    foreseen.look(0)
    before = scored(policy, tokens)
    policy.restore(moved(policy))
    foreseen.look(1)
    after = scored(policy, tokens)
    assert before != pytest.approx(after, abs=10 * ROUNDING), "the versions differ"
    assert foreseen.scores(0, asked) == pytest.approx(before, abs=ROUNDING)
    assert foreseen.scores(1, asked) == pytest.approx(after, abs=ROUNDING)
    assert foreseen.scores(1, asked[::-1]) == pytest.approx(after[::-1], abs=ROUNDING)
    assert foreseen.scores(1, [completion((1, 2), 3)]) is None
    assert foreseen.scores(1, [completion(PROMPTS[0], 3, 4)]) is None
    foreseen.look(2)
    assert foreseen.scores(0, asked) is None, "two versions are kept"
    assert foreseen.scores(1, asked) is not None
    foreseen.look(1)
    assert foreseen.scores(2, asked) is not None, "a return to a version leaves the one it returned from"


def test_the_model_holds_other_weights_for_a_while_and_then_its_own_bits(policy):
    own = policy.snapshot()
    tokens = (11, 2, 30)
    before, other = scored(policy, tokens), moved(policy)
    with policy.holding(other):
        assert scored(policy, tokens) != before
        assert all(torch.equal(policy.weights[name], tensor) for name, tensor in other.items())
    assert all(torch.equal(policy.weights[name], tensor) for name, tensor in own.items())
    with pytest.raises(KeyError), policy.holding({**other, "no.such": torch.zeros(1)}):
        pass
    assert scored(policy, tokens) == before


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_a_copy_on_the_host_keeps_what_the_weights_were(device):
    weights = {
        "a": torch.randn(300, 7, device=device).to(torch.bfloat16),
        "b": torch.randn((), device=device).to(torch.bfloat16),
        "c": torch.randn(5, device=device),
    }
    copy = HostCopy(weights)
    for _ in range(2):
        then = {name: tensor.cpu().clone() for name, tensor in weights.items()}
        copy.begin()
        copy.wait()
        for tensor in weights.values():
            tensor += 1
        assert all(torch.equal(copy.tensors[name], tensor) for name, tensor in then.items())
    assert copy.nbytes == 2 * 2101 + 4 * 5
    assert all(tensor.is_pinned() == (device == "cuda") for tensor in copy.tensors.values())
