"""Adapter of frame models: latents of the next frames given their actions and the frames before
(``gen.models.adapters.protocols.FramesModel``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gen.core.errors import bad_value
from gen.models.adapters.base import ModelAdapter
from gen.models.nets.frames import FrameModel

Pairs = list[tuple[Tensor, Tensor]]  # keys and values of every layer


class FrameLM(ModelAdapter):
    """Adapter of the built-in frame model.

    Attributes:
        positions: P, positions of a frame.
        channels: C, numbers of a position.
        window: frames that a frame attends to, itself included.
        none_action: action of a first frame.
        context_signal: signal level of frames that later ones attend to.
    """

    model: FrameModel

    def __init__(self, model: Any):
        self.model = model.eval()
        config = model.config
        self.positions, self.channels = config.positions, config.position_channels
        self.window, self.finest = config.window, config.finest
        self.none_action, self.context_signal = len(config.actions), config.context_signal
        colours = torch.tensor(config.palette, dtype=self.dtype, device=self.device)
        self._palette = colours.repeat(1, config.patch**2) / 127.5 - 1 if config.palette else None
        self._spatial: Tensor | None = None  # the same in every forward pass

    def condition_token(self, number: int) -> int:
        """Return the token at the first position of a prompt: the start frame with a number."""
        return self.none_action + 1 + number

    def levels(self, steps: int) -> list[float]:
        """Return the signal levels that a sampler of ``steps`` steps passes, from 0 to 1.

        Raises:
            GenError: a number of steps that the model was not trained for.
        """
        if steps & (steps - 1) or not 1 <= steps <= self.finest:
            raise bad_value(
                "sampler.steps", steps, f"a power of two up to {self.finest}, as trained"
            )
        return [k / steps for k in range(steps + 1)]

    @torch.inference_mode()
    def forward(
        self,
        z: Tensor,
        signal: Tensor,
        steps: Tensor,
        actions: Tensor,
        past: Pairs,
        known: Tensor,
        keep: bool = False,
    ) -> tuple[Tensor, Pairs]:
        """See ``FramesModel.forward``."""
        if self._spatial is None:
            self._spatial = self.model.spatial_scores(z.dtype)
        return self.model(z, signal, steps, actions, past, known, keep, self._spatial)

    def empty(self, rows: int, frames: int) -> Pairs:
        """Make keys and values [rows, frames, P, D] of every layer."""
        config = self.model.config
        shape = (rows, frames, self.positions, config.hidden_size)
        options: Any = {"dtype": self.dtype, "device": self.device}
        return [
            (torch.zeros(shape, **options), torch.zeros(shape, **options))
            for _ in range(config.num_hidden_layers)
        ]

    def settle(self, x: Tensor) -> Tensor:
        """Round latents [..., P, C] to the colours of the palette, or to 8-bit pixels.

        What a frame shows is what later ones see, and a saved frame is the whole of it. A palette
        keeps small errors from adding up.
        """
        if self._palette is not None:
            away = (x[..., None, :] - self._palette).square().sum(-1)
            return self._palette[away.argmin(-1)]
        return ((x + 1) * 127.5).round().clamp(0, 255) / 127.5 - 1
