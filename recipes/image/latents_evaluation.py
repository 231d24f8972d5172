"""Measurements and model cards of the embedded image models of latents, called by
``recipes/image/latents.py``. Held-out captions and the pixel checker are those of
``recipes/image/evaluation.py``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gen.modalities.image import captions as shapes
from gen.pipeline.output import PipelineOutput
from gen.recipes.common.grid_evaluation import CARD_HEAD
from gen.recipes.image.evaluation import frontend_figures
from gen.recipes.image.figures import (
    HELD_OUT_SEED,
    Figures,
    any_length,
    mean,
    measure_samplers,
    measure_short,
    pixels_of,
)
from gen.tokenizers.image.kl import KL

SAMPLING = {"guidance_scale": 2.0}
CAUSAL = {
    "autoregressive": "autoregressive",
    **{
        f"continuous_jacobi {t:g}": {"name": "continuous_jacobi", "tolerance": t}
        for t in (0.0, 1e-3, 0.05, 0.1, 0.2)
    },
}
DRAFTED = {
    "cspd": {"name": "cspd"},
    "continuous_speculative exact": {"name": "continuous_speculative", "mode": "exact"},
}
MASKED = {f"mar {n}": {"name": "mar", "steps": n} for n in (64, 32, 16)}
# measured with captions of every length too
SHORT = {name: {**CAUSAL, **MASKED}[name] for name in ("continuous_jacobi 0.001", "mar 16")}


def evaluate(zoo: Path, held_out: int, log=print) -> dict:
    """Measure the models in ``zoo``, and write ``evaluation-latents.json`` there and a model card
    into each folder. A second call measures only what the file lacks.
    """
    head = {"held_out_captions": held_out, "sampling": SAMPLING}
    models = {name: ("image-mar",) for name in MASKED}
    models |= {name: ("image-causal-latents",) for name in CAUSAL}
    models |= {name: ("image-causal-latents", "image-causal-latents-draft") for name in DRAFTED}
    figures = Figures(zoo / "evaluation-latents.json", head, models)
    if "frontend" not in figures.values:
        kl = KL.from_pretrained(zoo / "image-kl")
        figures.save("frontend", frontend_figures(kl, max(held_out, 8)))
    captions = shapes.captions(held_out, HELD_OUT_SEED, held=True)
    draft = {"draft_model": str(zoo / "image-causal-latents-draft")}
    drafted = {name: {**spec, **draft} for name, spec in DRAFTED.items()}
    for folder, samplers in (("image-mar", MASKED), ("image-causal-latents", CAUSAL | drafted)):
        measure_samplers(figures, zoo / folder, captions, samplers, SAMPLING, describe, log)
    measure_short(figures, zoo, captions, SHORT, SAMPLING, log)
    write_cards(zoo, figures.values)
    return figures.values


def describe(name: str, out: PipelineOutput, verdicts: list, reference: Any) -> dict[str, Any]:
    """Return the passes and acceptance rate of the draft model, and the deviation of latents and
    pixels from ``autoregressive`` with the same seed."""
    rates = [s.draft_acceptance_rate for s in out.stats]
    row = {
        "draft_nfe_mean": mean([s.draft_nfe for s in out.stats if s.draft_nfe is not None]),
        "acceptance": mean([rate for rate in rates if rate is not None]),
    }
    if name != "autoregressive" and reference is not None:
        row |= deviation(out.tokens, pixels_of(out), reference.tokens, pixels_of(reference))
    return row


def deviation(
    tokens: torch.Tensor, pixels: np.ndarray, other_tokens: torch.Tensor, other_pixels: np.ndarray
) -> dict:
    """Root mean square difference of the latents, and the PSNR of the images against each other in
    dB (None if equal).
    """
    error = float(((pixels.astype(np.float64) - other_pixels) ** 2).mean())
    return {
        "latent_rms_difference": (tokens - other_tokens).double().square().mean().sqrt().item(),
        "latent_largest_difference": (tokens - other_tokens).abs().max().item(),
        "psnr_between": 10 * math.log10(255**2 / error) if error else None,
    }


def write_cards(zoo: Path, result: dict) -> None:
    """Write a README.md into each model's folder."""
    f, rows = result["frontend"], result["samplers"]
    made = (
        "Trained from scratch on synthetic images (`modalities/image/captions.py`),"
        " with\n`python -m gen.recipes.image.latents all --work DIR`. No other data were used.\n"
    )
    table = (
        "| sampler | caption passed | any length | forward passes (mean) | of the draft model |\n"
        "| --- | --- | --- | --- | --- |\n"
    )

    def line(n):
        return (
            f"| {n} | {rows[n]['passed']:.3f} | {any_length(rows[n])} | {rows[n]['nfe_mean']:.1f} |"
            f" {rows[n]['draft_nfe_mean'] or 0:.1f} |\n"
        )

    about = (
        f"Measured on {result['held_out_captions']} held-out captions, one sample each, guidance"
        " 2. *Any length*: the same captions\nafter words but the shapes were left out at"
        " random.\n\n"
    )
    (zoo / "image-kl" / "README.md").write_text(
        f"{CARD_HEAD}# image-kl\n\n`diffusers.AutoencoderKL`: 64x64 RGB images to 8x8"
        f" latents.\n{made}\nPSNR of held-out images {f['psnr_mean']:.1f} dB (worst"
        f" {f['psnr_min']:.1f}); the pixel checker passes the caption"
        f" in\n{f['checker_on_real']:.3f} of the images and {f['checker_on_reconstructions']:.3f}"
        " of their reconstructions.\n"
    )
    kind = (
        "A small Llama over latents of `image-kl` with a diffusion head"
        " (`gen/models/nets/grid_latent.py`)"
    )
    for folder, what, names in (
        ("image-causal-latents", "left to right", {**CAUSAL, **DRAFTED}),
        (
            "image-causal-latents-draft",
            "left to right, smaller: the draft model of `image-causal-latents`",
            {},
        ),
        ("image-mar", "a masked encoder and decoder (MAR)", MASKED),
    ):
        figures = f"\n{about}{table}{''.join(map(line, names))}" if names else ""
        (zoo / folder / "README.md").write_text(
            f"{CARD_HEAD}# {folder}\n\n{kind}, {what}. {made}{figures}"
        )
