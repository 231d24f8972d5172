"""Draw the strip of images on the first page, with the models in the package.

    python docs/figures/demo.py            write docs/images/demo.png and demo.json beside it
    python docs/figures/demo.py --check    exit with 1 if the image is of other weights or an older
                                           version of this script

``demo.json`` holds the digests of the script and of the weights that the image was made with, and
the verdicts of the checker.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import gen

ROOT = Path(__file__).resolve().parents[2]
FILE, RECORD = ROOT / "docs" / "images" / "demo.png", ROOT / "docs" / "images" / "demo.json"
PROMPTS = (
    "a large red circle at the top left",
    "a small blue ring in the centre",
    "a large green cross at the left and a small yellow triangle at the right",
)
# sampler, model, and how its images relate to those of the first column
COLUMNS = (
    ("autoregressive", "image-causal", "one token at a time"),
    ("speculative_jacobi", "image-causal", "the same images"),
    ("typical", "image-causal", "relaxed"),
    ("maskgit", "image-masked", "masked model"),
    ({"name": "mar", "steps": 16}, "image-mar", "latents, masked"),
)
SEED, SIDE, GAP, LEFT, TOP = 0, 160, 16, 210, 74  # pixels
INK, QUIET, PAPER = (15, 23, 42), (100, 116, 139), (251, 250, 247)


def digests() -> dict[str, str]:
    """Return the digests of this script, and of the weights that it draws with."""
    paths = {"script": Path(__file__)}
    models = {model for _, model, _ in COLUMNS} | {"image-vq", "image-kl"}
    for model in sorted(models):
        (paths[model],) = (ROOT / "gen" / "zoo" / model).glob("*model.safetensors")
    return {name: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for name, p in paths.items()}


def is_stale(record: dict) -> bool:
    """Return whether a record is of other weights or of another version of this script."""
    return record.get("digests") != digests()


def draw() -> tuple[Image.Image, dict[str, list[bool]]]:
    """Draw the strip.

    Returns:
        The image, and for each column whether its images show their prompts.
    """
    height = TOP + len(PROMPTS) * (SIDE + GAP + 20)
    canvas = Image.new("RGB", (LEFT + len(COLUMNS) * (SIDE + GAP), height), PAPER)
    pen, passed = ImageDraw.Draw(canvas), {}
    name_font, small = ImageFont.load_default(17), ImageFont.load_default(14)
    for row, prompt in enumerate(PROMPTS):
        top = TOP + row * (SIDE + GAP + 20)
        pen.multiline_text((GAP, top), broken(prompt), INK, ImageFont.load_default(16), spacing=6)
    for column, (sampler, model, note) in enumerate(COLUMNS):
        left = LEFT + column * (SIDE + GAP)
        pipe = gen.load("image", model=model)
        name = sampler if isinstance(sampler, str) else sampler["name"]
        out = pipe(list(PROMPTS), sampler, seed=SEED)
        passed[name] = [
            pipe.modality.check(image, prompt).passed
            for image, prompt in zip(out.media, PROMPTS, strict=True)
        ]
        pen.text((left, 16), name, INK, name_font)
        pen.text((left, 40), note, QUIET, small)
        for row, (image, stats) in enumerate(zip(out.media, out.stats, strict=True)):
            top = TOP + row * (SIDE + GAP + 20)
            large = Image.fromarray(np.asarray(image)).resize(
                (SIDE, SIDE), Image.Resampling.BICUBIC
            )
            canvas.paste(large, (left, top))
            pen.text((left, top + SIDE + 4), f"{stats.nfe} forward passes", QUIET, small)
    return canvas, passed


def broken(text: str, width: int = 22) -> str:
    """Return a text in lines of at most ``width`` letters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def main() -> int:
    """Write the image and its record, or look at the record with ``--check``."""
    if "--check" in sys.argv[1:]:
        return int(is_stale(json.loads(RECORD.read_text("utf-8"))))
    image, passed = draw()
    image.save(FILE, optimize=True)
    record = {"digests": digests(), "passed": passed}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
