"""Learn2PD: a small trained filter classifies which proposed tokens are already final.

    q_i = s(f(x_i))      x_i: confidences around position i, f: two linear layers with a ReLU
                         between them, s: the logistic function
    committed            the positions with q_i >= ``filter_threshold``, and the one of highest
                         score

Learn2PD (Bao et al., arXiv 2509.25188). A position's label is 1 if its proposal equals the token
that one-position-per-pass decoding ends with; ``recipes/text/filter.py`` collects such labels and
trains on them. A threshold above 1 means one position per forward pass, 0 one forward pass per
block.

The published filter reads the confidences of a block of 32 positions at once and classifies all of
them, so it serves blocks of that length only. This filter classifies one position at a time. It
reads, of the positions i - R to i + R,

    whether the position is in the block, and whether it is unmasked; c, the probability of its
    proposal; -log10(1 - c + 1e-5) / 5, which separates 0.9 from 0.999; exp(-H) of its distribution;
    the gap between its two highest probabilities. An unmasked position has ones, a position outside
    the block zeros

and of the current block, the share of unmasked positions, and the mean, minimum and maximum of c
over the masked ones. All features are between 0 and 1 and independent of token ids and of the
length of the block, so the filter of one model runs with any other, well or badly. The
distributions are those that ``confidence_on`` names. Rows do not influence each other, and neither
do positions outside the block.

A filter is a folder with ``config.json`` and ``model.safetensors``; ``sampler.filter`` is its path
or the name of an embedded filter. The sampler reads it once per call: the loop makes a part that is
a class from the parameters and the device when decoding begins (``gen.samplers.masked.loop``).

End-of-text prediction, the second contribution of Learn2PD, is the stop ``end`` (``stops``): once
the eos token is committed and no position before it is masked, no position behind it is computed
any more. The published method cuts off the positions behind the eos token as soon as it is
committed, which saves positions in the forward passes up to there.

Guarantee: approximate; the distribution of tokens depends on the filter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gen.core.errors import GenError, unknown
from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.params import Params, number, text
from gen.core.registry import register
from gen.models.load.locate import read_config, readable, zoo
from gen.samplers.masked.parts.orders import entropy as certainty
from gen.samplers.masked.parts.selection import fixed_blocks, greedy
from gen.samplers.masked.step import ON_HOST, MaskedStep, highest, needs

KIND = "position_filter"
PER_POSITION, PER_BLOCK = 6, 4
FLOOR = 1e-5  # smallest distance from 1 at which confidences differ


def features(step: MaskedStep, radius: int) -> Tensor:
    """Compute the features of every position: float64 [b, T, F], F = 6 (2 R + 1) + 4; see the
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


class PositionFilter(nn.Module):
    """Filter that maps features [n, F] of positions (``features``) to logits [n] of their proposals
    being final. ``radius``: R in positions; ``hidden``: width of the hidden layer."""

    def __init__(self, radius: int = 2, hidden: int = 64):
        super().__init__()
        self.radius, self.hidden = radius, hidden
        self.layers = nn.Sequential(
            nn.Linear(PER_POSITION * (2 * radius + 1) + PER_BLOCK, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[..., 0]

    @torch.no_grad()
    def probability(self, step: MaskedStep) -> Tensor:
        """Compute the probability that a proposal is final: float64 [b, T], minus infinity at the
        positions that may not be committed. The filter has to be in float64."""
        out = torch.full(
            step.masked.shape, -torch.inf, dtype=torch.float64, device=step.masked.device
        )
        out[step.eligible] = self(features(step, self.radius)[step.eligible]).sigmoid()
        return out

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
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
        """Load a filter.

        Args:
            folder: name of an embedded filter, or a folder.
            device: device of the weights.
            dtype: dtype of the weights.

        Raises:
            GenError: the folder is missing, holds something else, or has unreadable weights.
        """
        path = zoo().get(str(folder)) or Path(folder).expanduser()
        if not str(folder) or not (path / "config.json").is_file():
            raise unknown(
                "filter",
                str(folder),
                embedded() or ["none that is embedded"],
                "the zoo; it is not a folder with a config.json either",
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
    """``filter``: folder of a trained filter, or the name of a built-in one.
    ``filter_threshold``: probability from which a proposal is final; above 1 means one position per
    forward pass, 0 one forward pass per block."""

    filter: str = text("", "a folder with a trained filter, or the name of an embedded one")
    filter_threshold: float = number(0.96)


def embedded() -> list[str]:
    """List the names of the filters in the zoo."""
    return [name for name, path in zoo().items() if read_config(path).get("model_type") == KIND]


@method(
    "learn2pd",
    paper="2509.25188",
    title="Learning to Parallel: Accelerating Diffusion Large Language Models via Learnable"
    " Parallel Decoding",
    about="Learn2PD: positions that a trained filter classifies as final; stops at the eos token",
    params=greedy(
        selector="learned",
        filter="text-filter",
        filter_threshold=0.96,
        stop="end",
        **fixed_blocks(),
    ),
    aliases={"threshold": "filter_threshold"},
    limit=Limit(SEQUENTIAL, {"filter_threshold": 1.1}),
    # rows of the contract's space have no eos token
    example={"stop": "filled"},
)
@register("selector", "learned", params=LearnedParams)
@needs(ON_HOST)
class Learned:
    """Selector of the positions that the filter classifies as final, and of the position of highest
    score, which decoding without a filter would commit.

    Raises:
        GenError: no filter is named, or the named filter does not exist.
    """

    def __init__(self, params: LearnedParams, device: torch.device | str = "cpu"):
        if not params.filter:
            known = ", or one of ".join(
                [
                    "a folder with a trained filter",
                    *([", ".join(names)] if (names := embedded()) else []),
                ]
            )
            raise GenError(f"sampler.filter is '', where selector is 'learned'; expected {known}")
        # in float64 the filter's output for a row does not depend on the number of rows
        self.filter = PositionFilter.from_pretrained(params.filter, device, torch.float64)

    def __call__(self, step: MaskedStep) -> Tensor:
        found = self.filter.probability(step) >= step.params.filter_threshold
        return found | highest(step.score, step.eligible, torch.ones_like(step.rows))
