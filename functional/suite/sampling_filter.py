"""Top-k and top-p as vLLM applies them: log-probs of what remains, by which the trainer scores what was sampled.

Of logits over temperature, top-k keeps the k largest and what equals the least of them; of these, top-p keeps each
token before which less than p of their mass lies. Rounding moves tokens over the edge of a set: one that the engine
sampled is scored as a member all the same, and how far it lay outside is noted.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

HALVINGS = 18
"""On a GPU vLLM 0.23.0 (topk_topp_triton.py) sorts nothing: it looks for the probability at the edge of top-p by
halving the span of the probabilities that top-k leaves, this often at most. Of tokens nearer to each other than the
last half, which is at most the largest probability times 2^-18, it cannot tell which of them is the edge."""
ROWS = 256
"""Distributions that are sorted at a time: sorting takes three times their memory."""


@dataclass(frozen=True)
class SamplingFilter:
    """top_k: None keeps all; top_p: 1 keeps all."""

    top_k: int | None = None
    top_p: float = 1.0

    @property
    def is_on(self) -> bool:
        return self.top_k is not None or self.top_p < 1


@dataclass
class Flips:
    """Sampled tokens that the trainer's own logits leave out. furthest: by how many nats its logits would have to move,
    at least, for all of them to be members."""

    tokens: int = 0
    furthest: float = 0.0


def logprobs(logits: Tensor, ids: Tensor, kept: SamplingFilter) -> Tensor:
    """Log-probs of `ids` [N] among what remains of `logits` [N, V], each ID a member of its own set -> [N] float32."""
    members = logits.detach() >= least_kept(logits.detach(), kept)
    members.scatter_(1, ids[:, None], True)
    remaining = logits.masked_fill(~members, -torch.inf)
    return torch.log_softmax(remaining, -1).gather(1, ids[:, None])[:, 0]


@torch.no_grad()
def least_kept(logits: Tensor, kept: SamplingFilter) -> Tensor:
    """The smallest logit that remains of each row of `logits` [N, V] -> [N, 1]."""
    return torch.cat([_least_kept(rows, kept) for rows in logits.split(ROWS)])


def _least_kept(logits: Tensor, kept: SamplingFilter) -> Tensor:
    vocabulary = logits.shape[1]
    if kept.top_p >= 1:
        return logits.topk(min(kept.top_k or vocabulary, vocabulary)).values[:, -1:]
    largest = logits.topk(min(kept.top_k or vocabulary, vocabulary)).values  # in falling order
    mass = _mass(logits, largest[:, -1:])
    share = (largest - mass).exp()
    count = (share.cumsum(-1) - share < kept.top_p).sum(-1, keepdim=True)
    return largest.gather(1, count.clamp(min=1) - 1)


def _mass(logits: Tensor, least: Tensor) -> Tensor:
    """Logarithm of the mass of what is `least` or above -> [N, 1]."""
    return torch.logsumexp(logits.masked_fill(logits < least, -torch.inf), -1, keepdim=True)


@torch.no_grad()
def find_flips(logits: Tensor, ids: Tensor, kept: SamplingFilter, flips: Flips) -> None:
    """Note which of the sampled `ids` [N] are outside the sets of `logits` [N, V].

    With logits that move by e at most, whatever is less than 2 e above a token may fall behind it, and the log-odds of
    the mass that still lies before it come down by 2 e at most. It enters top-k once fewer than k are before it, and
    top-p once those log-odds are p's. A token that the engine's own search cannot tell from the edge of top-p is noted
    and no distance away.
    """
    own = logits.gather(1, ids[:, None])
    outside = (own < least_kept(logits, kept))[:, 0]
    if not outside.any():
        return
    flips.tokens += int(outside.sum())
    for rows, scores in zip(logits[outside].split(ROWS), own[outside].split(ROWS), strict=True):
        needed = _needed(rows, scores, kept).masked_fill(_cannot_be_told(rows, scores, kept), 0)
        flips.furthest = max(flips.furthest, float(needed.max()))


def _cannot_be_told(logits: Tensor, own: Tensor, kept: SamplingFilter) -> Tensor:
    """Whether the tokens of `own` [N, 1], in their rows' top-k, are as near top-p's edge as HALVINGS says -> [N]."""
    if kept.top_p >= 1:
        return torch.zeros_like(own[:, 0], dtype=torch.bool)
    kth = _least_kept(logits, SamplingFilter(kept.top_k))
    mass = _mass(logits, kth)
    short = (_least_kept(logits, kept) - mass).exp() - (own - mass).exp()
    reach = (logits.max(-1, keepdim=True).values - mass).exp() * 2.0**-HALVINGS
    return ((own >= kth) & (short <= reach))[:, 0]


def _needed(logits: Tensor, own: Tensor, kept: SamplingFilter) -> Tensor:
    """By how many nats the logits of rows [N, V] must move for the tokens of `own` [N, 1] to be members -> [N]."""
    edge = torch.full_like(own, -torch.inf)
    if kept.top_k is not None:
        edge = _least_kept(logits, SamplingFilter(kept.top_k))
    needed = (edge - own).clamp(min=0)[:, 0]
    if kept.top_p < 1:
        falling = logits.masked_fill((logits < edge) & (logits != own), -torch.inf).sort(descending=True).values
        share = falling.softmax(-1)
        odds = (share.cumsum(-1) - share).clamp(max=1 - 1e-6).logit()  # of what is before each place
        short = odds - math.log(kept.top_p / (1 - kept.top_p))
        needed = torch.maximum(needed, torch.maximum((falling - own).clamp(min=0), short).min(-1).values)
    return needed / 2
