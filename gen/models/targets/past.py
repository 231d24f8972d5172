"""Logits that depend on the tokens before a position: penalties, n-grams, bad words, processors.

Everything is counted anew from the tokens before each position, so that nothing has to be rolled
back: a rejected draft is not among the tokens any more when the next position is asked about. The
parts apply in this order:

    logit bias           z + bias[v]; also bad words of one token, -inf
    repetition penalty   z / r where z > 0, else z r, for tokens of prompt and output
    frequency, presence  z - f count(v) - p [count(v) > 0], for tokens of the output
    n-grams, bad words   z = -inf for tokens that would complete one, of prompt and output
    logits processors    scores = processor(input_ids, z), in their order

A position may be left without a token that is not -inf. It then has no distribution, which is an
error only where a token is committed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace

NONE = -1  # no token


def token_bias(sampling: SamplingParams, size: int, vocab_size: int) -> Tensor | None:
    """Return what is added to the logits of all positions: float64 [size]; None where it is
    nothing.

    Args:
        sampling: sampling parameters, tokens by id.
        size: number of logits of a position.
        vocab_size: V, which no id may reach.

    Raises:
        GenError: a token is named by a text, or its id is too large.
    """
    added = dict(sampling.logit_bias or {})
    words = sampling.bad_words
    for name, tokens in (("logit_bias", added), ("bad_words", [t for w in words for t in w])):
        for token in tokens:
            if not isinstance(token, int):
                raise GenError(
                    f"sampling.{name} names a token by the text {token!r}; expected token ids,"
                    " which pipelines of texts make of it"
                )
            if token >= vocab_size:
                raise GenError(
                    f"sampling.{name} names token {token}; expected an id below {vocab_size}"
                )
    added |= {word[0]: -torch.inf for word in words if len(word) == 1}
    added = {token: add for token, add in added.items() if token < size}
    if not added:
        return None
    bias = torch.zeros(size, dtype=torch.float64)
    bias[list(added)] = torch.tensor([float(add) for add in added.values()], dtype=bias.dtype)
    return bias


class ItemProcessor(ABC):
    """Logits processor that also takes the item of each row.

    ``sampling.logits_processor`` holds it like any other.
    """

    @abstractmethod
    def __call__(self, input_ids: Tensor, scores: Tensor, items: Tensor) -> Tensor:
        """Return the scores of a position.

        Args:
            input_ids: tokens of prompt and output before the position, long [n, S].
            scores: logits [n, V].
            items: item of each row, long [n].
        """


class Past:
    """Parameters that read the tokens before a position, and the prompts of the items.

    Args:
        sampling: sampling parameters, tokens by id.
        space: token space; its prefix counts as output.
        prompts: prompts of all items, long [N, P], padded on the right.
        lengths: their lengths, long [N].
    """

    def __init__(
        self, sampling: SamplingParams, space: TokenSpace, prompts: Tensor, lengths: Tensor
    ):
        self.sampling, self.device = sampling, prompts.device
        self.words = [torch.tensor(w, device=self.device) for w in sampling.bad_words if len(w) > 1]
        prefix = [] if space.prefix is None else space.prefix.tolist()
        self.prefix = torch.tensor(prefix, dtype=torch.long, device=self.device)
        table = None if space.prompt_tokens is None else space.prompt_tokens.tolist()
        rows = []
        for row, length in zip(prompts.tolist(), lengths.tolist(), strict=True):
            ids = row[: length - len(prefix)]
            if table is not None:
                ids = [table[i] for i in ids if 0 <= i < len(table)]
            rows.append([i for i in ids if i >= 0])
        width = max(map(len, rows))
        padded = [[NONE] * (width - len(row)) + row for row in rows]
        # right-aligned, so that a position of the output is the same column in every row
        self.prompts = torch.tensor(padded, dtype=torch.long, device=self.device)
        self.prompts = self.prompts.view(len(rows), width)

    def __call__(self, logits: Tensor, history: Tensor, positions: Tensor, items: Tensor) -> Tensor:
        """Return the logits of positions, given the tokens before each.

        Args:
            logits: floats [n, L, V], guided and biased.
            history: long [n, T]; entries at or after a position change nothing.
            positions: long [n, L].
            items: item of each row, long [n].

        Returns:
            Floats [n, L, V].
        """
        sampling, size = self.sampling, logits.shape[-1]
        output = torch.cat([self.prefix.expand(len(history), -1), history], 1)
        num_output = positions + len(self.prefix)
        tokens = torch.cat([self.prompts[items], output], 1)
        num_prompt = tokens.shape[1] - output.shape[1]
        ends = num_output + num_prompt
        z = F.pad(logits, (0, 1))  # the last entry takes what is written for no token
        penalties = sampling.presence_penalty, sampling.frequency_penalty
        if sampling.repetition_penalty != 1 or any(penalties):
            self._penalise(z, tokens, num_prompt, num_output)
        if sampling.no_repeat_ngram_size:
            _ban_repeated(z, tokens, ends, sampling.no_repeat_ngram_size)
        for word in self.words:
            _ban_word(z, tokens, ends, word)
        z = z[..., :size]
        return self._processed(z, tokens, ends, items) if sampling.logits_processor else z

    def _penalise(self, z: Tensor, tokens: Tensor, num_prompt: int, num_output: Tensor) -> None:
        """Apply the penalties to the logits of the tokens that prompt or output have.

        Args:
            z: logits [n, L, V + 1], written to; the last entry means nothing.
            tokens: prompt and output, long [n, S], ``NONE`` in front.
            num_prompt: columns of the prompt.
            num_output: tokens of the output before each position, long [n, L].
        """
        size, sampling = z.shape[-1] - 1, self.sampling
        tokens = torch.where((tokens >= 0) & (tokens < size), tokens, size)
        # equal tokens of a row have one number
        order = tokens.argsort(1)
        ordered = tokens.gather(1, order)
        is_new = ordered.diff(dim=1, prepend=ordered[:, :1]) != 0
        number = torch.empty_like(tokens).scatter_(1, order, is_new.long().cumsum(1))
        column = torch.arange(tokens.shape[1] - num_prompt, device=z.device)
        before = (column < num_output[..., None]).to(z.dtype)
        shape = *num_output.shape, tokens.shape[1]
        counts = z.new_zeros(shape)
        counts.scatter_add_(-1, number[:, None, num_prompt:].expand(before.shape), before)
        counts = counts.gather(-1, number[:, None].expand(shape))
        said = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, number[:, :num_prompt], True)
        is_said = (counts > 0) | said.gather(1, number)[:, None]
        index = tokens[:, None].expand(shape)
        old = z.gather(-1, index)
        repetition = sampling.repetition_penalty
        new = torch.where(old < 0, old * repetition, old / repetition)
        new = torch.where(is_said, new, old) - sampling.frequency_penalty * counts
        new = new - sampling.presence_penalty * (counts > 0).to(z.dtype)
        z.scatter_(-1, index, new)

    def _processed(self, z: Tensor, tokens: Tensor, ends: Tensor, items: Tensor) -> Tensor:
        """Call the logits processors with rows of one length at a time, without padding.

        Args:
            z: logits [n, L, V].
            tokens: prompt and output, long [n, S], ``NONE`` in front.
            ends: column of ``tokens`` before which each position looks, long [n, L].
            items: item of each row, long [n].
        """
        first = (tokens < 0).sum(1)
        lengths, out = ends - first[:, None], z.clone()
        for length in lengths.unique().tolist():
            row, column = (lengths == length).nonzero(as_tuple=True)
            at = first[row, None] + torch.arange(length, device=tokens.device)
            ids, scores = tokens[row[:, None], at], z[row, column]
            for processor in self.sampling.logits_processor:
                more = (items[row],) if isinstance(processor, ItemProcessor) else ()
                scores = processor(ids, scores, *more)
                _check_scores(processor, scores, z[row, column])
            out[row, column] = scores.to(out.dtype)
        return out


def _check_scores(processor: object, scores: object, given: Tensor) -> None:
    """Refuse what a logits processor returned unless it is scores of the given shape."""
    if isinstance(scores, Tensor) and scores.shape == given.shape and scores.is_floating_point():
        return
    came = f"{scores.dtype} {tuple(scores.shape)}" if isinstance(scores, Tensor) else repr(scores)
    # a class has no such name
    name = getattr(processor, "__qualname__", type(processor).__name__)
    raise GenError(
        f"the logits processor {name} returned {came}; expected floats {tuple(given.shape)}"
    )


def _ban_repeated(z: Tensor, tokens: Tensor, ends: Tensor, length: int) -> None:
    """Ban the tokens that would complete an n-gram a second time.

    Args:
        z: logits [n, L, V + 1], written to; the last entry means nothing.
        tokens: long [n, S], ``NONE`` in front.
        ends: column before which each position looks, long [n, L].
        length: tokens of an n-gram.
    """
    if length > tokens.shape[1]:
        return  # so long an n-gram has not come once
    column = torch.arange(tokens.shape[1], device=tokens.device)
    # the n-gram that ends in a column, and the tokens before a position, agree but for the last
    again = (column < ends[..., None]) & (tokens >= 0)[:, None]
    for back in range(1, length):
        earlier = F.pad(tokens, (back, 0), value=NONE)[:, : tokens.shape[1]]
        last = _before(tokens, ends, back)
        again = again & (earlier[:, None] == last[..., None]) & (last >= 0)[..., None]
    _ban(z, tokens[:, None].expand(again.shape), again)


def _ban_word(z: Tensor, tokens: Tensor, ends: Tensor, word: Tensor) -> None:
    """Ban the last token of a word after the others; arguments as of ``_ban_repeated``."""
    found = torch.ones_like(ends, dtype=torch.bool)
    for back, token in enumerate(word[:-1].flip(0), 1):
        found = found & (_before(tokens, ends, back) == token)
    _ban(z, word[-1].expand(*found.shape, 1), found[..., None])


def _before(tokens: Tensor, ends: Tensor, back: int) -> Tensor:
    """Return the token so many columns before each end, long [n, L]; ``NONE`` where none is."""
    at = ends - back
    return torch.where(at >= 0, tokens.gather(1, at.clamp_min(0)), NONE)


def _ban(z: Tensor, tokens: Tensor, chosen: Tensor) -> None:
    """Ban the chosen ones of tokens [n, L, K] in logits [n, L, V + 1]."""
    size = z.shape[-1] - 1
    z.scatter_(-1, torch.where(chosen & (tokens < size), tokens, size), -torch.inf)
