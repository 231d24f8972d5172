"""Peers of ``gen bench``: transformers' own ``generate`` on the causal model, with a processor that
keeps the allowed tokens.

    generate (greedy)          the most likely tokens; the samplers' distribution only at
                               temperature 0
    generate (sampling)        temperature, top-k, top-p, min-p and guidance of the sampling
                               parameters, by transformers' own settings
    generate (assisted)        with the modality's draft model, sampling where the sampling
                               parameters do
    generate (prompt lookup)   with earlier tokens as drafts, likewise

The last two take one row at a time. They cannot run with guidance: its processor keeps a cache of
the unconditional branch from which rejected drafts are never removed. Guidance itself costs a
second forward pass per token there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from gen.bench.baselines.base import NOT_HERE, Calls, Network, Peer, network, prompts, spoken
from gen.core.sampling_params import SamplingParams
from gen.core.stats import Stats
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.load.locate import quiet
from gen.pipeline.pipeline import Pipeline

LOOKUP = 10  # tokens that are looked up at once, the number in transformers' documentation
GUIDED = "not under guidance"


class Legal(LogitsProcessor):
    """Logits processor that keeps the allowed tokens. ``start``: number of prompt tokens before the
    first position."""

    def __init__(self, space: TokenSpace, start: int, device: torch.device):
        self.space, self.start, self.legal = space, start, space.legal.to(device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - self.start
        if position >= self.space.length:  # assisted decoding asks for one more than it takes
            return scores
        legal = self.legal[position].expand(len(scores), 1, -1)
        if self.space.is_history_dependent:
            history = torch.nn.functional.pad(
                input_ids[:, self.start :], (0, self.space.length - position)
            )
            legal = self.space.apply_constraint(
                legal, history, torch.full((len(scores), 1), position, device=scores.device)
            )
        return scores.masked_fill(~legal[:, 0], float("-inf"))


def settings(net: Network, items: Sequence[Any], sampling: SamplingParams) -> dict[str, Any]:
    """Return the arguments of ``generate`` for the sampling parameters; defaults from the model's
    folder are reset."""
    rows, without = prompts(net, items, sampling)
    device, space = net.module.device, net.space
    ids, mask = _left(rows, device)
    said: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "max_new_tokens": space.length,
        "eos_token_id": list(space.ends) or None,
        "pad_token_id": 0 if space.eos_token_id is None else space.eos_token_id,
        "logits_processor": LogitsProcessorList([Legal(space, ids.shape[1], device)]),
    }
    if without is not None:
        said["negative_prompt_ids"], said["negative_prompt_attention_mask"] = _left(without, device)
        said["guidance_scale"] = sampling.guidance_scale
    if sampling.is_greedy:
        return {**said, "do_sample": False}
    return {
        **said,
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }


def _left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows on the left; return them and the mask of their tokens: long [B, P] each."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + list(r) for r in rows], device=device)
    return ids, torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)


def generated(
    pipe: Pipeline,
    net: Network,
    items: Sequence[Any],
    sampling: SamplingParams,
    draft: Network | None = None,
    **more: Any,
) -> tuple[Tensor, list[Stats]]:
    """Generate tokens [B, T] and their cost. Random numbers come from torch's generator, seeded by
    the items and restored afterwards."""
    said, space = settings(net, items, sampling), net.space
    devices = [net.module.device] if net.module.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(quiet())
        torch.manual_seed(pipe.draw_key(items[0]))
        calls = stack.enter_context(Calls(net.module))
        drafts = stack.enter_context(Calls(draft.module)) if draft else None
        found = net.module.generate(
            **said, **({"assistant_model": draft.module} if draft else {}), **more
        )[:, said["input_ids"].shape[1] :]
    fill = (
        0 if space.eos_token_id is None else space.eos_token_id
    )  # rows that are all over end early
    tokens = torch.nn.functional.pad(found, (0, space.length - found.shape[1]), value=fill)
    cost = {} if drafts is None else {"draft_nfe": drafts.n}
    return tokens, [
        calls.stats(
            space.length if space.eos_token_id is None else spoken(row, space), len(items), **cost
        )
        for row in tokens
    ]


def peers(pipe: Pipeline, sampling: SamplingParams) -> list[Peer]:
    """Return the rows of this group, with reasons for those that cannot run."""
    net, greedy = (
        network(pipe, "causal", CausalLM),
        SamplingParams(temperature=0.0, guidance_scale=sampling.guidance_scale),
    )
    draft = network(pipe, "causal", CausalLM, draft=True) if net else None
    away = None if net else NOT_HERE
    one = away or (GUIDED if sampling.guided else None)

    def say(name, sampling, missing, serial=False, **more):
        return Peer(
            f"generate ({name})",
            sampling,
            net,
            lambda items: generated(pipe, net, items, sampling, **more),
            serial,
            missing,
        )

    return [
        say("greedy", greedy, away),
        say(
            "sampling",
            sampling,
            away if sampling.temperature or away else "temperature 0 is the greedy row",
        ),
        say("assisted", sampling, one or (None if draft else "no draft model"), True, draft=draft),
        say("prompt lookup", sampling, one, True, prompt_lookup_num_tokens=LOOKUP),
    ]
