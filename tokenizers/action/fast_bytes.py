"""FAST tokenizers as they are published (Pertsch et al., arXiv 2501.09747): byte-pair encoding of
bytes.

    c_kd = sum_t u_kt x_td            u: the orthonormal DCT-II along time
    n_kd = round(scale c_kd)          flattened with k slowest
    text = chr(max(n - min_token, 0)), one character each, in UTF-8
    ids  = byte-level BPE(text)

The folder holds ``processor_config.json`` (scale, min_token, vocab_size, time_horizon, action_dim)
and ``tokenizer.json``. An id stands for some bytes, and may begin or end inside a character, so
whether ids make a chunk of H D numbers depends on both: how many characters have begun, and whether
the last one is whole. ``WholeCharacters`` keeps drawn ids decodable. The id behind the published
ones is the end, up to the last place.
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
LAST = 0x7FF  # the last character of two bytes: an id then has to wait for one byte at most


def byte_symbols() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable ones of Latin-1 are
    themselves, the others follow from 256 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in own]
    return {**{chr(b): b for b in own}, **{chr(256 + i): b for i, b in enumerate(rest)}}


def begins(byte: int) -> bool:
    """Whether a character of up to two bytes begins with this one."""
    return byte < 0x80 or 0xC2 <= byte < 0xE0


def state_of(word: bytes) -> tuple[int, int, int] | None:
    """Bytes of an id: whether it ends a character that another began, how many characters it
    begins, and whether the last one is open. None for bytes that stand in no text of such
    characters."""
    waits = int(0x80 <= word[0] < 0xC0)
    open_, count = waits, 0
    for byte in word:
        if (0x80 <= byte < 0xC0) != bool(open_) or not (open_ or begins(byte)):
            return None
        open_, count = int(not open_ and byte >= 0xC2), count + (not open_)
    return waits, count, open_


@dataclass(frozen=True, eq=False)
class WholeCharacters:
    """Ids whose characters are ``total`` and then ``eos_token_id`` for ever. Of every id, int64 [V]:
    ``begun`` characters, whether it ``waits`` for one to end, and what it ``opens`` less what it
    closes; bool [V]: whether it is ``usable`` at all.
    """

    begun: Tensor
    waits: Tensor
    opens: Tensor
    usable: Tensor
    total: int
    eos_token_id: int

    def legal(self, history: Tensor, positions: Tensor) -> Tensor:
        """See ``gen.core.token_space.Constraint``. Places [n, L] -> bool [n, L, V], never empty."""

        def move(x):
            return x.to(history.device)

        known = (history >= 0) & (history < len(self.begun))
        ids = history.clamp(0, len(self.begun) - 1)
        at = positions.clamp(max=history.shape[1])

        def count(x):
            return torch.nn.functional.pad(
                torch.where(known, move(x)[ids], 0).cumsum(1), (1, 0)
            ).gather(1, at)

        left, open_ = (
            self.total - count(self.begun)[..., None],
            count(self.opens).clamp(0, 1)[..., None],
        )
        fits = (
            move(self.usable)
            & (move(self.waits) == open_)
            & ((move(self.begun) <= left) | (left < 0))
        )
        end = torch.arange(len(self.begun), device=history.device) == self.eos_token_id
        return torch.where((left == 0) & (open_ == 0), end, fits)


@register("tokenizer", "action_fast_bytes")
class FastBytes(Frequencies):
    """Ids [B, 1, places] of action chunks [B, H, D] in [-1, 1], filled up with ``eos_token_id``; ids
    after the first ``end`` say nothing."""

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
        if not {(0, 1, 0), (1, 0, 0)} <= set(states):
            raise GenError(
                "the vocabulary of the action tokenizer has no single characters or no bytes that"
                " end one; expected byte-level BPE"
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
        """Of a published folder. ``horizon``, ``dimensions``: what its config leaves open.
        ``statistics``: by default chunks are in [-1, 1] as they are, which is what the tokenizer
        takes. Raises ``GenError`` for a folder that lacks something or contradicts what was said.
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
        found = {}
        for key, name, given in (
            ("time_horizon", "horizon", horizon),
            ("action_dim", "dimensions", dimensions),
        ):
            stated = config.get(key)
            if stated is None and given is None:
                raise GenError(
                    f"{path / CONFIG} leaves {key} open; expected {name}=, the"
                    f" {'steps' if name == 'horizon' else name} of a chunk"
                )
            if None not in (stated, given) and stated != given:
                raise GenError(f"{name} is {given}; {path / CONFIG} has {key} {stated}")
            found[name] = stated if given is None else at_least(name, given, 1)
        statistics = statistics or ActionStatistics(
            (-1.0,) * found["dimensions"], (1.0,) * found["dimensions"]
        )
        return cls(
            bpe,
            config["scale"],
            config["min_token"],
            **found,
            statistics=statistics,
            device=device,
            dtype=dtype,
        )

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.positions,)

    def encode(self, x: Tensor) -> Tensor:
        """Coefficients below ``min_token`` become it, as there. Raises ``GenError`` where the
        vocabulary lacks bytes of a chunk."""
        numbers = (quantise(self.require_signals(x), self.scale) - self.min_token).clamp_min(0)
        ids = torch.full((len(x), 1, self.positions), self.eos_token_id)
        for row, one in zip(ids, numbers.tolist(), strict=True):
            text = "".join(map(chr, one))
            found = self.bpe.encode(text, add_special_tokens=False).ids
            if b"".join(self.words[i] for i in found) != text.encode():
                raise GenError(
                    "the vocabulary of the action tokenizer has no ids for some coefficients of the"
                    " chunk; expected one that was trained on chunks of this range"
                )
            row[0, : len(found)] = torch.tensor(found)
        return ids.to(self.device)

    def coefficients(self, codes: Tensor) -> Tensor:
        """The integers that ids [B, 1, N] stand for: int64 [B, H, D], lowest frequency first.

        Raises ``GenError`` for ids that stand for no text, or for more or fewer than H * D numbers,
        with the first such row.
        """
        require_codes(codes, self.config)
        out = []
        for number, row in enumerate(codes[:, 0].tolist()):
            kept = row[: row.index(self.eos_token_id)] if self.eos_token_id in row else row
            try:
                text = b"".join(self.words[i] for i in kept).decode()
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
