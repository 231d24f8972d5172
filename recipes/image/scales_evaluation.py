"""Measurements and model cards of the embedded next-scale models, called by
``recipes/image/scales.py``. Held-out captions and the pixel checker are those of
``recipes/image/evaluation.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gen.modalities.image import captions as shapes
from gen.modalities.image.checker import grade
from gen.models.nets.grid_scales import GridScalesModel
from gen.pipeline.output import PipelineOutput
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_evaluation import CARD_HEAD
from gen.recipes.image.evaluation import frontend_figures
from gen.recipes.image.figures import (
    BATCH,
    HELD_OUT_SEED,
    Figures,
    any_length,
    mean,
    measure_samplers,
    measure_short,
    pixels_of,
)
from gen.tokenizers.image.scale_vq import ScaleVQ

SAMPLING = {"guidance_scale": 2.0, "top_k": 100}
SCALES: dict[str, Any] = {
    "next_scale": "next_scale",
    "next_scale more_smooth": {"name": "next_scale", "more_smooth": True},
}
DRAFTED = {
    f"next_scale early {n}": {"name": "next_scale", "early": n} for n in (5, 4, 3)
}  # CoDe: the draft model makes the later scales
MASKED: dict[str, Any] = {
    "fill": {"name": "next_scale_masked", "schedule": "fill"},
    "next_scale_masked": "next_scale_masked",
    "next_scale_masked, fine scales": {
        "name": "next_scale_masked",
        "schedule": [[1], [4], [9], [16], [18, 18], [32, 32]],
    },
    "next_scale_masked halton": {"name": "next_scale_masked", "order": "halton"},
    "scale_draft": "scale_draft",
}
# judged by the likelihood of another model
JUDGED = ("fill", "next_scale_masked", "next_scale_masked, fine scales")
SHORT = {"next_scale": "next_scale", "next_scale_masked": "next_scale_masked"}
ABOUT = {
    "image-scales": "a scale sees the scales before it (VAR)",
    "image-scales-masked": "a scale sees the sum of those before it, and can be refined (HMAR)",
    "image-scales-draft": "smaller: the draft model of `image-scales`",
}


def evaluate(zoo: Path, held_out: int, log=print) -> dict:
    """Measure the models in ``zoo``, and write ``evaluation-scales.json`` there and a model card
    into each folder. A second call measures only what the file lacks.
    """
    head = {"held_out_captions": held_out, "sampling": SAMPLING}
    models = {name: ("image-scales",) for name in SCALES}
    models |= {name: ("image-scales", "image-scales-draft") for name in DRAFTED}
    models |= {name: ("image-scales-masked",) for name in MASKED}
    figures = Figures(zoo / "evaluation-scales.json", head, models)
    if "frontend" not in figures.values:
        vq = ScaleVQ.from_pretrained(zoo / "image-scales-vq")
        figures.save("frontend", frontend_figures(vq, max(held_out, 8)))
    captions = shapes.captions(held_out, HELD_OUT_SEED, held=True)
    draft = {"draft_model": str(zoo / "image-scales-draft")}
    drafted = {name: {**spec, **draft} for name, spec in DRAFTED.items()}
    for folder, samplers in (("image-scales", SCALES | drafted), ("image-scales-masked", MASKED)):
        measure_samplers(figures, zoo / folder, captions, samplers, SAMPLING, describe, log)
    measure_short(figures, zoo, captions, SHORT, SAMPLING, log)
    if "log_likelihood" not in figures.values:
        figures.save("log_likelihood", log_likelihoods(zoo, captions))
        log(f"log-likelihood: {figures.values['log_likelihood']}")
    write_cards(zoo, figures.values)
    return figures.values


def log_likelihoods(zoo: Path, captions: list[shapes.Caption]) -> dict[str, list[float]]:
    """Return the mean log-probability per token under ``image-scales``, and its standard error over
    captions, of images of ``image-scales-masked`` and of real ones.
    """
    judge = GridScalesModel.from_pretrained(zoo / "image-scales", torch_dtype=torch.float32).eval()
    vq = ScaleVQ.from_pretrained(zoo / "image-scales-vq")
    words = torch.tensor([c.pairs() for c in captions])
    rng = np.random.default_rng(5)
    real = torch.stack([vq.preprocess(shapes.draw(c, rng)) for c in captions])
    tokens = {"real images": vq.encode(real)[:, 0]}
    pipe = Pipeline("image", str(zoo / "image-scales-masked"))
    for name in JUDGED:
        out = pipe([str(c) for c in captions], MASKED[name], **SAMPLING, seed=0, batch_size=BATCH)
        tokens[name] = out.tokens.long()
    found = {}
    for name, ids in tokens.items():
        with torch.no_grad():
            logp = judge(words, ids).log_softmax(-1).gather(-1, ids[..., None]).mean((1, 2))
        found[name] = [logp.mean().item(), (logp.std() / len(logp) ** 0.5).item()]
    return found


def describe(name: str, out: PipelineOutput, verdicts: list, reference: Any) -> dict[str, Any]:
    """Return the mean grade of the images, and the passes of the draft model."""
    images = zip(pixels_of(out), out.items, strict=True)
    return {
        "grade": mean([grade(image, item.prompt) for image, item in images]),
        "draft_nfe_mean": mean([s.draft_nfe for s in out.stats if s.draft_nfe is not None]),
    }


def write_cards(zoo: Path, result: dict) -> None:
    """Write a README.md into each model's folder."""
    f, rows = result["frontend"], result["samplers"]
    made = (
        "Trained on synthetic images (`modalities/image/captions.py`) with\n"
        "`python -m gen.recipes.image.scales all --work DIR`, from embedded models of the same"
        " images.\nNo other data were used.\n"
    )
    table = (
        "| sampler | caption passed | mean grade | any length | forward passes (mean) | of the"
        " draft model |\n| --- | --- | --- | --- | --- | --- |\n"
    )

    def line(name: str) -> str:
        row = rows[name]
        return (
            f"| {name} | {row['passed']:.3f} | {row['grade']:.4f} | {any_length(row)} |"
            f" {row['nfe_mean']:.1f} | {row['draft_nfe_mean'] or 0:.1f} |\n"
        )

    about = (
        f"Measured on {result['held_out_captions']} held-out captions, one sample each, guidance 2"
        " (of the last scale),\ntop-k 100. *Any length*: the same captions after words but the"
        " shapes were left out at random.\n\n"
    )
    (zoo / "image-scales-vq" / "README.md").write_text(
        f"{CARD_HEAD}# image-scales-vq\n\n64x64 RGB images to six token maps of sides 1, 2, 3, 4, 6"
        " and 8 over one codebook\n(`gen/models/nets/scale_vq.py`). "
        f"{made}\nPSNR of held-out images {f['psnr_mean']:.1f} dB (worst {f['psnr_min']:.1f}); the"
        f" pixel checker passes the caption in\n{f['checker_on_real']:.3f} of the images and"
        f" {f['checker_on_reconstructions']:.3f} of their reconstructions.\n"
    )
    kind = (
        "A small Llama over the token maps of `image-scales-vq` (`gen/models/nets/grid_scales.py`)"
    )
    names = {"image-scales": {**SCALES, **DRAFTED}, "image-scales-masked": MASKED}
    for folder, what in ABOUT.items():
        lines = "".join(map(line, names.get(folder, ())))
        figures = f"\n{about}{table}{lines}" if lines else ""
        if names.get(folder) is MASKED:
            figures += judged(result["log_likelihood"])
        (zoo / folder / "README.md").write_text(
            f"{CARD_HEAD}# {folder}\n\n{kind}: {what}. {made}{figures}"
        )


def judged(found: dict[str, list[float]]) -> str:
    """Table of the log-likelihoods under another model."""
    lines = "".join(f"| {n} | {mean:.3f} | {error:.3f} |\n" for n, (mean, error) in found.items())
    return (
        "\nLog-probability per token under `image-scales`, which shares no pass with this model, of"
        " the same images:\n\n| images | mean | standard error |\n| --- | --- | --- |\n" + lines
    )
