"""Requests of ``model.generate`` of transformers, translated to prompts, sampling parameters and
the token space.

The settings are read from the logits processors and stopping criteria that ``generate`` made of
them, because it would apply those. Unknown ones are refused by name; none is dropped silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationConfig, logits_process, stopping_criteria

from gen.core.errors import GenError
from gen.core.token_space import TokenSpace
from gen.interop.transformers_processors import (
    REFUSED,
    WARPERS,
    Chain,
    require_functions,
    translate,
)
from gen.models.load.transformers_compat import CACHE_NAME, is_users_cache

P = logits_process
GUIDANCE = P.UnbatchedClassifierFreeGuidanceLogitsProcessor
CRITERIA = (
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.EosTokenCriteria,
    stopping_criteria.StopStringCriteria,
)
# settings without a processor of their own, and their values where they are unused
UNSUPPORTED = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "cache_implementation": (None,),
    "prefill_chunk_size": (None,),
    "use_cache": (None, True),
}
# keyword arguments that ``generate`` passes to every model
READ = (
    "attention_mask",
    "position_ids",
    CACHE_NAME,
    "use_cache",
    "logits_to_keep",
)


class Ends:
    """Ends of rows: end tokens and stop strings.

    Attributes:
        token_ids: token ids that end a row, long [n].
        stop: finds rows that have a stop string at their end; None without stop strings.
        pads: whether ``generate`` pads rows behind their ends, which it does with an end token.

    Args:
        criteria: stopping criteria of ``generate``.
        input_ids: padded prompts, long [B, S].
        vocab_size: vocabulary size of the model.
    """

    def __init__(self, criteria: list, input_ids: Tensor, vocab_size: int):
        found = [c for c in criteria if type(c) is stopping_criteria.EosTokenCriteria]
        ids = torch.cat([torch.zeros(0).long(), *(c.eos_token_id.cpu().flatten() for c in found)])
        self.token_ids, self.pads = ids[(ids >= 0) & (ids < vocab_size)], bool(found)
        stops = [c for c in criteria if type(c) is stopping_criteria.StopStringCriteria]
        self.stop = _AnyStop(stops) if stops else None
        self.input_ids = input_ids
        self._checked, self._stopped = 0, torch.full((len(input_ids),), torch.iinfo(torch.long).max)

    def lengths(self, tokens: Tensor, known: int | None = None) -> Tensor:
        """Count the tokens of each row up to and including its end: long [B].

        Args:
            tokens: tokens of the rows, long [B, T]; the same ones in every call, or more.
            known: columns that are known; T for all. Rows that do not end in them have T tokens.
        """
        known = tokens.shape[1] if known is None else known
        total = torch.full((len(tokens),), tokens.shape[1], device=tokens.device)
        over = torch.isin(tokens[:, :known], self.token_ids.to(tokens.device))
        if known:
            total = torch.where(over.any(1), over.long().argmax(1) + 1, total)
        if self.stop is None:
            return total
        self._stopped = self._stopped.to(tokens.device)
        for n in range(self._checked, known):
            text = torch.cat([self.input_ids.to(tokens.device), tokens[:, : n + 1]], 1)
            ends = torch.where(self.stop(text), n + 1, self._stopped)
            self._stopped = torch.minimum(self._stopped, ends)
        self._checked = max(self._checked, known)
        return torch.minimum(total, self._stopped)


@dataclass(frozen=True)
class _AnyStop:
    """Stop strings of several criteria."""

    criteria: list[stopping_criteria.StopStringCriteria]

    def __call__(self, ids: Tensor) -> Tensor:
        """Find the rows, long [n, S], that have a stop string at their end: bool [n]."""
        return torch.stack([criterion(ids, None) for criterion in self.criteria]).any(0)


@dataclass(frozen=True)
class Request:
    """Request of one call of ``generate``.

    Attributes:
        prompts: token ids of every row.
        negative: token ids of every row of the unconditional CFG branch, if guided.
        sampling: sampling parameters that the settings name.
        space: token space of the answer.
        ends: ends of rows.
        warps: whether a logits processor applies temperature and filters itself.
        controls: names of what acts on the scores of tokens beside temperature and filters.
    """

    prompts: list[list[int]]
    negative: list[list[int]] | None
    sampling: dict[str, Any]
    space: TokenSpace
    ends: Ends
    warps: bool = False
    controls: tuple[str, ...] = ()


def _refuse_unsupported(
    config: GenerationConfig, processors: list, criteria: list, others: dict[str, Any]
) -> None:
    """Refuse what cannot be honoured; arguments and errors as in ``read_request``."""
    asked = [
        f"{k}={getattr(config, k)!r}"
        for k, usual in UNSUPPORTED.items()
        if getattr(config, k, None) not in usual
    ]
    asked += [f"{k}" for k, v in others.items() if k not in READ and v is not None]
    asked += [f"stopping criterion {type(c).__name__}" for c in criteria if type(c) not in CRITERIA]
    asked += [f"logits processor {type(p).__name__}" for p in processors if isinstance(p, REFUSED)]
    guidance = [n for n, p in enumerate(processors) if type(p) is GUIDANCE]
    if guidance and guidance != [0]:
        asked.append(f"logits processor {GUIDANCE.__name__} behind another one")
    cache = others.get(CACHE_NAME)
    if cache is not None and (is_users_cache(cache) or cache.get_seq_length()):
        asked.append(CACHE_NAME)
    if asked:
        raise GenError(
            f"gen.transformers_generate cannot honour {', '.join(asked)}; expected none of these"
            " (see docs/interop.md)"
        )


def read_request(
    input_ids: Tensor,
    config: GenerationConfig,
    processors: list,
    criteria: list,
    vocab_size: int,
    others: dict[str, Any],
) -> Request:
    """Translate the arguments of ``generate``.

    Args:
        input_ids: prompts, long [B, S].
        config: settings of ``generate``.
        processors: logits processors made of them.
        criteria: stopping criteria made of them.
        vocab_size: vocabulary size of the model.
        others: keyword arguments for the model.

    Raises:
        GenError: settings that cannot be honoured, by name.
    """
    processors, criteria = list(processors or ()), list(criteria or ())
    _refuse_unsupported(config, processors, criteria, others)
    width = input_ids.shape[1]
    lengths = [c.max_length for c in criteria if type(c) is stopping_criteria.MaxLengthCriteria]
    length = min(lengths, default=config.max_length) - width
    if length < 1:
        raise GenError(
            f"max_length is {length + width} and the prompts have {width} tokens; expected room for"
            " one more at least"
        )
    prompts = unpadded(input_ids, others.get("attention_mask"), "attention_mask")
    _same_positions(others.get("position_ids"), input_ids, others.get("attention_mask"))
    sampling, negative = {}, None
    if processors and type(processors[0]) is GUIDANCE:
        sampling["guidance_scale"] = float(processors[0].guidance_scale)
        negative = _negative(processors[0].unconditional_context, prompts)
        processors = processors[1:]
    ends = Ends(criteria, input_ids, vocab_size)
    padding = torch.tensor([width - len(p) for p in prompts])
    found = translate(processors, padding, ends.stop is not None)
    require_functions(found.objects, input_ids, vocab_size)
    space = make_space(length, width, vocab_size, ends.token_ids, found.rules)
    sampling = {"temperature": 1.0, **sampling, **found.sampling}
    if not config.do_sample:
        sampling["temperature"] = 0.0
    looks_back = [type(p).__name__ for p in found.objects]
    looks_back += [k for k in found.sampling if k not in WARPERS.values()]
    looks_back += ["stop_strings"] if ends.stop is not None else []
    if found.objects or ends.stop is not None:
        end_ids = torch.tensor(space.end_token_ids, dtype=torch.long)
        sampling["logits_processor"] = [
            Chain(found.objects, input_ids, padding, end_ids, ends.stop)
        ]
    return Request(prompts, negative, sampling, space, ends, found.warps, tuple(looks_back))


def make_space(length: int, width: int, vocab_size: int, ends: Tensor, rules: list) -> TokenSpace:
    """Make the token space of an answer.

    Args:
        length: number of positions.
        width: length of the padded prompts.
        vocab_size: vocabulary size of the model.
        ends: token ids that end a row.
        rules: processors that forbid tokens.

    Raises:
        GenError: no token is allowed at a position.
    """
    legal = torch.ones(1, vocab_size, dtype=torch.bool).expand(length, -1)
    if rules:
        legal = legal.clone()
    for rule in rules:
        if isinstance(rule, P.MinLengthLogitsProcessor):
            legal[: max(0, rule.min_length - width), rule.eos_token_id.cpu()] = False
        elif isinstance(rule, P.MinNewTokensLengthLogitsProcessor):
            legal[: rule.min_new_tokens, rule.eos_token_id.cpu()] = False
        elif isinstance(rule, P.SuppressTokensAtBeginLogitsProcessor):
            position = rule.begin_index - width
            legal[position : position + 1, rule.begin_suppress_tokens.cpu()] = False
        else:
            legal[:, rule.suppress_tokens.cpu()] = False
    if not bool(legal.any(1).all()):
        raise GenError(
            "the suppressed tokens leave nothing that may be generated; expected one token at least"
        )
    possible = ends[legal[-1, ends]]
    if not len(possible):
        return TokenSpace((length,), vocab_size, legal)
    ends = tuple(possible.tolist())
    return TokenSpace((length,), vocab_size, legal, eos_token_id=ends[0], end_token_ids=ends)


def unpadded(ids: Tensor, mask: Tensor | None, name: str) -> list[list[int]]:
    """Remove the left padding of tokens [B, S].

    Raises:
        GenError: padding is elsewhere, or a row is padding only.
    """
    if mask is None:
        return ids.tolist()
    mask = mask.bool()
    if (
        mask.shape != ids.shape
        or bool((mask.long().diff(dim=1) < 0).any())
        or not bool(mask[:, -1].all())
    ):
        raise GenError(
            f"{name} has shape {tuple(mask.shape)}, or hides tokens that are not padding on the"
            f" left; expected {tuple(ids.shape)}, in every row zeros, then ones"
        )
    return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]


def _same_positions(positions: Tensor | None, ids: Tensor, mask: Tensor | None) -> None:
    """Raise ``GenError`` unless ``position_ids`` count the tokens of each row from 0."""
    seen = torch.ones_like(ids) if mask is None else mask.long()
    usual = seen.cumsum(1) - 1
    if positions is not None and (
        positions.ndim != 2 or bool(((positions != usual) & seen.bool()).any())
    ):
        raise GenError(
            "position_ids do not count the tokens of each row from 0; expected those that do, or"
            " none"
        )


def _negative(context: dict[str, Any], prompts: list[list[int]]) -> list[list[int]]:
    """Return the prompts of the unconditional CFG branch.

    They are those of the context, one for each row or for each group of rows of a prompt; without
    them, a prompt's last token.
    """
    ids = context["input_ids"]
    if ids is None:
        return [p[-1:] for p in prompts]
    rows = unpadded(ids, context["attention_mask"], "negative_prompt_attention_mask")
    if not rows or len(prompts) % len(rows):
        raise GenError(
            f"negative_prompt_ids has {len(rows)} rows and there are {len(prompts)}; expected one"
            " for each prompt"
        )
    return [row for row in rows for _ in range(len(prompts) // len(rows))]
