"""Peers, ``gen bench --peers``: other implementations in the same table, on the same weights,
prompts and sampling parameters.

    transformers   ``generate`` of transformers on the causal model
                   (``gen.bench.baselines.transformers``)
    diffusers      ``LLaDA2Pipeline`` and ``AmusedPipeline`` on checkpoints of their families
                   (``gen.bench.baselines.diffusers``)
    reference      the rules of papers as plain loops, one item at a time
                   (``gen.bench.baselines.reference``)

A peer returns tokens, which are decoded like those of all samplers. A hook on the network counts
its forward passes, both CFG branches included: a peer that runs the branches one after the other
has two where a batched one has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from gen.bench.variants import Variant
from gen.contracts.checkpoint import Checkpoint
from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Binding
from gen.core.errors import GenError, unknown
from gen.core.resolve import resolve_sampler
from gen.core.sampling_params import SamplingParams
from gen.core.stats import Stats
from gen.core.token_space import TokenSpace
from gen.models.load.transformers_compat import CACHE_NAME
from gen.models.nets.grid import Located
from gen.pipeline.pipeline import Pipeline

PEERS = {
    "transformers": "gen.bench.baselines.transformers",
    "diffusers": "gen.bench.baselines.diffusers",
    "reference": "gen.bench.baselines.reference",
}
NOT_HERE = "not for this model"


@dataclass(frozen=True)
class Network:
    """Module with its binding to the modality and the frontend of its tokens."""

    module: nn.Module
    binding: Binding
    frontend: TokenFrontend

    @property
    def space(self) -> TokenSpace:
        return self.binding.space


@dataclass
class Peer:
    """Row of a peer. ``run(items)`` returns tokens long [B, T] of ``net`` and the cost of each row.
    ``serial``: takes one item at a time; ``missing``: reason why it cannot run."""

    label: str
    sampling: SamplingParams
    net: Network | None = None
    run: Callable[[Sequence[Any]], tuple[Tensor, list[Stats]]] | None = None
    serial: bool = False
    missing: str | None = None


@dataclass
class Output:
    """Measured part of a pipeline's output."""

    media: list[Any]
    tokens: Tensor
    stats: list[Stats]


def peers_of(
    text: str, pipe: Pipeline, sampling: dict[str, Any], several: bool = False
) -> list[Variant]:
    """Return the rows of the groups that ``--peers`` names, or of ``all``. A row that cannot run on
    this model has the reason.

    Raises:
        GenError: a group does not exist, or a named group has no row that can run, unless there are
            ``several`` modalities.
    """
    names = list(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    for name in names:
        if name not in PEERS and name != "all":
            raise unknown("peer", name, [*PEERS, "all"], "--peers")
    found = []
    for group in PEERS if "all" in names else names:
        peers = import_module(PEERS[group]).peers(pipe, SamplingParams(**sampling))
        if group in names and not several and all(p.missing for p in peers):
            reasons = "; ".join(f"{p.label}: {p.missing}" for p in peers)
            raise GenError(
                f"--peers names {group!r}, of which nothing can run with"
                f" {pipe.model or 'the modality ' + pipe.modality.name} ({reasons}); expected"
                " another model, or --peers all, which leaves out what cannot run"
            )
        for p in peers:
            make = None if p.missing else made_by(pipe, p)
            found.append(
                Variant(
                    p.label,
                    {"peer": p.label},
                    p.sampling.to_dict(),
                    p.label,
                    peer=group,
                    make=make,
                    serial=p.serial,
                    missing=p.missing,
                    asked=False,
                )
            )
    return found


def made_by(pipe: Pipeline, peer: Peer) -> Callable[[Sequence[Any]], Output]:
    """Decode a peer's tokens, as ``Pipeline.generate`` does."""

    def make(items: Sequence[Any]) -> Output:
        tokens, stats = peer.run(items)
        made = [
            pipe.decode(row, peer.net.space, peer.net.frontend) for row in tokens.to(pipe.device)
        ]
        return Output(
            [pipe.modality.complete(m, i.condition) for m, i in zip(made, items, strict=True)],
            tokens,
            stats,
        )

    return make


def network(pipe: Pipeline, protocol: str, adapter: type, draft: bool = False) -> Network | None:
    """Return the network of a protocol if its adapter is exactly ``adapter``, whose module has a
    known call; else None."""
    sampler = resolve_sampler(
        {"causal": "speculative" if draft else "autoregressive", "masked": "maskgit"}[protocol]
    )[0]
    try:
        name = pipe.draft_names(sampler)[0] if draft else pipe.model_name(sampler)
        model, *bound = pipe.bound(name)
        seen = model.adapter(protocol) if isinstance(model, Checkpoint) else adapter(model)
    except GenError:
        return None
    found = Network(seen.model, *bound)
    return found if type(seen) is adapter and not found.space.channels else None


class Calls:
    """Count forward passes of a module and the positions sent through it, by a hook: ``with
    Calls(module) as calls``.

    The embedded architecture counts positions from zero where none are passed, even behind a cache.
    ``generate`` passes none to the unconditional CFG branch, so the hook adds the length of the
    cache.
    """

    def __init__(self, module: nn.Module):
        self.module, self.n, self.positions = module, 0, 0

    def __enter__(self) -> Calls:
        self._hooks = [self.module.register_forward_hook(self._count, with_kwargs=True)]
        if isinstance(self.module, Located):
            self._hooks.append(self.module.register_forward_pre_hook(_positioned, with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _count(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        self.n, self.positions = self.n + 1, self.positions + ids.numel()

    def stats(self, tokens: int, rows: int = 1, **more: Any) -> Stats:
        """Return the cost of each of ``rows`` rows of ``tokens`` tokens that were decoded
        together."""
        positions = self.positions // rows
        return Stats(self.n, tokens, positions, positions, tokens / self.n, **more)


def _positioned(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    cache, ids = kwargs.get(CACHE_NAME), args[0] if args else kwargs.get("input_ids")
    if kwargs.get("position_ids") is not None or cache is None or ids is None:
        return None
    at = cache.get_seq_length() + torch.arange(ids.shape[1], device=ids.device)
    return args, {**kwargs, "position_ids": at.expand_as(ids)}


def prompts(
    net: Network, items: Sequence[Any], sampling: SamplingParams
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Return the tokens before every item's canvas, and those of the unconditional CFG branch if
    guided."""
    return [net.binding.prompt(i.condition) for i in items], (
        [net.binding.without(i.condition) for i in items] if sampling.guided else None
    )


def spoken(tokens: Tensor, space: TokenSpace) -> int:
    """Count the tokens of a row [T] up to and including its eos token."""
    return min(space.length, len(space.before_end(tokens)) + 1)
