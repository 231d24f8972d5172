"""Decoding loops of published methods, one row at a time, from their papers and descriptions.

``f`` gives the logits [T, V] of a canvas, a list of T tokens. Every loop returns the tokens, and of
each forward pass the committed tokens by position and the positions that were masked again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Logits = Callable[[list[int]], Tensor]
Steps = list[tuple[dict[int, int], list[int]]]
Result = tuple[list[int], Steps]


def highest(value: Tensor, among: Sequence[int], count: int) -> list[int]:
    """Positions of the largest values, the first of equal ones."""
    return sorted(sorted(among, key=lambda i: (-float(value[i]), i))[:count])


def masked_in(x: list[int], mask: int, start: int = 0, end: int | None = None) -> list[int]:
    return [i for i in range(start, len(x) if end is None else end) if x[i] == mask]


def write(x: list[int], steps: Steps, tokens: Tensor, chosen: Sequence[int]) -> None:
    committed = {i: int(tokens[i]) for i in chosen}
    for i, token in committed.items():
        x[i] = token
    steps.append((committed, []))


def even_counts(masked: int, steps: int) -> list[int]:
    return [masked // steps + (i < masked % steps) for i in range(steps)]


def llada(
    f: Logits, length: int, mask: int, *, steps: int, block: int, held: Sequence[int] = ()
) -> Result:
    """LLaDA: even counts per block. ``held``: tokens whose confidence is taken away, in the softmax
    as well."""
    x, out = [mask] * length, []
    for start in range(0, length, block):
        for count in even_counts(block, steps * block // length):
            logits = f(x)
            tokens = logits.argmax(-1)
            logits[:, list(held)] = -torch.inf
            p = logits.softmax(-1).gather(1, tokens[:, None])[:, 0]
            write(x, out, tokens, highest(p, masked_in(x, mask, start, start + block), count))
    return x, out


def adablock(
    f: Logits,
    length: int,
    mask: int,
    *,
    block: int,
    threshold: float,
    delimiters: Sequence[int],
    delimiter_threshold: float,
) -> Result:
    """AdaBlock: blocks end with the most confident delimiter of the next quarter of the canvas."""
    x, out, start, end = [mask] * length, [], 0, 0
    while mask in x:
        p, tokens = f(x).softmax(-1).max(-1)
        if start == end:
            near = range(start, min(start + length // 4, length))
            found = [i for i in near if int(tokens[i]) in delimiters]
            best = max(found, key=lambda i: (float(p[i]), -i), default=-1)
            is_end = best >= 0 and float(p[best]) >= delimiter_threshold
            end = best + 1 if is_end else min(start + block, length)
        left = masked_in(x, mask, start, end)
        sure = [i for i in left if float(p[i]) >= threshold]
        write(x, out, tokens, sure or highest(p, left, 1))
        if not masked_in(x, mask, start, end):
            start = end
    return x, out


def klass(
    f: Logits,
    length: int,
    mask: int,
    *,
    block: int,
    conf: float,
    kl: float,
    history: int,
    guard: bool = True,
) -> Result:
    """KLASS: divergences go on across blocks, and count from step ``history`` - 1 of a block on."""
    x, out = [mask] * length, []
    before, moved = None, [[math.inf] * history for _ in range(length)]
    for start in range(0, length, block):
        step = 0
        while left := masked_in(x, mask, start, start + block):
            p = f(x).softmax(-1)
            old = torch.full_like(p, 1e-300) if before is None else before
            divergence = torch.where(p > 0, p * (p / old).log(), 0).sum(-1).tolist()
            moved = [[*past[1:], now] for past, now in zip(moved, divergence, strict=True)]
            before = p
            confidence, tokens = p.max(-1)
            ready = [
                i
                for i in left
                if (step >= history - 1 or not guard)
                and max(moved[i]) < kl
                and float(confidence[i]) > conf
            ]
            write(x, out, tokens, ready or highest(confidence, left, 1))
            step += 1
    return x, out


def dream(f: Logits, length: int, mask: int, *, steps: int, eps: float = 1e-3) -> Result:
    """Dream at temperature 0, ``alg`` entropy: int(m (1 - s / t)) positions. Calls that commit
    nothing are kept."""
    x, out = [mask] * length, []
    times = torch.linspace(1, eps, steps + 1)
    for i in range(steps):
        p = f(x).softmax(-1)
        left = masked_in(x, mask)
        share = 1 - times[i + 1] / times[i]
        count = int(len(left) * share) if i < steps - 1 else len(left)
        negative_entropy = (p * p.clamp_min(1e-30).log()).sum(-1)
        write(x, out, p.argmax(-1), highest(negative_entropy, left, count))
    return x, out


def prophet(
    f: Logits,
    length: int,
    mask: int,
    *,
    steps: int,
    block: int,
    region: tuple[int, int],
    thresholds: tuple[float, float, float] = (7.5, 5.0, 2.5),
) -> Result:
    """Prophet: LLaDA's steps until the two best logits of the answer are far apart."""
    x, out, calls = [mask] * length, [], 0
    for start in range(0, length, block):
        for count in even_counts(block, steps * block // length):
            calls += 1
            logits = f(x)
            tokens = logits.argmax(-1)
            best = logits[region[0] : region[0] + region[1]].topk(2, -1).values
            gap, r = float((best[:, 0] - best[:, 1]).mean()), calls / steps
            if gap >= thresholds[0 if r < 0.33 else 1 if r < 0.67 else 2]:
                write(x, out, tokens, masked_in(x, mask))
                return x, out
            p = logits.softmax(-1).max(-1).values
            write(x, out, tokens, highest(p, masked_in(x, mask, start, start + block), count))
    return x, out


def wino(
    f: Logits,
    length: int,
    mask: int,
    *,
    block: int,
    threshold: float,
    back: float,
    released_bound: bool = False,
    most: int = 200,
) -> Result:
    """WINO: many in, and out again what its neighbours alone do not confirm; at most one fewer than
    this step commits, or with ``released_bound`` than the step before did."""
    x, out = [mask] * length, []
    for start in range(0, length, block):
        last = 30
        while (left := masked_in(x, mask, start, start + block)) and len(out) < most:
            p, tokens = f(x).softmax(-1).max(-1)
            limit = min(max(int(len(left) * 0.7), 5), 20)
            sure = [i for i in left if float(p[i]) > threshold]
            chosen = highest(p, sure, limit) or highest(p, left, 1)
            confirmed = {}
            for i in set(range(start, start + block)) - set(left):
                without = f([*x[:i], mask, *x[i + 1 :]]).softmax(-1)
                confirmed[i] = float(without[i, x[i]])
            doubtful = sorted((c, i) for i, c in confirmed.items() if c < back)
            bound = (last - 1 if len(chosen) > 1 else 0) if released_bound else len(chosen) - 1
            removed = sorted(i for _, i in doubtful[:bound])
            write(x, out, tokens, chosen)
            for i in removed:
                x[i] = mask
            out[-1] = out[-1][0], removed
            last = len(chosen)
    return x, out


def pc(
    f: Logits,
    length: int,
    mask: int,
    *,
    steps: int,
    counts: dict[int, int],
    total: int,
    decay: float,
    bound: float = 10.0,
) -> Result:
    """PC-Sampler without blocks: p times minus the logarithm of the token's share, fading."""
    x, out = [mask] * length, []
    for count in even_counts(length, steps):
        p, tokens = f(x).softmax(-1).max(-1)
        rare = [-math.log(counts.get(int(t), 1) / total) for t in tokens]
        score = torch.tensor(
            [min(float(p[i]) * rare[i], bound) * math.exp(-decay * i) for i in range(length)]
        )
        write(x, out, tokens, highest(score, masked_in(x, mask), count))
    return x, out


def halton_counts(cells: int, steps: int) -> list[int]:
    """Positions that are known after each step of the Halton scheduler."""
    known = []
    for s in range(steps):
        share = 1 - float(torch.arccos(torch.tensor((s + 1) / steps))) / (math.pi / 2)
        known.append(max(s + 1, int(share * cells)))
    return known
