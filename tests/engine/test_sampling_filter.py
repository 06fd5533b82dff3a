"""The trainer's top-k and top-p against vLLM's own."""

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, apply_top_k_top_p_pytorch

from functional.suite.sampling_filter import HALVINGS, Flips, SamplingFilter, find_flips, least_kept, logprobs

ROWS, VOCABULARY = 600, 300
ROUNDED = 1e-6
"""What single precision may move a sum of probabilities by."""
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


def halving(logits, top_k, top_p, halvings):
    """The way of vLLM's kernel for GPUs to the edge of top-p, for a processor: log-probs of every token. It looks for a
    probability above which the mass is top-p, by halving the span among what top-k leaves."""
    remaining = logits.masked_fill(logits < least_kept(logits, SamplingFilter(top_k)), -torch.inf)
    share = remaining.softmax(-1)
    for row in range(len(logits)):
        own = share[row][share[row] > 0]
        low, high = own.min(), own.max()
        for _ in range(halvings):
            pivot = (low + high) / 2
            above = own[own > pivot]
            if above.sum() >= top_p and above.sum() - above.min() < top_p:
                break
            low, high = (pivot, high) if above.sum() > top_p else (low, pivot)
        else:
            pivot = (low + high) / 2
        remaining[row, share[row] <= pivot] = -torch.inf
    return torch.log_softmax(remaining, -1)


def part_too_far(logits, theirs, kept):
    """Tokens on which the sets part although they lie further from the edge than the kernel's search can tell."""
    least = least_kept(logits, kept)
    top = logits.masked_fill(logits < least_kept(logits, SamplingFilter(kept.top_k)), -torch.inf)
    share = top.softmax(-1)
    edge = share.masked_fill(logits < least, torch.inf).min(-1, keepdim=True).values
    told = share.max(-1, keepdim=True).values * 2.0**-HALVINGS + 1e-5 * edge  # and what single precision rounds
    differ = theirs.isfinite() != (logits >= least)
    too_far = differ & ((share - edge).abs() > (told if kept.top_p < 1 else 0))
    for row, token in too_far.nonzero().tolist():
        before = share[row][share[row] > share[row, token]].double().sum()
        too_far[row, token] = abs(float(before) - kept.top_p) > ROUNDED
    return too_far, differ.any(-1)


def test_a_search_that_halves_too_seldom_parts_too_far():
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    kept = SamplingFilter(50, 0.95)
    too_far, rows = part_too_far(logits, halving(logits, 50, 0.95, HALVINGS), kept)
    assert not too_far.any()
    assert 0 < rows.sum() < ROWS / 50, "a few edges are closer than the search can tell"
    too_far, _ = part_too_far(logits, halving(logits, 50, 0.95, HALVINGS - 5), kept)
    assert too_far.any()


def test_tokens_that_the_search_cannot_tell_are_flips_of_no_distance():
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    kept = SamplingFilter(50, 0.95)
    for halvings, is_near in ((HALVINGS, True), (HALVINGS - 5, False)):
        members = halving(logits, 50, 0.95, halvings).isfinite()
        rows, ids = (members & (logits < least_kept(logits, kept))).nonzero(as_tuple=True)
        flips = Flips()
        find_flips(logits[rows], ids, kept, flips)
        assert flips.tokens == len(rows) > 0
        assert (flips.furthest == 0) is is_near


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: there vLLM has a kernel of its own")
@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
def test_members_and_log_probs_are_those_of_vllms_kernel(top_k, top_p):
    """But for tokens nearer the edge of top-p than the kernel can tell. A sampled one that the trainer would cut is
    scored as a member, and counted. Distinct logits: of equals at the edge of top-k the kernel keeps the first, as many
    as fill up to k."""
    logits = (3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))).cuda()
    k = None if top_k is None else torch.full((ROWS,), min(top_k, VOCABULARY), device="cuda", dtype=torch.int32)
    p = None if top_p == 1 else torch.full((ROWS,), top_p, device="cuda")
    theirs = torch.log_softmax(apply_top_k_top_p(logits.clone(), k, p), -1)
    kept, flips = SamplingFilter(top_k, top_p), Flips()
    too_far, parted = part_too_far(logits, theirs, kept)
    assert not too_far.any(), f"{int(too_far.sum())} tokens in {int(too_far.any(-1).sum())} rows"
    ids = torch.multinomial(theirs.exp(), 1)[:, 0]
    find_flips(logits, ids, kept, flips)
    assert flips.tokens <= parted.sum()
    assert flips.furthest < 1e-4
    expected = theirs.gather(1, ids[:, None])[:, 0]
    differ = (logprobs(logits, ids, kept) - expected).abs()
    assert differ[~parted].max() < 1e-4
