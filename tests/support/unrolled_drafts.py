"""Layers that draft from entries: what they say in decoding beside what they say in training."""

from __future__ import annotations

import torch
from decoding import decode_causal
from trained_drafters import LAST, LENGTHS, NET, PROMPTS, target

from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.models.draft_heads.entries import EntryLayer, last_tokens
from gen.samplers.causal.drafters.heads import EntryNodes
from gen.samplers.causal.shapes.base import NodeDrafter, Shape

LENGTH = 7


class Noted(EntryNodes):
    """Nodes that note what the target's head would read, with the tree that it is about."""

    def begin(self, step, tokens):
        made = super().begin(step, tokens)
        self.seen = getattr(self, "seen", [])
        self.tokens, self.made = tokens.clone(), made
        return made

    def extend(self, step, tree, first):
        made = super().extend(step, tree, first)
        if self.known.any():
            known, heads = self.known.copy(), self.layer.head_input(self.outputs).detach()
            self.made = torch.cat([self.made, made], 1)
            at = self.tokens, step.start.clone(), tree.tokens, tree.parents
            self.seen.append((*at, known, heads, step.items, self.made))
        return made


def noted(net: EntryLayer, layers: tuple[str, ...], shape: Shape, draws: str) -> list:
    """Notes of decoding three rows, two at a time."""
    of = target(LENGTH, 20)
    of.at_most(2)
    nodes = Noted(of, "eagle", net, layers, of.sampling)
    rule = registry.get("verifier", "recursive")().attach(of)
    drafter = NodeDrafter(nodes, shape, draws, rule)
    decode_causal(of, CounterRNG([5, 6, 7]), drafter)
    return nodes.seen


def nodes_of(seen: list, depth: int | None):
    """Walk over the nodes of notes: (item, tokens before the round, drafts on the way, what the
    head reads, log-probabilities)."""
    count = 0
    for tokens, start, drafts, parents, known, heads, items, made in seen:
        for row in known.nonzero()[0].tolist():
            begun = tokens[row, : int(start[row])].tolist()
            for node in range(-1, drafts.shape[1]):
                path, at = [], node
                while at >= 0:
                    path.insert(0, int(drafts[row, at]))
                    at = int(parents[row, at])
                if len(begun) + len(path) >= LENGTH:
                    continue
                if depth is not None and len(path) >= depth:
                    assert made[row, node + 1].isneginf().all()
                    continue
                yield int(items[row]), begun, path, heads[row, node + 1], made[row, node + 1]
                count += 1
    assert count > 20


def gap(seen: list, net: EntryLayer, layers: tuple[str, ...], shift: int = 0) -> float:
    """Largest difference between decoding and training over all nodes of all rows and steps."""
    worst = 0.0
    for item, begun, path, heads, _ in nodes_of(seen, net.depth):
        if net.depth is None or len(path) + shift < net.depth:
            wanted = in_training(net, layers, item, begun + path, len(path) + shift)
            worst = max(worst, float((heads - wanted).abs().max()))
    return worst


@torch.no_grad()
def in_training(
    net: EntryLayer, layers: tuple[str, ...], row: int, tokens: list[int], depth: int
) -> torch.Tensor:
    """What the head reads behind tokens whose last ``depth`` are drafts, by unrolled training."""
    prompt = PROMPTS[row, : LENGTHS[row]].tolist()
    ids = torch.tensor([[*prompt, *tokens]])
    found = NET(ids, output_hidden_states=True, use_cache=False).hidden_states
    by_name = {"model.layers.0": found[1], "model.layers.1": last_layer(ids), LAST: found[2]}
    states = torch.cat([by_name[name] for name in layers], -1)[:, :-1]
    # what the target says of drafts is never known while they are drafted
    first = ids.shape[1] - 1 - depth
    states[:, first:] = torch.randn(1, states.shape[1] - first, states.shape[2]).double()
    embedding = last_tokens(NET.get_input_embeddings()(ids), net.num_tokens)
    return net(states, embedding, depth + 1)[depth][0, -1]


def last_layer(ids: torch.Tensor) -> torch.Tensor:
    """Output of the last layer, before the norm behind it."""
    kept = []
    hook = NET.model.layers[1].register_forward_hook(
        lambda m, i, out: kept.append(out[0] if isinstance(out, tuple) else out)
    )
    NET(ids, use_cache=False)
    hook.remove()
    return kept[0]
