"""The trainer's top-k and top-p against vLLM's own."""

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, apply_top_k_top_p_pytorch

from functional.suite.sampling_filter import Flips, SamplingFilter, find_flips, least_kept, logprobs

ROWS, VOCABULARY = 600, 300
FILTERS = [(None, 0.95), (None, 0.3), (50, 1.0), (1, 1.0), (50, 0.95), (7, 0.5), (VOCABULARY, 0.9), (400, 1.0)]


def engines(logits, top_k, top_p):
    """Log-probs of every token as vLLM's processed ones are."""
    rows = len(logits)
    k = None if top_k is None else torch.full((rows,), min(top_k, logits.shape[1]))
    p = None if top_p == 1 else torch.full((rows,), top_p)
    return torch.log_softmax(apply_top_k_top_p_pytorch(logits.clone(), k, p), -1)


@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
def test_members_and_log_probs_are_vllms(top_k, top_p):
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    theirs, kept = engines(logits, top_k, top_p), SamplingFilter(top_k, top_p)
    assert torch.equal(logits >= least_kept(logits, kept), theirs.isfinite())
    ids = torch.multinomial(theirs.exp(), 1)[:, 0]
    expected = theirs.gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs(logits, ids, kept), expected, atol=1e-5, rtol=0)
    flips = Flips()
    find_flips(logits, ids, kept, flips)
    assert flips == Flips()


def test_equals_of_the_kth_all_remain_as_in_vllm():
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    assert (logits >= least_kept(logits, SamplingFilter(2))).tolist() == [[True, True, True, True, False]]
    assert engines(logits, 2, 1.0).isfinite().tolist() == [[True, True, True, True, False]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: there vLLM has a kernel of its own")
@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
def test_members_and_log_probs_are_those_of_vllms_kernel(top_k, top_p):
    """Distinct logits: of equals at the edge of top-k the kernel keeps the first, as many as fill up to k."""
    logits = (3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))).cuda()
    k = None if top_k is None else torch.full((ROWS,), min(top_k, VOCABULARY), device="cuda", dtype=torch.int32)
    p = None if top_p == 1 else torch.full((ROWS,), top_p, device="cuda")
    theirs = torch.log_softmax(apply_top_k_top_p(logits.clone(), k, p), -1)
    ids = torch.multinomial(theirs.exp(), 1)[:, 0]
    kept, flips = SamplingFilter(top_k, top_p), Flips()
    find_flips(logits, ids, kept, flips)
    assert flips.furthest < 1e-4
    expected = theirs.gather(1, ids[:, None])[:, 0]
    differ = (logprobs(logits, ids, kept) - expected).abs()
    assert (differ < 1e-4).float().mean() > 0.99
