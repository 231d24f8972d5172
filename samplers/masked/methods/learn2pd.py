"""A selector with weights: a small filter that was trained to say which proposed ids are already
final.

    q_i = s(f(x_i))      x_i: how sure the model is around place i, f: two linear layers with a ReLU
                         between them, s: the logistic function
    committed            the places with q_i >= ``filter_threshold``, and the one of highest score

Learn2PD (Bao et al., arXiv 2509.25188). The label of a place is whether what is proposed there is
what stands there in the end, if one place is committed per call; ``recipes/text/filter.py`` writes
such labels down and trains on them. A threshold above 1 is one place per call, 0 one call per
block.

Their filter reads the confidences of a block of 32 places at once and answers for all of them, so
it serves blocks of that length and no other. Here it answers for one place at a time, and reads
what lies around it: of the places i - R to i + R

    whether the place is of the block, and whether it is known; c, the probability of its proposal;
    -log10(1 - c + 1e-5) / 5, which tells 0.9 from 0.999; exp(-H) of its law; the gap between its
    two highest probabilities. A known place has ones, one that is not of the block zeros

and of the block at work, the share of its places that is known, and mean, least and highest c of
those that are not. All of that is between 0 and 1, and none of it is about ids or about how long a
block is: a filter of one model reads any other, well or badly. Laws are those that
``confidence_on`` names. Rows say nothing about each other, and what is not of the block says
nothing about it.

A filter is a folder, ``config.json`` and ``model.safetensors``; ``sampler.filter`` says which, by
its path or the name of an embedded one. It is read once per call of the sampler: a part that is a
class is made from the knobs and the device when a call begins (``masked_loop``).

End-of-text prediction, the other half of Learn2PD, is the stop ``end`` (``stops``): once the end is
committed and nothing is empty before it, nothing behind it is computed any more. Theirs cuts what
is behind the end off as soon as that is committed, which saves places in the calls up to there.

Guarantee: none about the law.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from gen.core.errors import GenError, unknown
from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.params import Params, number, text
from gen.core.registry import register
from gen.models.load.locate import read_config, readable, zoo
from gen.samplers.masked.parts.orders import entropy as certainty
from gen.samplers.masked.parts.selection import fixed_blocks, greedy
from gen.samplers.masked.step import MaskedStep, highest

KIND = "place_filter"
PER_PLACE, PER_BLOCK = 6, 4
FLOOR = 1e-5  # how near to 1 confidences are told apart


def features(step: MaskedStep, radius: int) -> Tensor:
    """What a filter reads of every place: float64 [b, T, F], F = 6 (2 R + 1) + 4; see the
    module."""
    known, empty = step.open & ~step.masked, step.open & step.masked
    c = step.confidence.clamp(0, 1)
    first, second = step.confidence_logprobs().double().topk(2, -1).values.exp().unbind(-1)
    logprobs = torch.stack(
        [c, -torch.log10((1 - c).clamp_min(0) + FLOOR) / 5, certainty(step).exp(), first - second],
        -1,
    ).clamp(0, 1)
    logprobs = logprobs.masked_fill(known[..., None], 1) * step.open[..., None]
    position = torch.cat([step.open[..., None].double(), known[..., None].double(), logprobs], -1)
    around = (
        nn.functional.pad(position, (0, 0, radius, radius)).unfold(1, 2 * radius + 1, 1).flatten(2)
    )
    count = empty.sum(1).clamp_min(1)
    block = torch.stack(
        [
            known.double().sum(1) / step.open.sum(1).clamp_min(1),
            (c * empty).sum(1) / count,
            c.masked_fill(~empty, 1).amin(1),
            c.masked_fill(~empty, 0).amax(1),
        ],
        -1,
    )
    return torch.cat([around, block[:, None].expand(-1, c.shape[1], -1)], -1)


class PlaceFilter(nn.Module):
    """The filter: features [n, F] of places (``features``) -> logits [n] of their proposals being
    final. ``radius``: how far it looks, in places; ``hidden``: numbers between the two layers."""

    def __init__(self, radius: int = 2, hidden: int = 64):
        super().__init__()
        self.radius, self.hidden = radius, hidden
        self.layers = nn.Sequential(
            nn.Linear(PER_PLACE * (2 * radius + 1) + PER_BLOCK, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[..., 0]

    @torch.no_grad()
    def probability(self, step: MaskedStep) -> Tensor:
        """How likely the proposal of every place that may be committed is final, by a filter in
        float64: [b, T], minus infinity at the others."""
        out = torch.full(
            step.masked.shape, -torch.inf, dtype=torch.float64, device=step.masked.device
        )
        out[step.eligible] = self(features(step, self.radius)[step.eligible]).sigmoid()
        return out

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes ``config.json`` and ``model.safetensors``."""
        from safetensors.torch import save_file

        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_file(
            {k: v.detach().float().contiguous().cpu() for k, v in self.state_dict().items()},
            path / "model.safetensors",
        )
        (path / "config.json").write_text(
            json.dumps({"model_type": KIND, "radius": self.radius, "hidden": self.hidden}, indent=1)
            + "\n"
        )

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Of the name of an embedded filter or of a folder. Raises ``GenError`` for one that is not
        there, that is something else, or whose weights cannot be read."""
        from safetensors.torch import load_file

        path = zoo().get(str(folder)) or Path(folder).expanduser()
        if not str(folder) or not (path / "config.json").is_file():
            raise unknown(
                "filter",
                str(folder),
                embedded() or ["none that is embedded"],
                "the zoo; it is no folder with a config.json either",
            )
        config = read_config(path)
        known = config if isinstance(config, dict) else {}
        radius, hidden = known.get("radius"), known.get("hidden")
        if (
            not isinstance(radius, int)
            or not isinstance(hidden, int)
            or isinstance(radius, bool)
            or isinstance(hidden, bool)
            or not 0 <= radius <= 64
            or not 0 < hidden <= 4096
            or known.get("model_type") != KIND
        ):
            raise GenError(
                f"the config of filter {folder} is {str(config)[:200]}; expected model_type"
                f" {KIND!r}, radius and hidden"
            )
        found = cls(radius, hidden)
        with readable("filter", folder):
            found.load_state_dict(load_file(path / "model.safetensors"))
        return found.to(device, dtype).eval().requires_grad_(False)


@dataclass(frozen=True)
class LearnedParams(Params):
    """``filter``: folder of a trained filter, or the name of an embedded one.
    ``filter_threshold``: probability from which a proposal is final; above 1 means one position per
    forward pass, 0 one forward pass per block."""

    filter: str = text("", "a folder with a trained filter, or the name of an embedded one")
    filter_threshold: float = number(0.96)


def embedded() -> list[str]:
    """The names of the filters in the zoo."""
    return [name for name, path in zoo().items() if read_config(path).get("model_type") == KIND]


@method(
    "learn2pd",
    paper="2509.25188",
    title="Learning to Parallel: Accelerating Diffusion Large Language Models via Learnable"
    " Parallel Decoding",
    about="Learn2PD: what a small trained filter holds for final; rows stop at their end",
    params=greedy(
        selector="learned",
        filter="text-filter",
        filter_threshold=0.96,
        stop="end",
        **fixed_blocks(),
    ),
    aliases={"threshold": "filter_threshold"},
    limit=Limit(SEQUENTIAL, {"filter_threshold": 1.1}),
    # rows of the contract's space have no end
    example={"stop": "filled"},
)
@register("selector", "learned", params=LearnedParams)
class Learned:
    """What the filter holds for final, and the place of highest score, which is what decoding
    without a filter would commit. Raises ``GenError`` where no filter is named, or none of that
    name is there."""

    def __init__(self, params: LearnedParams, device: torch.device | str = "cpu"):
        if not params.filter:
            known = ", or one of ".join(
                [
                    "a folder with a trained filter",
                    *([", ".join(names)] if (names := embedded()) else []),
                ]
            )
            raise GenError(f"sampler.filter is '', where selector is 'learned'; expected {known}")
        # in float64 a row's verdicts do not depend on how many rows are judged with it
        self.filter = PlaceFilter.from_pretrained(params.filter, device, torch.float64)

    def __call__(self, step: MaskedStep) -> Tensor:
        found = self.filter.probability(step) >= step.params.filter_threshold
        return found | highest(step.score, step.eligible, torch.ones_like(step.rows))
