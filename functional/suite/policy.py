"""The trained policy: fp32 master weights, and the bfloat16 copy that both the forward pass and the refit use.

What `named_tensors` hands to the engine is bit for bit what `logprobs` computes with, so log-probs of trainer and
engine differ only by their kernels.

In a trainer of several ranks each holds a part of every weight (`shards`), and all call the same methods with the same
arguments in the same order. What comes out is the same on each, and the same as of one rank, up to rounding.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, SequentialLR
from transformers import AutoModelForCausalLM

from functional.runtime.recipe.model import LossConfig, OptimizerConfig, SchedulerConfig
from functional.suite.checkpoint_views import CheckpointForm
from functional.suite.grpo import clean, clipped_loss, mean_abs_difference, token_mult_prob_error
from functional.suite.sampling_filter import Flips, SamplingFilter, find_flips
from functional.suite.sampling_filter import logprobs as filtered_logprobs
from functional.suite.shards import Shards, emptied, filled, part_of

WHOLE = SamplingFilter()
"""The model's own distribution, of which nothing is cut."""
ENGINE_ROUNDING = 4.0
"""An engine agrees with the trainer within this many times what bfloat16 costs the trainer itself: as much again for
the engine's own rounding makes 1.4; the rest is room for kernels that round more often."""
ROUNDING_FLOOR = 0.01
"""Nats; where rounding costs less, this much difference is allowed: it changes a probability by 1%."""


@dataclass(frozen=True)
class Sample:
    """One completion as it came back: token IDs as the engine reports them, and its log-prob of each (nats).

    own_logprobs: the trainer's under the policy version that made it, where that is an older one; is_judged: whether
    engine and trainer can be held against each other on it, which needs log-probs of one version.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    generation_logprobs: Sequence[float]
    advantage: float = 0.0
    own_logprobs: Sequence[float] | None = None
    is_judged: bool = True


@dataclass(frozen=True)
class Batch:
    """Samples as tensors, padded right. B samples, L = longest prompt + completion, T = longest completion.

    input_ids [B, L] int64; prompt_lengths [B] int64; completion_ids [B, T] int64; mask [B, T] bool, true at completion
    tokens; generation_logprobs [B, T] float32; advantages [B] float32; own_logprobs [B, T] float32, NaN where the
    present version made the sample; judged [B, T] bool, true at tokens that engine and trainer are compared on.
    """

    input_ids: Tensor
    prompt_lengths: Tensor
    completion_ids: Tensor
    mask: Tensor
    generation_logprobs: Tensor
    advantages: Tensor
    own_logprobs: Tensor
    judged: Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`; tensors that are there already are shared."""
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def rows(self, start: int, stop: int) -> Batch:
        """Samples `start` up to `stop`, L and T as they are; a view."""
        return Batch(**{name: tensor[start:stop] for name, tensor in vars(self).items()})

    def share(self, shards: Shards | None) -> Batch:
        """A rank's samples: as many as any other's, some of them, past the end, without a completion."""
        if shards is None:
            return self
        start, each = shards.rows(len(self))
        rows = torch.arange(start, start + each, device=self.input_ids.device)
        taken = rows.clamp(max=len(self) - 1)
        share = Batch(**{name: tensor[taken] for name, tensor in vars(self).items()})
        for flags in (share.mask, share.judged):
            flags[rows >= len(self)] = False
        return share


def collate(samples: Sequence[Sample]) -> Batch:
    """The samples as one batch. Raises ValueError for an empty prompt or completion, or lengths that differ."""
    if not samples:
        raise ValueError("no samples")
    for i, s in enumerate(samples):
        if not s.prompt_ids or not s.completion_ids:
            raise ValueError(f"sample {i}: prompt or completion is empty")
        if len(s.completion_ids) != len(s.generation_logprobs):
            raise ValueError(
                f"sample {i}: {len(s.completion_ids)} completion tokens, {len(s.generation_logprobs)} log-probs"
            )
    rows, length = len(samples), max(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
    longest = max(len(s.completion_ids) for s in samples)
    batch = Batch(
        input_ids=torch.zeros(rows, length, dtype=torch.long),
        prompt_lengths=torch.tensor([len(s.prompt_ids) for s in samples]),
        completion_ids=torch.zeros(rows, longest, dtype=torch.long),
        mask=torch.zeros(rows, longest, dtype=torch.bool),
        generation_logprobs=torch.zeros(rows, longest),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32),
        own_logprobs=torch.full((rows, longest), torch.nan),
        judged=torch.zeros(rows, longest, dtype=torch.bool),
    )
    for row, s in enumerate(samples):
        ids = [*s.prompt_ids, *s.completion_ids]
        n = len(s.completion_ids)
        batch.input_ids[row, : len(ids)] = torch.tensor(ids)
        batch.completion_ids[row, :n] = torch.tensor(list(s.completion_ids))
        batch.mask[row, :n] = True
        batch.generation_logprobs[row, :n] = torch.tensor(list(s.generation_logprobs))
        batch.judged[row, :n] = s.is_judged
        if s.own_logprobs is not None:
            batch.own_logprobs[row, :n] = torch.tensor(list(s.own_logprobs))
    return batch


class Scorer(nn.Module):
    """A causal language model that makes logits only where they are asked for (a real vocabulary is large)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Of what follows each of the positions [B, T] of input_ids [B, L] -> [B, T, V] float32.

        Rows are padded right, so causal attention needs no mask.
        """
        hidden = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        hidden = hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[2]))
        return logits_of(self.model, hidden)

    @property
    def layers(self) -> Any:
        return self.model.model.layers


class Policy:
    """A causal language model under training, on one device or several ranks.

    temperature, kept: what generation samples at and from; log-probs are of what `kept` leaves of logits / temperature,
    as the engine's processed log-probs are. micro_batch_size: samples a forward pass (None: the whole batch).
    optimizer: AdamW at 1e-3 unless given. keep_reference: keep a copy of the first weights, for
    reference_policy_kl_penalty. shards: of a trainer of several ranks; weights, masters and snapshots are then this
    rank's parts.
    """

    def __init__(
        self,
        model: Path | str,
        device: torch.device | str = "cpu",
        *,
        optimizer: OptimizerConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        max_grad_norm: float | None = 1.0,
        temperature: float = 1.0,
        kept: SamplingFilter = WHOLE,
        micro_batch_size: int | None = None,
        keep_reference: bool = False,
        seed: int = 0,
        shards: Shards | None = None,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature must be > 0 to train on samples, not {temperature}")
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.temperature = temperature
        self.kept = kept
        self.max_grad_norm = max_grad_norm
        self.micro_batch_size = micro_batch_size
        self.shards = shards
        loaded: Any = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.bfloat16, attn_implementation="sdpa")
        self.model: Any = loaded.to(self.device).eval()  # eval: no dropout; gradients flow all the same
        self.form = CheckpointForm(self.model)
        self._plain = emptied(self.model) if shards is not None and shards.leads else None
        reference: Any = copy.deepcopy(self.model).requires_grad_(False) if keep_reference else None
        self.scorer = self._divided(self.model)
        self.reference: Scorer | None = None if reference is None else self._divided(reference)
        # Tied weights appear once, under the checkpoint's name.
        self.parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        self.weights = {name: part_of(parameter) for name, parameter in self.parameters.items()}
        self.master = {name: p.detach().float().clone() for name, p in self.weights.items()}
        self.last_scored = (torch.empty(0), torch.empty(0))
        """Log-probs of the last step's tokens, before it: the trainer's and the engine's."""
        self.steps = 0
        """Optimizer steps taken, those of an earlier run included: what the learning rate goes by."""
        self._configs = optimizer or OptimizerConfig(lr=1e-3), scheduler
        self.optimizer, self.scheduler = self._new_optimizer()

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.model.config

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, contiguous bfloat16 tensor on the policy's device) of every weight, in a fixed order."""
        return self.form.each(self.whole_weights())

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(the model's own name, weight) of each; those of several ranks are gathered, one after the other."""
        return ((name, self._whole(name, weight)) for name, weight in self.weights.items())

    @torch.no_grad()
    def logprobs(self, batch: Batch, kept: SamplingFilter | None = None, flips: Flips | None = None) -> Tensor:
        """Log-probs of the batch's completion tokens -> [B, T] float32 on the CPU, zero where the mask is false.

        kept: what they were sampled from, if not from what this policy's rollouts are; `flips` notes the sampled tokens
        that this leaves out.
        """
        return self._all_logprobs(self.scorer, batch.to(self.device), kept or self.kept, self.shards, flips).cpu()

    @torch.no_grad()
    def prompt_logprobs(self, prompt: Sequence[int], scorer: Scorer | None = None) -> Tensor:
        """Log-probs of a prompt's tokens but the first, by the model's own distribution -> [tokens - 1] float32, on the
        policy's device. Two tokens at least. scorer: another model than the policy's."""
        ids = torch.tensor(prompt, device=self.device)
        before = torch.arange(len(prompt) - 1, device=self.device)
        logp = torch.log_softmax((scorer or self.scorer)(ids[None], before[None])[0], -1)
        return logp.gather(-1, ids[1:, None])[:, 0]

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The model computes with `weights` meanwhile, and with its own again afterwards; no second model is made."""
        with torch.no_grad():
            try:
                for name, tensor in weights.items():
                    self.weights[name].copy_(tensor)
                yield
            finally:
                for name, master in self.master.items():
                    self.weights[name].copy_(master)  # rounds to what it was: see `_step`

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch) -> Tensor:
        """As logprobs, of whole distributions, by the weights the policy began with. Raises ValueError where none were
        kept."""
        if self.reference is None:
            raise ValueError("this policy keeps no reference: make it with keep_reference=True")
        return self._all_logprobs(self.reference, batch.to(self.device), WHOLE, self.shards).cpu()

    def train_step(self, batch: Batch, loss_config: LossConfig, flips: Flips | None = None) -> dict[str, float]:
        """One optimizer step on the batch, and its metrics. flips: of the samples that an older version made.

        Besides clipped_loss's: grad_norm (before clipping), logp_noise (mean |trainer - engine| in nats, before the
        step), logp_shift (mean |after - before| on the same samples), tokens, and what `agreement_bounds` gives. Of
        samples that older versions made, logp_noise and token_mult_prob_error are by those; logp_lag is how far (mean,
        nats) the trainer has gone since they were made, and judged_tokens how many tokens could be compared.
        Raises ValueError when gradients are not finite; the weights are then unchanged.
        """
        batch, shards = batch.to(self.device), self.shards
        flips = flips or Flips()
        with torch.no_grad():
            before = self._all_logprobs(self.scorer, batch, self.kept, shards, flips)
            penalised = self.reference if loss_config.reference_policy_kl_penalty > 0 else None
            reference = None if penalised is None else self._all_logprobs(penalised, batch, WHOLE, shards)
        own = torch.where(batch.own_logprobs.isnan(), before, batch.own_logprobs)
        self.last_scored = own[batch.judged], batch.generation_logprobs[batch.judged]
        bounds = self.agreement_bounds(batch, before)
        if self.kept.is_on:
            bounds |= {"filter_flips": float(flips.tokens), "filter_flip_nats": flips.furthest}
        tokens, samples = int(batch.mask.sum()), len(batch)
        gradients = {name: torch.zeros_like(m) for name, m in self.master.items()}
        metrics: dict[str, float] = {}
        share, old = batch.share(shards), self._share(before)
        of_reference = None if reference is None else self._share(reference)
        for start, stop in self._slices(len(share)):
            part = share.rows(start, stop)
            logits = self._logits(self.scorer, part)
            logp = self._score(logits, part, self.kept)
            whole = self._score(logits, part, WHOLE) if self.kept.is_on and penalised is not None else logp
            loss, values = clipped_loss(
                logp,
                old[start:stop],
                part.generation_logprobs,
                part.advantages,
                part.mask,
                loss_config,
                reference_logp=None if of_reference is None else of_reference[start:stop],
                whole_logp=whole,
                tokens=tokens,
                samples=samples,
            )
            torch.autograd.backward(loss)
            for name in gradients:
                if (gradient := self._take_gradient(name)) is not None:
                    gradients[name] += gradient
            metrics = {name: metrics.get(name, 0.0) + value for name, value in values.items()}
        metrics = self._summed(metrics)
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        metrics["grad_norm"] = self._step(gradients)
        with torch.no_grad():
            after = self._all_logprobs(self.scorer, batch, self.kept, shards)
        engine, judged = batch.generation_logprobs, batch.judged
        return {
            **metrics,
            **bounds,
            "tokens": float(tokens),
            "token_mult_prob_error": float(token_mult_prob_error(own, engine, judged)),
            "logp_noise": float(mean_abs_difference(own, engine, judged)),
            "logp_shift": float(mean_abs_difference(after, before, batch.mask)),
            "logp_lag": float(mean_abs_difference(before, own, batch.mask)),
            "judged_tokens": float(judged.sum()),
        }

    @torch.no_grad()
    def agreement_bounds(self, batch: Batch, logprobs: Tensor) -> dict[str, float]:
        """How far engine and trainer may differ on these tokens, from what bfloat16 costs the trainer itself: its
        log-probs against those of the same weights computed in float32, on the first micro-batch.

        logprobs: the trainer's, [B, T]. Returns logp_rounding (mean |bfloat16 - float32|), logp_noise_bound (nats),
        token_mult_prob_error_bound, and filter_flip_nats_bound, of the token that rounding moved furthest. Of several
        ranks only the first has them.
        """
        exact_scorer = self.copied(torch.float32)
        if exact_scorer is None:
            return {}
        start, stop = next(self._slices(len(batch)))
        part = batch.rows(start, stop)
        exact = self._score(self._logits(exact_scorer, part), part, self.kept)
        rounding = (logprobs[start:stop] - exact).abs()[part.mask]
        allowed = (ENGINE_ROUNDING * rounding).clamp(min=ROUNDING_FLOOR)
        return {
            "logp_rounding": float(rounding.mean()),
            "logp_noise_bound": float(allowed.mean()),
            "token_mult_prob_error_bound": float(allowed.exp().mean()),
            "filter_flip_nats_bound": float(allowed.max()),
        }

    @torch.no_grad()
    def copied(self, dtype: torch.dtype) -> Scorer | None:
        """A model of its own with the weights as they are now, undivided; on the first of several ranks alone."""
        if self.shards is None:
            return Scorer(copy.deepcopy(self.model).to(dtype))
        taken = {}
        for name, weight in self.whole_weights():
            if self._plain is not None:
                taken[name] = weight.to(dtype)
        return None if self._plain is None else Scorer(filled(self._plain, taken))

    def checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Master weights by name, and the optimizer's state by `key/name`, all on the host. Of several ranks only the
        first has them."""
        weights, state = {}, {}
        for name, master in self.master.items():
            if (kept := self._on_first(name, master)) is not None:
                weights[name] = kept
            for key, value in self.optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor) and (kept := self._on_first(name, value)) is not None:
                    state[f"{key}/{name}"] = kept
        return weights, state

    def _on_first(self, name: str, value: Tensor) -> Tensor | None:
        """On the host of the first rank, all of what each rank has a part of; a number all have."""
        whole = value if value.ndim == 0 else self._whole(name, value)
        if self.shards is not None and not self.shards.leads:
            return None
        return whole.detach().cpu().contiguous()

    @torch.no_grad()
    def resume(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], steps: int) -> None:
        """Take what `checkpoint` gave, after so many optimizer steps. Raises ValueError, before anything is changed,
        for tensors of another model."""
        if other := weights.keys() ^ self.master.keys():
            raise ValueError(f"the checkpoint is of another model: {sorted(other)[:3]} differ")
        for name, tensor in weights.items():
            if tensor.shape != self.parameters[name].shape:
                raise ValueError(f"the checkpoint is of another model: {name} has shape {list(tensor.shape)}")
        for name, tensor in weights.items():
            self.master[name].copy_(self._part(tensor))
            self.weights[name].copy_(self.master[name])
        self.steps = steps
        self.optimizer, self.scheduler = self._new_optimizer()
        for place, value in state.items():
            key, _, name = place.partition("/")
            master = self.master[name]
            self.optimizer.state[master][key] = value if value.ndim == 0 else self._part(value).to(master.device)

    def snapshot(self) -> dict[str, Tensor]:
        """The bfloat16 weights, copied to host memory."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.weights.items()}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Go back to a snapshot. Master weights take its bfloat16 values and the optimizer starts anew.

        Raises ValueError, before anything is changed, for a snapshot of other tensors.
        """
        if snapshot.keys() != self.weights.keys():
            raise ValueError(f"snapshot does not fit: {sorted(snapshot.keys() ^ self.weights.keys())[:3]} differ")
        for name, tensor in snapshot.items():
            self.weights[name].copy_(tensor)
            self.master[name].copy_(self.weights[name])
        self.optimizer, self.scheduler = self._new_optimizer()

    def _new_optimizer(self) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
        """A fresh optimizer, and a scheduler that has seen `steps` steps."""
        optimizer, scheduler = self._configs
        made = make_optimizer(optimizer, list(self.master.values()))
        return made, None if scheduler is None else make_scheduler(scheduler, made, self.steps)

    def _step(self, gradients: dict[str, Tensor]) -> float:
        """Clip, step the master weights, round them into the bfloat16 copy -> the gradients' norm before clipping."""
        for name, master in self.master.items():
            master.grad = gradients[name]
        norm = self._clip(list(gradients.values()))
        if not math.isfinite(norm):
            raise ValueError(f"gradients are not finite (norm {norm}); weights left as they were")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        if self.scheduler is not None:
            self.scheduler.step()
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(self.master[name])
        return norm

    def _clip(self, gradients: list[Tensor]) -> float:
        """Scale the gradients down to `max_grad_norm` -> their norm before."""
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.shards is not None:
            norm = self.shards.sum(norm.double().square()[None])[0].sqrt().float()
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(list(self.master.values()), self.max_grad_norm, norm)
        return float(norm)

    def _divided(self, model: Any) -> Scorer:
        scorer = Scorer(model)
        if self.shards is not None:
            self.shards.divide(scorer, scorer.layers)
        return scorer

    def _whole(self, name: str, part: Tensor) -> Tensor:
        return part if self.shards is None else self.shards.whole(self.parameters[name], part)

    def _part(self, whole: Tensor) -> Tensor:
        return whole if self.shards is None else self.shards.part(whole)

    def _take_gradient(self, name: str) -> Tensor | None:
        parameter = self.parameters[name]
        if self.shards is not None:
            return self.shards.gradient(parameter)
        gradient, parameter.grad = parameter.grad, None
        return gradient

    def _share(self, values: Tensor) -> Tensor:
        """A rank's rows of what all have of the batch, as `Batch.share` takes them."""
        if self.shards is None:
            return values
        start, each = self.shards.rows(len(values))
        return values[torch.arange(start, start + each, device=values.device).clamp(max=len(values) - 1)]

    def _summed(self, metrics: dict[str, float]) -> dict[str, float]:
        """Of all ranks' parts of a batch."""
        if self.shards is None:
            return metrics
        values = self.shards.sum(torch.tensor(list(metrics.values()), dtype=torch.float64))
        return dict(zip(metrics, values.tolist(), strict=True))

    def _add_flips(self, flips: Flips, found: Flips, shards: Shards | None) -> None:
        """To `flips`, what each rank found in its share."""
        tokens, furthest = found.tokens, found.furthest
        if shards is not None:
            tokens = int(shards.sum(torch.tensor([tokens])))
            furthest = float(shards.largest(torch.tensor([furthest])))
        flips.tokens += tokens
        flips.furthest = max(flips.furthest, furthest)

    def _slices(self, count: int) -> Iterator[tuple[int, int]]:
        size = self.micro_batch_size or count
        for start in range(0, count, size):
            yield start, min(start + size, count)

    def _all_logprobs(
        self, scorer: Scorer, batch: Batch, kept: SamplingFilter, shards: Shards | None, flips: Flips | None = None
    ) -> Tensor:
        """Of the whole batch, of which each of the ranks that a model is divided among scores a share."""
        share, found, own_flips = batch.share(shards), [], None if flips is None else Flips()
        for start, stop in self._slices(len(share)):
            part = share.rows(start, stop)
            found.append(self._score(self._logits(scorer, part), part, kept, own_flips))
        if flips is not None and own_flips is not None:
            self._add_flips(flips, own_flips, shards)
        scored = torch.cat(found)
        return scored if shards is None else shards.joined(scored, len(batch))

    def _logits(self, scorer: Scorer, batch: Batch) -> Tensor:
        """Over temperature, where a completion token is predicted: [B, T, V] float32."""
        steps = torch.arange(batch.mask.shape[1], device=self.device)
        predicts = (batch.prompt_lengths[:, None] - 1 + steps).clamp(max=batch.input_ids.shape[1] - 1)
        logits: Tensor = scorer(batch.input_ids, predicts)
        return logits / self.temperature

    def _score(self, logits: Tensor, batch: Batch, kept: SamplingFilter, flips: Flips | None = None) -> Tensor:
        """Log-probs of the completion tokens, [B, T]; `flips` notes those that their set would leave out."""
        if not kept.is_on:
            logp = torch.log_softmax(logits, -1).gather(-1, batch.completion_ids[:, :, None])[..., 0]
            return clean(logp, batch.mask)
        rows, ids = logits[batch.mask], batch.completion_ids[batch.mask]
        if flips is not None:
            now = batch.own_logprobs.isnan() & batch.judged
            find_flips(logits[now], batch.completion_ids[now], kept, flips)
        return torch.zeros_like(logits[..., 0]).masked_scatter(batch.mask, filtered_logprobs(rows, ids, kept))


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """float32 logits of hidden states, as the model's own forward makes them: Granite scales them down."""
    logits: Tensor = model.lm_head(hidden).float()
    return logits / getattr(model.config, "logits_scaling", 1.0)


def make_optimizer(config: OptimizerConfig, weights: list[Tensor]) -> torch.optim.Optimizer:
    """The optimizer over the tensors."""
    if config.name == "adamw":
        return torch.optim.AdamW(
            weights, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas, eps=config.eps
        )
    return torch.optim.SGD(weights, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum)


def make_scheduler(config: SchedulerConfig, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """The learning rate's course over an optimizer, after as many steps. Raises TypeError for arguments that a stage
    does not take."""
    stages = [
        getattr(torch.optim.lr_scheduler, stage.name.rpartition(".")[2])(optimizer, **stage.kwargs)
        for stage in config.stages
    ]
    made = stages[0] if len(stages) == 1 else SequentialLR(optimizer, stages, config.milestones)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        for _ in range(steps):  # as far as it has come; the optimizer itself takes no step
            made.step()
    return made
