"""Parity of tokens on a device: against those of the CPU, and against those of plain autoregression
in other batches and windows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

import gen
from gen.bench.variants import serves
from gen.contracts.frontend import FrontendConfig
from gen.contracts.modality import Modality
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import protocol_of
from gen.modalities.image.modality import ImageModality
from gen.modalities.text.modality import TextModality
from gen.modalities.text.translation import START
from gen.models.load.locate import ZOO
from gen.tokenizers.image.vq import VQ

REFERENCE = "autoregressive"
NONE = "none"  # of the options of a model
DIGITS = ("seven seven two", "one two three four", "nine zero", "five six five")
TRANSLATIONS = [f"{START} {digits}" for digits in DIGITS]


class Codebook(VQ):
    """VQ tokenizer whose images stay codes: its codebook, without the network of diffusers.

    Args:
        folder: folder of the network.
        device: device of the codebook.
        dtype: its floating-point type.
    """

    def __init__(self, folder: Path, device: str | torch.device, dtype: torch.dtype):
        with safe_open(folder / "diffusion_pytorch_model.safetensors", "pt") as file:
            table: Tensor = file.get_tensor("quantize.embedding.weight")
        self._table = table.to(device, dtype)
        self.config = FrontendConfig("image", "codes", (len(self._table),), (4, 4))

    @property
    def codebooks(self) -> list[Tensor]:
        return [self._table]

    def decode(self, codes: Tensor) -> Tensor:
        return codes

    def postprocess(self, x: Tensor) -> Tensor:
        return x


class Codes(ImageModality):
    """Images as codes."""

    def frontend(self, kind="codes", device="cpu", dtype=torch.float32, folder: Path | None = None):
        return Codebook(folder or ZOO / self.frontends[kind], device, dtype)


def spec_of(window: int | str) -> dict[str, Any]:
    """Return the sampler whose passes are so wide."""
    return {"name": "speculative_jacobi", "window": window} if window != 1 else {"name": REFERENCE}


def loaded(modality: Modality, device: str, dtype: str, option: str) -> Any:
    """Return a pipeline with an option of the model switched on, or with none."""
    options = {option: True} if option != NONE else {}
    return gen.load(modality, device=device, dtype=dtype, **options)


def decoded(pipe: Any, sampler: Any, count: int, batch: int) -> Tensor:
    """Decode example prompts, ``batch`` at a time, and return their tokens [N, T]."""
    prompts = pipe.modality.example_prompts(count, 0)
    if protocol_of(sampler) == "lattice":  # its model translates
        prompts = TRANSLATIONS[:count]
    items = pipe.plan(prompts, 1, 0)
    parts = [items[at : at + batch] for at in range(0, len(items), batch)]
    return torch.cat([pipe.generate(part, sampler).tokens.cpu() for part in parts])


def compared(tokens: Tensor, expected: Tensor) -> dict[str, float]:
    """Return the share of equal tokens, and of items all of whose tokens are equal."""
    same = (tokens == expected).double()
    return {"equal tokens": same.mean().item(), "equal items": same.amin(1).mean().item()}


class Parity:
    """Comparisons of tokens. Pipelines and references are kept between measurements.

    Args:
        device: device whose tokens are compared.
    """

    def __init__(self, device: str):
        self.device = device
        self.pipe, self.reference = cache(self._pipe), cache(self._reference)

    def _pipe(self, modality: str, device: str, dtype: str = "float32", option: str = NONE) -> Any:
        kinds = {"image": Codes, "text": TextModality}  # the registry would import every modality
        return loaded(kinds[modality](), device, dtype, option)

    def _reference(self, dtype: str, option: str, count: int) -> Tensor:
        """Return the tokens of plain autoregression, image by image."""
        return decoded(self.pipe("image", self.device, dtype, option), REFERENCE, count, 1)

    def image(
        self, dtype: str, count: int, option: str, window: int, batch: int
    ) -> dict[str, float]:
        """Compare images with those of plain autoregression at batch 1.

        Args:
            dtype: name of the floating-point type.
            count: images.
            option: option of the model, such as batch_invariant, or none.
            window: window of ``speculative_jacobi``; 1 for ``autoregressive``.
            batch: images that are decoded at a time.
        """
        pipe = self.pipe("image", self.device, dtype, option)
        expected = self.reference(dtype, option, count)
        return compared(decoded(pipe, spec_of(window), count, batch), expected)

    def image_cpu(self, count: int, altered: float) -> dict[str, float]:
        """Compare images in float32 with those of the CPU.

        Args:
            count: images.
            altered: noise on the output matrix of the device's model, in standard deviations of
                it. With any the tokens have to differ: the control.
        """
        pipe = self._pipe("image", self.device)
        weight = pipe.bound(pipe.model_name(REFERENCE))[0].lm_head.weight.data
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        weight += altered * weight.std() * noise.to(weight)
        expected = decoded(self.pipe("image", "cpu"), REFERENCE, count, count)
        return compared(decoded(pipe, REFERENCE, count, count), expected)

    def text(self, count: int, option: str, part: int, parts: int) -> dict[str, Any]:
        """Compare texts in float32 with those of the CPU, by sampler and preset.

        Args:
            count: texts.
            option: option of the device's model.
            part: number of the part of all samplers that is measured.
            parts: number of parts.

        Returns:
            How many have equal tokens, of the others the share or the error, and the reasons of
            those that are refused.
        """
        ours = self.pipe("text", self.device, option=option)
        theirs = self.pipe("text", "cpu")
        names = [n for kind in ("sampler", "preset") for n in registry.table(kind)]
        shares, refused = {}, {}
        for name in [n for n in names if serves(theirs, n, None)][part::parts]:
            try:
                tokens = decoded(ours, name, count, count)
                expected = decoded(theirs, name, count, count)
                shares[name] = compared(tokens, expected)["equal tokens"]
            except GenError as problem:
                refused[name] = str(problem)
            except RuntimeError as problem:  # of kernels
                shares[name] = str(problem)
        other = {name: share for name, share in shares.items() if share != 1}
        told = {"compared": len(shares), "equal": len(shares) - len(other), "other": other}
        return {**told, "refused": refused}
