"""Target of frame models: start frames and actions of a batch of items."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.targets.canvas_rule import AnyOrderTarget


class FramesTarget(AnyOrderTarget):
    """Frame model with the start and the actions of each item.

    A prompt is the number of a start frame (``ModelAdapter.condition_token``), then one token per
    action. The space has as many frames as the longest prompt; rows with fewer actions end before.

    Raises:
        GenError: guidance, or a temperature or filter of tokens.
    """

    def _require_controls(self, space: TokenSpace, sampling: SamplingParams) -> None:
        plain = SamplingParams().to_dict()
        for name, value in sampling.to_dict().items():
            if name in plain and value != plain[name]:
                raise GenError(
                    f"sampling.{name} is {value!r}, and a frame model has no distribution over"
                    f" tokens to change; expected {plain[name]!r}"
                )
        super()._require_controls(space, sampling)

    @property
    def frames(self) -> Tensor:
        """Frames of each row, the start included, long [B]."""
        return self.prompt_length

    @property
    def actions(self) -> Tensor:
        """Actions that lead to the frames 1, 2, ... of each row, long [B, F - 1], padded."""
        return self.prompt[:, 1:]

    @property
    def starts(self) -> Tensor:
        """Start frame of each row: latents [B, P, C]."""
        numbers = (self.prompt[:, 0] - self.model.condition_token(0)).tolist()
        return torch.stack([self.model.features[n]["frame"] for n in numbers]).to(self.device)


def frames_space(space: TokenSpace, frames: int) -> TokenSpace:
    """Return the space of so many frames, for the space of any number of them."""
    legal = space.legal[:1].expand(frames * space.length // space.grid[0], -1)
    return replace(space, grid=(frames, *space.grid[1:]), legal=legal)
