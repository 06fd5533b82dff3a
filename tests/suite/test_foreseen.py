"""What a trainer has ready before an update: its copy on the host, and its scores of what the probe may sample."""

import pytest
import torch

from functional.suite.host_copy import HostCopy
from functional.suite.models import ARITHMETIC_DIR
from functional.suite.policy import Policy, Sample, collate
from functional.suite.sampling_filter import SamplingFilter
from functional.suite.trainer_rank import Foreseen

PROMPT = (23, 16, 24, 34, 27, 11, 2)
ROUNDING = 0.02


@pytest.fixture
def policy():
    return Policy(ARITHMETIC_DIR)


def scored(policy, prompt=PROMPT):
    """By the path that samples are trained on: the prompt's tail as a completion."""
    batch = collate([Sample(prompt[:1], prompt[1:], (0.0,) * (len(prompt) - 1))])
    return policy.logprobs(batch)[batch.mask].tolist()


def moved(policy):
    generator = torch.Generator().manual_seed(0)
    return {
        name: (tensor.detach() + 0.05 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in policy.weights.items()
    }


def test_foreseen_scores_are_those_of_both_versions(policy):
    foreseen = Foreseen(policy)
    foreseen.look(0)
    assert foreseen.scores(0, PROMPT) is None, "nothing was asked for"
    foreseen.prompt = PROMPT
    foreseen.look(0)
    before = scored(policy)
    policy.restore(moved(policy))
    foreseen.look(1)
    after = scored(policy)
    assert before != pytest.approx(after, abs=10 * ROUNDING), "the versions differ"
    assert foreseen.scores(0, PROMPT) == pytest.approx(before, abs=ROUNDING)
    assert foreseen.scores(1, list(PROMPT)) == pytest.approx(after, abs=ROUNDING)
    assert foreseen.scores(1, PROMPT[:-1]) is None
    foreseen.look(2)
    assert foreseen.scores(0, PROMPT) is None, "two versions are kept"
    assert foreseen.scores(1, PROMPT) is not None
    foreseen.look(1)
    assert foreseen.scores(2, PROMPT) is not None, "a return to a version leaves the one it returned from"


def test_a_prompt_is_scored_by_the_models_own_distribution():
    prompt = PROMPT
    whole = scored(Policy(ARITHMETIC_DIR))
    filtered = Policy(ARITHMETIC_DIR, temperature=0.5, kept=SamplingFilter(top_k=2))
    assert filtered.prompt_logprobs(prompt).tolist() == pytest.approx(whole, abs=ROUNDING)


def test_the_model_holds_other_weights_for_a_while_and_then_its_own_bits(policy):
    own = policy.snapshot()
    before, other = scored(policy), moved(policy)
    with policy.holding(other):
        assert scored(policy) != before
        assert all(torch.equal(policy.weights[name], tensor) for name, tensor in other.items())
    assert all(torch.equal(policy.weights[name], tensor) for name, tensor in own.items())
    with pytest.raises(KeyError), policy.holding({**other, "no.such": torch.zeros(1)}):
        pass
    assert scored(policy) == before


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
