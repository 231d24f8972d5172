"""Target of causal models: the distributions of the next positions, given drafts, against a cache
of everything that is committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Self, cast

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.lookup import legal_at, take
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.protocols import (
    CausalModel,
    HiddenStateModel,
    SharedModel,
    SuperposedModel,
    TreeModel,
)
from gen.models.adapters.rotations import require_kept_keys
from gen.models.targets.base import PromptStates, StepOutput, Target
from gen.models.targets.past import Past


class CausalTarget(Target):
    """Causal model with the prompts of its items and a cache of their committed tokens.

    Where the allowed tokens of a position depend on the tokens before it, those are held beside the
    cache in a slot per position, as the cache does: every call says which token stands before each
    of its positions, so that a rejected draft is overwritten before anything after it is asked
    about again.

    Attributes:
        history: tokens of the rows, long [B, T + 1], column n holding the one before position n;
            None where distributions depend on no such token but through the model.
        allowed: allowed tokens of the last call's positions, bool [B, L, V], with a history.
        hidden_layers: layers whose hidden states every forward pass returns.
        lacks_prompts: whether the prompt of any row is not in the cache.
        gives_raw: whether every forward pass returns log-probabilities before temperature and
            filters (``StepOutput.raw``), as it does where the sampling parameters ask for them.
    """

    model: CausalModel
    left_to_right = True
    gives_raw = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        require_kept_keys(self.model, self.prompts.host_lengths, self.length)
        self.cache = self.model.new_cache(self.prompt.shape[1] + self.length)
        self.history: Tensor | None = None
        self._known: Tensor | None = None
        self.past: Past | None = None
        if self.sampling.looks_back:
            prompts = self.prompts.all_tokens[: self.items], self.prompts.all_lengths[: self.items]
            self.past = Past(self.sampling, self.space, *prompts)
        if self.is_history_dependent:
            self.history = self._no_history()
        self.allowed: Tensor | None = None
        # of a tree, the history of every column's branch, [B, L, T + 1]
        self._branches: Tensor | None = None
        self.hidden_layers: tuple[str, ...] = ()
        self._fresh = np.ones(self.rows, dtype=bool)  # rows whose prompt is not in the cache
        self.lacks_prompts = True
        # from positions of the grid to slots of the cache, [H B, 1]
        self._shift = (self.prompt_length - 1)[:, None]
        # positions that the prompt of each item brings into the cache, all branches together
        self._prompt_positions = (self.prompts.host_lengths - 1).reshape(self.branches, -1).sum(0)

    def _constrain(self) -> None:
        """Take the constraint, which is asked about the tokens before each position."""

    @property
    def is_history_dependent(self) -> bool:
        """True if allowed tokens or logits of a position are made of the tokens before it."""
        dependent = self.space.is_history_dependent or bool(self.sampling.looks_back)
        return dependent or self._known is not None

    @property
    def reach(self) -> np.ndarray | None:
        """Number of grid positions of each row that the network has vectors for, int64 [b]; None
        where there is no such number."""
        limit = self.model.learned_positions if isinstance(self.model, ModelAdapter) else None
        if limit is None:
            return None
        lengths = self.prompts.host_lengths.reshape(self.branches, -1)[:, self.prompts.row_items]
        return limit - lengths.max(0) + 1

    def _no_history(self) -> Tensor:
        """Make the history of rows without tokens, long [B, T + 1]."""
        return torch.zeros(self.rows, self.length + 1, dtype=torch.long, device=self.device)

    @property
    def known(self) -> Tensor | None:
        """Tokens that positions of each item have to get; see ``Target.known``."""
        return self._known

    @known.setter
    def known(self, canvas: Tensor | None) -> None:
        self._known = canvas
        if self.is_history_dependent and self.history is None:
            self.history = self._no_history()

    def _only_known(self, allowed: Tensor, positions: Tensor) -> Tensor:
        """Leave of the allowed tokens [B, L, V] of positions [B, L] the known one alone."""
        known = cast(Tensor, self._known)
        item = torch.from_numpy(self.prompts.row_items).to(known.device)[:, None]
        tokens = known[item, positions.clamp_max(known.shape[1] - 1)]
        only = torch.arange(allowed.shape[-1], device=known.device) == tokens[..., None]
        return torch.where(self.space.is_masked(tokens)[..., None], allowed, only)

    @property
    def row_inputs(self) -> list[Tensor]:
        """What a pass reads of the rows: first slots [H B, 1] and prompts [H B, P]."""
        return [self._shift, self.prompts.tokens]

    @row_inputs.setter
    def row_inputs(self, tensors: Sequence[Tensor]) -> None:
        self._shift, self.prompts.tokens = tensors

    @property
    def replaces(self) -> bool:
        """True if rows can become other items: the cache has to take calls about some rows."""
        return self.cache.select is not None

    def at_most(self, rows: int) -> None:
        """See ``Target.at_most``."""
        super().at_most(rows)
        self._fresh = self._fresh[: self.rows]
        self.history = None if self.history is None else self.history[: self.rows]

    @property
    def opens(self) -> bool:
        """True if items can be given prompts later (``Target.put``): rows have to take items."""
        return self.replaces

    def widest(self, longest: int) -> int:
        """See ``Target.widest``: powers of two, so that few widths come up."""
        return 1 << (longest - 1).bit_length()

    def put(self, items: np.ndarray, other: Target, numbers: np.ndarray) -> None:
        """See ``Target.put``."""
        super().put(items, other, numbers)
        require_kept_keys(self.model, self.prompts.host_lengths, self.length)
        self._prompt_positions = (self.prompts.host_lengths - 1).reshape(self.branches, -1).sum(0)
        if self.past is not None:
            prompts = self.prompts.all_tokens[: self.items], self.prompts.all_lengths[: self.items]
            self.past = Past(self.sampling, self.space, *prompts)

    def _follow_items(self) -> None:
        self._shift = (self.prompt_length - 1)[:, None]

    def _reset_rows(self, rows: np.ndarray) -> None:
        self._fresh, self.lacks_prompts = self._fresh | rows, True

    def keep(self, rows: Tensor) -> None:
        """See ``Target.keep``."""
        branch_rows = self.prompts.branch_rows(rows)
        super().keep(rows)
        self.cache.keep(branch_rows)
        self._follow_items()
        self._fresh = self._fresh[rows.cpu().numpy()]
        self.lacks_prompts = bool(self._fresh.any())
        if self.history is not None:
            self.history = self.history[rows]

    def with_model(self, model: CausalModel | ModelAdapter | SharedModel) -> Self:
        """Make a fresh target of the same items and sampling parameters with another model."""
        return self._handed_over(type(self)(model, *self._init_args(self.sampling)[1:]))

    def run_with(self, model: CausalModel | ModelAdapter | SharedModel) -> None:
        """Run another model of the same distributions from now on, before the first pass."""
        self.model = model
        self.cache = model.new_cache(self.prompt.shape[1] + self.length)

    def with_space(self, space: TokenSpace) -> Self:
        """Make a fresh target of the same model, items and sampling parameters with another token
        space of the same tokens and positions."""
        model, prompt, _, *rest = self._init_args(self.sampling)
        return self._handed_over(type(self)(model, prompt, space, *rest))

    def require_hidden_states(self, layers: tuple[str, ...], method: str) -> None:
        """Return the hidden states of these layers from now on (``StepOutput.hidden_states``).

        Args:
            layers: names of submodules of the model.
            method: name of the method that needs them.

        Raises:
            GenError: the model has no hidden states, or no such layer.
        """
        if not isinstance(self.model, HiddenStateModel):
            raise GenError(
                f"{method} needs hidden_states, and {type(self.model).__name__} gives logits alone;"
                " expected a causal language model of transformers"
            )
        self.model.check_layers(layers)
        self.hidden_layers = tuple(layers)

    def require_superposition(self, method: str) -> None:
        """Refuse a model or a token space that cannot take several tokens as one input, as a method
        of this name needs them.

        Raises:
            GenError: the model takes token ids alone, or a constraint or a sampling parameter
                reads the tokens before.
        """
        if not self.model.superposes:
            raise GenError(
                f"{method} needs a model that takes weighted sums of embeddings, and"
                f" {type(self.model).__name__} takes token ids alone; expected a causal language"
                " model of transformers"
            )
        if self.space.constraint is not None:
            raise GenError(
                f"{method} came with a constraint, which reads one token per position; expected a"
                " token space without one"
            )
        if self.sampling.looks_back:
            raise GenError(
                f"{method} came with sampling.{self.sampling.looks_back[0]}, which reads one token"
                " per position; expected sampling parameters that do not look back"
            )

    def predict(
        self,
        tokens: Tensor,
        positions: Tensor,
        parents: Tensor | None = None,
        own: Tensor | None = None,
    ) -> StepOutput:
        """Run one forward pass: the distributions of grid positions [B, L].

        A position may be repeated in a row if its token is repeated with it, which pads ragged
        windows.

        Args:
            tokens: the token one position before each, [B, L(, C)]; before position 0 stands the
                prompt, whatever is passed.
            positions: long [B, L].
            parents: of a tree of drafts, the draft that each of the last L - 1 columns follows,
                long [B, L - 1], -1 for column 0, the last committed token; ``positions`` are then
                those by depth, or with ``own`` any. None means a chain.
            own: columns whose token stands at the position itself, bool [B, L], as a mask token
                does; None means that all stand one before. Slots of the cache follow the tokens.

        Returns:
            Log-probabilities [B, L, V], or of latents conditioning vectors [B, L, H, D].
        """
        self._branches, grid = None, positions
        positions = positions if own is None else positions + own
        self._note(tokens, positions, parents)
        width, fresh, prefix, prompt_states = tokens.shape[1], self._fresh, None, None
        tokens = self._inputs(torch.cat([tokens] * self.branches) if self.branches > 1 else tokens)
        # the positions of each branch, shifted
        slots = (positions + self._shift.view(self.branches, -1, 1)).view(-1, width)
        num_computed = num_positions = width * self.branches
        # before position 0 stands the prompt of each branch, which may end differently
        if self.lacks_prompts or not grid.is_cpu or np.count_nonzero(grid.numpy()) < grid.numel():
            first = self.first
            start = (slots == self._shift).view(*slots.shape, *[1] * (tokens.ndim - 2))
            tokens = torch.where(start, take(first, self._shift), tokens)
        if self.lacks_prompts:
            computed, alike = self._to_prefill()
            if not np.array_equal(computed, fresh):
                self._share_prefill(first, alike)
            elif fresh.all() and parents is None:
                prefix = self._before()
                tokens = torch.cat([take(first, prefix), tokens], 1)
                slots = torch.cat([prefix, slots], 1)
            elif self.prompt.shape[1] > 1:
                prompt_states = self._prefill(first, fresh)
            num_computed = num_computed + computed * self._prompt_positions[self.prompts.row_items]
            num_positions = num_positions + computed * (self.prompt.shape[1] - 1) * self.branches
            self._fresh, self.lacks_prompts = np.zeros_like(fresh), False
        out, hidden = self._forward(tokens, slots, width if prefix is not None else 0, parents)
        out = out if out.shape[1] == width else out[:, -width:]
        if prefix is not None and hidden is not None:
            prompt_states, hidden = self._without_prompts(hidden, width)
        ran = None if self.cache.ran is None else self.cache.ran.view(self.branches, -1).any(0)
        logprobs, raw = self._outcome(out, grid)
        return StepOutput(
            logprobs, num_computed, num_positions, ran, hidden, prompt_states=prompt_states, raw=raw
        )

    def predict_superposed(self, tokens: Tensor, weights: Tensor, positions: Tensor) -> StepOutput:
        """Run one forward pass as ``predict`` does, with several tokens as one input.

        Args:
            tokens: tokens one position before each, long [B, L, K].
            weights: weights of their embeddings, [B, L, K], which sum to 1.
            positions: long [B, L].

        Returns:
            Log-probabilities [B, L, V].
        """
        self._note(tokens[..., 0], positions)
        model, fresh, width = cast(SuperposedModel, self.model), self._fresh, tokens.shape[1]
        repeats = self.branches, 1
        slots = positions.repeat(repeats) + self._shift
        start = (slots == self._shift)[..., None]
        before = take(self.prompt, self._shift)[..., None]
        inputs = torch.where(start, before, tokens.repeat(*repeats, 1))
        num_computed = num_positions = width * self.branches
        if self.lacks_prompts:
            if self.prompt.shape[1] > 1:
                self._prefill(self.prompt, fresh)
            prompts = self._prompt_positions[self.prompts.row_items]
            num_computed = num_computed + np.where(fresh, prompts, 0)
            padded = (self.prompt.shape[1] - 1) * self.branches
            num_positions = num_positions + np.where(fresh, padded, 0)
            self._fresh, self.lacks_prompts = np.zeros_like(fresh), False
        with self._routed():
            out = model.forward_superposed(inputs, weights.repeat(*repeats, 1), slots, self.cache)
        return StepOutput(self._outcome(out, positions)[0], num_computed, num_positions)

    def _routed(self, rows: Tensor | None = None) -> AbstractContextManager[None]:
        """Compute the forward pass inside with the adapters of some rows of all branches, long
        [n]; None means of all."""
        if self.router is None:
            return nullcontext()
        index = torch.from_numpy(self._row_adapters()).to(self.device).repeat(self.branches)
        return self.router.rows(index if rows is None else index[rows])

    def _row_adapters(self) -> np.ndarray:
        """Look up the adapter of each row, int64 [B]; 0 where there are none."""
        items = self.prompts.row_items
        return np.zeros_like(items) if self.adapters is None else self.adapters[items]

    def _forward(
        self, tokens: Tensor, slots: Tensor, keep: int, parents: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Run the model: logits [H B, L, V], and hidden states if there are any to return.

        Args:
            tokens: as the model takes them, [H B, L(, D)].
            slots: long [H B, L].
            keep: logits of so many last tokens are needed; 0 means of all.
            parents: long [B, L - 1]; None means a chain.
        """
        self.cache.starts = self._shift
        with self._routed():
            if parents is not None:
                if not isinstance(self.model, TreeModel):
                    raise GenError(
                        f"the draft is a tree, and {type(self.model).__name__} takes chains;"
                        " expected a causal language model of transformers"
                    )
                parents = parents.repeat(self.branches, 1)
                if not self.hidden_layers:
                    return self.model.forward_tree(tokens, slots, parents, self.cache), None
            if self.hidden_layers:
                out, states = self._with_states(tokens, slots, parents)
                return out, {name: x[: self.rows] for name, x in states.items()}
            more = {"keep": keep} if keep and self.model.keeps else {}
            return self.model.forward(tokens, slots, self.cache, **more), None

    def _with_states(
        self, tokens: Tensor, slots: Tensor, parents: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the model as ``_forward`` does: logits and hidden states of all branches."""
        model = cast(HiddenStateModel, self.model)
        return model.forward_with_hidden_states(
            tokens, slots, self.cache, self.hidden_layers, parents
        )

    def commit_path(self, path: Tensor, num_accepted: Tensor) -> None:
        """Move the accepted drafts of the last call's tree to where a chain would have put them.

        Args:
            path: columns of the accepted drafts, from the root on, long [B, n].
            num_accepted: how many of them count, long [B].
        """
        repeats = self.branches, 1
        self.cache.commit_path(path.repeat(repeats), num_accepted.repeat(self.branches))
        if self._branches is None:
            return
        row = torch.arange(len(path), device=path.device)
        columns = torch.cat([torch.zeros_like(path[:, :1]), path + 1], 1)
        self.history = self._branches[row, columns[row, num_accepted]]
        self.allowed = self.allowed[row[:, None], columns]

    def _without_prompts(
        self, states: dict[str, Tensor], width: int
    ) -> tuple[PromptStates, dict[str, Tensor]]:
        """Split hidden states of prompts and ``width`` positions behind them, of all rows."""
        every = torch.arange(self.rows, device=self.device)
        of_prompts = {name: x[:, :-width] for name, x in states.items()}
        return PromptStates(every, of_prompts), {k: x[:, -width:] for k, x in states.items()}

    def _before(self) -> Tensor:
        """Positions of the prompts without their last token, [H B, P - 1]; shorter prompts repeat
        their last."""
        column = torch.arange(self.prompt.shape[1] - 1, device=self.device)
        return torch.minimum(column.expand(len(self.prompt), -1), self.prompt_length[:, None] - 1)

    def _to_prefill(self) -> tuple[np.ndarray, np.ndarray]:
        """Find the new rows whose prompts are to be computed, bool [B], and the row whose prompt
        each row has, int64 [B]."""
        every = np.arange(self.rows)
        wanted = self.shares_prefill and not self.hidden_layers and self.prompt.shape[1] > 1
        if not wanted or self.cache.copy_rows is None:
            return self._fresh, every
        alike = self._first_alike()
        return self._fresh & (alike == every), alike

    def _first_alike(self) -> np.ndarray:
        """Find the first new row with the prompt of each row: int64 [B], itself for old rows."""
        prompts, found = self.prompts, np.arange(self.rows)
        tokens = prompts.tokens.view(self.branches, self.rows, -1).transpose(0, 1).cpu().numpy()
        lengths = prompts.host_lengths.reshape(self.branches, -1)[:, prompts.row_items]
        adapters = self._row_adapters()
        rows: dict[bytes, int] = {}
        for row in self._fresh.nonzero()[0].tolist():
            key = tokens[row].tobytes() + lengths[:, row].tobytes() + adapters[row].tobytes()
            found[row] = rows.setdefault(key, row)
        return found

    def _share_prefill(self, first: Tensor, alike: np.ndarray) -> None:
        """Bring the prompts of new rows into the cache, each different one once.

        Args:
            first: prompts as the model takes them.
            alike: row whose prompt each row has, int64 [B]; see ``_first_alike``.
        """
        computed = self._fresh & (alike == np.arange(self.rows))
        if self.cache.is_empty:  # its rows are those of the first call
            numbers = np.cumsum(computed) - 1
            self._prefill(first, computed)
            rows = torch.from_numpy(numbers[alike]).to(self.device)
            count = int(computed.sum())
            self.cache.keep(torch.cat([rows + h * count for h in range(self.branches)]))
            return
        self._prefill(first, computed)
        copies = (alike != np.arange(self.rows)).nonzero()[0]
        at = (torch.from_numpy(x).to(self.device) for x in (alike[copies], copies))
        self.cache.copy_rows(*map(self.prompts.branch_rows, at))

    def _prefill(self, first: Tensor, fresh: np.ndarray) -> PromptStates | None:
        """Bring the prompts of some rows into the cache, in a forward pass of their own: the other
        rows are further on. Returns their hidden states where they were asked for."""
        rows = torch.from_numpy(np.tile(fresh, self.branches).nonzero()[0]).to(self.device)
        slots = self._before()[rows]
        some = not fresh.all() and not self.cache.is_empty
        if some:
            self.cache.select(rows)
        try:
            with self._routed(rows):
                return self._prompt_states(take(first[rows], slots), slots, rows)
        finally:
            if some:
                self.cache.select(None)

    def _prompt_states(self, tokens: Tensor, slots: Tensor, rows: Tensor) -> PromptStates | None:
        """Run the model over prompts of rows [n] of all branches; see ``_prefill``."""
        self.cache.starts = self._shift[rows]
        if not self.hidden_layers:
            more = {"keep": 1} if self.model.keeps else {}
            self.model.forward(tokens, slots, self.cache, **more)
            return None
        _, states = self._with_states(tokens, slots)
        ours = len(rows) // self.branches
        return PromptStates(rows[:ours], {name: x[:ours] for name, x in states.items()})

    @property
    def first(self) -> Tensor:
        """Prompts as the model takes them."""
        return self.prompt

    def _inputs(self, tokens: Tensor) -> Tensor:
        """Turn tokens into what the model takes."""
        return tokens

    def _outcome(
        self, out: Tensor, positions: Tensor
    ) -> tuple[Tensor, Callable[[], Tensor] | None]:
        """Turn what the model gave for positions [B, L] into log-probabilities [B, L, V], and
        into ``StepOutput.raw`` where the sampling parameters ask for log-probabilities."""
        past = None if self.past is None else partial(self._look_back, positions=positions)
        legal = self._legal(positions)
        ended = self._ended(positions, legal)
        if self.sampling.logprobs is None and not self.gives_raw:
            return self._only_eos(self._logprobs(out, legal, consume=True, past=past), ended), None
        scores = self._scores(out, past)
        logprobs = self._only_eos(self.sampling(scores, None, legal), ended)
        return logprobs, lambda: self._only_eos(SamplingParams()(scores, None, legal), ended)

    def _ended(self, positions: Tensor, legal: Tensor | None) -> Tensor | None:
        """Find the positions where the row has ended: bool [B, L]; None without a history.

        They are those behind an end and, so that no ban of the eos token keeps a row from ending,
        those where it alone is allowed.

        Args:
            positions: long [B, L].
            legal: allowed tokens, bool [B, L, V].
        """
        end = self.space.eos_token_id
        if self.history is None or end is None:
            return None
        column = torch.arange(self.history.shape[1] - 1, device=self.device)
        # of a tree every column has a history of its own
        history = self.history[:, None] if self._branches is None else self._branches
        is_end = self.space.is_end(history[..., 1:])
        first = torch.where(is_end, column, len(column)).amin(-1)
        ended = first < positions
        if self.past is None or legal is None:
            return ended
        return ended | (legal[..., end] & (legal.sum(-1) == 1))

    def _only_eos(self, logprobs: Tensor, ended: Tensor | None) -> Tensor:
        """Let the eos token follow the end of a row, whatever the logits are.

        Args:
            logprobs: log-probabilities [B, L, V], which are written over.
            ended: positions where the row has ended, bool [B, L]; None without a history.
        """
        if ended is not None:
            logprobs.masked_fill_(ended[..., None], -torch.inf)
            logprobs[..., self.space.eos_token_id].masked_fill_(ended, 0.0)
        return logprobs

    def _look_back(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Add to the logits [B, L, V] of positions [B, L] what the tokens before them add."""
        past, history = cast(Past, self.past), cast(Tensor, self.history)
        items = torch.from_numpy(self.prompts.row_items).to(self.device)
        if self._branches is None:
            return past(logits, history[:, 1:], positions, items)
        # of a tree every column has a history of its own
        branches, columns = self._branches.flatten(0, 1), logits.shape[1]
        at = positions.reshape(-1, 1), items.repeat_interleave(columns)
        return past(logits.flatten(0, 1)[:, None], branches[:, 1:], *at).view(logits.shape)

    def _note(self, tokens: Tensor, positions: Tensor, parents: Tensor | None = None) -> None:
        """Write the tokens [B, L] one position before positions [B, L] into the history, if there
        is one; of a tree the root, and all of a branch into its own."""
        if self.history is None:
            return
        if parents is None:
            self.history.scatter_(1, positions, tokens)
            return
        self.history.scatter_(1, positions[:, :1], tokens[:, :1])
        branches = self.history[:, None].repeat(1, tokens.shape[1], 1)
        row = torch.arange(len(tokens), device=tokens.device)
        for column in range(1, tokens.shape[1]):
            branch = branches[row, parents[:, column - 1] + 1]
            at = positions[:, column, None]
            branches[:, column] = branch.scatter(1, at, tokens[:, column, None])
        self._branches = branches

    def _legal(self, positions: Tensor) -> Tensor | None:
        """Look up the allowed tokens of positions [B, L]: bool [B, L, V]; None where all are."""
        if self.history is None:
            return legal_at(self.legal, positions) if self._narrow else None
        history, at = self.history, positions
        if self._branches is not None:
            history, at = self._branches.flatten(0, 1), positions.reshape(-1, 1)
        allowed = self.space.apply_constraint(self.legal[at], history[:, 1:], at)
        self.allowed = allowed.view(*positions.shape, -1)
        if self._known is not None:
            self.allowed = self._only_known(self.allowed, positions)
        return self.allowed

    def refuse_illegal(
        self, ids: Tensor, positions: Tensor, new: Tensor, columns: Tensor | None = None
    ) -> None:
        """Refuse committed tokens that may not follow those before them.

        Samplers that keep the distribution never commit one; a sampler that accepts drafts by other
        tokens' probability might.

        Args:
            ids: tokens [B, L].
            positions: those of the last call, long [B, L].
            new: tokens that are committed, bool [B, L].
            columns: column of the last call that each token is from, long [B, L]; None means the
                one with its number.

        Raises:
            GenError: one of them is not allowed.
        """
        allowed = self.allowed
        if columns is not None:
            allowed = allowed.gather(1, columns[..., None].expand(-1, -1, allowed.shape[-1]))
        wrong = new & ~allowed.gather(-1, ids[..., None])[..., 0]
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise GenError(
                f"the sampler accepted id {int(ids[row, column])} at position"
                f" {int(positions[row, column])}, which the constraint forbids there; expected a"
                " sampler whose guarantee is 'same_tokens' or 'same_distribution'"
            )
