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
from gen.models.load.transformers_compat import end_tokens, is_users_cache

P = logits_process
WARPERS = {
    P.TemperatureLogitsWarper: "temperature",
    P.TopKLogitsWarper: "top_k",
    P.TopPLogitsWarper: "top_p",
    P.MinPLogitsWarper: "min_p",
}
RULES = (
    P.MinLengthLogitsProcessor,
    P.MinNewTokensLengthLogitsProcessor,
    P.SuppressTokensLogitsProcessor,
    P.SuppressTokensAtBeginLogitsProcessor,
)
# in the order in which sampling parameters apply; allowed tokens are one stage, so their rules may
# come in any order
STAGES = {
    P.UnbatchedClassifierFreeGuidanceLogitsProcessor: 0,
    **dict.fromkeys(RULES, 1),
    **{warper: 2 + i for i, warper in enumerate(WARPERS)},
    P.LogitNormalization: 9,
}
CRITERIA = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
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
    "past_key_values",
    "use_cache",
    "logits_to_keep",
)


@dataclass(frozen=True)
class SeveralEnds:
    """Constraint for several end tokens: after any of ``ends`` comes ``eos_token_id``.

    Tokens before position ``first``, where no end token is allowed, do not count as ends.
    """

    ends: Tensor
    eos_token_id: int
    first: int
    vocab_size: int

    def legal(self, history: Tensor, positions: Tensor) -> Tensor:
        position = torch.arange(history.shape[1], device=history.device)
        found = torch.isin(history, self.ends.to(history.device)) & (position >= self.first)
        over = torch.where(found, position, len(position)).amin(1, keepdim=True) < positions
        only = torch.arange(self.vocab_size, device=history.device) == self.eos_token_id
        return only | ~over[..., None]


@dataclass(frozen=True)
class Request:
    """Request of one call of ``generate``.

    Attributes:
        prompts: token ids of every row.
        negative: token ids of every row of the unconditional CFG branch, if guided.
        sampling: sampling parameters that the settings name.
        space: token space of the answer.
        ends: token ids that end a row.
    """

    prompts: list[list[int]]
    negative: list[list[int]] | None
    sampling: dict[str, Any]
    space: TokenSpace
    ends: Tensor


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
    asked += [
        f"stopping criterion {type(c).__name__}" for c in criteria or () if type(c) not in CRITERIA
    ]
    asked += [
        f"logits processor {type(p).__name__}" for p in processors or () if type(p) not in STAGES
    ]
    cache = others.get("past_key_values")
    if cache is not None and (is_users_cache(cache) or cache.get_seq_length()):
        asked.append("past_key_values")
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
    _refuse_unsupported(config, processors, criteria, others)
    stages = [STAGES[type(p)] for p in processors or ()]
    if stages != sorted(stages) or len({s for s in stages if s != 1}) < sum(s != 1 for s in stages):
        raise GenError(
            f"the logits processors are {', '.join(type(p).__name__ for p in processors)}; expected"
            " each once and in the order guidance, allowed tokens, temperature, top-k, top-p, min-p"
        )
    length = config.max_length - input_ids.shape[1]
    if length < 1:
        raise GenError(
            f"max_length is {config.max_length} and the prompts have {input_ids.shape[1]} tokens;"
            " expected room for one more at least"
        )
    prompts = unpadded(input_ids, others.get("attention_mask"), "attention_mask")
    _same_positions(others.get("position_ids"), input_ids, others.get("attention_mask"))
    sampling = {"temperature": 1.0} | {
        WARPERS[type(p)]: getattr(p, WARPERS[type(p)])
        for p in processors or ()
        if type(p) in WARPERS
    }
    if not config.do_sample:
        sampling["temperature"] = 0.0
    negative = None
    if stages and stages[0] == 0:
        sampling["guidance_scale"] = float(processors[0].guidance_scale)
        negative = _negative(processors[0].unconditional_context, prompts)
    ends = end_tokens(config)
    ends = torch.zeros(0, dtype=torch.long) if ends is None else ends.cpu().flatten()
    ends = ends[(ends >= 0) & (ends < vocab_size)]
    rules = [p for p in processors or () if type(p) in RULES]
    return Request(
        prompts,
        negative,
        sampling,
        make_space(length, input_ids.shape[1], vocab_size, ends, rules),
        ends,
    )


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
    end, several = int(possible[0]), None
    if len(possible) > 1:
        several = SeveralEnds(possible, end, int(legal[:, end].long().argmax()), vocab_size)
    return TokenSpace(
        (length,),
        vocab_size,
        legal,
        eos_token_id=end,
        constraint=several,
        end_token_ids=tuple(possible.tolist()),
    )


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
