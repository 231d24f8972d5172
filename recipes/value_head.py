"""Train a value head, which predicts the reward of unfinished outputs from their tokens.

    python -m gen.recipes.value_head action --scorer goal_distance --out goal.safetensors

makes trajectories of a model on example prompts, scores their outputs, and fits
``gen.samplers.search.scorers.value_head`` to what was decided on the way. It prints the share of
the rewards' variance that the head explains on held-out prompts, for outputs that are half decided
and for finished ones. ``--quick`` makes a tenth of the trajectories. Seeds are fixed, and training
runs on one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.scorer import Sample, checked_scores, read_scorer
from gen.core.errors import GenError
from gen.pipeline.pipeline import Pipeline, load
from gen.pipeline.request import GenerationRequest
from gen.samplers.search.scorers.value_head import (
    HeadFacts,
    HeadNet,
    padded,
    prompt_tokens,
    write_head,
)

SNAPSHOTS = 6  # of every trajectory, besides its end
SAMPLES = 2  # trajectories of every prompt
HELD_OUT = 0.1  # share of the prompts
EPOCHS, ROWS, RATE, DECAY = 40, 256, 3e-3, 1e-4


@dataclass(frozen=True)
class Trajectories:
    """Parts of outputs and the reward of each whole.

    Attributes:
        tokens: tokens, long [n, T]; undecided ones hold any id.
        known: decided positions, bool [n, T].
        prompts: token ids of each prompt.
        rewards: rewards of the outputs, float64 [n].
    """

    tokens: Tensor
    known: Tensor
    prompts: list[list[int]]
    rewards: np.ndarray

    def of_rows(self, rows: np.ndarray) -> Trajectories:
        """Return some of the rows."""
        chosen = torch.from_numpy(rows)
        prompts = [self.prompts[i] for i in rows.tolist()]
        return Trajectories(self.tokens[chosen], self.known[chosen], prompts, self.rewards[rows])


def trajectories(
    pipe: Pipeline, spec: dict[str, Any], scorer: Any, count: int, seed: int, batch: int
) -> Trajectories:
    """Make outputs and keep what was decided at some of their steps.

    Args:
        pipe: the pipeline.
        spec: the sampler.
        scorer: spec of the reward.
        count: number of outputs.
        seed: seed of the prompts and of the steps that are kept.
        batch: outputs decoded at a time.
    """
    prompts = pipe.modality.example_prompts(max(2, count // SAMPLES), seed)
    items = pipe.plan(prompts, num_samples=SAMPLES)
    rng, parts = np.random.default_rng(seed), []
    for first in range(0, len(items), batch):
        some = items[first : first + batch]
        out, steps = with_steps(pipe, spec, some)
        kept = rng.permutation(len(steps))[:SNAPSHOTS].tolist()
        seen = [steps[k] for k in kept]
        seen.append((out.tokens, torch.ones(out.tokens.shape, dtype=torch.bool)))
        rewards = rewards_of(pipe, spec, scorer, some, out)
        ids = prompt_tokens(pipe, pipe.model_name(spec), [x.condition for x in some])
        parts += [Trajectories(t.cpu(), k.cpu(), ids, rewards) for t, k in seen]
    return Trajectories(
        torch.cat([p.tokens for p in parts]),
        torch.cat([p.known for p in parts]),
        [row for p in parts for row in p.prompts],
        np.concatenate([p.rewards for p in parts]),
    )


def with_steps(
    pipe: Pipeline, spec: dict[str, Any], items: Sequence[Any]
) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Make outputs: those, and tokens and decided positions [n, T] after every forward pass."""
    steps: list[tuple[Tensor, Tensor]] = []

    def keep(info: dict[str, Any]) -> None:
        steps.append((info["tokens"].clone(), info["known"].clone()))

    return pipe.generate(items, spec, callback=keep), steps


def rewards_of(
    pipe: Pipeline, spec: dict[str, Any], scorer: Any, items: Sequence[Any], out: Any
) -> np.ndarray:
    """Score the outputs of a call: float64 [n]."""
    attached = read_scorer(scorer, "--scorer").attach(
        pipe, GenerationRequest(items, spec, *pipe.resolve(spec))
    )
    samples = [
        Sample(media, tokens, item.prompt, item.condition, pipe.modality, k)
        for k, (media, tokens, item) in enumerate(zip(out.media, out.tokens, items, strict=True))
    ]
    return checked_scores(attached, samples)


def fit(
    data: Trajectories, watched: Trajectories, vocabulary: int, seed: int
) -> tuple[HeadNet, float, float]:
    """Fit a head by least squares: the network, and mean and scale of the rewards.

    Of all epochs the weights with the least error on ``watched`` stay, so that few trajectories do
    not give a head that knows them by heart.
    """
    torch.manual_seed(seed)
    net = HeadNet(vocabulary, data.tokens.shape[1], max(map(len, data.prompts)))
    mean, scale = float(data.rewards.mean()), float(data.rewards.std())
    if not scale:
        raise GenError(
            f"all {len(data.rewards)} rewards are {mean:g}; expected a reward that tells outputs of"
            " these prompts apart"
        )
    tokens, prompts = inputs(net, data)
    wanted = torch.from_numpy((data.rewards - mean) / scale).float()
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=DECAY)
    steps = EPOCHS * -(-len(wanted) // ROWS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best, kept = -float("inf"), net.state_dict()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(wanted)).split(ROWS):
            loss = (net(tokens[rows], prompts[rows]) - wanted[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        share = explained(net, mean, scale, watched)
        if share > best:
            best, kept = share, {k: v.clone() for k, v in net.state_dict().items()}
    net.load_state_dict(kept)
    return net.eval().requires_grad_(False), mean, scale


def split(data: Trajectories) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows to fit, to watch and to measure, whole prompts each."""
    texts = [tuple(p) for p in data.prompts]
    every = list(dict.fromkeys(texts))
    number = {text: k for k, text in enumerate(every)}
    fold = np.array([number[t] % round(1 / HELD_OUT) for t in texts])
    return (fold > 1).nonzero()[0], (fold == 1).nonzero()[0], (fold == 0).nonzero()[0]


def inputs(net: HeadNet, data: Trajectories) -> tuple[Tensor, Tensor]:
    """Return what a network reads: tokens with undecided ones marked, and prompts."""
    return data.tokens.where(data.known, net.undecided), padded(data.prompts, net)


def explained(net: HeadNet, mean: float, scale: float, data: Trajectories) -> float:
    """Return the share of the rewards' variance that a head explains; below 0 it harms."""
    with torch.no_grad():
        out = net(*inputs(net, data))
    predicted = out.double().numpy() * scale + mean
    spread = float(((data.rewards - data.rewards.mean()) ** 2).mean())
    return 1 - float(((predicted - data.rewards) ** 2).mean()) / spread if spread else 0.0


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modality")
    parser.add_argument("--scorer", required=True, help="name of the reward, or JSON")
    parser.add_argument("--sampler", default="maskgit", help="name, or JSON")
    parser.add_argument("--model", help="name of the model (default: the modality's own)")
    parser.add_argument("--count", type=int, default=5000, help="trajectories")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="a tenth of the trajectories")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train the head of a command line."""
    args = read_arguments(argv)
    torch.set_num_threads(1)
    scorer, sampler = read_spec(args.scorer), read_spec(args.sampler)
    spec = {"name": sampler} if isinstance(sampler, str) else sampler
    read_scorer(scorer, "--scorer")
    pipe = load(args.modality, args.model)
    name = pipe.model_name(spec)
    space = pipe.bound(name)[1].space
    if space.channels:
        raise GenError(
            f"model {name} makes latents; expected a model of tokens, which a head reads"
        )
    began = time.time()
    count = args.count // 10 if args.quick else args.count
    data = trajectories(pipe, spec, scorer, count, args.seed, args.batch_size)
    made = time.time()
    fitted, watched, measured = split(data)
    net, mean, scale = fit(data.of_rows(fitted), data.of_rows(watched), space.vocab_size, args.seed)
    share = data.known.float().mean(1).numpy()
    figures = {
        "trajectories": count,
        "seconds_decoding": round(made - began, 1),
        "seconds_training": round(time.time() - made, 1),
    }
    for what, some in (("half", (share > 0.3) & (share < 0.7)), ("finished", share == 1)):
        rows = measured[some[measured]]
        if len(rows):
            found = explained(net, mean, scale, data.of_rows(rows))
            figures[f"explained_{what}"] = round(found, 3)
    write_head(args.out, net, replace(HeadFacts.of(pipe, name, scorer), mean=mean, scale=scale))
    print(json.dumps({"out": str(args.out), **figures}))
    return 0


def read_spec(text: str) -> Any:
    """Return a name, or the mapping that JSON states.

    Raises:
        GenError: the text begins like JSON and is none.
    """
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise GenError(f"{text!r} is no JSON: {error}") from None


if __name__ == "__main__":
    raise SystemExit(main())
