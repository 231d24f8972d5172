"""Measurements of the captioner and of edits by instruction, called by
``recipes/image/captioner.py``.

Sources are images of held-out captions. An edit passes if the pixel checker finds the caption
of the changed image: the new attribute, and all others as they were. The rest of the image, all
cells farther than one from a pixel that the renderer changes, counts as unchanged if at most one
pixel in a hundred differs by more than ``TOLERANCE``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gen.contracts.condition import Condition
from gen.core.errors import GenError
from gen.modalities.image.checker import check_many
from gen.modalities.image.instructions import ATTRIBUTES
from gen.modalities.image.reading import CAPTIONER, ordered
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_evaluation import CARD_HEAD
from gen.recipes.image.pairs import CELL, Pair, pairs

CAPTIONER_WORDS = "image-captions-words"
SEED = 77
OTHER_SEED, OTHERS = 78, 3  # of further images, as many times ``held_out``
TOLERANCE = 32  # of 255, in any channel
SAMPLERS = ("maskgit", "halton", "next_scale_masked", "mar", "speculative_jacobi")
FIGURES = "evaluation-captions.json"


def rest_unchanged(pair: Pair, image: np.ndarray) -> bool:
    """Return whether the pixels that an edit is not about are those of the source."""
    rest = ~np.kron(pair.touched, np.ones((CELL, CELL), dtype=bool))
    difference = np.abs(pair.images[0].astype(int) - image.astype(int)).max(-1)
    return bool((difference[rest] > TOLERANCE).mean() <= 0.01)


def figures(drawn: list[Pair], images: list[np.ndarray]) -> dict[str, Any]:
    """Return the shares of edits that pass and that leave the rest unchanged."""
    wanted = [p.instruction.applied(p.source) for p in drawn]
    passed = [v.passed for v in check_many(images, wanted)]
    kinds = {
        name: [ok for ok, p in zip(passed, drawn, strict=True) if p.instruction.attribute == name]
        for name in ATTRIBUTES
    }
    same = [rest_unchanged(p, image) for p, image in zip(drawn, images, strict=True)]
    return {
        "passed": statistics.mean(passed),
        "rest_unchanged": statistics.mean(same),
        **{name: statistics.mean(found) for name, found in kinds.items() if found},
    }


def _is_read(pipe: Pipeline, prompt: dict[str, Any]) -> bool:
    """Return whether the instruction fits what the captioner reads."""
    try:
        pipe.modality.parse(Condition.of(prompt))
    except GenError:
        return False
    return True


def evaluate(zoo: Path, held_out: int, log: Callable[[str], Any] = print) -> dict[str, Any]:
    """Measure the captioner of a folder, and edits by the embedded models; write their figures and
    the model cards there."""
    drawn = pairs(held_out, SEED, held=True)
    sources = [p.images[0] for p in drawn]
    found: dict[str, Any] = {"held_out": held_out, "captions": {}, "edits": {}}
    reader = Pipeline("text", str(zoo / CAPTIONER))
    others = pairs(OTHERS * held_out, OTHER_SEED, held=True)
    for name, temperature, seen in (
        ("greedy", 0.0, drawn),
        ("sampled", 1.0, drawn),
        ("greedy, others", 0.0, others),
    ):
        asked = [{"text": "describe", "image": p.images[0]} for p in seen]
        said = reader(asked, "speculative_jacobi", temperature=temperature, seed=0, progress=False)
        exact = [text == str(ordered(p.source)) for text, p in zip(said.media, seen, strict=True)]
        nfe = statistics.mean(s.nfe for s in said.stats)
        row = {"images": len(seen), "exact": statistics.mean(exact), "nfe": nfe}
        found["captions"][name] = row
        log(f"{name}: {row}")
    found["edits"]["the source itself"] = figures(drawn, sources)
    found["edits"]["the rendered target"] = figures(drawn, [p.images[1] for p in drawn])
    pipe = Pipeline("image")
    prompts = [
        {"text": str(p.instruction), "image": source}
        for p, source in zip(drawn, sources, strict=True)
    ]
    read = [_is_read(pipe, prompt) for prompt in prompts]
    for sampler in SAMPLERS:
        asked = [prompt for prompt, ok in zip(prompts, read, strict=True) if ok]
        out = pipe(asked, sampler, seed=0, batch_size=20, progress=False)
        made = iter(out.media)
        # what cannot be edited, since the captioner misread it, stays as it was
        images = [np.asarray(next(made)) if ok else s for s, ok in zip(sources, read, strict=True)]
        row = figures(drawn, images)
        row["nfe"] = statistics.mean(s.nfe for s in out.stats)
        found["edits"][f"{out.model}, {sampler}"] = row
        log(f"{out.model}, {sampler}: {row}")
    (zoo / FIGURES).write_text(json.dumps(found, indent=1) + "\n")
    write_cards(zoo, found)
    return found


CARD = f"""{CARD_HEAD}# {{name}}

{{about}}
Made by `python -m gen.recipes.image.captioner all --work DIR` from synthetic images. No other data
were used.
"""
MEASURED = f"""
Captions of {{held_out}} images of held-out captions that are exact: {{greedy:.3f}} greedy,
{{sampled:.3f}} sampled; of {{others}} others {{more:.3f}} greedy. Edits by instruction begin
with a caption. *Passed*: the checker finds
the caption of the changed image. *Rest unchanged*: at most one pixel in a hundred, outside of the
changed cells and their neighbours, differs by more than {TOLERANCE} of 255.

| | passed | rest unchanged | forward passes |
| --- | --- | --- | --- |
"""


def write_cards(zoo: Path, found: dict[str, Any]) -> None:
    """Write the model cards."""
    about = "A word-level tokenizer of the words of captions."
    card = CARD.format(name=CAPTIONER_WORDS, about=about)
    (zoo / CAPTIONER_WORDS / "README.md").write_text(card)
    about = (
        "A causal model that describes images of captioned shapes from their codes, which\n"
        "convolutions read first (`gen/models/nets/grid_reader.py`)."
    )
    card = CARD.format(name=CAPTIONER, about=about)
    rows = found["captions"]
    card += MEASURED.format(
        held_out=found["held_out"],
        greedy=rows["greedy"]["exact"],
        sampled=rows["sampled"]["exact"],
        others=rows["greedy, others"]["images"],
        more=rows["greedy, others"]["exact"],
    )
    for name, row in found["edits"].items():
        card += f"| {name} | {row['passed']:.3f} | {row['rest_unchanged']:.3f} |"
        card += f" {row.get('nfe', 0):g} |\n"
    (zoo / CAPTIONER / "README.md").write_text(card)
