"""Results of a call that was interrupted, and previews of one that is still decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gen.core.sampler import Callback
from gen.core.stats import SampleOutput, Stats
from gen.core.token_space import TokenSpace

GREY = 128


class LastStep:
    """Callback that remembers what it was told, and then calls another one."""

    def __init__(self, callback: Callback | None):
        self.callback = callback
        self.info: dict[str, Any] | None = None

    def __call__(self, info: dict[str, Any]) -> None:
        self.info = info
        if self.callback:
            self.callback(info)

    def output(self, space: TokenSpace, in_order: bool) -> SampleOutput:
        """Return the tokens so far; positions that are not known hold allowed tokens.

        Args:
            space: token space of the rows.
            in_order: positions are decoded from left to right.
        """
        assert self.info is not None, "a callback interrupts a step, and is told of it before"
        tokens, known, steps = self.info["tokens"], self.info["known"], self.info["step"]
        known = known.to(tokens.device)
        counts = known.sum(1).tolist()
        stats = [
            Stats(
                nfe=steps,
                tokens=count,
                tokens_computed=0,
                positions_computed=0,
                mean_acceptance_length=count / max(1, steps),
            )
            for count in counts
        ]
        return SampleOutput(fill(tokens, known, space, in_order), stats)


def fill(tokens: Tensor, known: Tensor, space: TokenSpace, in_order: bool) -> Tensor:
    """Fill unknown positions with tokens that are allowed there.

    Args:
        tokens: long [B, T], or latents [B, T, C].
        known: bool [B, T].
        space: token space of the rows.
        in_order: positions are decoded from left to right.
    """
    if space.channels:
        return torch.where(known[..., None], tokens, 0.0)
    legal = space.legal.to(tokens.device)
    tokens = torch.where(known, tokens, legal.long().argmax(1))
    # allowed tokens depend on those before; the eos token comes as soon as it is allowed
    if in_order and space.is_history_dependent:
        for position in range(int(known.long().cumprod(1).sum(1).min()), space.length):
            at = torch.full((len(tokens), 1), position, device=tokens.device)
            may = space.apply_constraint(legal[at], tokens, at)[:, 0]
            least = may.long().argmax(1)
            if space.eos_token_id is not None:
                least = torch.where(may[:, space.eos_token_id], space.eos_token_id, least)
            tokens[:, position] = torch.where(known[:, position], tokens[:, position], least)
    return tokens


def grey_where_unknown(image: Image.Image, known: Tensor, grid: tuple[int, ...]) -> Image.Image:
    """Return an image whose undecided regions are grey.

    Args:
        image: decoded image, with any tokens in those regions.
        known: bool [T] in raster order; an image whose T is no grid stays as it is.
        grid: rows and columns of the tokens.
    """
    if len(grid) != 2 or known.numel() != grid[0] * grid[1]:
        return image
    cells = Image.fromarray(known.reshape(grid).cpu().numpy().astype(np.uint8) * 255)
    mask = cells.resize(image.size, Image.Resampling.NEAREST)
    return Image.composite(image, Image.new(image.mode, image.size, (GREY,) * 3), mask)
