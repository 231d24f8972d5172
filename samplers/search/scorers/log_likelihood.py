"""Scorer ``log_likelihood``: how probable a model finds an output.

    r(x) = 1/n sum_t log p(x_t | prompt, x_<t)      t: the n decided positions, eos token included

One forward pass of a causal model with the item's prompt gives all terms (teacher forcing). The
distribution is the model's own: temperature 1, no filters, no guidance. Reward forward passes are
not counted in the statistics of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gen.contracts.scorer import Sample, Scorer
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.core.resolve import resolve_sampler
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.targets.causal import CausalTarget

ROWS = 32  # outputs of a forward pass
IMPOSSIBLE = -50.0  # log-probability of a token that the model cannot make


@register("scorer", "log_likelihood")
@dataclass(frozen=True)
class LogLikelihood(Scorer):
    """Mean log-probability per token under a causal model of tokens.

    ``model``: name of a model of the same frontend; None for the model of the call.
    """

    model: str | None = None

    about: ClassVar[str] = "mean log-probability per token of a causal model; at most 0"

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, str):
            raise bad_value("log_likelihood.model", self.model, "the name of a model, or None")

    def score(self, samples):
        raise GenError(
            "scorer 'log_likelihood' needs the model of a call; expected a call of a pipeline"
        )

    def attach(self, models: Any, request: Any) -> Scorer:
        """Return the scorer with the target of the call's prompts.

        Raises:
            GenError: the model is not a causal one of tokens, or has another frontend.
        """
        # a look-up of scorers must not import transformers
        from gen.pipeline.models import same_frontend

        own = models.model_name(request.spec)
        name = own if self.model is None else self.model
        _, binding, frontend = models.bound(name)
        protocols = models.serves(name)[0]
        if "causal" not in protocols or binding.space.channels:
            usual = models.modality.models.get("causal")
            raise GenError(
                f"log_likelihood.model is {name!r}, a {' and '.join(protocols)} model of"
                f" {binding.space.kind}; expected a causal model of codes"
                + (f", such as {usual!r}" if usual else "")
            )
        if not same_frontend(frontend, models.bound(own)[2]):
            raise GenError(
                f"log_likelihood.model {name!r} was trained on the tokens of another frontend than"
                f" {own!r}; expected the same one"
            )
        sampler = resolve_sampler("autoregressive")[0]
        return _Likelihood(models.target(sampler, SamplingParams(), request.items, name))


class _Likelihood(Scorer):
    """Log-likelihood of the outputs of a call.

    Args:
        target: causal target of the call's items.
    """

    def __init__(self, target: CausalTarget):
        self.target = target

    @property
    def name(self) -> str:
        return "log_likelihood"

    def score(self, samples):
        parts = [samples[k : k + ROWS] for k in range(0, len(samples), ROWS)]
        return torch.cat([self._means(part) for part in parts]).tolist()

    @torch.no_grad()
    def _means(self, samples: Sequence[Sample]) -> Tensor:
        """Compute the mean log-probability of the decided tokens of each sample, [n]."""
        space, device = self.target.space, self.target.device
        tokens = torch.stack([s.tokens for s in samples]).to(device)
        if tokens.shape[1] > space.length:
            raise GenError(
                f"scorer 'log_likelihood' got outputs of {tokens.shape[1]} positions; expected at"
                f" most {space.length}, those of model {self.target.name}"
            )
        counted = torch.stack([_counted(s, space) for s in samples]).to(device)
        target = self.target.of_items(np.array([s.item for s in samples]))
        before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], 1)
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        logp = target.predict(before, positions.contiguous()).logprobs.double()
        # a masked model may have drawn ids that this one does not have
        ids = tokens.clamp(max=logp.shape[-1] - 1)
        of_token = logp.gather(2, ids[..., None])[..., 0].clamp(min=IMPOSSIBLE)
        of_token = torch.where(tokens == ids, of_token, IMPOSSIBLE)
        total = torch.where(counted, of_token, 0.0).sum(1)
        return (total / counted.sum(1).clamp(min=1)).cpu()


def _counted(sample: Sample, space: TokenSpace) -> Tensor:
    """Find the decided positions of a sample up to its end, bool [T]."""
    tokens, known = sample.tokens, sample.known
    counted = torch.ones(len(tokens), dtype=torch.bool) if known is None else known.cpu()
    ends = space.is_end(tokens).long()
    return counted & (ends.cumsum(0) - ends == 0)
