"""Token spaces: which tokens may stand at which position, in what grid.

Shape letters: B batch, T positions, L window, V vocabulary, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gen.core.errors import GenError, bad_value

if TYPE_CHECKING:
    from gen.core.row_rules import HistoryConstraint, StopRule

GUARANTEES = {
    "same_tokens": "the same tokens as the reference with that seed",
    "same_distribution": "the same distribution as the reference",
    "group": "exact over stated groups of tokens",
    "approximate": "a distribution that deviates from the reference",
}


def kept_guarantee(guarantee: str, dtype: torch.dtype, batch_invariant: bool) -> str:
    """Return the guarantee of a sampler that its outputs keep in a dtype.

    In 16 bits the last bits of a position's logits depend on what a forward pass computes beside
    it. Each token is drawn from the model's distribution as that pass rounds it, but where two
    tokens are nearly tied, the reference may take the other one.

    Args:
        guarantee: guarantee of the sampler, one of ``GUARANTEES``.
        dtype: dtype of the model.
        batch_invariant: whether the bits of a pass are kept from depending on what runs beside a
            token.
    """
    rounds = dtype.is_floating_point and dtype.itemsize <= 2 and not batch_invariant
    return "same_distribution" if guarantee == "same_tokens" and rounds else guarantee


@dataclass(frozen=True)
class TokenSpace:
    """Shape of what is generated: tokens, or latents.

    Attributes:
        grid: sizes of the axes, slowest first.
        vocab_size: V, the width of the model's logits; 0 for latents.
        legal: bool [T, V], allowed tokens at each position in raster order.
        mask_token_id: token of a masked position, if any.
        codebook: float [n, D], vectors of the first n tokens, the metric of relaxed acceptance.
        channels: C, floats of a latent; 0 for tokens. A masked position of latents holds NaN.
        constraint: further rule about tokens, given those before them.
        eos_token_id: token after which a row is over. Every later position holds it, and causal
            samplers stop there. Masked and block models take it for a token like any other, also
            under a constraint, which has to be an automaton for them.
        end_token_ids: all tokens that end a text or a turn, where the eos token is one of several.
            A row is over after any of them, and holds the eos token from there on.
        prefix: long [k], tokens before the first position, where a constraint or an end begins to
            look (``suffix``).
        delimiters: tokens that end a sentence or another unit.
        rarity: float [V], minus the logarithm of each token's frequency in the training data, if
            that is known.
        prompt_tokens: long [n], the token that each id of a prompt stands for, -1 for none; None
            where a prompt's ids are tokens wherever they may be generated.
        stop: texts before which the text of a row is cut off.
        stop_token_ids: tokens that end a row as ``end_token_ids`` do, at the wish of a user: a
            structure takes them for text.
        stops: rule of ``stop``, where positions are filled in order.
        blocks: consecutive slices of positions that cover the grid, for models that decode block by
            block; empty where the model's one ``block_length`` says it.

    Raises:
        GenError: an eos token that is allowed at a position but not at all after it, a latent space
            with rules about tokens, or blocks that do not cover the grid in order.
    """

    grid: tuple[int, ...]
    vocab_size: int
    legal: Tensor
    mask_token_id: int | None = None
    codebook: Tensor | None = None
    channels: int = 0
    constraint: HistoryConstraint | None = None
    eos_token_id: int | None = None
    prefix: Tensor | None = None
    delimiters: tuple[int, ...] = ()
    rarity: Tensor | None = None
    blocks: tuple[slice, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    prompt_tokens: Tensor | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stops: StopRule | None = None

    def __post_init__(self) -> None:
        if self.channels and self.is_history_dependent:
            raise GenError(
                "a space of latents has a constraint or an eos token; expected neither, both are"
                " about ids"
            )
        for delimiter in self.delimiters:
            if not 0 <= delimiter < self.vocab_size:
                raise bad_value("delimiters", delimiter, f"ids below {self.vocab_size}")
        for end in self.end_token_ids:
            if not 0 <= end < self.vocab_size:
                raise bad_value("end_token_ids", end, f"ids below {self.vocab_size}")
        self._check_blocks()
        if self.eos_token_id is None:
            return
        if not 0 <= self.eos_token_id < self.vocab_size:
            raise bad_value("eos_token_id", self.eos_token_id, f"an id below {self.vocab_size}")
        missing = (~self.legal[:, self.eos_token_id]).nonzero()[:, 0].tolist()
        if bool(self.legal[: missing[-1] if missing else 0, self.eos_token_id].any()):
            raise GenError(
                f"eos_token_id {self.eos_token_id} may not stand at position {missing[-1]};"
                " expected every position after the first that it may stand at, since a row that is"
                " over holds nothing else"
            )

    def _check_blocks(self) -> None:
        """Refuse blocks that do not cover the positions in order."""
        covered = 0
        for block in self.blocks:
            if block.start != covered or block.step not in (None, 1) or block.stop <= block.start:
                raise GenError(
                    f"block {block.start}:{block.stop} comes after position {covered}; expected"
                    f" consecutive slices from 0 to {self.length}, none of them empty"
                )
            covered = block.stop
        if self.blocks and covered != self.length:
            raise GenError(
                f"the blocks end at position {covered}; expected {self.length}, the positions of"
                f" the grid {self.grid}"
            )

    @cached_property
    def num_logits(self) -> int:
        """Width of distributions: up to the last token that may come anywhere.

        It is the whole vocabulary where the allowed tokens depend on those before.
        """
        if self.is_history_dependent or self.rarity is not None or not self.vocab_size:
            return self.vocab_size
        return int(self.legal.any(0).nonzero()[-1]) + 1

    @cached_property
    def is_uniform(self) -> bool:
        """True where the same tokens are allowed at all positions."""
        return bool((self.legal == self.legal[:1]).all())

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text or a turn: the eos token if any, and ``end_token_ids``."""
        eos = () if self.eos_token_id is None else (self.eos_token_id,)
        return tuple(dict.fromkeys((*eos, *self.end_token_ids)))

    @cached_property
    def row_ends(self) -> tuple[int, ...]:
        """Tokens after which a row is over: ``ends`` and ``stop_token_ids``; none without an eos
        token, which follows them."""
        if self.eos_token_id is None:
            return ()
        return tuple(dict.fromkeys((*self.ends, *self.stop_token_ids)))

    def is_end(self, tokens: Tensor) -> Tensor:
        """Find the tokens after which a row is over (``row_ends``): bool of the shape of
        ``tokens``."""
        found = torch.zeros_like(tokens, dtype=torch.bool)
        for end in self.row_ends:  # a few, compared without a copy to the device
            found |= tokens == end
        return found

    @property
    def is_history_dependent(self) -> bool:
        """True where the allowed tokens at a position depend on those before it."""
        return self.constraint is not None or self.eos_token_id is not None

    @property
    def kind(self) -> str:
        """``codes`` or ``latents``."""
        return "latents" if self.channels else "codes"

    @property
    def length(self) -> int:
        """Number of positions T."""
        return self.legal.shape[0]

    def blank(
        self, batch: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return zeros: tokens long [B, T], or latents [B, T, C] of ``dtype``."""
        if self.channels:
            return torch.zeros(batch, self.length, self.channels, dtype=dtype, device=device)
        return torch.zeros(batch, self.length, dtype=torch.long, device=device)

    def empty(
        self, batch: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return a canvas [B, T(, C)] with all positions masked.

        Raises:
            ValueError: the space has tokens and no mask token.
        """
        blank = self.blank(batch, device, dtype)
        if self.channels:
            return blank + float("nan")
        if self.mask_token_id is None:
            raise ValueError("a token space without a mask token has no empty canvas")
        return blank + self.mask_token_id

    def is_masked(self, canvas: Tensor) -> Tensor:
        """Return which positions of a canvas [B, T(, C)] are masked: bool [B, T]."""
        return canvas.isnan().any(-1) if self.channels else canvas == self.mask_token_id

    def suffix(self, prefix: Tensor | int) -> TokenSpace:
        """Return the space of the positions after a prefix.

        It keeps the first axis if the prefix is whole slices of it, and else has one axis.

        Args:
            prefix: tokens [k(, C)], or their number. A space that is history-dependent needs the
                tokens themselves.

        Raises:
            ValueError: a history-dependent space got a number.
            GenError: the prefix holds an end.
        """
        positions = prefix if isinstance(prefix, int) else len(prefix)
        before = None
        if self.is_history_dependent and positions:
            if isinstance(prefix, int):
                raise ValueError(
                    "a space with a constraint or an end needs the given tokens themselves, not how"
                    " many they are"
                )
            found = [n for n, token in enumerate(prefix.tolist()) if token in self.ends]
            if found:
                raise GenError(
                    f"the prefix ends at position {found[0]}, with token {int(prefix[found[0]])};"
                    " expected tokens that something may follow"
                )
            before = prefix if self.prefix is None else torch.cat([self.prefix.to(prefix), prefix])
        size = torch.Size(self.grid[1:]).numel()
        whole = positions % size == 0
        grid = (
            (self.grid[0] - positions // size, *self.grid[1:])
            if whole
            else (self.length - positions,)
        )
        blocks = tuple(
            slice(max(0, block.start - positions), block.stop - positions)
            for block in self.blocks
            if block.stop > positions
        )
        return replace(self, grid=grid, legal=self.legal[positions:], prefix=before, blocks=blocks)

    def before_end(self, tokens: Tensor) -> Tensor:
        """Return the tokens [T(, C)] of one row before its end, or all of them.

        An end is one of ``ends`` or of ``stop_token_ids``; of latents, NaN.
        """
        if self.channels:
            return tokens[: int((~tokens.isnan().any(-1)).long().cumprod(0).sum())]
        ends = (*self.ends, *self.stop_token_ids)
        if not ends:
            return tokens
        is_end = torch.isin(tokens, torch.tensor(ends, device=tokens.device))
        return tokens[: int((~is_end).long().cumprod(0).sum())]

    def apply_constraint(self, legal: Tensor, history: Tensor, positions: Tensor) -> Tensor:
        """Return the allowed tokens at positions, given the tokens before each.

        Args:
            legal: bool [n, L, V], tokens allowed there whatever came before.
            history: long [n, T]; entries at or after a position change nothing.
            positions: long [n, L].

        Returns:
            Bool [n, L, V].

        Raises:
            GenError: the constraint leaves nothing at a position.
        """
        if self.prefix is not None:
            history = torch.cat([self.prefix.to(history).expand(len(history), -1), history], 1)
            positions = positions + len(self.prefix)
        if self.constraint is not None:
            legal = legal & self.constraint.legal(history, positions)
        if self.eos_token_id is not None:
            column = torch.arange(history.shape[1], device=history.device)
            ended = self.is_end(history)
            first_end = torch.where(ended, column, len(column)).amin(1, keepdim=True)
            only_eos = torch.arange(self.vocab_size, device=history.device) == self.eos_token_id
            legal = torch.where((first_end < positions)[..., None], only_eos, legal)
        stuck = ~legal.any(-1)
        if bool(stuck.any()):
            row, column = stuck.nonzero()[0].tolist()
            position = int(positions[row, column])
            raise GenError(
                f"the constraint leaves no token for position {position} after"
                f" {history[row, :position].tolist()}; expected at least one"
            )
        return legal

    @staticmethod
    def codes(
        grid: tuple[int, ...],
        codebook_size: int,
        vocab_size: int,
        mask_token_id: int | None = None,
        codebook: Tensor | None = None,
    ) -> TokenSpace:
        """Return a grid on which every position takes the tokens ``[0, codebook_size)``.

        Args:
            grid: sizes of the axes, slowest first.
            codebook_size: number of allowed tokens.
            vocab_size: width of the model's logits.
            mask_token_id: token of a masked position, if any.
            codebook: float [codebook_size, D], vectors of the tokens, if known.
        """
        legal = torch.zeros(torch.Size(grid).numel(), vocab_size, dtype=torch.bool)
        legal[:, :codebook_size] = True
        return TokenSpace(tuple(grid), vocab_size, legal, mask_token_id, codebook)

    @staticmethod
    def latents(grid: tuple[int, ...], channels: int) -> TokenSpace:
        """Return a grid of vectors of ``channels`` floats."""
        legal = torch.zeros(torch.Size(grid).numel(), 0, dtype=torch.bool)
        return TokenSpace(tuple(grid), 0, legal, channels=channels)
