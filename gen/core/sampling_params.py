"""Sampling parameters, and the distribution that they make of logits.

Log-probabilities are made from logits here and nowhere else, in this order:

    guidance    z = u + s (c - u)          c, u: logits with and without the condition (CFG),
                                           s = guidance_scale
    history     logit bias, penalties, n-grams, bad words, logits processors: what targets add
                (``gen.models.targets.past``), since it reads the tokens before a position
    allowed     z = -inf where a token may not stand
    temperature z = z / temperature        below 1e-5: all mass on the argmax
    top-k       the k largest
    top-p       the smallest set of largest tokens whose mass reaches p
    min-p       tokens with at least min_p times the mass of the largest

Drafts are judged against this distribution and recovered tokens are drawn from its residual. No
sampler filters or scales it a second time.

Logits may make no distribution: one of them is NaN or +inf, -inf in both branches of guidance, or
-inf for every allowed token. All V log-probabilities are NaN there, so that one of them tells
(``gen.core.distributions.has_no_distribution``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import Tensor

from gen.core import control_checks as checks
from gen.core.distributions import LOGITS_CHUNK, wide_dtype
from gen.core.errors import bad_value
from gen.core.plain import is_finite, torch_number

# Temperatures below take the argmax: logits divided by less overflow in float32.
GREEDY_BELOW = 1e-5


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters as keywords of a call; None and absent mean the default."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    guidance_scale: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    bad_words: Sequence[str | Sequence[int]] | None
    logit_bias: Mapping[int | str, float] | None
    min_new_tokens: int | None
    max_new_tokens: int | None
    max_length: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    logits_processor: Sequence[Callable[[Tensor, Tensor], Tensor]] | None
    structured: Mapping[str, Any] | None
    logprobs: int | None


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of the distribution that tokens are drawn from.

    Attributes:
        temperature: divisor of the logits; 0, or less than 1e-5, takes the argmax.
        top_k: number of most probable tokens that stay; 0 keeps all.
        top_p: mass of the most probable tokens that stay; 1 keeps all.
        min_p: least probability that stays, relative to the largest; 0 keeps all.
        guidance_scale: weight s of classifier-free guidance; 1 turns guidance off.
        repetition_penalty: divisor of positive logits, and factor of negative ones, of the tokens
            of prompt and output; 1 turns it off.
        presence_penalty: number taken off the logits of the output's tokens.
        frequency_penalty: the same, times how often the token is in the output.
        no_repeat_ngram_size: length of n-grams of prompt and output that may not come again; 0
            allows them.
        bad_words: texts or tuples of token ids that may not come. Of several tokens, the last may
            not follow the others.
        logit_bias: number added to a token's logit, by id or by the text of one token.
        min_new_tokens: tokens before which no row may end.
        max_new_tokens: tokens after which a row is over; None takes all positions of the model.
        max_length: tokens of prompt and output together after which a row is over, where
            ``max_new_tokens`` says nothing; None takes all positions of the model.
        stop: texts that end a row. The token that completes one is the row's last.
        stop_token_ids: tokens that end a row.
        logits_processor: functions (input_ids [n, S], scores [n, V]) -> scores, as transformers
            calls them, with the tokens of prompt and output.
        structured: rule that the output must obey, such as ``{"json_schema": ...}``.
        logprobs: number of likeliest tokens whose log-probabilities come with every token; None
            returns none.

    Raises:
        GenError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    guidance_scale: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[checks.Word, ...] = ()
    logit_bias: Mapping[int | str, float] | None = None
    min_new_tokens: int = 0
    max_new_tokens: int | None = None
    max_length: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logits_processor: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()
    structured: Mapping[str, Any] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise bad_value("sampling.temperature", self.temperature, "a number of at least 0")
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise bad_value(
                "sampling.top_k", self.top_k, "an integer of at least 0 (0 keeps all tokens)"
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise bad_value("sampling.top_p", self.top_p, "a number above 0 and at most 1")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise bad_value("sampling.min_p", self.min_p, "a number between 0 and 1")
        if not _is_number(self.guidance_scale) or not 0 <= self.guidance_scale < math.inf:
            raise bad_value(
                "sampling.guidance_scale",
                self.guidance_scale,
                "a number of at least 0 (1 turns guidance off)",
            )
        for name in ("temperature", "guidance_scale"):
            object.__setattr__(self, name, torch_number(getattr(self, name)))
        for name, value in self.controls().items():
            object.__setattr__(self, name, _checked(name, value))

    def controls(self) -> dict[str, Any]:
        """Return the parameters that look back, name tokens or shape the output, if not default."""
        found = {name: getattr(self, name) for name in CONTROLS}
        return {k: v for k, v in found.items() if not _equal(v, DEFAULTS[k])}

    def keywords(self) -> dict[str, Any]:
        """Return the keywords that make these parameters, those of ``controls`` where set."""
        return {name: getattr(self, name) for name in FILTERS} | self.controls()

    def to_dict(self) -> dict[str, Any]:
        """Return ``keywords`` as plain data, logits processors by their names."""
        return {k: _plain(v) for k, v in self.keywords().items()}

    @cached_property
    def looks_back(self) -> tuple[str, ...]:
        """Names of the parameters in use that read the tokens before a position."""
        several = any(isinstance(w, str) or len(w) > 1 for w in self.bad_words)
        return tuple(k for k in self.controls() if k in LOOK_BACK or (k == "bad_words" and several))

    def without_past(self) -> SamplingParams:
        """Return the parameters without those that read the tokens before a position."""
        defaults = {name: DEFAULTS[name] for name in self.looks_back if name != "bad_words"}
        words = tuple(w for w in self.bad_words if not isinstance(w, str) and len(w) == 1)
        return replace(self, **defaults, bad_words=words) if self.looks_back else self

    def unfiltered(self) -> SamplingParams:
        """Return the temperature alone: a drafter that is trained on the final distribution has
        learned guidance and filters."""
        return SamplingParams(temperature=self.temperature)

    @property
    def is_greedy(self) -> bool:
        """True where the temperature is so low that the argmax is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def guided(self) -> bool:
        """True where classifier-free guidance needs logits without the condition."""
        return self.guidance_scale != 1.0

    def __call__(
        self,
        logits: Tensor,
        uncond: Tensor | None = None,
        legal: Tensor | None = None,
        *,
        consume: bool = False,
    ) -> Tensor:
        """Return the log-probabilities [..., V] that tokens are drawn from.

        Args:
            logits: floats [..., V] of the conditional branch.
            uncond: floats [..., V] of the unconditional branch, if guided.
            legal: bool, broadcastable to ``logits``; allowed tokens.
            consume: the logits are not needed any more and may be written over.

        Returns:
            Log-probabilities [..., V], -inf where there is no mass, all of them NaN where the
            logits make no distribution; float64 for float64 logits, else float32.
        """
        most = max(LOGITS_CHUNK[logits.is_cpu], logits.shape[-1])
        if logits.numel() <= most:
            return self._logprobs(logits, uncond, legal)
        wide, rows = wide_dtype(logits.dtype), most // logits.shape[-1]
        out = (
            logits
            if consume and logits.dtype == wide and logits.is_contiguous()
            else torch.empty(logits.shape, dtype=wide, device=logits.device)
        )

        def flat(x: Tensor) -> Tensor:
            return x.expand(logits.shape).reshape(-1, logits.shape[-1])

        flat_out, flat_logits = out.view(-1, logits.shape[-1]), flat(logits)
        flat_uncond = None if uncond is None else flat(uncond)
        flat_legal = None if legal is None else flat(legal)
        for first in range(0, len(flat_out), rows):
            chunk = slice(first, first + rows)
            logprobs = self._logprobs(
                flat_logits[chunk],
                None if flat_uncond is None else flat_uncond[chunk],
                None if flat_legal is None else flat_legal[chunk],
            )
            flat_out[chunk].copy_(logprobs)
        return out

    def guide(self, logits: Tensor, uncond: Tensor | None) -> Tensor:
        """Return guided logits [..., V]: those with the condition, led away from those without.

        Args:
            logits: floats [..., V] of the conditional branch.
            uncond: floats [..., V] of the unconditional branch, if guided.
        """
        wide = wide_dtype(logits.dtype)
        # a conversion to the same type takes as long as a small operation
        z = logits if logits.dtype == wide else logits.float()
        if uncond is None:
            return z
        u = uncond if uncond.dtype == wide else uncond.to(wide)
        return (z - u).mul_(self.guidance_scale).add_(u)

    def _logprobs(self, logits: Tensor, uncond: Tensor | None, legal: Tensor | None) -> Tensor:
        """Apply the parts in the order of the module's head."""
        z = self.guide(logits, uncond)
        if legal is not None:
            z = torch.where(legal, z, -torch.inf)
        if self.is_greedy:
            best = z.argmax(-1, keepdim=True)  # a NaN, if any logit is
            exists = z.gather(-1, best).isfinite()
            nothing = torch.where(exists, -torch.inf, torch.nan).to(z.dtype)
            logprobs = nothing.expand(z.shape).contiguous()
            return logprobs.scatter_(-1, best, torch.where(exists, 0.0, torch.nan).to(z.dtype))
        if self.temperature != 1:
            z = z / self.temperature
        if 0 < self.top_k < z.shape[-1]:
            # exactly k tokens, whatever the ties
            largest = z.topk(self.top_k, -1, sorted=False)
            rest = torch.full_like(z, -torch.inf) if z is logits else z.fill_(-torch.inf)
            z = rest.scatter_(-1, largest.indices, largest.values)
        if self.top_p < 1:
            ordered, ids = z.sort(dim=-1, descending=True, stable=True)
            mass = ordered.softmax(-1)
            # a token stays while the larger ones do not reach p yet, so one always does
            before = mass.cumsum(-1) - mass
            removed = torch.zeros_like(z, dtype=torch.bool).scatter_(-1, ids, before >= self.top_p)
            z = z.masked_fill(removed, float("-inf"))
        if self.min_p > 0:
            logp = z.log_softmax(-1)
            floor = logp.amax(-1, keepdim=True) + torch.tensor(self.min_p, dtype=z.dtype).log()
            z = z.masked_fill(logp < floor, float("-inf"))
        return z.log_softmax(-1)


SAMPLING_FIELDS = tuple(SamplingParams.__dataclass_fields__)
DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}
FILTERS = ("temperature", "top_k", "top_p", "min_p", "guidance_scale")
CONTROLS = tuple(name for name in SAMPLING_FIELDS if name not in FILTERS)
# parameters that say which tokens may stand where, which is a matter of the token space
IN_SPACE = (
    "min_new_tokens", "max_new_tokens", "max_length", "stop", "stop_token_ids", "structured",
)  # fmt: skip
LOOK_BACK = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "logits_processor",
)


def _checked(name: str, value: Any) -> Any:
    """Return the plain value of a control. Raises ``GenError`` for a bad one."""
    if name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        return checks.number(name, value, positive=name == "repetition_penalty")
    if name == "bad_words":
        return checks.words(value)
    if name == "logit_bias":
        return checks.bias(value) or None
    if name == "stop":
        return checks.texts(name, value)
    if name == "stop_token_ids":
        return checks.ids(name, value)
    if name == "logits_processor":
        return checks.processors(value)
    if name == "structured":
        if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
            expected = "a mapping such as {'json_schema': {...}}"
            raise bad_value("sampling.structured", value, expected)
        return dict(value)
    return checks.count(name, value, least=1 if name.startswith("max_") else 0)


def _equal(value: Any, default: Any) -> bool:
    """Compare a value, of any type, to a default."""
    if isinstance(value, (int, float)):
        return isinstance(default, (int, float)) and bool(value == default)
    return value is default or (isinstance(value, tuple) and value == default)


def _plain(value: Any) -> Any:
    """Return tuples as lists, and functions by their names."""
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)  # a class has no such name
    return value


def _is_number(x: object) -> bool:
    """Return True for a finite number."""
    return isinstance(x, (int, float)) and is_finite(x)
