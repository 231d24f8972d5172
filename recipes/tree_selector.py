"""Train the selector of the shape ``selected`` for a model and its drafter, and measure it.

    python -m gen.recipes.tree_selector text --drafter exit --out W
    gen sample text "sort 3 1 2 =" --sampler speculative sampler.drafter=exit \\
        sampler.shape=selected sampler.verifier=recursive sampler.tree_selector=W --out out/tree

The model decodes prompts that no evaluation uses. In every round the drafter grows one tree that
has the trees of all actions in it: a trunk, and paths from each of its nodes. Of every action the
recipe computes the tokens that the verifier ``recursive`` commits on average over its coins, given
the drafts; a random action is then verified, and the round goes on. The selector learns those
tokens from what was known before the round. ``--quick`` runs the same path in seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.core.rng import CounterRNG
from gen.models.draft_heads.predictors import (
    HISTORY,
    Action,
    SelectorNet,
    root_features,
    round_features,
    times_of,
)
from gen.models.targets.trained_drafters import write_drafter
from gen.models.targets.trained_predictors import COSTS, selector_facts
from gen.pipeline.pipeline import Pipeline, load
from gen.pipeline.request import GenerationRequest
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.drafters.data import held_out_prompts, training_prompts
from gen.recipes.drafters.table import measured
from gen.samplers.causal.shapes.base import NodeDrafter, Shape, TreeBuilder
from gen.samplers.engine.causal_loop import CausalRun
from gen.samplers.engine.draft import WITH_REPLACEMENT, Draft
from gen.samplers.engine.rows import RowState

ROWS = 64  # items that are decoded together


@dataclass(frozen=True)
class SelectorPlan:
    """Sizes of the recipe.

    Attributes:
        prompts: prompts whose rounds are recorded.
        drafts: drafts of a round at most.
        most_paths: paths of a tree at most.
        steps: steps of training.
        batch: rounds per step.
        width: channels of the network.
        held_out: prompts of the measurement.
        lr: peak learning rate.
    """

    prompts: int = 2000
    drafts: int = 8
    most_paths: int = 4
    steps: int = 3000
    batch: int = 512
    width: int = 32
    held_out: int = 200
    lr: float = 3e-3


QUICK = SelectorPlan(prompts=6, drafts=4, most_paths=2, steps=20, batch=16, held_out=2)


@dataclass(frozen=True)
class Rounds:
    """Recorded rounds.

    Attributes:
        features: what was known before them, float32 [n, F].
        tokens: tokens that a round of each action commits on average, float32 [n, A].
    """

    features: Tensor
    tokens: Tensor


class AllActions(Shape):
    """One tree with the trees of all actions in it.

    Args:
        actions: the actions.
    """

    takes = (WITH_REPLACEMENT,)

    def __init__(self, actions: Sequence[Action]):
        super().__init__(None)
        self.actions = tuple(actions)
        self.most_trunk = max(n for n, _, _ in actions)
        # columns of the trunk, and by (trunk, path) those of each path
        self.trunk: list[int] = []
        self.paths: dict[tuple[int, int], list[int]] = {}
        self.lengths: dict[tuple[int, int], int] = {}
        for n, k, length in actions:
            for path in range(k):
                most = self.lengths.get((n, path), 0)
                self.lengths[n, path] = max(most, length)

    @property
    def nodes(self) -> int:
        return self.most_trunk + sum(self.lengths.values())

    @property
    def depth(self) -> int:
        return max(n + length for n, _, length in self.actions)

    def grow(self, builder: TreeBuilder) -> None:
        self.trunk, self.paths = [], {at: [] for at in self.lengths}
        for level in range(self.depth):
            tip = [self.trunk[-1] if self.trunk else -1]
            if level < self.most_trunk:
                self.trunk.append(builder.size)
                builder.add(builder.columns(tip))
            for (n, path), length in self.lengths.items():
                if n <= level < n + length:
                    own = self.paths[n, path]
                    start = self.trunk[n - 1] if n else -1
                    above = own[-1] if own else start
                    own.append(builder.size)
                    builder.add(builder.columns([above]))
            builder.expand()

    def columns_of(self, action: Action) -> list[int]:
        """List the columns of an action's tree, in the order in which its shape draws them."""
        n, k, length = action
        found = self.trunk[:n]
        for level in range(length):
            found += [self.paths[n, path][level] for path in range(k)]
        return found


def expected_tokens(
    columns: Sequence[int], tree: dict[str, np.ndarray], p: np.ndarray, q: np.ndarray, eos: int
) -> float:
    """Compute the tokens that the verifier ``recursive`` commits on average over its coins.

    Args:
        columns: drafts of the tree, in their order.
        tree: ``tokens``, ``parents`` and ``exists`` of one row, each [L].
        p: probabilities of the target after the root and each draft, [L + 1, V].
        q: those that the drafts were drawn from, [L, V].
        eos: the eos token, behind which nothing is committed; -1 for none.
    """
    children: dict[int, list[int]] = {}
    for column in columns:
        if tree["exists"][column]:
            children.setdefault(int(tree["parents"][column]), []).append(column)

    def behind(nodes: list[int]) -> float:
        """Expected tokens behind columns of equal paths, of which the first one stands."""
        rest, going, total = p[nodes[0] + 1], 1.0, 0.0
        below = sorted(c for node in nodes for c in children.get(node, ()))
        for column in below:
            token = int(tree["tokens"][column])
            chance = min(1.0, rest[token] / q[column, token])
            if chance > 0:
                same = [c for c in below if tree["tokens"][c] == token]
                total += going * chance * (1.0 if token == eos else 1.0 + behind(same))
            going *= 1.0 - chance
            if going <= 0:
                return total
            left = np.maximum(rest - q[column], 0.0)
            rest = left / left.sum() if left.sum() > 0 else rest
        return total + going

    return behind([-1])


class RecordingDrafter(NodeDrafter):
    """Drafter that records rounds of all actions, and goes on with a random one.

    Args:
        drafter: drafter of trees.
        target: the model with its items.
        actions: the actions.
        seed: seed of the random actions.
    """

    history = RowState(start=0.0)  # of the round before, float32 [b, 5]

    def __init__(self, drafter: NodeDrafter, target: Any, actions: Sequence[Action], seed: int):
        shape = AllActions(actions)
        super().__init__(drafter.nodes, shape, WITH_REPLACEMENT, drafter.verifier)
        self.every, self.actions = shape, tuple(actions)
        self.generator = np.random.default_rng(seed)
        self.eos = -1 if target.space.eos_token_id is None else int(target.space.eos_token_id)
        self.features: list[Tensor] = []
        self.tokens: list[Tensor] = []

    def _judge(self, step, tree, logp):
        root = root_features(tree.logq[:, 0])
        if self.history is None:
            self.history = root.new_zeros(len(root), HISTORY)
        labels = self._labels(tree, logp)
        known = torch.from_numpy(step.widths > 1) & tree.exists.any(1).cpu()
        self.features.append(torch.cat([root, self.history], -1).cpu()[known])
        self.tokens.append(labels[known])
        chosen = torch.zeros_like(tree.exists)
        for row in range(len(chosen)):
            action = self.actions[self.generator.integers(len(self.actions))]
            chosen[row, self.every.columns_of(action)] = True
        tree.exists = tree.exists & chosen
        verdict = super()._judge(step, tree, logp)
        row = torch.arange(len(logp), device=logp.device)
        last = logp[row, verdict.last_column]
        self.history = round_features(verdict.num_accepted, tree.exists.sum(1), last)
        return verdict

    def _labels(self, tree: Draft, logp: Tensor) -> Tensor:
        """Return the tokens that each action commits on average, float32 [b, A]."""
        rows = {k: vars(tree)[k].cpu().numpy() for k in ("tokens", "parents", "exists")}
        p, q = (x.exp().double().cpu().numpy() for x in (logp, tree.logq))
        ways = [self.every.columns_of(action) for action in self.actions]
        made = []
        for row in range(len(p)):
            own = {k: x[row] for k, x in rows.items()}
            made.append([expected_tokens(way, own, p[row], q[row], self.eos) for way in ways])
        return torch.tensor(made, dtype=torch.float32)


def recorded(
    pipe: Pipeline, spec: dict[str, Any], prompts: Sequence[str], actions: Sequence[Action]
) -> Rounds:
    """Record the rounds of prompts.

    Args:
        pipe: pipeline of the model.
        spec: a sampler with trees of the drafter.
        prompts: the prompts.
        actions: the actions.
    """
    sampler, sampling = pipe.resolve(spec)
    items, features, tokens = pipe.plan(prompts), [], []
    for first in range(0, len(items), ROWS):
        some = items[first : first + ROWS]
        prepared = pipe.prepare(GenerationRequest(some, spec, sampler, sampling))
        draft = prepared.drafts[0] if prepared.drafts else None
        made = sampler.make_drafter(prepared.target, draft)
        recorder = RecordingDrafter(made, prepared.target, actions, seed=first)
        rng = CounterRNG([7_000_000 + first + row for row in range(len(some))])
        run = CausalRun(prepared.target, rng, recorder)
        while not run.is_over:
            run.step()
        features += recorder.features
        tokens += recorder.tokens
    return Rounds(torch.cat(features), torch.cat(tokens))


def trained(data: Rounds, plan: SelectorPlan, work: Path, log: Callable) -> SelectorNet:
    """Train a selector on rounds; ``work`` is the folder of its checkpoint."""
    generator = torch.Generator().manual_seed(2)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            some = torch.randint(len(data.features), (plan.batch,), generator=generator)
            yield data.features[some], data.tokens[some]

    def loss(model, batch):
        x, tokens = batch
        return (model(x).float() - tokens).square().mean(), {}

    torch.manual_seed(0)
    net = SelectorNet(data.tokens.shape[1], plan.width)
    with torch.no_grad():
        net.out.weight.mul_(0.1)
        net.out.bias.copy_(data.tokens.mean(0))
    config = TrainConfig(steps=plan.steps, lr=plan.lr, log_every=max(1, plan.steps // 6))
    fit_average(net, batches(), loss, config, out=work, log=log)
    return net.eval().requires_grad_(False)


def best_rate(tokens: Tensor, predicted: Tensor, times: Tensor) -> float:
    """Compute the tokens per time of the rule argmax(predicted - rate times) at its own rate.

    Where predictions are right no choice of an action per round has a higher one (Dinkelbach, "On
    Nonlinear Fractional Programming", Management Science 13, 1967).

    Args:
        tokens: tokens that rounds of each action commit, [n, A].
        predicted: what a selector says of them, [n, A].
        times: times of the actions, [A].
    """
    rate = best = 0.0
    for _ in range(30):
        chosen = (predicted - rate * times).argmax(1)
        made = float(tokens.gather(1, chosen[:, None]).sum() / times[chosen].sum())
        if made <= best:
            break
        rate = best = made
    return rate


def budgeted_actions(drafts: int, most_paths: int) -> tuple[Action, ...]:
    """List the actions of at most so many drafts: chains, then trees of 2 paths and more."""
    chains = [(n, 0, 0) for n in range(1, drafts + 1)]
    trees = [
        (n, k, length)
        for n in range(drafts)
        for k in range(2, most_paths + 1)
        for length in range(1, (drafts - n) // k + 1)
    ]
    return (*chains, *trees)


def fixed(action: Action) -> dict[str, Any]:
    """Return the shape of an action that all rounds have."""
    n, k, length = action
    if not k:
        return {"shape": "paths", "trunk": 0, "paths": 1, "path_length": n}
    return {"shape": "paths", "trunk": n, "paths": k, "path_length": length}


def compared(
    spec: dict[str, Any], data: Rounds, actions: Sequence[Action], drafts: int, folder: Path
) -> dict[str, dict[str, Any]]:
    """List samplers to compare, by name: the fixed trees that commit most on the recorded rounds,
    the longest chain, trees with a budget, and the selector."""
    order = data.tokens.mean(0).argsort(descending=True).tolist()
    best = [actions[at] for at in order[:3]]
    rows = {f"best fixed tree {i + 1}, {a}": spec | fixed(a) for i, a in enumerate(best)}
    rows[f"chain of {drafts}"] = spec | fixed((drafts, 0, 0))
    bound = {"trunk": drafts - 4, "paths": 2, "path_length": 2, "branch_below": 0.9}
    rows["branch_below 0.9"] = spec | {"shape": "paths", **bound}
    rows["best_first"] = spec | {"shape": "best_first", "nodes": drafts}
    rows["selected"] = spec | {"shape": "selected", "tree_selector": str(folder)}
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modality")
    parser.add_argument("--out", type=Path, required=True, help="folder of the selector")
    parser.add_argument("--model", help="name of the model (default: the modality's own)")
    parser.add_argument("--drafter", default="model", help="name of the drafter (model)")
    parser.add_argument("--drafter-weights", help="its folder (default: the model's own)")
    parser.add_argument("--draft-model", help="name of the draft model (default: MODALITY-draft)")
    parser.add_argument("--prompts", type=int, default=SelectorPlan.prompts)
    parser.add_argument("--drafts", type=int, default=SelectorPlan.drafts, help="of a round (8)")
    parser.add_argument("--quick", action="store_true", help="a smoke run, in seconds")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    plan = QUICK if args.quick else SelectorPlan(prompts=args.prompts, drafts=args.drafts)
    pipe, began = load(args.modality, args.model), time.time()
    spec: dict[str, Any] = {"name": "speculative", "drafter": args.drafter}
    named = {"drafter_weights": args.drafter_weights, "draft_model": args.draft_model}
    spec |= {"verifier": "recursive"} | {k: v for k, v in named.items() if v is not None}
    actions = budgeted_actions(plan.drafts, plan.most_paths)
    paths = spec | {"shape": "paths"}
    data = recorded(pipe, paths, training_prompts(pipe.modality, plan.prompts), actions)
    made = time.time()
    net = trained(data, plan, args.out / "work", print)
    held = pipe.plan(held_out_prompts(pipe.modality, plan.held_out))
    sampler, sampling = pipe.resolve(paths)
    prepared = pipe.prepare(GenerationRequest(held[:1], paths, sampler, sampling))
    draft = prepared.drafts[0] if prepared.drafts else None
    predicted, table = net(data.features), torch.tensor(actions)
    rates = [best_rate(data.tokens, predicted, times_of(table, cost)) for cost in COSTS]
    facts = selector_facts(prepared.target, args.drafter, draft, actions, rates, plan.width)
    write_drafter(args.out, facts, net.state_dict())
    picked = data.tokens.gather(1, predicted.argmax(1, keepdim=True)).mean()
    figures = {
        "rounds": len(data.features),
        "actions": len(actions),
        "parameters": sum(p.numel() for p in net.parameters()),
        "tokens of the best fixed tree": round(float(data.tokens.mean(0).max()), 3),
        "tokens of the selector": round(float(picked), 3),
        "tokens of the best choice in hindsight": round(float(data.tokens.amax(1).mean()), 3),
        "seconds of data": round(made - began),
        "seconds of training": round(time.time() - made),
    }
    print(json.dumps(figures))
    print("| tree | tokens per pass | accepted | draft passes |\n| --- | --- | --- | --- |")
    for name, row in compared(spec, data, actions, plan.drafts, args.out).items():
        cells = measured(pipe, held, row, timed=1)
        print(f"| {name} | {' | '.join(cells[:3])} |", flush=True)


if __name__ == "__main__":
    main()
