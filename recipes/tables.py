"""Context tables of ``init: table``: what the tokens of a model's world follow.

    python -m gen.recipes.tables image-causal --offsets "[[-1,0],[0,-1]]"   the table of the zoo

A table holds token sequences: those that the model generates for training conditions, one for each,
and, if asked for, those of rendered training images as the tokenizer encodes them, which cost no
forward pass and help less. ``--generated`` conditions are drawn, of which the distinct ones count.
``--offsets`` are the neighbours, the one counted from level 1 on first; without them they are
chosen by the likelihood of every second sequence (``choose_offsets``).

Sequences for evaluation are of held-out conditions, so none of them is in a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.modality_of import modality_of
from gen.core.errors import unknown
from gen.modalities.image import captions as shapes
from gen.modalities.speech import synth as spoken
from gen.modalities.video import captions as moving
from gen.models.load.locate import locate
from gen.models.targets.context_table import ContextTable, Offset, gather, write_table
from gen.pipeline.pipeline import Pipeline
from gen.tokenizers.image.vq import VQ

CONDITIONS: dict[str, Callable[..., Sequence[Any]]] = {
    "image": shapes.captions,
    "speech": spoken.utterances,
    "video": moving.captions,
}
SEED, RENDERED_SEED, BATCH = 4242, 5, 24


def generated_sequences(pipe: Pipeline, modality: str, count: int) -> Tensor:
    """Generate one sequence for each distinct one of ``count`` training conditions: [n, T]."""
    drawn = [str(c) for c in CONDITIONS[modality](count, SEED, held=False)]
    prompts = list(dict.fromkeys(drawn))
    sampler = {"name": "speculative_jacobi", "init": "model"}
    parts = [
        pipe(prompts[i : i + BATCH], sampler, seed=0).tokens for i in range(0, len(prompts), BATCH)
    ]
    return torch.cat(parts)


def rendered_sequences(count: int) -> Tensor:
    """Encode rendered images of training captions: [count, T]."""
    rng, frontend = np.random.default_rng(RENDERED_SEED), VQ.from_pretrained(locate("image-vq"))
    captions = shapes.captions(count, SEED, held=False)
    images = [frontend.preprocess(shapes.draw(c, rng)) for c in captions]
    parts = [frontend.encode(torch.stack(images[i : i + 50])) for i in range(0, count, 50)]
    return torch.cat([part.flatten(1) for part in parts]).long()


def candidates(grid: tuple[int, ...]) -> list[Offset]:
    """List offsets to positions that come before: at most two cells along an axis, or one each
    along two."""
    axes = len(grid)
    steps = [s for s in itertools.product((-2, -1, 0, 1), repeat=axes) if 0 < sum(map(abs, s)) <= 2]
    return [s for s in steps if next(x for x in s if x) < 0]


def choose_offsets(
    sequences: Tensor, grid: tuple[int, ...], size: int, most: int = 4
) -> list[Offset]:
    """Choose neighbours one by one: each time the one that makes every second sequence likeliest
    under the table of the others.

    Args:
        sequences: token ids int64 [n, T].
        grid: sizes of the axes, slowest first.
        size: number of token ids V.
        most: neighbours at most.
    """
    chosen: list[Offset] = []
    best = -np.inf
    while len(chosen) < most:
        scores = {
            offset: log_likelihood(
                ContextTable(sequences[::2], grid, size, [*chosen, offset]), sequences[1::2]
            )
            for offset in candidates(grid)
            if offset not in chosen
        }
        offset = max(scores, key=scores.__getitem__)
        if scores[offset] <= best:
            break
        chosen, best = [*chosen, offset], scores[offset]
    return chosen


def log_likelihood(table: ContextTable, sequences: Tensor) -> float:
    """Mean log-probability of the tokens of sequences int64 [n, T]."""
    context = gather(sequences, table.where, table.size).flatten(0, 1)
    q = table.distribution(context)
    return float(q.gather(1, sequences.reshape(-1, 1)).log().mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="zoo name or folder of a causal model")
    parser.add_argument("--modality", default=None, help="the one that the model's config states")
    parser.add_argument("--generated", type=int, default=326, help="conditions (326)")
    parser.add_argument("--rendered", type=int, default=0, help="rendered images (0)")
    parser.add_argument("--offsets", type=json.loads, default=None, help="such as [[-1,0],[0,-1]]")
    args = parser.parse_args(argv)
    modality = args.modality or modality_of(args.model)
    if modality not in CONDITIONS:
        raise unknown("modality", modality, CONDITIONS, "the modalities with tables")
    pipe = Pipeline(modality, args.model)
    _, binding, _ = pipe.bound(args.model)
    grid, size = binding.space.grid, binding.space.num_logits
    parts = [generated_sequences(pipe, modality, args.generated)] if args.generated else []
    if modality == "image" and args.rendered:
        parts.append(rendered_sequences(args.rendered))
    sequences = torch.cat(parts)
    offsets = args.offsets or choose_offsets(sequences, grid, size)
    file = write_table(Path(locate(args.model)), sequences, grid, size, offsets)
    print(f"{file}: {len(sequences)} sequences, {file.stat().st_size} bytes, neighbours {offsets}")


if __name__ == "__main__":
    main()
