"""Measurements and model cards of the embedded image models, called by ``recipes/image/recipe.py``.

All figures are for held-out captions and images judged by the pixel checker.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gen.modalities.image import captions as shapes
from gen.modalities.image.checker import check_many
from gen.pipeline.output import PipelineOutput
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_evaluation import CARD_HEAD
from gen.recipes.image.figures import (
    BATCH,
    HELD_OUT_SEED,
    Figures,
    any_length,
    mean,
    measure_samplers,
    measure_short,
)
from gen.tokenizers.image.vq import VQ

SAMPLING = {"guidance_scale": 2.0, "top_k": 100}
CAUSAL = {
    "autoregressive": "autoregressive",
    "gumbel": {"name": "speculative_jacobi", "coupling": "gumbel"},
    "gumbel_shared": {"name": "speculative_jacobi", "coupling": "gumbel_shared"},
    "maximal": {"name": "speculative_jacobi", "coupling": "maximal"},
    "fresh": {"name": "speculative_jacobi", "coupling": "fresh"},
}
DRAFTED = {
    "speculative token": {"name": "speculative", "verifier": "token"},
    "speculative block": {"name": "speculative", "verifier": "block"},
}
RELAXED = {
    name: name for name in ("lantern", "lantern_pp", "gsd", "typical", "cool")
}  # distance is for ordered bins
RELAXED |= {
    "gumbel_shared, repeat": {"name": "scd_gs", "init": "repeat"}
}  # reference of the relaxed samplers
DRAFTED_RELAXED = {
    f"{name} of drafts": {"name": name, "drafter": "model"}
    for name in ("lantern_pp", "typical", "cool")
}
MASKED = {"maskgit": "maskgit", "halton": "halton"}
SHORT = {"gumbel": CAUSAL["gumbel"], **MASKED}  # measured with captions of every length too


def evaluate(zoo: Path, held_out: int, log=print) -> dict:
    """Measure the models in ``zoo``, and write ``evaluation.json`` there and a model card into each
    folder. A second call measures only what the file lacks.
    """
    vq = VQ.from_pretrained(zoo / "image-vq")
    head = {
        "held_out_captions": held_out,
        "sampling": SAMPLING,
        "codes": vq.config.codebook_sizes[0],
    }
    models = {name: ("image-causal",) for name in {**CAUSAL, **RELAXED}}
    models |= {name: ("image-causal", "image-draft") for name in (*DRAFTED, *DRAFTED_RELAXED)}
    models |= {name: ("image-masked",) for name in MASKED}
    figures = Figures(zoo / "evaluation.json", head, models)
    if "frontend" not in figures.values:
        figures.save("frontend", frontend_figures(vq, max(held_out, 8)))
    captions = shapes.captions(held_out, HELD_OUT_SEED, held=True)
    for kind, samplers in (
        ("causal", CAUSAL),
        ("masked", MASKED),
        ("causal", {**DRAFTED, **RELAXED, **DRAFTED_RELAXED}),
    ):
        folder = zoo / f"image-{kind}"
        measure_samplers(figures, folder, captions, samplers, SAMPLING, describe, log)
    measure_short(figures, zoo, captions, SHORT, SAMPLING, log)
    if "same_as_autoregressive_float64" not in figures.rows["gumbel"]:
        figures.save_row("gumbel", identity_figures(zoo, captions, log))
    write_cards(zoo, figures.values)
    return figures.values


def describe(name: str, out: PipelineOutput, verdicts: list, reference: Any) -> dict[str, Any]:
    """Return the shares by number of shapes, the passes of the draft model, and for causal samplers
    the share of items with the tokens of autoregression."""
    counts = [len(shapes.parse(item.prompt).items) for item in out.items]

    def share(n: int) -> float | None:
        return mean([v.passed for v, c in zip(verdicts, counts, strict=True) if c == n])

    row = {
        "valid": mean([v.valid for v in verdicts]),
        "one_shape": share(1),
        "two_shapes": share(2),
    }
    if any(s.draft_nfe for s in out.stats):
        row["draft_nfe_mean"] = mean([s.draft_nfe for s in out.stats])
    if name in CAUSAL and reference is not None:
        same = (out.tokens == reference.tokens).all(1)
        row["same_as_autoregressive_float32"] = same.double().mean().item()
    return row


def identity_figures(zoo: Path, captions: list[shapes.Caption], log=print) -> dict:
    """Share of items, in float64, for which the ``gumbel`` coupling gave the tokens of
    autoregression, and its forward passes.
    """
    double = Pipeline("image", str(zoo / "image-causal"), dtype="float64")
    prompts = [str(c) for c in captions]
    reference, jacobi = (
        double(prompts, s, **SAMPLING, seed=0, batch_size=BATCH)
        for s in ("autoregressive", CAUSAL["gumbel"])
    )
    nfe = [s.nfe for s in jacobi.stats]
    figures = {
        "same_as_autoregressive_float64": (
            (reference.tokens == jacobi.tokens).all(1).double().mean().item()
        ),
        "nfe_mean_float64": mean(nfe),
        "nfe_max_float64": max(nfe),
    }
    log(f"gumbel in float64: {json.dumps(figures)}")
    return figures


def frontend_figures(frontend, images: int) -> dict:
    """Checker on real images and on their reconstructions, and the PSNR of the reconstructions in
    dB.
    """
    captions = shapes.captions(images, seed=77, held=True)
    rng = np.random.default_rng(5)
    real = np.stack([shapes.draw(c, rng) for c in captions])
    x = torch.stack([frontend.preprocess(p) for p in real])
    y = torch.cat([frontend.decode(frontend.encode(part)) for part in x.split(20)])
    again = np.stack([np.asarray(frontend.postprocess(p)) for p in y])
    error = ((again.astype(np.float64) - real) ** 2).mean((1, 2, 3))

    def share(p):
        return statistics.mean(v.passed for v in check_many(p, captions))

    return {
        "checker_on_real": share(real),
        "checker_on_reconstructions": share(again),
        "psnr_mean": float(np.mean([10 * math.log10(255**2 / e) for e in error])),
        "psnr_min": float(min(10 * math.log10(255**2 / e) for e in error)),
    }


def write_cards(zoo: Path, result: dict) -> None:
    """Write a README.md into each model's folder."""
    f, rows = result["frontend"], result["samplers"]
    made = (
        "Trained from scratch on synthetic images (`modalities/image/captions.py`),"
        " with\n`python -m gen.recipes.image all --work DIR`. No other data were used.\n"
    )

    def line(n):
        return (
            f"| {n} | {rows[n]['passed']:.3f} | {rows[n]['one_shape'] or 0:.3f} |"
            f" {rows[n]['two_shapes'] or 0:.3f} | {any_length(rows[n])} |"
            f" {rows[n]['nfe_median']:g} |\n"
        )

    table = (
        "| sampler | caption passed | one shape | two shapes | any length | forward passes (median)"
        " |\n| --- | --- | --- | --- | --- | --- |\n"
    )
    about = (
        f"Measured on {result['held_out_captions']} held-out captions, one sample each, guidance 2,"
        " top-k 100. *Any length*: the same\ncaptions after words but the shapes were left out at"
        " random.\n\n"
    )
    (zoo / "image-vq" / "README.md").write_text(
        f"{CARD_HEAD}# image-vq\n\n`diffusers.VQModel`: 64x64 RGB images to 16x16 codes of"
        f" {result['codes']}.\n{made}\nPSNR of held-out images {f['psnr_mean']:.1f} dB (worst"
        f" {f['psnr_min']:.1f}); the pixel checker passes the caption"
        f" in\n{f['checker_on_real']:.3f} of the images and {f['checker_on_reconstructions']:.3f}"
        " of their reconstructions.\n"
    )
    (zoo / "image-draft" / "README.md").write_text(
        f"{CARD_HEAD}# image-draft\n\nThe architecture of `image-causal`, smaller: the draft"
        f" model of its speculative decoding. {made}"
    )
    for kind, names in (("causal", CAUSAL), ("masked", MASKED)):
        (zoo / f"image-{kind}" / "README.md").write_text(
            f"{CARD_HEAD}# image-{kind}\n\nA small Llama with row and column embeddings"
            " (`gen/models/nets/grid.py`): eight caption slots, then 256 codes of\n`image-vq`,"
            f" {'left to right' if kind == 'causal' else 'any of them masked'}."
            f" {made}\n{about}{table}{''.join(map(line, names))}"
        )
