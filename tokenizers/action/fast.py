"""Action chunks as byte-pair-encoded frequencies: FAST (Pertsch et al., arXiv 2501.09747).

    c_kd = sum_t u_kt x_td            u: the orthonormal DCT-II along time
    n_kd = round(scale c_kd)          flattened with k slowest: the lowest frequency of all
                                      dimensions first
    tokens = BPE(n)                   every integer is one character, every token stands for one
                                      integer or more

Smooth chunks have few frequencies, and runs of zeros become one token. As |x| <= 1 and u_k has unit
length, |c_kd| <= sqrt(H) by Cauchy and Schwarz: the alphabet holds every integer up to round(scale
sqrt(H)), so every coefficient has a token and none is ever clipped.

A chunk has as many tokens as it needs, then the eos token up to position H D. Tokens decode only if
they stand for exactly H D integers, which unconstrained sampling hardly ever produces.
``ExactLength`` allows the tokens that keep this possible: with r integers missing, those that stand
for at most r. Every single integer is a token, so some token is always allowed, and every
constrained sequence decodes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, require_codes
from gen.core.errors import GenError, bad_value
from gen.core.registry import register, registry
from gen.tokenizers.action.base import ActionFrontend, ActionStatistics, at_least, numbers

# the installed package; the room of the same name is gen.tokenizers
from tokenizers import Tokenizer, models, trainers

# the private use area: characters without meaning, which nothing normalises or splits
FIRST, ROOM = 0xE000, 6400
FILE = "tokenizer.json"


@dataclass(frozen=True, eq=False)
class ExactLength:
    """Constraint: tokens whose lengths sum to ``total``, then only ``eos_token_id``.

    ``lengths``: int64 [V]; a token that is never legal has 0. Raises ``GenError`` if no token has
    length 1 (some remainders could not be filled), and if ``eos_token_id`` has a length.
    """

    lengths: Tensor
    total: int
    eos_token_id: int

    def __post_init__(self) -> None:
        if (
            self.lengths.dtype != torch.long
            or self.lengths.ndim != 1
            or not bool((self.lengths >= 0).all())
        ):
            raise GenError(
                f"the lengths are {self.lengths.dtype} {tuple(self.lengths.shape)}; expected int64"
                " [V] of at least 0"
            )
        at_least("total", self.total, 1)
        if not bool((self.lengths == 1).any()):
            raise GenError(
                "no token has length 1; expected one, so that every remainder can be filled"
            )
        if at_least("eos_token_id", self.eos_token_id, 0) >= len(self.lengths) or int(
            self.lengths[self.eos_token_id]
        ):
            raise bad_value(
                "eos_token_id",
                self.eos_token_id,
                f"a token id below {len(self.lengths)} of length 0",
            )

    def to(self, device: torch.device | str) -> ExactLength:
        """Return the constraint on a device."""
        return replace(self, lengths=self.lengths.to(device))

    def remaining(self, history: Tensor, positions: Tensor) -> Tensor:
        """Return ``total`` minus the lengths of tokens ``history`` [n, T] before ``positions`` [n,
        L]: int64 [n, L]."""
        lengths = self.lengths.to(history.device)
        # a masked position may hold any value and has no length
        is_token = (history >= 0) & (history < len(lengths))
        token_lengths = torch.where(is_token, lengths[history.clamp(0, len(lengths) - 1)], 0)
        before = torch.nn.functional.pad(token_lengths.cumsum(1), (1, 0))
        return self.total - before.gather(1, positions.clamp(max=history.shape[1]))

    def legal(self, history: Tensor, positions: Tensor) -> Tensor:
        """Return the legal tokens at ``positions``, given the tokens before each.

        A history that is already too long leaves all tokens with a length: tokens drawn there are
        discarded.

        Args:
            history: int64 [n, T]; values at or after a position are ignored.
            positions: int64 [n, L], 0 to T.

        Returns:
            bool [n, L, V], with at least one legal token per position.
        """
        lengths = self.lengths.to(history.device)
        left = self.remaining(history, positions)[..., None]
        end = torch.arange(len(lengths), device=history.device) == self.eos_token_id
        return torch.where(left == 0, end, (lengths > 0) & ((lengths <= left) | (left < 0)))


def cosines(size: int) -> Tensor:
    """Return the orthonormal DCT-II as a matrix, float64 [k, t]; ``cosines(n).T`` is its
    inverse."""
    n = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * (n + 0.5) * n[:, None]) * math.sqrt(2 / size)
    basis[0] = math.sqrt(1 / size)
    return basis


class Frequencies(ActionFrontend):
    """Base class of tokenizers whose tokens stand for integer DCT coefficients along time.

    A subclass defines ``coefficients``, ``bpe`` and ``scale``.
    """

    def coefficients(self, codes: Tensor) -> Tensor:
        """Decode token ids [B, 1, positions] to integers [B, H, D]. Raises ``GenError`` for tokens
        that stand for another number of integers."""
        raise NotImplementedError

    @cached_property
    def _inverse(self) -> Tensor:
        return (
            (cosines(self.horizon).T / self.scale)
            .to(torch.promote_types(self.dtype, torch.float32))
            .to(self.device)
        )

    def decode(self, codes: Tensor) -> Tensor:
        """Decode token ids [B, 1, positions] to signals [B, H, D], clipped to [-1, 1], since
        rounding and sampled tokens can exceed it."""
        return (
            (self._inverse @ self.coefficients(codes).to(self._inverse.dtype))
            .clamp(-1, 1)
            .to(self.dtype)
        )

    @property
    def codebooks(self) -> list[Tensor]:
        """Return no codebook: tokens stand for sequences of integers."""
        return []

    @property
    def fingerprint(self) -> Tensor:
        return self.digest(json.loads(self.bpe.to_str())["model"])

    def save_parts(self, path: Path) -> None:
        self.bpe.save(str(path / FILE))

    @classmethod
    def load_parts(cls, path: Path, config: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"bpe": Tokenizer.from_file(str(path / FILE))}
        except Exception as error:  # the library raises bare Exceptions
            reason = " ".join(str(error).split())
            raise GenError(
                f"the vocabulary of frontend {path} cannot be read from {FILE}: {reason[:200]}"
            ) from None


@register("tokenizer", "action_fast")
class ActionFast(Frequencies):
    """FAST action tokenizer: token ids [B, 1, H * D] of chunks [B, H, D] in [-1, 1].

    Tokens are padded with ``eos_token_id``; tokens after the first one are ignored. ``scale``:
    steps per unit of a coefficient; a larger scale is more exact and takes more tokens.
    ``symbol_lengths``: int64 [V], coefficients per token. ``total``: H * D. ``constraint``: keeps
    sampled tokens decodable.
    """

    name, keys = "action_fast", ("scale",)

    def __init__(
        self,
        bpe: Tokenizer,
        scale: float,
        horizon: int,
        dimensions: int,
        statistics: ActionStatistics,
        device="cpu",
        dtype=torch.float32,
    ):
        super().__init__(horizon, dimensions, statistics, device, dtype)
        self.bpe, self.scale, self.reach = bpe, float(scale), reach(scale, horizon)
        self.eos_token_id, self.total = bpe.get_vocab_size(), self.horizon * self.dimensions
        self.vocab_size = self.eos_token_id + 1
        self.config = FrontendConfig("action", "ids", (self.vocab_size,), (1,))
        words = [bpe.id_to_token(i) or "" for i in range(self.eos_token_id)]
        singles = [word([n], self.reach) for n in range(-self.reach, self.reach + 1)]
        if (
            words[: len(singles)] != singles
            or not set("".join(words)) <= set(singles)
            or not all(words)
        ):
            raise GenError(
                f"the vocabulary of the action tokenizer does not begin with the {len(singles)}"
                f" integers {-self.reach} to {self.reach}; expected one trained with scale"
                f" {self.scale} and horizon {horizon}"
            )
        self.symbol_lengths = torch.tensor([*map(len, words), 0], device=self.device)
        self._symbols = torch.tensor(
            [ord(c) - FIRST - self.reach for c in "".join(words)], device=self.device
        )
        self._starts = self.symbol_lengths.cumsum(0) - self.symbol_lengths

    @classmethod
    def train(
        cls,
        chunks: np.ndarray,
        *,
        vocab_size: int = 1024,
        scale: float = 10.0,
        statistics: ActionStatistics | None = None,
        device="cpu",
        dtype=torch.float32,
    ) -> Self:
        """Train a tokenizer on chunks [N, H, D] in physical units.

        ``vocab_size``: maximum size including the eos token; the vocabulary is smaller if no pair
        of tokens is left that occurs twice. ``statistics``: by default those of the chunks. Raises
        ``GenError`` for other shapes, and for a vocabulary that is too small.
        """
        chunks = numbers(chunks, "the chunks")
        if chunks.ndim != 3 or not chunks.size:
            raise GenError(f"the chunks have shape {chunks.shape}; expected [N, H, D]")
        limit = reach(scale, chunks.shape[1])
        at_least("vocab_size", vocab_size, 2 * limit + 2)
        statistics = ActionStatistics.from_data(chunks) if statistics is None else statistics
        coefficients = quantise(torch.from_numpy(statistics.normalise(chunks)), scale)
        alphabet = [word([n], limit) for n in range(-limit, limit + 1)]
        bpe = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False
        )
        bpe.train_from_iterator([word(c, limit) for c in coefficients.tolist()], trainer)
        return cls(bpe, scale, *chunks.shape[1:], statistics, device, dtype)

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.total,)

    @property
    def constraint(self) -> ExactLength:
        """Constraint that keeps sampled tokens decodable."""
        return ExactLength(self.symbol_lengths, self.total, self.eos_token_id)

    def encode(self, x: Tensor) -> Tensor:
        coefficients = quantise(self.require_signals(x), self.scale)
        encodings = self.bpe.encode_batch_fast(
            [word(c, self.reach) for c in coefficients.tolist()], add_special_tokens=False
        )
        tokens = torch.full((len(x), 1, self.total), self.eos_token_id)
        for row, encoding in zip(tokens, encodings, strict=True):
            row[0, : len(encoding.ids)] = torch.tensor(encoding.ids)
        return tokens.to(self.device)

    def coefficients(self, codes: Tensor) -> Tensor:
        """Decode token ids [B, 1, N], N > 0, to integers int64 [B, H, D], lowest frequency first.

        Raises ``GenError`` for tokens that stand for more or fewer than H * D integers before the
        first eos token, with the first such row.
        """
        require_codes(codes, self.config)
        if codes.dtype != torch.long:
            raise GenError(f"the codes are {codes.dtype}; expected int64")
        tokens = codes[:, 0].to(self.device)
        before_eos = (tokens == self.eos_token_id).cumsum(1) == 0
        counts = (self.symbol_lengths[tokens] * before_eos).sum(1)
        wrong = (counts != self.total).nonzero().flatten().tolist()
        if wrong:
            raise GenError(
                f"row {wrong[0]}: its ids stand for {int(counts[wrong[0]])} coefficients before the"
                f" end; expected {self.total}, {self.horizon} steps of {self.dimensions} dimensions"
                f" ({len(wrong)} of {len(tokens)} rows are wrong)"
            )
        used = tokens[before_eos]
        lengths = self.symbol_lengths[used]
        # index of every coefficient in the concatenated vocabulary
        shift = self._starts[used] - (lengths.cumsum(0) - lengths)
        count = torch.arange(self.total * len(tokens), device=tokens.device)
        index = shift.repeat_interleave(lengths) + count
        return self._symbols[index].view(len(tokens), self.horizon, self.dimensions)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, device="cpu", dtype=torch.float32, **options: Any
    ) -> ActionFrontend:
        """Load an action tokenizer of gen, or a published folder with ``processor_config.json``.

        ``options``: ``horizon``, ``dimensions`` and ``statistics`` of a published folder
        (``gen.tokenizers.action.fast_bytes``), if its config lacks them. Raises ``GenError`` for
        options with a folder of gen.
        """
        if (Path(folder) / "processor_config.json").is_file():
            return registry.get("tokenizer", "action_fast_bytes").published(
                folder, device, dtype, **options
            )
        if options:
            raise GenError(
                f"{', '.join(options)} given for {folder}; expected none: only folders with"
                " processor_config.json take them"
            )
        return super().from_pretrained(folder, device, dtype)


def reach(scale: Any, horizon: int) -> int:
    """Return the largest coefficient of any chunk in [-1, 1], in steps. Raises ``GenError`` for a
    scale out of range."""
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 0 < scale < math.inf:
        raise bad_value("scale", scale, "a number above 0")
    limit = math.floor(scale * math.sqrt(horizon) + 0.5)
    if not 1 <= limit < ROOM // 2:
        raise bad_value(
            "scale",
            scale,
            f"one that leaves 1 to {ROOM // 2 - 1} steps for coefficients up to"
            f" {math.sqrt(horizon):.2f}",
        )
    return limit


def quantise(x: Tensor, scale: float) -> Tensor:
    """Convert signals [B, H, D] to integer coefficients int64 [B, H * D] on the CPU."""
    fine = cosines(x.shape[1]) @ x.detach().cpu().double() * (scale * 2.0**20)
    # rounded twice, so that ties round the same way in any batch, whatever the last bit of the sum
    return (fine.round() / 2.0**20).round().long().flatten(1)


def word(coefficients: Sequence[int], limit: int) -> str:
    """Write integers in -limit..limit as characters."""
    return "".join(chr(FIRST + limit + n) for n in coefficients)
