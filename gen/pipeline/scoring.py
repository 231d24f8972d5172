"""Forward passes over prompts alone: log-probabilities of their tokens, and embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.logprobs import ItemLogprobs, TokenLogprob
from gen.models.adapters.base import ModelAdapter
from gen.models.load.pooling import Pooling
from gen.models.load.routed import Router, router_of
from gen.pipeline.logprobs import with_texts
from gen.pipeline.output import ItemPlan
from gen.pipeline.prompted import PromptedModels

# Numbers of the distributions that are there at a time: a long prompt is passed in parts, since the
# logits of all of its positions may take more memory than the model.
CHUNK = 1 << 23
MOST_POSITIONS = 512  # of a part

Check = Callable[[], None]  # raises to end the work between two forward passes


def go_on() -> None:
    """Let the work go on."""


class ScoredModels(PromptedModels):
    """Models of a modality that score or embed prompts, without a sampler."""

    @torch.no_grad()
    def prompt_logprobs(
        self, items: Sequence[ItemPlan], top: int = 0, check: Check = go_on
    ) -> list[ItemLogprobs]:
        """Compute the log-probability of every token of prompts, given the tokens before it.

        They belong to the model's own distribution, before sampling parameters. The numbers of an
        item do not depend on the others. Items with equal prompts are computed once.

        Args:
            items: items of ``Pipeline.plan``.
            top: number of likeliest tokens whose log-probabilities come with every token.
            check: called before every forward pass.

        Returns:
            One entry per token of each prompt. The log-probability of the first, which follows
            nothing, is NaN.

        Raises:
            GenError: the model has no such distribution, or a prompt has media or more tokens than
                the model has positions.
        """
        if self.model is None or "tokens" not in self.modality.accepts:
            raise GenError(
                "the model takes no token ids, which log-probabilities of prompts belong to;"
                " expected a published causal language model"
            )
        checkpoint = self.modality.checkpoint
        if "causal" not in checkpoint.protocols:
            raise GenError(
                "the model is a masked one, which has no log-probabilities of a prompt; expected a"
                " causal language model"
            )
        _, binding, frontend = self.bound(self.model)
        adapter = self._adapter(self.model, "causal", binding.space)
        made: dict[tuple[str | None, tuple[int, ...]], ItemLogprobs] = {}
        found: list[ItemLogprobs] = []
        for item in items:
            ids = binding.prompt(item.condition)
            if not isinstance(ids, list):
                raise GenError("the prompt has media; expected one of text or token ids alone")
            key = item.adapter, tuple(ids)
            if key not in made:
                made[key] = self._scored(adapter, ids, top, item.adapter, check)
            found.append(made[key])
        return with_texts(found, frontend) or []

    @property
    def pooling(self) -> Pooling | None:
        """How the model embeds texts; None where it is no embedding model, or not loaded yet."""
        checkpoint = self.modality.checkpoint
        return None if checkpoint is None else checkpoint.pooling

    @torch.no_grad()
    def embeddings(
        self, items: Sequence[ItemPlan], dimensions: int | None = None, check: Check = go_on
    ) -> list[Tensor]:
        """Compute a vector of every prompt, float32 [D].

        Args:
            items: items of ``Pipeline.plan``.
            dimensions: first numbers of a vector that are kept; None keeps all.
            check: called before every forward pass.

        Raises:
            GenError: the model is no embedding model, or a prompt has too many tokens.
        """
        pooling, checkpoint = self.pooling, self.modality.checkpoint
        if pooling is None or checkpoint.ranks is not None:
            raise GenError(
                "the model makes no embeddings; expected one in a single process whose folder says"
                " how to pool hidden states (modules.json of sentence-transformers)"
            )
        adapter = checkpoint.adapter("causal")
        router, most = router_of(adapter.model), [adapter.max_positions, pooling.most]
        longest = min((n for n in most if n is not None), default=None)
        found = []
        for item in items:
            ids = self.bound(str(self.model))[1].prompt(item.condition)
            if longest is not None and len(ids) > longest:
                raise GenError(f"an input has {len(ids)} tokens; expected at most {longest}")
            check()
            tokens = torch.tensor([ids], device=self.device)
            with _rows_of(router, item.adapter, self.device):
                out = adapter.model.base_model(input_ids=tokens, use_cache=False)
            found.append(pooling(out.last_hidden_state[0], dimensions).cpu())
        return found

    def _scored(
        self, adapter: ModelAdapter, ids: list[int], top: int, name: str | None, check: Check
    ) -> ItemLogprobs:
        """Compute the log-probabilities of one prompt; ``name`` is that of its LoRA adapter."""
        found: ItemLogprobs = [TokenLogprob(ids[0], math.nan)]
        for start, logprobs in self._distributions(adapter, ids, name, check):
            targets = torch.tensor(ids[start + 1 : start + 1 + len(logprobs)])
            rows = logprobs[: len(targets)]
            own = rows.gather(1, targets[:, None].to(rows.device))[:, 0].tolist()
            tops = rows.topk(min(top, rows.shape[1]), 1)
            for target, x, values, indices in zip(
                targets.tolist(), own, tops.values.tolist(), tops.indices.tolist(), strict=True
            ):
                ranked = tuple(zip(indices, values, strict=True))
                found.append(TokenLogprob(target, x, ranked))
        return found

    def _distributions(
        self, adapter: ModelAdapter, ids: list[int], name: str | None, check: Check
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of a first position, and the log-probabilities of the token after it and
        after those behind it, float64 [n, V]."""
        most = adapter.max_positions
        if most is not None and len(ids) > most:
            raise GenError(
                f"a prompt has {len(ids)} tokens; expected at most {most}, the positions of the"
                " model"
            )
        router = router_of(adapter.model)
        tokens = torch.tensor([ids], device=self.device)
        positions = torch.arange(len(ids), device=self.device)[None]
        cache = adapter.new_cache(len(ids))
        cache.starts = positions[:, -1:]  # rotations that depend on the length take that of it all
        size = max(1, min(MOST_POSITIONS, CHUNK // adapter.vocab_size))
        for start in range(0, len(ids), size):
            check()
            part = slice(start, start + size)
            with _rows_of(router, name, self.device):
                logits = adapter.forward(tokens[:, part], positions[:, part], cache)
            yield start, logits[0].double().log_softmax(-1)


def _rows_of(
    router: Router | None, name: str | None, device: torch.device
) -> AbstractContextManager[None]:
    """Compute the passes of one row inside with a LoRA adapter, or with none."""
    if router is None:
        return nullcontext()
    return router.rows(torch.tensor([router.number(name)], device=device))
