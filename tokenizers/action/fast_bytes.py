"""Published FAST tokenizers (Pertsch et al., arXiv 2501.09747): byte-pair encoding of bytes.

    c_kd = sum_t u_kt x_td            u: the orthonormal DCT-II along time
    n_kd = round(scale c_kd)          flattened with k slowest
    text = chr(max(n - min_token, 0)), one character each, in UTF-8
    tokens = byte-level BPE(text)

The folder holds ``processor_config.json`` (scale, min_token, vocab_size, time_horizon, action_dim)
and ``tokenizer.json``. A token stands for some bytes and may begin or end inside a character, so a
sequence decodes to H D numbers depending on the number of characters begun and on the completeness
of the last one. ``WholeCharacters`` keeps sampled tokens decodable. The token id after the
published ones is the eos token, up to the last position.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, require_codes
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.tokenizers.action.base import ActionStatistics, at_least
from gen.tokenizers.action.fast import FILE, Frequencies, quantise, reach
from tokenizers import Tokenizer  # the installed package: the room is gen.tokenizers

CONFIG = "processor_config.json"
LAST = 0x7FF  # the last character of two bytes: at most one byte of a character is open


def byte_symbols() -> dict[str, int]:
    """Return the characters of byte-level BPE with their bytes: printable Latin-1 stands for
    itself, all other bytes follow from character 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(rest)}}


def begins(byte: int) -> bool:
    """Return True if a character of up to two bytes can begin with this byte."""
    return byte < 0x80 or 0xC2 <= byte < 0xE0


def state_of(word: bytes) -> tuple[int, int, int] | None:
    """Analyse the bytes of a token.

    Returns:
        Continuation bytes at its start (0 or 1), number of characters it begins, and 1 if its last
        character is incomplete; None for bytes that are no such text.
    """
    waits = int(0x80 <= word[0] < 0xC0)
    open_, count = waits, 0
    for byte in word:
        if (0x80 <= byte < 0xC0) != bool(open_) or not (open_ or begins(byte)):
            return None
        open_, count = int(not open_ and byte >= 0xC2), count + (not open_)
    return waits, count, open_


@dataclass(frozen=True, eq=False)
class WholeCharacters:
    """Constraint: tokens with ``total`` characters, then only ``eos_token_id``.

    Per token: ``begun`` int64 [V], characters it begins; ``waits`` int64 [V], 1 if it first
    completes a character; ``opens`` int64 [V], characters it leaves open minus those it completes;
    ``usable`` bool [V], False if it is never legal.
    """

    begun: Tensor
    waits: Tensor
    opens: Tensor
    usable: Tensor
    total: int
    eos_token_id: int

    def legal(self, history: Tensor, positions: Tensor) -> Tensor:
        """Return the legal tokens at ``positions`` [n, L] after ``history`` [n, T]: bool [n, L, V],
        with at least one per position (``gen.core.token_space.Constraint``)."""

        def move(x):
            return x.to(history.device)

        is_token = (history >= 0) & (history < len(self.begun))
        tokens = history.clamp(0, len(self.begun) - 1)
        columns = positions.clamp(max=history.shape[1])

        def count(x):
            per_token = torch.where(is_token, move(x)[tokens], 0)
            return torch.nn.functional.pad(per_token.cumsum(1), (1, 0)).gather(1, columns)

        left = self.total - count(self.begun)[..., None]
        open_ = count(self.opens).clamp(0, 1)[..., None]
        fits = (
            move(self.usable)
            & (move(self.waits) == open_)
            & ((move(self.begun) <= left) | (left < 0))
        )
        end = torch.arange(len(self.begun), device=history.device) == self.eos_token_id
        return torch.where((left == 0) & (open_ == 0), end, fits)


@register("tokenizer", "action_fast_bytes")
class FastBytes(Frequencies):
    """Published FAST tokenizer: token ids [B, 1, positions] of chunks [B, H, D] in [-1, 1].

    Tokens are padded with ``eos_token_id``; tokens after the first one are ignored.
    """

    name, keys = "action_fast_bytes", ("scale", "min_token")

    def __init__(
        self,
        bpe: Tokenizer,
        scale: float,
        min_token: int,
        horizon: int,
        dimensions: int,
        statistics: ActionStatistics,
        device="cpu",
        dtype=torch.float32,
    ):
        super().__init__(horizon, dimensions, statistics, device, dtype)
        if (
            not isinstance(min_token, int)
            or isinstance(min_token, bool)
            or reach(scale, horizon) - min_token > LAST
        ):
            raise bad_value(
                "min_token", min_token, f"an integer of at least {reach(scale, horizon) - LAST}"
            )
        self.bpe, self.scale, self.min_token = bpe, float(scale), min_token
        self.total, self.eos_token_id = self.horizon * self.dimensions, bpe.get_vocab_size()
        self.positions = self.total * (1 + (reach(scale, horizon) - min_token >= 0x80))
        self.vocab_size = self.eos_token_id + 1
        self.config = FrontendConfig("action", "ids", (self.vocab_size,), (1,))
        symbols = byte_symbols()
        written = [bpe.id_to_token(i) or "" for i in range(self.eos_token_id)]
        self.words = [
            (
                bytes(symbols[c] for c in w)
                if all(c in symbols for c in w)
                else w.encode("utf-8", "replace")
            )
            for w in written
        ]
        states = [state_of(w) if w else None for w in self.words] + [None]

        def column(part):
            return torch.tensor([0 if s is None else s[part] for s in states], device=self.device)

        usable = torch.tensor([s is not None for s in states], device=self.device)
        self.constraint = WholeCharacters(
            column(1), column(0), column(2) - column(0), usable, self.total, self.eos_token_id
        )
        # a tokenizer that was fitted on fewer than 128 numbers has characters of one byte alone
        opens = any(state is not None and state[2] for state in states)
        if (0, 1, 0) not in states or (opens and (1, 0, 0) not in states):
            raise GenError(
                "the vocabulary of the action tokenizer has no single characters, or bytes that"
                " begin one and none that end it; expected byte-level BPE"
            )

    @classmethod
    def published(
        cls,
        folder: str | Path,
        device="cpu",
        dtype=torch.float32,
        horizon: int | None = None,
        dimensions: int | None = None,
        statistics: ActionStatistics | None = None,
    ) -> Self:
        """Load a published folder.

        ``horizon``, ``dimensions``: required if its config lacks them. ``statistics``: by default
        chunks are in [-1, 1] already. Raises ``GenError`` for a folder that lacks a file or a key,
        and for one that contradicts the arguments.
        """
        path = Path(folder)
        try:
            config = json.loads((path / CONFIG).read_text())
            bpe = Tokenizer.from_file(str(path / FILE))
        except Exception as error:  # the library raises bare Exceptions
            raise GenError(
                f"the action tokenizer {folder} cannot be read:"
                f" {' '.join(str(error).split())[:200]}"
            ) from None
        for key in ("scale", "min_token"):
            if key not in config:
                raise GenError(
                    f"{path / CONFIG} has no {key!r}; expected scale, min_token, vocab_size,"
                    " time_horizon and action_dim"
                )
        shape = {}
        for key, name, argument in (
            ("time_horizon", "horizon", horizon),
            ("action_dim", "dimensions", dimensions),
        ):
            stated = config.get(key)
            if stated is None and argument is None:
                raise GenError(
                    f"{path / CONFIG} leaves {key} open; expected {name}=, the"
                    f" {'steps' if name == 'horizon' else name} of a chunk"
                )
            if None not in (stated, argument) and stated != argument:
                raise GenError(f"{name} is {argument}; {path / CONFIG} has {key} {stated}")
            shape[name] = stated if argument is None else at_least(name, argument, 1)
        statistics = statistics or ActionStatistics(
            (-1.0,) * shape["dimensions"], (1.0,) * shape["dimensions"]
        )
        return cls(
            bpe,
            config["scale"],
            config["min_token"],
            **shape,
            statistics=statistics,
            device=device,
            dtype=dtype,
        )

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.positions,)

    def encode(self, x: Tensor) -> Tensor:
        """Encode signals [B, H, D]; coefficients below ``min_token`` are clipped to it, as in the
        published code. Raises ``GenError`` if the vocabulary lacks bytes of a chunk."""
        numbers = (quantise(self.require_signals(x), self.scale) - self.min_token).clamp_min(0)
        tokens = torch.full((len(x), 1, self.positions), self.eos_token_id)
        for row, characters in zip(tokens, numbers.tolist(), strict=True):
            text = "".join(map(chr, characters))
            encoded = self.bpe.encode(text, add_special_tokens=False).ids
            if b"".join(self.words[i] for i in encoded) != text.encode():
                raise GenError(
                    "the vocabulary of the action tokenizer has no tokens for some coefficients of"
                    " the chunk; expected a vocabulary trained on chunks of this range"
                )
            row[0, : len(encoded)] = torch.tensor(encoded)
        return tokens.to(self.device)

    def coefficients(self, codes: Tensor) -> Tensor:
        """Decode token ids [B, 1, N] to integers int64 [B, H, D], lowest frequency first.

        Raises ``GenError`` for tokens that stand for no text, or for more or fewer than H * D
        numbers, with the first such row.
        """
        require_codes(codes, self.config)
        out = []
        for number, row in enumerate(codes[:, 0].tolist()):
            used = row[: row.index(self.eos_token_id)] if self.eos_token_id in row else row
            try:
                text = b"".join(self.words[i] for i in used).decode()
            except UnicodeDecodeError as error:
                raise GenError(
                    f"row {number}: its ids stand for no text ({error.reason} at byte"
                    f" {error.start}); expected ids drawn by the constraint"
                ) from None
            if len(text) != self.total:
                raise GenError(
                    f"row {number}: its ids stand for {len(text)} coefficients before the end;"
                    f" expected {self.total}, {self.horizon} steps of {self.dimensions} dimensions"
                )
            out.append([ord(c) + self.min_token for c in text])
        return torch.tensor(out, device=self.device).view(len(codes), self.horizon, self.dimensions)
