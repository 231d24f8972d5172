"""Judge of DeepPrune for a text model: whether two unfinished answers will end alike.

    python -m gen.recipes.text.judge --out DIR            the judge of the documented figures
    python -m gen.recipes.text.judge --out DIR --quick    a smoke run of the same path

Samples of training tasks are cut off after every word; the pairs of those that go on are what the
judge learns from (``gen.samplers.search.judges``), with the label whether their whole answers are
equal. No task is held out; half of them are kept for the measurement that is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from gen.modalities.text import tasks as text_tasks
from gen.pipeline.pipeline import Pipeline
from gen.samplers.search.judges import FEATURES, TrainedJudge, features

SEED, SAMPLES, TEMPERATURES = 77, 8, (1.0, 1.5, 2.0)
STEPS, RIDGE = 30, 1e-3


def pairs(pipe: Pipeline, tasks: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw samples of training tasks and cut them off: features [m, F] and labels [m]."""
    prompts = [str(t) for t in text_tasks.tasks(tasks, SEED, held=False)]
    sampler = {"name": "autoregressive"}
    out = pipe(
        prompts, sampler, num_samples=SAMPLES, seed=0, temperature=temperature, batch_size=256
    )
    tokens = out.tokens.numpy().reshape(tasks, SAMPLES, -1)
    end = pipe.bound(out.model)[1].space.eos_token_id
    length = np.where((tokens == end).any(2), (tokens == end).argmax(2) + 1, tokens.shape[2])
    x, y = [], []
    for some, lengths in zip(tokens, length, strict=True):
        for cut in range(1, int(lengths.max())):
            known = np.broadcast_to(np.arange(some.shape[1]) < cut, some.shape)
            for i, j in combinations((lengths > cut).nonzero()[0].tolist(), 2):
                x.append(features(some, known, i, j))
                y.append(bool((some[i] == some[j]).all()))
    return np.asarray(x), np.asarray(y, dtype=np.float64)


def fit(x: np.ndarray, y: np.ndarray) -> TrainedJudge:
    """Fit a logistic regression by Newton's method, with a small ridge."""
    inputs = np.concatenate([x, np.ones((len(x), 1))], 1)
    weights = np.zeros(inputs.shape[1])
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-(inputs @ weights)))
        gradient = inputs.T @ (p - y) / len(y) + RIDGE * weights
        hessian = (inputs.T * (p * (1 - p))) @ inputs / len(y) + RIDGE * np.eye(len(weights))
        weights = weights - np.linalg.solve(hessian, gradient)
    return TrainedJudge(tuple(weights[:-1].round(6).tolist()), round(float(weights[-1]), 6))


def auroc(score: np.ndarray, label: np.ndarray) -> float:
    """Return the probability that a pair that ends alike scores above one that does not."""
    _, index, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[index]
    positive, total = label.sum(), len(label)
    above = rank[label > 0].sum() - positive * (positive + 1) / 2
    return float(above / (positive * (total - positive)))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the judge")
    parser.add_argument("--model", default=None, help="zoo name or folder of a causal model")
    parser.add_argument("--tasks", type=int, default=300, help="training tasks (300)")
    parser.add_argument("--quick", action="store_true", help="a few tasks")
    args = parser.parse_args(argv)
    pipe = Pipeline("text", args.model)
    data = [pairs(pipe, 6 if args.quick else args.tasks, t) for t in TEMPERATURES]
    learn = [(x[: len(x) // 2], y[: len(y) // 2]) for x, y in data]
    held = [(x[len(x) // 2 :], y[len(y) // 2 :]) for x, y in data]
    judge = fit(np.concatenate([x for x, _ in learn]), np.concatenate([y for _, y in learn]))
    judge.save(args.out)
    print(dict(zip(FEATURES, judge.weights, strict=True)), "bias", judge.bias)
    for temperature, (x, y) in zip(TEMPERATURES, held, strict=True):
        logit = x @ np.asarray(judge.weights) + judge.bias
        prefix = (x[:, FEATURES.index("beginning")] == 1).astype(float)
        print(
            f"temperature {temperature}: {len(y)} pairs, {y.mean():.3f} end alike; AUROC"
            f" {auroc(logit, y):.3f}, of equal beginnings {auroc(prefix, y):.3f}"
        )


if __name__ == "__main__":
    main()
