"""Bands: a channel vocoder (Dudley, "The Vocoder", 1939) with quantised levels, without weights.

A frame is ``hop`` samples. Its spectrum is cut into bands, one stream of codes each. The level of a
band is the amplitude of a sine with the power of the band, and code l > 0 stands for the amplitude
2 ** (l - L + 1) of L levels, 6 dB apart; code 0 is silence. Decoding sounds one sine per band. All
of them have whole periods in a frame. A level rises at once, where a frame begins, and falls over
the last fifth of the frame before, so that the end of a sound is no click. What a band contains
beside its level is lost.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, TokenFrontend, require_codes
from gen.core.errors import GenError
from gen.core.registry import register
from gen.models.load.locate import locate, read_config

FALL = 5  # a falling level takes the last hop / FALL samples
SIZES = ("rate", "hop", "levels", "edges", "tones")


@register("tokenizer", "bands")
class Bands(TokenFrontend):
    """Codec: codes [B, Q, F] of waves [B, 1, F * hop] in [-1, 1], one stream per band, low first.

    Args:
        rate: samples per second.
        hop: samples of a frame.
        levels: codes of a band, silence included.
        edges: Q + 1 borders of the bands in Hz, ascending.
        tones: frequency of each band's sine in Hz.
        device: device of signals and codes.
        dtype: floating-point type of signals.

    Raises:
        GenError: a tone outside its band, or without whole periods in a frame.
    """

    name = "bands"

    def __init__(
        self,
        rate: int,
        hop: int,
        levels: int,
        edges: tuple[float, ...],
        tones: tuple[float, ...],
        device: Any = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.rate, self.hop, self.levels = rate, hop, levels
        self.edges, self.tones = tuple(edges), tuple(tones)
        self.device, self.dtype = device, dtype
        if len(self.edges) != len(self.tones) + 1 or levels < 2:
            raise GenError(
                f"{len(self.edges)} edges, {len(self.tones)} tones and {levels} levels; expected"
                " one edge more than tones, and at least 2 levels"
            )
        for (low, high), tone in zip(pairwise(self.edges), self.tones, strict=True):
            if not low <= tone < high or (tone * hop) % rate:
                raise GenError(
                    f"the tone of {tone} Hz belongs to the band from {low} to {high} Hz; expected"
                    f" a multiple of {rate / hop:g} Hz in it"
                )
        n = torch.arange(hop, dtype=torch.float64)
        hertz = torch.tensor(self.tones, dtype=torch.float64)
        self.sines = (2 * torch.pi * hertz[:, None] / rate * n).sin().to(device, dtype)
        last = hop // FALL
        cosine = 0.5 + 0.5 * (torch.pi * (n - hop) / last).cos()
        self.fading = cosine.masked_fill(n < hop - last, 0).to(device, dtype)
        steps = torch.arange(levels, dtype=torch.float64)
        table = torch.where(steps > 0, 2 ** (steps - levels + 1), 0)
        self.table = table.to(device, dtype)[:, None]
        self.config = FrontendConfig("audio", "codes", (levels,) * len(self.tones), (hop,))

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, device: Any = "cpu", dtype: torch.dtype = torch.float32
    ) -> Self:
        """Load a zoo name or local folder. Raises ``GenError`` for a folder that is missing or
        holds another frontend."""
        config = read_config(Path(locate(folder, "frontend")))
        if config.get("frontend_class") != cls.name or set(config) != {"frontend_class", *SIZES}:
            raise GenError(
                f"the config of frontend {folder} is {config}; expected frontend_class {cls.name!r}"
                f" and {', '.join(SIZES)}"
            )
        return cls(*(config[key] for key in SIZES), device=device, dtype=dtype)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, all that there is."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        values = (self.rate, self.hop, self.levels, list(self.edges), list(self.tones))
        config = {"frontend_class": self.name, **dict(zip(SIZES, values, strict=True))}
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    def preprocess(self, media: Any) -> Tensor:
        """Convert a wave float [n] to float [1, n]. Raises ``GenError`` for other shapes, and if n
        is no whole number of frames."""
        wave = np.asarray(media, dtype=np.float32)
        if wave.ndim != 1 or not len(wave) or len(wave) % self.hop or not np.isfinite(wave).all():
            raise GenError(
                f"the wave has shape {wave.shape}; expected finite samples [n] with n a multiple"
                f" of {self.hop}"
            )
        return torch.from_numpy(wave.copy())[None].to(self.device, self.dtype)

    def encode(self, x: Tensor) -> Tensor:
        frames = x[:, 0].double().unflatten(1, (-1, self.hop))
        power = (torch.fft.rfft(frames).abs() * 2 / self.hop).square()  # of sines, by frequency
        hertz = torch.arange(power.shape[-1], device=power.device) * self.rate / self.hop
        amplitudes = [
            power[..., (hertz >= low) & (hertz < high)].sum(-1).sqrt()
            for low, high in pairwise(self.edges)
        ]
        steps = torch.stack(amplitudes, 1).clamp_min(1e-12).log2().round() + self.levels - 1
        return steps.clamp(0, self.levels - 1).long()

    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        levels = self.table[codes, 0]  # [B, Q, F]
        after = torch.nn.functional.pad(levels[..., 1:], (0, 1))
        fall = (levels - after).clamp_min(0)[..., None] * self.fading
        return ((levels[..., None] - fall) * self.sines[:, None]).sum(1).flatten(1)[:, None]

    def postprocess(self, x: Tensor) -> np.ndarray:
        """Convert a wave [1, n] to float32 [n], clipped to [-1, 1]."""
        return x[0].float().clamp(-1, 1).cpu().numpy()

    @property
    def codebooks(self) -> list[Tensor]:
        return [self.table] * len(self.tones)

    @property
    def fingerprint(self) -> Tensor:
        values = [self.rate, self.hop, self.levels, *self.edges, *self.tones]
        return torch.tensor(values, dtype=torch.float32)

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (input_shape[-1] // self.hop,)
