"""Statistics of the tokens that a model generates, for drafters without a model:

    python -m gen.recipes.common.draft_table text --prompts 200 --samples 4 --out text.safetensors

decodes example prompts with plain autoregression and counts the tokens and which token followed
which. ``sampler.draft_table`` reads the file: ``token_recycling`` begins with the successors, and
``sampler.draft_vocab`` keeps the most frequent tokens. The file says which weights it is of, and is
refused with others.
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from gen.core.resolve import resolve_sampler
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.models.targets.token_table import TokenTable, write_table
from gen.pipeline.pipeline import load

SAMPLER = "autoregressive"


def count(texts: list[list[int]], size: int, successors: int) -> TokenTable:
    """Count tokens, and which token followed which.

    Args:
        texts: token ids of every text, below ``size``.
        size: number of token ids.
        successors: most frequent successors of a token that are kept; of equal ones the smallest
            ids.
    """
    counts, kept = torch.zeros(size, dtype=torch.long), torch.full((size, successors), -1)
    pairs: dict[int, Counter[int]] = {}
    for text in texts:
        counts += torch.bincount(torch.tensor(text, dtype=torch.long), minlength=size)
        for one, other in pairwise(text):
            pairs.setdefault(one, Counter())[other] += 1
    for one, found in pairs.items():
        order = sorted(found, key=lambda token: (-found[token], token))[:successors]
        kept[one, : len(order)] = torch.tensor(order)
    return TokenTable(counts, kept)


def texts_of(tokens: Tensor, space: TokenSpace) -> list[list[int]]:
    """List the tokens [N, T] of every row, up to its end."""
    ends = space.is_end(tokens).long()
    kept = ends.cumsum(1) - ends == 0
    rows = [row[keep].tolist() for row, keep in zip(tokens, kept, strict=True)]
    if space.eos_token_id is None:
        return rows
    return [row if row[-1] in space.row_ends else [*row, space.eos_token_id] for row in rows]


def main(argv: list[str] | None = None) -> int:
    """Write the table of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modality")
    parser.add_argument("--model", help="name of the model (default: the modality's own)")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--samples", type=int, default=4, help="samples of each prompt")
    parser.add_argument("--successors", type=int, default=8, help="successors of each token")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    pipe = load(args.modality, args.model)
    prompts = pipe.modality.example_prompts(args.prompts, args.seed)
    out = pipe(
        prompts,
        SAMPLER,
        num_samples=args.samples,
        seed=args.seed,
        batch_size=args.batch_size,
    )
    target = pipe.target(*resolve_sampler(SAMPLER), pipe.plan(prompts[:1]))
    assert isinstance(target.model, ModelAdapter)
    texts = texts_of(out.tokens.cpu(), target.space)
    table = count(texts, target.legal.shape[-1], args.successors)
    write_table(args.out, table, target.model.model)
    print(f"{args.out}: {int(table.counts.sum()):,} tokens of {len(texts):,} outputs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
