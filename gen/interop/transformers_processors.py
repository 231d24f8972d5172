"""Logits processors of ``generate``, as sampling parameters or as themselves.

Those that mean the same as a sampling parameter become one. From the first that does not, the
objects of transformers are called, in the order that ``generate`` gave them: with the padded rows
that ``generate`` would show them, for every position whose distribution is asked for, drafts
included. The target's distribution is thereby that of ``generate``, whatever the sampler.

A processor is called with texts of several lengths in any order, and for drafts that are rejected
later. It must therefore be a function of its arguments, row by row; ``require_functions`` refuses
others by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from gen.core.errors import GenError
from gen.models.load.transformers_compat import allowed_tokens_function
from gen.models.targets.past import ItemProcessor

P = logits_process
WARPERS = {
    P.TemperatureLogitsWarper: "temperature",
    P.TopKLogitsWarper: "top_k",
    P.TopPLogitsWarper: "top_p",
    P.MinPLogitsWarper: "min_p",
}
OTHER_WARPERS = (
    P.TypicalLogitsWarper,
    P.EpsilonLogitsWarper,
    P.EtaLogitsWarper,
    P.TopHLogitsWarper,
)
# rules about positions, which the token space holds
RULES = (
    P.MinLengthLogitsProcessor,
    P.MinNewTokensLengthLogitsProcessor,
    P.SuppressTokensLogitsProcessor,
    P.SuppressTokensAtBeginLogitsProcessor,
)
# they read an encoder's input, keep a state, or need several branches or codebooks
REFUSED = (
    P.EncoderRepetitionPenaltyLogitsProcessor,
    P.EncoderNoRepeatNGramLogitsProcessor,
    P.SynthIDTextWatermarkLogitsProcessor,
    P.WatermarkLogitsProcessor,
    P.ClassifierFreeGuidanceLogitsProcessor,
    P.DiaClassifierFreeGuidanceLogitsProcessor,
    P.DiaEOSChannelFilterLogitsProcessor,
    P.DiaEOSDelayPatternLogitsProcessor,
    P.WhisperTimeStampLogitsProcessor,
    P.WhisperNoSpeechDetection,
)
Step = Callable[[Tensor, Tensor, Tensor], Tensor]  # input_ids, scores, items -> scores


@dataclass
class Translation:
    """Logits processors in the terms of gen.

    Attributes:
        sampling: sampling parameters.
        rules: rules about positions, for the token space.
        objects: processors that are called themselves, in their order.
        warps: whether temperature and filters are among ``objects``.
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    rules: list[Any] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    warps: bool = False


def translate(processors: Sequence[Any], padding: Tensor, has_stop: bool) -> Translation:
    """Translate logits processors, without that of guidance.

    Args:
        processors: processors in the order of ``generate``.
        padding: padded positions of each row, long [B].
        has_stop: whether stop strings end rows, as an object does that comes last.
    """
    found, first = Translation(), _first_warper(processors)
    rank = -1
    for processor in processors[:first]:
        order, params = _as_params(processor, padding)
        if type(processor) in RULES and not found.objects:
            found.rules.append(processor)
        elif params and order > rank and not found.objects:
            rank = order
            found.sampling |= params
        else:
            found.objects.append(processor)
    filters = [p for p in processors[first:] if type(p) is not P.LogitNormalization]
    order = [list(WARPERS).index(type(p)) if type(p) in WARPERS else -1 for p in filters]
    if -1 in order or order != sorted(set(order)):
        found.objects += processors[first:]
        found.warps = True
    else:
        found.sampling |= {WARPERS[type(p)]: getattr(p, WARPERS[type(p)]) for p in filters}
    if found.objects or has_stop:  # objects may bring back a token that a rule took away
        found.objects, found.rules = found.rules + found.objects, []
    return found


def _first_warper(processors: Sequence[Any]) -> int:
    """Count the processors before temperature and filters, or before the final normalisation."""
    ends = (*WARPERS, *OTHER_WARPERS)
    for n, processor in enumerate(processors):
        if type(processor) in ends:
            return n
    last = len(processors) - 1
    return last if processors and type(processors[last]) is P.LogitNormalization else last + 1


def _as_params(processor: Any, padding: Tensor) -> tuple[int, dict[str, Any]]:
    """Return a processor as sampling parameters, and its number among them; none where padded rows
    or sequences of several tokens make a difference."""
    kind, is_padded = type(processor), bool((padding > 0).any())
    if kind is P.SequenceBiasLogitsProcessor:
        bias = processor.sequence_bias
        if all(len(s) == 1 and abs(x) < float("inf") for s, x in bias.items()):
            return 0, {"logit_bias": {int(s[0]): float(x) for s, x in bias.items()}}
    if kind is P.RepetitionPenaltyLogitsProcessor:
        ignored = processor.prompt_ignore_length
        same = isinstance(ignored, Tensor) and torch.equal(ignored.cpu().long(), padding)
        if same or (ignored is None and not is_padded):
            return 1, {"repetition_penalty": processor.penalty}
    if kind is P.NoRepeatNGramLogitsProcessor and not is_padded:
        return 2, {"no_repeat_ngram_size": processor.ngram_size}
    if kind is P.NoBadWordsLogitsProcessor and processor.sequence_bias:
        words = [tuple(map(int, s)) for s in processor.sequence_bias]
        if not is_padded or all(len(word) == 1 for word in words):
            return 3, {"bad_words": words}
    return -1, {}


class Chain(ItemProcessor):
    """Logits processors of ``generate``, one after the other, with the rows that it would show.

    Args:
        processors: processors in their order.
        input_ids: padded prompts of all items, long [B, S].
        padding: padded positions of each row, long [B].
        ends: token ids that end a row, long [n]; the first one ends rows at a stop.
        stop: finds rows that have a stop string at their end; None without.
    """

    def __init__(
        self,
        processors: Sequence[Any],
        input_ids: Tensor,
        padding: Tensor,
        ends: Tensor,
        stop: Callable[[Tensor], Tensor] | None = None,
    ):
        self.input_ids, self.padding = input_ids, padding.to(input_ids.device)
        self.ends, self.stop = ends.to(input_ids.device), stop
        self.steps = [_step(p, input_ids.shape[1]) for p in processors]

    def __call__(self, input_ids: Tensor, scores: Tensor, items: Tensor) -> Tensor:
        out, padding = scores.clone(), self.padding[items]
        for width in padding.unique().tolist():
            rows = (padding == width).nonzero()[:, 0]
            ids = torch.cat([self.input_ids[items[rows], :width], input_ids[rows]], 1)
            is_over = self._is_over(ids)
            if bool(is_over.any()):
                only = torch.full_like(scores[0], -torch.inf)
                only[self.ends[0]] = 0.0
                out[rows[is_over]] = only
                rows, ids = rows[~is_over], ids[~is_over]
            if len(rows):
                made = scores[rows]
                for step in self.steps:
                    made = step(ids, made, items[rows])
                out[rows] = made.to(out.dtype)
        return out

    def _is_over(self, ids: Tensor) -> Tensor:
        """Find the rows, long [n, S], that have an end, or a stop string at their end: bool [n]."""
        width = self.input_ids.shape[1]
        over = torch.isin(ids[:, width:], self.ends).any(1)
        # a prompt may end in a stop string; without an end token nothing can end a row
        if self.stop is None or ids.shape[1] == width or not len(self.ends):
            return over
        return over | self.stop(ids)


def _step(processor: Any, width: int) -> Step:
    """Return a processor as a function of rows of given items."""
    if type(processor) is P.PrefixConstrainedLogitsProcessor:
        return AllowedPrefixes(allowed_tokens_function(processor), width)
    if type(processor) is P.RepetitionPenaltyLogitsProcessor:
        ignored, kind = processor.prompt_ignore_length, type(processor)
        if isinstance(ignored, Tensor):
            return lambda ids, scores, items: kind(processor.penalty, ignored.to(items)[items])(
                ids, scores
            )
    return lambda ids, scores, items: processor(ids, scores)


class AllowedPrefixes:
    """``prefix_allowed_tokens_fn``, asked only about texts that it allows itself.

    Drafts may be forbidden. Nothing after a forbidden draft is ever committed, and every token is
    allowed there.

    Args:
        function: (number of the row, its tokens) -> allowed tokens.
        width: length of the padded prompts.
    """

    def __init__(self, function: Callable[[int, Tensor], Sequence[int]], width: int):
        self.function, self.width = function, width
        # of each item a text, and what may follow each of its beginnings; None after a wrong token
        self.rows: dict[int, tuple[list[int], list[list[int] | None]]] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, items: Tensor) -> Tensor:
        out = scores.clone()
        for n, (ids, item) in enumerate(zip(input_ids, items.tolist(), strict=True)):
            allowed = self._allowed(item, ids)
            if allowed is not None:
                only = P.PrefixConstrainedLogitsProcessor(lambda *_, found=allowed: found, 1)
                out[n] = only(ids[None], scores[n, None])[0]
        return out

    def _allowed(self, item: int, ids: Tensor) -> list[int] | None:
        tokens = ids[self.width :].tolist()
        text, allowed = self.rows.setdefault(item, ([], []))
        same = next(
            (n for n, (a, b) in enumerate(zip(text, tokens, strict=False)) if a != b),
            min(len(text), len(tokens)),
        )
        del allowed[same + 1 :]
        for n in range(len(allowed), len(tokens) + 1):
            before = allowed[n - 1] if n else []
            if n and (before is None or tokens[n - 1] not in before):
                allowed.append(None)
            else:
                allowed.append([int(i) for i in self.function(item, ids[: self.width + n])])
        text[:] = tokens
        return allowed[-1]


def require_functions(processors: Sequence[Any], input_ids: Tensor, vocab_size: int) -> None:
    """Refuse logits processors whose scores do not follow from the tokens of a row alone.

    Each is called a few times with the prompts; those of transformers itself are known.

    Raises:
        GenError: a processor needs more arguments, keeps a state across calls, or looks at other
            rows.
    """
    for processor in processors:
        if isinstance(processor, P.LogitsProcessor) and type(processor).__module__ == P.__name__:
            continue
        name = getattr(processor, "__qualname__", type(processor).__name__)  # functions have one
        if len(inspect.signature(processor).parameters) != 2:
            raise GenError(
                f"gen.transformers_generate cannot honour logits processor {name}, which takes"
                " other arguments than (input_ids, scores); expected one that takes these"
            )
        problem = _state_of_calls(processor, input_ids, vocab_size)
        if problem:
            raise GenError(
                f"gen.transformers_generate cannot honour logits processor {name}, {problem};"
                " expected a function of the tokens of each row, since drafts are processed as well"
            )


def _state_of_calls(processor: Any, input_ids: Tensor, vocab_size: int) -> str:
    """Return what makes a processor more than a function of each row; empty for none."""
    shape = len(input_ids), vocab_size
    seed = torch.arange(shape[0] * shape[1], device=input_ids.device, dtype=torch.float32)
    scores = torch.sin(seed * 12.9898).view(shape)

    def call(ids: Tensor, rows: slice = slice(None)) -> Tensor:
        return processor(ids[rows], scores[rows].clone())

    first = call(input_ids)  # some prepare tables at their first call
    before = _fingerprint(processor)
    longer = torch.cat([input_ids, input_ids[:, -1:]], 1)
    call(longer)
    again = call(input_ids)
    if _fingerprint(processor) != before or not _equal(first, again):
        return "which keeps a state across calls or draws random numbers"
    if len(input_ids) > 1 and not _equal(call(input_ids, slice(-1, None)), first[-1:]):
        return "whose scores of a row depend on the other rows or on its number in the batch"
    return ""


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _fingerprint(x: Any, depth: int = 4) -> Any:
    """Return a value that changes with the state of an object: numbers, texts, tensors by identity
    and version, and containers and attributes down to a depth."""
    if x is None or isinstance(x, (bool, int, float, str, bytes)):
        return x
    if isinstance(x, Tensor):
        return id(x), x._version
    if isinstance(x, torch.Generator):
        return bytes(x.get_state().tolist())
    if not depth:
        return id(x)
    if isinstance(x, dict):
        return tuple((repr(k), _fingerprint(v, depth - 1)) for k, v in x.items())
    if isinstance(x, (list, tuple)):
        return tuple(_fingerprint(v, depth - 1) for v in x)
    if isinstance(x, (set, frozenset)):
        return tuple(sorted(map(repr, x)))
    if inspect.isfunction(x):
        return tuple(_fingerprint(cell.cell_contents, depth - 1) for cell in x.__closure__ or ())
    # any class of a user
    return id(x), _fingerprint(vars(x), depth - 1) if hasattr(x, "__dict__") else None
