"""Forward passes and acceptance rates of drafters without a model, beside the optimal-transport
bound: the table of docs/drafts.md.

    python -m gen.recipes.draft_acceptance text --prompts 200 --samples 4
    python -m gen.recipes.draft_acceptance speech --prompts 6 --samples 2

Text prompts are the held-out tasks that quote their prompt, those of other modalities the example
prompts. Drafters with ``scope: call`` learn from finished items and decode one item after the
other. A node is visited if it is the root or an accepted draft, and has children.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import islice
from statistics import mean
from typing import Any

import torch

from gen.contracts.modality import Modality
from gen.modalities.text import tasks as text_tasks
from gen.pipeline.output import ItemPlan
from gen.pipeline.pipeline import Pipeline, load
from gen.pipeline.request import GenerationRequest
from gen.samplers.causal.speculative import Speculative
from gen.samplers.engine.draft import RANKS
from gen.samplers.verifiers.base import Verifier
from gen.samplers.verifiers.bounds import optimal_acceptance
from gen.samplers.verifiers.trees import node

QUOTING = ("copy", "insert", "remove", "replace")  # tasks whose answer repeats their prompt
NODES = 4000
DRAFTERS = ("prompt_lookup", "aggressive", "suffix", "aded", "stand", "token_recycling")
LEARNERS = ("suffix", "token_recycling", "stand")  # rows with scope: call, for text
BATCH = 8


@dataclass
class Visits:
    """Visited nodes: how many accepted a child, and the bounds of the first ``NODES``."""

    nodes: int = 0
    accepted: int = 0
    bound: float = 0.0


class MeasuredSpeculative(Speculative):
    """Speculative decoding whose verifier notes every visited node. It is not registered: a request
    names the sampler that it is made of."""

    def __init__(self, visits: Visits, **params: Any):
        object.__setattr__(self, "visits", visits)
        super().__init__(**params)

    def make_verifier(self) -> Verifier:
        rule, sampler = self.parts.verifier, self

        class Noted(rule):
            """The verifier, with notes."""

            def verify(self, step, draft, logp):
                verdict = super().verify(step, draft, logp)
                note(sampler.visits, draft, logp, verdict, sampler.way_to_draw())
                return verdict

        return Noted()


def run(pipe: Pipeline, items: Sequence[ItemPlan], spec: dict[str, Any]) -> tuple[float, Visits]:
    """Decode items; return the mean number of forward passes, and the visited nodes."""
    sampler, sampling = pipe.resolve(spec)
    visits, size = Visits(), 1 if "scope" in spec else BATCH
    if isinstance(sampler, Speculative):
        params = {f.name: getattr(sampler, f.name) for f in fields(sampler)}
        sampler = MeasuredSpeculative(visits, **params)
    request = GenerationRequest(items, spec, sampler, sampling, max_batch=size)
    return mean(s.nfe for s in pipe.run(pipe.prepare(request)).stats), visits


def note(visits: Visits, tree, logp: torch.Tensor, verdict, draws: str) -> None:
    """Count the visited nodes of a step."""
    columns = torch.arange(tree.tokens.shape[1], device=logp.device)
    path = columns.expand_as(tree.tokens) if verdict.path is None else verdict.path
    for depth in range(tree.tokens.shape[1]):
        reached = verdict.num_accepted >= depth
        at = path[:, depth - 1] if depth else torch.full_like(verdict.num_accepted, -1)
        children = tree.exists & (tree.parents == at[:, None])
        count = children.sum(1)
        visited = reached & (count > 0)
        for row in visited.nonzero()[:, 0].tolist():
            if visits.nodes >= NODES:
                return
            p = node(logp, at)[row].exp().double()
            visits.nodes += 1
            visits.accepted += int(verdict.num_accepted[row] > depth)
            if draws == RANKS:
                visits.bound += float(p[tree.tokens[row, children[row]]].sum())
            else:
                # the first child has what the node is, no sibling being drawn
                q = tree.logq[row, children[row].byte().argmax()].exp().double()
                k = min(int(count[row]), int((q > 0).sum()))
                visits.bound += float(optimal_acceptance(p, q, k, draws))


def prompts_of(modality: Modality, name: str, count: int) -> list[str]:
    """Choose the prompts of a modality."""
    if name != "text":
        return modality.example_prompts(count, 0)
    drawn = text_tasks.tasks(40 * count, 123, held=True)
    return list(islice((str(t) for t in drawn if t.op in QUOTING), count))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows of a modality."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modality")
    parser.add_argument("--prompts", type=int, default=6, help="prompts (6)")
    parser.add_argument("--samples", type=int, default=2, help="samples of each (2)")
    args = parser.parse_args(argv)
    pipe = load(args.modality)
    items = pipe.plan(prompts_of(pipe.modality, args.modality, args.prompts), args.samples)
    specs = [{"name": name} for name in DRAFTERS]
    if args.modality == "text":
        specs += [{"name": name, "scope": "call", "verifier": "follow"} for name in LEARNERS]
    print(
        "| modality, drafter | passes | fewer | accepted | bound |\n| --- | --- | --- | --- | --- |"
    )
    plain, _ = run(pipe, items, {"name": "autoregressive"})
    print(f"| {args.modality}, `autoregressive` | {plain:.2f} | 1.00x |  |  |", flush=True)
    for spec in specs:
        passes, visits = run(pipe, items, spec)
        scope = ", `scope: call`" if "scope" in spec else ""
        row = f"{args.modality}, `{spec['name']}`{scope} | {passes:.2f} | {plain / passes:.2f}x"
        rates = [f"{x / visits.nodes:.3f}" for x in (visits.accepted, visits.bound) if visits.nodes]
        print(f"| {row} | {' | '.join(rates or ['-', '-'])} |", flush=True)


if __name__ == "__main__":
    main()
