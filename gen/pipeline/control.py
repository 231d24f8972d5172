"""Controlled token spaces: what sampling parameters say about tokens and ends, put into the space.

Texts become token ids. The number of positions, allowed tokens, stops and structured output go into
the token space that targets and samplers see; what is left in the sampling parameters changes
logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gen.constraints.build import build
from gen.contracts.constraint import Constraint
from gen.contracts.frontend import TokenFrontend, Vocabulary
from gen.contracts.row_constraint import RowConstraint
from gen.core.errors import GenError
from gen.core.row_rules import HistoryConstraint
from gen.core.sampling_params import DEFAULTS, IN_SPACE, SamplingParams
from gen.core.token_space import TokenSpace
from gen.pipeline.stops import StopConstraint
from gen.tokenizers.base.text_bytes import TextBytes


@dataclass(frozen=True)
class AllOf:
    """Constraints that hold together, and stops, which come first: a row that is over is over.

    Attributes:
        parts: the constraints.
        stops: constraint of the stops, after which the eos token alone may follow; None without.
    """

    parts: tuple[HistoryConstraint, ...]
    stops: HistoryConstraint | None

    def legal(self, history: Tensor, positions: Tensor) -> Tensor:
        """See ``HistoryConstraint.legal``."""
        found = [part.legal(history, positions) for part in self.parts]
        legal = torch.stack(found).all(0) if found else None
        if self.stops is None:
            assert legal is not None, "there is at least one constraint"
            return legal
        unstopped = self.stops.legal(history, positions)
        if legal is None:
            return unstopped
        goes_on = unstopped.sum(-1, keepdim=True) > 1
        return torch.where(goes_on, legal & unstopped, unstopped)


def shaped(
    space: TokenSpace, sampling: SamplingParams, frontend: TokenFrontend, num_prefix: int = 0
) -> TokenSpace:
    """Return the space with as many positions as ``max_new_tokens`` says, and its stops.

    Args:
        space: token space of the model.
        sampling: sampling parameters.
        frontend: frontend of the model.
        num_prefix: positions of a given prefix, which do not count as new.

    Raises:
        GenError: the tokens are no text.
    """
    controls = sampling.controls()
    for name in ("max_new_tokens", "max_length", "stop"):
        if name in controls and not isinstance(frontend, TextBytes):
            raise GenError(
                f"sampling.{name} is {controls[name]!r}, and the model's tokens are no text;"
                " expected a text model (media of other kinds take frames)"
            )
    space = replace(space, stop=sampling.stop, stop_token_ids=sampling.stop_token_ids)
    if sampling.max_new_tokens is None:
        return space
    return resized(space, num_prefix + sampling.max_new_tokens)


def resized(space: TokenSpace, length: int) -> TokenSpace:
    """Return the space with so many positions; new ones allow what the last one does."""
    more = space.legal[-1:].expand(max(0, length - space.length), -1)
    legal = torch.cat([space.legal, more])[:length]
    blocks = tuple(slice(b.start, min(b.stop, length)) for b in space.blocks if b.start < length)
    return replace(space, grid=(length,), legal=legal, blocks=blocks)


def within_length(
    sampling: SamplingParams, limits: Sequence[int | None], prompts: Sequence[int], positions: int
) -> list[int | None]:
    """Return ``max_new_tokens`` of each item under ``max_length``.

    Args:
        sampling: sampling parameters.
        limits: ``max_new_tokens`` of each item, or None.
        prompts: tokens of the prompt of each item, and of what is given.
        positions: new tokens that a row may have.

    Raises:
        GenError: a prompt leaves no room for a token.
    """
    most = sampling.max_length
    if most is None or sampling.max_new_tokens is not None:
        return list(limits)
    if max(prompts) >= most:
        raise GenError(
            f"sampling.max_length is {most} and a prompt has {max(prompts)} tokens; expected room"
            " for one more at least"
        )
    return [
        most - n if most - n < positions else limit
        for n, limit in zip(prompts, limits, strict=True)
    ]


def item_limits(
    limits: Sequence[int | None], space: TokenSpace, sampling: SamplingParams
) -> np.ndarray | None:
    """Return the tokens that each item may have, int64 [N]; None where all may have as many.

    Args:
        limits: ``max_new_tokens`` of each item, or None.
        space: token space.
        sampling: sampling parameters.

    Raises:
        GenError: rows cannot end, or the output has a structure that needs its length.
    """
    if all(limit is None or limit == sampling.max_new_tokens for limit in limits):
        return None
    if sampling.structured is not None or space.eos_token_id is None:
        reason = "the model has no eos token"
        if sampling.structured is not None:
            reason = "structured output is planned for one length"
        raise GenError(
            f"max_new_tokens differs between prompts and {reason}; expected one number for all"
        )
    return np.array([space.length if limit is None else limit for limit in limits])


def filled_behind(canvas: Tensor, lengths: np.ndarray, space: TokenSpace) -> Tensor:
    """Return a canvas [B, T] with eos tokens behind the first ``lengths`` positions, int64 [B]."""
    column = torch.arange(canvas.shape[1], device=canvas.device)
    behind = column >= torch.from_numpy(lengths).to(canvas.device)[:, None]
    return torch.where(behind, cast(int, space.eos_token_id), canvas)


def with_output(
    space: TokenSpace,
    positions: int | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
) -> TokenSpace:
    """Return the space of tokens that were made under sampling parameters, to decode them.

    Args:
        space: token space of the model.
        positions: positions of a row, if not the model's.
        stop: texts before which the text of a row is cut off.
        stop_token_ids: tokens that end a row.
    """
    space = space if positions is None else resized(space, positions)
    return replace(space, stop=tuple(stop), stop_token_ids=tuple(stop_token_ids))


def controlled(
    space: TokenSpace,
    sampling: SamplingParams,
    frontend: TokenFrontend,
    vocabulary: Callable[[], Vocabulary | None],
    left_to_right: bool,
    num_prefix: int = 0,
    build: Callable[..., Constraint] = build,
) -> tuple[TokenSpace, SamplingParams]:
    """Return the token space and the sampling parameters that targets see.

    Args:
        space: token space that ``shaped`` returned, with the positions of the prefix.
        sampling: sampling parameters as users write them.
        frontend: frontend of the model, which makes token ids of texts.
        vocabulary: gives the bytes of every token; None where tokens are no text.
        left_to_right: whether positions are filled in order. Otherwise stops only cut the text.
        num_prefix: positions of a given prefix.
        build: builds the constraint of structured output (``gen.constraints.build.build``).

    Raises:
        GenError: a parameter does not fit the model.
    """
    if not sampling.controls():
        return space, sampling
    sampling = replace(
        sampling,
        bad_words=tuple(i for word in sampling.bad_words for i in _word_ids(word, frontend)),
        logit_bias=_bias_by_id(sampling.logit_bias or {}, frontend) or None,
    )
    for token in sampling.stop_token_ids:
        if token >= space.vocab_size:
            raise GenError(
                f"sampling.stop_token_ids names token {token}; expected ids below"
                f" {space.vocab_size}"
            )
    ends_rows = left_to_right and bool(sampling.stop or sampling.stop_token_ids)
    if ends_rows:
        ends_rows = _may_end(space, sampling, space.length - num_prefix)
    space, first = _lengthened(space, sampling, num_prefix)
    space, sampling = _banned(space, sampling)
    constraints = [] if space.constraint is None else [space.constraint]
    stops = None
    if ends_rows and sampling.stop:
        eos, words = cast(int, space.eos_token_id), cast(Vocabulary, vocabulary())
        stops = StopConstraint(space.vocab_size, eos, sampling.stop, words, first)
    if sampling.structured is not None:
        constraint = build(sampling.structured, vocabulary(), space, left_to_right)
        constraints.append(RowConstraint(constraint, space.length))
    if stops is not None or len(constraints) > 1:
        rows = None if stops is None else RowConstraint(stops, space.length)
        constraints = [AllOf(tuple(constraints), rows)]
    if constraints:
        space = replace(space, constraint=constraints[0], stops=stops)
    return space, replace(sampling, **{k: DEFAULTS[k] for k in IN_SPACE})


def _lengthened(
    space: TokenSpace, sampling: SamplingParams, num_prefix: int
) -> tuple[TokenSpace, int]:
    """Return the space without ends before ``min_new_tokens``, and the first position whose token
    may end a row by a stop.

    A stop may come one position before the eos token may, which follows it.
    """
    least, positions = sampling.min_new_tokens, space.length - num_prefix
    if least > positions:
        raise GenError(
            f"sampling.min_new_tokens is {least}; expected at most {positions}, the positions of"
            " the output"
        )
    first = num_prefix + least if least else 0
    if space.eos_token_id is not None and (sampling.stop or sampling.stop_token_ids):
        first = max(first, int(space.legal[:, space.eos_token_id].long().argmax()) - 1)
    if not first:
        return space, first
    legal = space.legal.clone()
    legal[:first, list(sampling.stop_token_ids)] = False
    legal[: num_prefix + least if least else 0, list(space.ends)] = False
    return replace(space, legal=legal), first


def _banned(space: TokenSpace, sampling: SamplingParams) -> tuple[TokenSpace, SamplingParams]:
    """Move tokens that may stand nowhere from the parameters to the space.

    Constraints then know that texts cannot hold them.

    Raises:
        GenError: a token is outside of the vocabulary, or a position is left without a token.
    """
    bias = sampling.logit_bias or {}
    words = {word[0] for word in sampling.bad_words if len(word) == 1}
    banned = {*words, *(token for token, add in bias.items() if add == -math.inf)}
    for token in banned:
        if token >= space.vocab_size:
            name = "bad_words" if token in words else "logit_bias"
            raise GenError(
                f"sampling.{name} names token {token}; expected ids below {space.vocab_size}"
            )
    if not banned:
        return space, sampling
    legal = space.legal.clone()
    legal[:, list(banned)] = False
    empty = (~legal.any(1)).nonzero()[:, 0].tolist()
    if empty:
        raise GenError(
            f"sampling.bad_words and logit_bias leave no token for position {empty[0]}; expected"
            " at least one"
        )
    sampling = replace(
        sampling,
        bad_words=tuple(word for word in sampling.bad_words if len(word) > 1),
        logit_bias={k: add for k, add in bias.items() if k not in banned} or None,
    )
    return replace(space, legal=legal), sampling


def _may_end(space: TokenSpace, sampling: SamplingParams, positions: int) -> bool:
    """Return whether a stop can end a row of an output of some positions before its last one.

    Raises:
        GenError: the model has no eos token, or it may stand nowhere.
    """
    if space.eos_token_id is None:
        name = "stop" if sampling.stop else "stop_token_ids"
        raise GenError(
            f"sampling.{name} ends rows, and the rows of this model have one length and no eos"
            " token; expected a model with an eos token"
        )
    if bool(space.legal[:, space.eos_token_id].any()):
        return True
    if positions > 1:
        raise GenError(
            f"the eos token {space.eos_token_id} may stand nowhere, and rows that are stopped are"
            " filled with it; expected sampling parameters that allow it"
        )
    return False  # of one token no position is left to fill: its text is cut


def _word_ids(word: str | tuple[int, ...], frontend: TokenFrontend) -> list[tuple[int, ...]]:
    """Return the tokens of a bad word: of a text as it is, and after a space."""
    if not isinstance(word, str):
        return [word]
    spellings = (word, " " + word.lstrip())
    return list(dict.fromkeys(tuple(_ids("bad_words", text, frontend)) for text in spellings))


def _bias_by_id(bias: Mapping[int | str, float], frontend: TokenFrontend) -> dict[int, float]:
    """Return biases by token id. Raises ``GenError`` for two of one token."""
    found: dict[int, float] = {}
    for token, add in bias.items():
        key = _one_token(token, frontend)
        if key in found:
            raise GenError(
                f"sampling.logit_bias names token {key} twice, once as {token!r}; expected each"
                " token once"
            )
        found[key] = add
    return found


def _one_token(token: int | str, frontend: TokenFrontend) -> int:
    """Return the id of a token. Raises ``GenError`` for a text of several tokens."""
    if isinstance(token, int):
        return token
    ids = _ids("logit_bias", token, frontend)
    if len(ids) != 1:
        raise GenError(
            f"sampling.logit_bias names {token!r}, which is {len(ids)} tokens: {ids}; expected the"
            " text of one token, or its id"
        )
    return ids[0]


def _ids(name: str, text: str, frontend: TokenFrontend) -> list[int]:
    """Return the token ids of a text. Raises ``GenError`` where tokens are no text."""
    if not isinstance(frontend, TextBytes):
        raise GenError(
            f"sampling.{name} holds the text {text!r}, and the model's tokens are no text; expected"
            " token ids"
        )
    try:
        return frontend.ids(text)
    except GenError as error:
        raise GenError(f"sampling.{name}: {error}") from None


def before_stop(text: str, stops: tuple[str, ...]) -> str:
    """Return a text up to the first stop in it."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text


def held_back(text: str, stops: tuple[str, ...]) -> str:
    """Return the part of an unfinished text that no stop can cut off any more."""
    text = before_stop(text, stops)
    held = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return text[: len(text) - max(held, default=0)]
