"""Peers of ``gen bench``: the rules of papers as plain loops, one item at a time, against
transformers' own module and cache. Simple on purpose.

reference (autoregression)    one token per forward pass
reference (Jacobi)            speculative Jacobi decoding, Teng et al., arXiv 2410.01699:
    x_j ~ q_j in the last forward pass, or any allowed token where a position has just come into the
    window (q_j = 1 there); accept x_j while u < p_j(x_j) / q_j(x_j); at the first rejected position
    draw from max(0, p_j - q_j), normalised; behind it draw from p_j: the next drafts
reference (MaskGIT)           Chang et al., arXiv 2202.04200: step s of S commits all but the
                              floor(T cos(pi r / 2)) masked positions of lowest
    confidence log p(x) + t (1 - r) Gumbel, r = (s + 1) / S
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from gen.bench.baselines.base import NOT_HERE, Calls, Network, Peer, network, prompts
from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.sampling_params import SamplingParams
from gen.core.stats import Stats
from gen.models.adapters.language_models import CausalLM, MaskedLM
from gen.models.load.cache_argument import with_cache
from gen.models.load.networks import config_field
from gen.pipeline.pipeline import Pipeline

Made = tuple[list[int], list[int]]  # tokens, and the acceptance histogram


class Item:
    """Item of a loop: the distribution at its positions. The two CFG branches are two rows of one
    forward pass."""

    def __init__(self, net: Network, item: Any, sampling: SamplingParams):
        self.net, self.sampling, self.space = net, sampling, net.space
        (said,), without = prompts(net, [item], sampling)
        rows = [said, *(without or [])]
        if len({len(row) for row in rows}) > 1:
            raise GenError(
                f"a prompt has {len(rows[0])} ids, and {len(rows[1])} without its condition;"
                " expected as many"
            )  # for one plain call
        self.prompt = torch.tensor(rows, device=net.module.device)
        self.legal = net.space.legal.to(net.module.device)
        self.cache = DynamicCache()

    def split(self, logits: Tensor, legal: Tensor) -> Tensor:
        """Convert logits [branches, n, V] to probabilities [n, V]."""
        return self.sampling(logits[0], logits[1] if self.sampling.guided else None, legal).exp()

    @torch.no_grad()
    def after(self, tokens: list[int], drafts: list[int]) -> Tensor:
        """Return log-probabilities [d + 1, V] of the positions behind ``tokens``, each given the
        drafts before it."""
        n, width = len(tokens), self.prompt.shape[1]
        said = torch.tensor(
            [(tokens[-1:] if n else []) + drafts], dtype=torch.long, device=self.prompt.device
        ).expand(len(self.prompt), -1)
        ids = said if n else torch.cat([self.prompt, said], 1)
        kept = width + n - 1 if n else 0  # everything but the last token, which goes in now
        if self.cache.get_seq_length() > kept:
            self.cache.crop(kept - self.cache.get_seq_length())
        at = torch.arange(kept, kept + ids.shape[1], device=ids.device).expand_as(ids)
        logits = self.net.module(
            input_ids=ids,
            position_ids=at,
            use_cache=True,
            **with_cache(self.net.module, self.cache),
        ).logits[:, -len(drafts) - 1 :]
        return self.split(logits, self.allowed(tokens, drafts))

    def allowed(self, tokens: list[int], drafts: list[int]) -> Tensor:
        """Return the allowed tokens at those positions: bool [d + 1, V]."""
        n, length = len(tokens), self.space.length
        legal = self.legal[n : n + len(drafts) + 1]
        if not self.space.is_history_dependent:
            return legal
        history = torch.tensor([(tokens + drafts + [0] * length)[:length]], device=legal.device)
        return self.space.apply_constraint(
            legal[None], history, torch.arange(n, n + len(legal), device=legal.device)[None]
        )[0]

    def over(self, tokens: list[int]) -> bool:
        return len(tokens) == self.space.length or (
            bool(tokens) and tokens[-1] in self.space.row_ends
        )


def draw(p: Tensor, generator: torch.Generator) -> int:
    """Draw a token from weights [V]."""
    return int(torch.multinomial(p.cpu(), 1, generator=generator))


def autoregression(item: Item, generator: torch.Generator) -> Made:
    tokens: list[int] = []
    while not item.over(tokens):
        tokens.append(draw(item.after(tokens, [])[0], generator))
    return tokens, []


def jacobi(item: Item, generator: torch.Generator, window: int = 16) -> Made:
    """Decode up to ``window`` positions per forward pass."""
    tokens, drafts, histogram = [], [], [0] * window
    distributions: list[Tensor | None] = []  # that the drafts came from; none: taken as they are
    while not item.over(tokens):
        for position in range(
            len(tokens) + len(drafts), min(len(tokens) + window - 1, item.space.length - 1)
        ):
            drafts.append(draw(item.legal[position].double(), generator))
            distributions.append(None)
        p = item.after(tokens, drafts)
        kept = 0
        while kept < len(drafts) and not item.over(tokens):
            x, q = drafts[kept], distributions[kept]
            if float(torch.rand((), generator=generator)) * (
                1.0 if q is None else float(q[x])
            ) >= float(p[kept, x]):
                break
            tokens.append(x)
            kept += 1
        histogram[kept] += 1
        if not item.over(tokens):
            rest = p[kept]
            if kept < len(drafts):
                q = (
                    (torch.arange(len(rest), device=rest.device) == drafts[kept]).to(rest)
                    if distributions[kept] is None
                    else distributions[kept]
                )
                rest = (rest - q).clamp_min(0)
            tokens.append(draw(rest, generator))
        distributions = list(
            p[kept + 1 :][: item.space.length - len(tokens) - 1]
        )  # the last position follows whatever is kept before it
        drafts = [draw(row, generator) for row in distributions]
    return tokens, histogram


@torch.no_grad()
def maskgit(item: Item, generator: torch.Generator, steps: int, temperature: float) -> Made:
    """Decode by MaskGIT. ``temperature``: t. Every forward pass computes all positions, without a
    cache."""
    module, length, mask = item.net.module, item.space.length, item.space.mask_token_id
    shift = int(config_field(module.config, "shifted", False))
    canvas, branches = torch.full((length,), mask, device=item.prompt.device), len(item.prompt)
    for step in range(steps):
        r, masked = (step + 1) / steps, canvas == mask
        if not bool(masked.any()):
            break
        ids = torch.cat([item.prompt, canvas.expand(branches, -1)], 1)
        seen = torch.zeros(
            branches,
            1,
            ids.shape[1],
            ids.shape[1],
            dtype=next(module.parameters()).dtype,
            device=ids.device,
        )
        logits = module(input_ids=ids, attention_mask=seen, use_cache=False).logits[
            :, -length - shift :
        ][:, :length]
        p = item.split(logits, item.legal)
        x = torch.multinomial(p.cpu(), 1, generator=generator)[:, 0].to(canvas.device)
        gumbel = -torch.log(
            -torch.log(torch.rand(length, generator=generator, dtype=torch.float64))
        ).to(p.device)
        score = (
            p.gather(1, x[:, None])[:, 0].double().log() + temperature * (1 - r) * gumbel
        ).masked_fill(~masked, -math.inf)
        left = (
            min(int(length * math.cos(math.pi * r / 2) + 1e-9), int(masked.sum()) - 1)
            if step < steps - 1
            else 0
        )
        chosen = score.argsort(descending=True, stable=True)[: int(masked.sum()) - left]
        canvas[chosen] = x[chosen]
    return canvas.tolist(), []


def looped(
    pipe: Pipeline,
    net: Network,
    sampling: SamplingParams,
    loop: Callable[..., Made],
    items: Sequence[Any],
) -> tuple[Tensor, list[Stats]]:
    """Run a loop on one item after the other."""
    rows, stats = [], []
    for item in items:
        generator = torch.Generator().manual_seed(pipe.draw_key(item))
        with Calls(net.module) as calls:
            tokens, histogram = loop(Item(net, item, sampling), generator)
        rows.append(tokens + [net.space.eos_token_id] * (net.space.length - len(tokens)))
        stats.append(calls.stats(len(tokens), acceptance_histogram=histogram))
    return torch.tensor(rows), stats


def peers(pipe: Pipeline, sampling: SamplingParams) -> list[Peer]:
    """Return the rows of this group, with reasons for those that cannot run."""
    causal, masked = network(pipe, "causal", CausalLM), network(pipe, "masked", MaskedLM)
    preset, window = resolve_sampler("maskgit")[0], resolve_sampler("sjd")[0].window
    unmasked = (
        NOT_HERE
        if masked is None
        else (
            None
            if masked.space.eos_token_id is None
            else "rows that end, which MaskGIT knows nothing of"
        )
    )

    def say(name, net, loop, missing):
        return Peer(
            f"reference ({name})",
            sampling,
            net,
            partial(looped, pipe, net, sampling, loop),
            True,
            missing,
        )

    away = None if causal else NOT_HERE
    return [
        say("autoregression", causal, autoregression, away),
        say("Jacobi", causal, partial(jacobi, window=window), away),
        say(
            "MaskGIT",
            masked,
            partial(maskgit, steps=preset.steps, temperature=preset.choice_temperature),
            unmasked,
        ),
    ]
