"""Drafts of all depths in one forward pass, at mask tokens behind the committed ones.

The draft model reads the tokens that were committed since its last pass and k - 1 mask tokens
behind them; its distribution at the last token is that of the first draft, and those at the masks
are those of the further ones. They know nothing of the drafts between, so that the joint
distribution of the drafts is a product. Keys and values of masks are written over by what is
committed there.

    masked   a small model with attention to what stands before. Cheng et al., "DEER: Draft with
             Diffusion, Verify with Autoregressive Models" (arXiv 2512.15176), whose drafter is a
             masked model with attention to all positions and drafts in one denoising step
    prompt   the target itself with trained embeddings for the masks, one for each depth. Chen et
             al., "Hardware-Aware Parallel Prompt Decoding" (arXiv 2405.18628). There the prompt
             tokens stand in the target's own forward pass; here a draft costs one pass of the
             target, so that it saves steps and no arithmetic

Guarantee: that of the verifier, whatever the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.registry import register
from gen.models.adapters.layer_plans import replaced
from gen.models.adapters.protocols import SharedModel
from gen.models.targets.causal import CausalTarget
from gen.models.targets.trained_drafters import (
    checked_load,
    language_model,
    read_drafter,
    unfiltered,
)
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.causal.drafters.model import DraftModel
from gen.samplers.engine.draft import Draft
from gen.samplers.engine.step_context import CausalStep

MASKED, PROMPT = "masked", "prompt"


def masked_network(model: SharedModel, net: Mapping[str, Any]) -> nn.Module:
    """Make a small network of the target's architecture with one mask token more.

    Args:
        model: the target's model.
        net: ``width`` and ``layers`` of the small one.
    """
    config, width = copy.deepcopy(model.config), int(net["width"])
    config.hidden_size, config.num_hidden_layers = width, int(net["layers"])
    config.head_dim = min(32, width)
    config.num_attention_heads = config.num_key_value_heads = max(1, width // 32)
    config.intermediate_size = max(32, width * 8 // 3 // 32 * 32)
    config.vocab_size = model.config.vocab_size + 1
    config.tie_word_embeddings = True
    made: Any = type(model.model)(config)
    made.tie_weights()
    return made


class PromptTokens(nn.Module):
    """Embeddings of the mask tokens of k - 1 depths.

    Args:
        depth: drafts k.
        embedding: the target's embeddings [V, D], whose mean the tokens begin at.
    """

    def __init__(self, depth: int, embedding: Tensor):
        super().__init__()
        mean = embedding.detach().mean(0)
        self.vectors = nn.Parameter(mean.repeat(depth - 1, 1))

    def forward(self) -> Tensor:
        """Return the embeddings, [k - 1, D]."""
        return self.vectors


def prompt_model(model: SharedModel, tokens: PromptTokens) -> SharedModel:
    """Make the target's model with further ids for prompt tokens, those behind its vocabulary."""
    network, table = model.model, model.input_embeddings
    name = next(name for name, module in network.named_modules() if module is table)
    rows = torch.cat([table.weight, tokens.vectors.to(table.weight)]).detach()
    extended = nn.Embedding.from_pretrained(rows).eval()
    return model.with_network(replaced(network, name, extended))


class ParallelNodes(DraftModel, DraftSource):
    """Distributions of a draft model at mask tokens.

    Args:
        draft: the draft model's target.
        masks: ids of the mask tokens behind the last token, long [k - 1].
    """

    def __init__(self, draft: CausalTarget, masks: Tensor):
        super().__init__(draft)
        self.masks = masks

    def count_passes(self, step, passes):
        super().count_passes(step, passes.clamp_max(1))

    def begin(self, step: CausalStep, tokens: Tensor) -> Tensor:
        given, at = self.unseen(step, tokens)
        self.known = step.starts
        # a mask beyond the last position repeats the one before it
        room = self.draft.length - 1 - step.start[:, None]
        index = torch.arange(1, len(self.masks) + 1, device=tokens.device)
        index = torch.minimum(index, room)
        ids = torch.where(index > 0, self.masks[index.clamp_min(1) - 1], given[:, -1:])
        inputs = torch.cat([given, ids], 1)
        positions = torch.cat([at, step.start[:, None] + index], 1)
        logprobs = self.draft.predict(inputs, positions).logprobs
        self.logq = logprobs[:, -1 - len(self.masks) :]
        return self.logq[:, :1]

    def extend(self, step: CausalStep, tree: Draft, first: int) -> Tensor:
        depth = tree.depth[:, first:]
        row = torch.arange(len(depth), device=depth.device)[:, None]
        found = self.logq[row, depth.clamp_max(len(self.masks))]
        return torch.where((depth <= len(self.masks))[..., None], found, -torch.inf)


def draft_target(target: CausalTarget, model: SharedModel) -> CausalTarget:
    """Make the target of a draft model that takes mask tokens.

    It has no constraint: masks are no tokens that one could read, and the verifier refuses what
    the constraint forbids.
    """
    free = target.with_space(replace(target.space, constraint=None))
    return free.with_model(model).with_params(unfiltered(target.sampling))


@register("drafter", MASKED)
class Masked(ParallelNodes):
    """Drafts of all depths in one pass of a small model over mask tokens. Parameters:
    ``drafter_weights``."""

    needs_weights = True

    @classmethod
    def of(cls, sampler, target, draft):
        facts, weights = read_drafter(sampler.drafter_weights, MASKED, target)
        model = language_model(target, MASKED)
        net = model.with_network(checked_load(masked_network(model, facts.net), weights, MASKED))
        masks = torch.full((int(facts.net["depth"]) - 1,), model.config.vocab_size)
        return cls(draft_target(target, net), masks.to(target.device))


@register("drafter", PROMPT)
class Prompt(ParallelNodes):
    """Drafts of all depths in one pass of the target over trained prompt tokens. Parameters:
    ``drafter_weights``."""

    needs_weights = True

    @classmethod
    def of(cls, sampler, target, draft):
        facts, weights = read_drafter(sampler.drafter_weights, PROMPT, target)
        model, depth = language_model(target, PROMPT), int(facts.net["depth"])
        table = model.input_embeddings.weight
        tokens = checked_load(PromptTokens(depth, table), weights, PROMPT)
        masks = torch.arange(depth - 1, device=target.device) + len(table)
        return cls(draft_target(target, prompt_model(model, tokens)), masks)
