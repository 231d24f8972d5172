"""aMUSEd (Patil et al., arXiv 2401.01808) through the masked protocol: ``UVit2DModel`` of
diffusers, conditioned on a text and on numbers about the image.

    micro conditions   width, height (pixels), 0, 0 (crop of the training image), aesthetic score,
                       in this order
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.conditioning import Conditions


class AmusedLM(ModelAdapter):
    """Masked model: token ids [B, 1 + T] -> logits [B, T, V].

    V counts the codes and the mask token, whose probability is zero. A canvas of T codes in raster
    order follows the number of its condition, counted from V; ``conditions`` holds its ``pooled``
    [D] and ``states`` [L, D'].

    ``grid``: rows and columns of codes. ``mask_token_id``: the model's own. ``aesthetic_score``:
    micro condition. ``factor``: pixels per code.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        conditions: Conditions,
        grid: tuple[int, int],
        mask_token_id: int,
        factor: int,
        aesthetic_score: float,
    ):
        self.model, self.conditions, self.grid = model.eval(), conditions, grid
        self.codes, self.mask_token_id = model.config.codebook_size, mask_token_id
        self.vocab_size = self.codes + 1
        self.micro = (grid[1] * factor, grid[0] * factor, 0, 0, aesthetic_score)

    def prompt(self, condition: str) -> list[int]:
        """Return the prefix of a canvas: the number of its condition, as a token id."""
        return [self.vocab_size + self.conditions.number(condition)]

    @torch.no_grad()
    def forward(self, ids: Tensor, canvas_length: int) -> Tensor:
        """Compute logits [B, T, V] of token ids [B, 1 + T]."""
        condition = self.conditions.stacked(ids[:, 0] - self.vocab_size)
        canvas = ids[:, -canvas_length:]
        canvas = torch.where(canvas == self.codes, self.mask_token_id, canvas).view(
            len(ids), *self.grid
        )
        micro = torch.tensor(self.micro, dtype=self.dtype, device=ids.device).expand(len(ids), -1)
        logits = self.model(
            canvas,
            encoder_hidden_states=condition["states"],
            pooled_text_emb=condition["pooled"],
            micro_conds=micro,
        )
        # finite, so that guidance has a difference to take
        return torch.nn.functional.pad(
            logits.flatten(2).transpose(1, 2), (0, 1), value=torch.finfo(logits.dtype).min
        )
