"""Targets: a model with the prompts of its items and the sampling parameters, which is all that a
sampler sees of a model. ``gen.models.targets.latent`` holds those of latents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.errors import GenError
from gen.core.sampling_params import IN_SPACE, SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.protocols import SharedModel
from gen.models.load.routed import Router
from gen.models.targets.identity import facts_of_model
from gen.models.targets.mixed import Groups, grouped, logprobs_of_groups
from gen.models.targets.past import token_bias
from gen.models.targets.token_table import TokenTable, read_table


@dataclass(frozen=True)
class PromptStates:
    """Hidden states of prompts that a forward pass computed.

    Attributes:
        rows: rows of the batch whose prompts they are, long [n].
        states: hidden states by the name of the layer, of the prompt without its last token,
            [n, P - 1, D]; shorter prompts repeat that of their last token.
    """

    rows: Tensor
    states: dict[str, Tensor]


@dataclass
class StepOutput:
    """Outcome of one forward pass of a target for B rows.

    Attributes:
        logprobs: final log-probabilities [B, L, V] of the positions asked for; of latents their
            conditioning vectors [B, L, H, D].
        num_computed_tokens: positions of its own that each row sent through the model: one number
            for all rows, or int64 [B], an array or a tensor.
        num_computed_positions: the same with padding.
        ran_network: bool [B], the rows whose network ran; None where it ran for all of them.
        hidden_states: hidden states by the name of the layer, [B, L, D] each; None unless asked
            for.
        prompt_states: those of the prompts that the pass computed; None unless asked for, and
            where it computed none.
        raw: gives the log-probabilities [B, L, V] before temperature and filters; None where the
            target cannot, or is causal and the sampling parameters ask for no log-probabilities.
        fresh: bool [B, L], the positions that this forward pass computed; None where it computed
            all of them.
        under: gives the final log-probabilities [m, V] of some positions with other allowed tokens,
            from their rows and their positions, long [m], and bool [m, V]; None where the target
            cannot.
    """

    logprobs: Tensor
    num_computed_tokens: int | np.ndarray | Tensor
    num_computed_positions: int | np.ndarray | Tensor
    ran_network: Tensor | None = None
    hidden_states: dict[str, Tensor] | None = None
    prompt_states: PromptStates | None = None
    raw: Callable[[], Tensor] | None = None
    fresh: Tensor | None = None
    under: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


class PromptBatch:
    """Prompts of N items with their branches of classifier-free guidance (CFG), and the rows of the
    batch that hold some of the items.

    Attributes:
        branches: H, 2 where there is an unconditional branch, else 1.
        items: number of items N.
        row_items: item of each row, int64 [B].
        tokens: prompts of the rows, long [H B, P], padded on the right; all conditional ones come
            first.
        lengths: their lengths, long [H B].
        host_lengths: lengths of all items' prompts, int64 [H N].
        version: number of times that items were given other prompts (``put``).

    Args:
        device: device of the prompts.
        prompt: long [N, P].
        prompt_length: long [N]; None means P.
        uncond: unconditional prompts, long [N, P']; None without guidance.
        uncond_length: long [N]; None means P'.
    """

    def __init__(
        self,
        device: torch.device,
        prompt: Tensor,
        prompt_length: Tensor | None = None,
        uncond: Tensor | None = None,
        uncond_length: Tensor | None = None,
    ):
        def lengths_of(tokens: Tensor, lengths: Tensor | None) -> Tensor:
            return torch.full((len(tokens),), tokens.shape[1]) if lengths is None else lengths

        branches = [(prompt, lengths_of(prompt, prompt_length))]
        if uncond is not None:
            branches.append((uncond, lengths_of(uncond, uncond_length)))
        width = max(tokens.shape[1] for tokens, _ in branches)
        padded = [F.pad(tokens, (0, width - tokens.shape[1])) for tokens, _ in branches]
        lengths = torch.cat([n for _, n in branches])
        self.device, self.branches, self.items = device, len(branches), len(prompt)
        self.all_tokens, self.all_lengths = torch.cat(padded).to(device), lengths.to(device)
        self.host_lengths = lengths.cpu().numpy().copy()
        self.tokens, self.lengths = self.all_tokens, self.all_lengths
        self.row_items = np.arange(self.items)
        self.next_item = self.items
        self.version = 0

    @property
    def has_one_length(self) -> bool:
        """Compare the prompts of all items: True if they have one length."""
        return bool((self.host_lengths == self.host_lengths[0]).all())

    def branch_items(self) -> np.ndarray:
        """Number the rows' items among those of all branches: int64 [H B]."""
        return np.concatenate([self.row_items + h * self.items for h in range(self.branches)])

    def branch_rows(self, rows: Tensor) -> Tensor:
        """Repeat a choice of rows, bool [B] or their numbers long [n], for all branches."""
        if rows.dtype == torch.bool:
            return rows.repeat(self.branches)
        return torch.cat([rows + h * len(self.row_items) for h in range(self.branches)])

    def put(self, items: np.ndarray, other: PromptBatch, numbers: np.ndarray) -> None:
        """Give items the prompts of items of another batch.

        Args:
            items: items of this batch, int64 [n].
            other: the other batch; it has an unconditional branch if this one has.
            numbers: items of the other batch, int64 [n].

        Raises:
            ValueError: a prompt is longer than this batch has columns for.
        """
        for branch in range(self.branches):
            here = torch.from_numpy(items + branch * self.items).to(self.device)
            there = torch.from_numpy(numbers + branch * other.items).to(other.device)
            lengths = other.all_lengths[there]
            width = int(lengths.max())
            if width > self.all_tokens.shape[1]:
                raise ValueError(
                    f"a prompt has {width} tokens; expected at most {self.all_tokens.shape[1]}"
                )
            self.all_tokens[here, :width] = other.all_tokens[there, :width].to(self.device)
            self.all_lengths[here] = lengths.to(self.device)
            self.host_lengths[items + branch * self.items] = lengths.cpu().numpy()
        self.version += 1

    def limit(self, rows: int) -> None:
        """Hold the first items only."""
        self.next_item, self.row_items = rows, self.row_items[:rows]
        self._gather()

    def assign(self, rows: np.ndarray, items: np.ndarray | None) -> None:
        """Give rows (bool [B]) other items, int64 [n]; None means the next ones that wait."""
        if items is None:
            items = np.arange(self.next_item, self.next_item + int(rows.sum()))
        self.row_items = self.row_items.copy()
        self.row_items[rows] = items
        self.next_item = int(items.max(initial=self.next_item - 1)) + 1
        self._gather()

    def select(self, rows: Tensor) -> None:
        """Keep rows, bool [B] or their numbers long [n], which may repeat."""
        chosen = self.branch_rows(rows)
        self.tokens, self.lengths = self.tokens[chosen], self.lengths[chosen]
        self.row_items = self.row_items[rows.cpu().numpy()]

    def _gather(self) -> None:
        index = torch.from_numpy(self.branch_items()).to(self.device)
        self.tokens, self.lengths = self.all_tokens[index], self.all_lengths[index]


class Target:
    """Model with the prompts of its items and the sampling parameters: all that a sampler sees.

    CFG runs both branches in one batched forward pass. Rows leave the batch (``keep``) or become
    other items (``replace``); ``at_most`` lets so many rows in at a time.

    Attributes:
        prompts: prompts of the items and the rows that hold them.
        branches: H, forward passes of CFG that run as one: 1 or 2.
        items: number of items N.
        legal: allowed tokens, bool [T, V], V up to the last one that is allowed anywhere.
        bias: number added to the logits of all positions, float [V]; None where it is nothing.
        cache: keys and values of the model; None where it has none.
        name: name of the model in messages; empty where nobody gave one.
        limits: tokens that each item may have, int64 [N], of rows that end with the eos token;
            None where all positions are every item's.
        known: tokens that positions of each item have to get, long [N, T], masked where they are
            free; None where all are. Only targets of causal models of codes read it.
        learned: what samplers measured of this model and want to know in the next call; a pipeline
            hands it on.
        evaluator: scores and answers of outputs (``gen.contracts.scorer.Evaluator``), for samplers
            that search; None where nobody gave one.
        item_sampling: sampling parameters of each item where they differ, in ``FILTERS`` alone;
            None where ``sampling`` is that of all items.
        shares_prefill: whether rows with the same prompt that are new together compute it once.
        drafters: folders of trained drafters that the model was loaded with, by kind.
        router: chooses the LoRA adapters of the rows; None where the network has none by name.
        adapters: LoRA adapter of each item, int64 [N], with a router.

    Args:
        model: adapter of a protocol (``gen.models.adapters.protocols``).
        prompt: long [N, P], padded on the right.
        space: positions, allowed tokens and special tokens.
        sampling: sampling parameters.
        uncond: unconditional prompts long [N, P'], needed for guidance.
        prompt_length: long [N]; None means P.
        uncond_length: long [N]; None means P'.

    Raises:
        GenError: the constraint of the space or a sampling parameter cannot be honoured.
        ValueError: guidance without unconditional prompts.
    """

    left_to_right: ClassVar[bool] = False
    cache: Any = None
    limits: np.ndarray | None = None
    known: Tensor | None = None
    evaluator: Any = None
    item_sampling: list[SamplingParams] | None = None
    shares_prefill = False
    router: Router | None = None
    adapters: np.ndarray | None = None

    def __init__(
        self,
        model,
        prompt: Tensor,
        space: TokenSpace,
        sampling: SamplingParams,
        uncond: Tensor | None = None,
        prompt_length: Tensor | None = None,
        uncond_length: Tensor | None = None,
    ):
        self._require_controls(space, sampling)
        if sampling.guided and uncond is None:
            raise ValueError("guidance_scale is not 1; expected unconditional prompts as well")
        self.model, self.space, self.sampling = model, space, sampling
        self.device = model.device
        self.learned: dict[Any, Any] = {}
        self.name = ""
        self.drafters: Mapping[str, str] = {}
        self.prompts = PromptBatch(
            self.device, prompt, prompt_length, uncond if sampling.guided else None, uncond_length
        )
        self.branches, self.items = self.prompts.branches, self.prompts.items
        # logits processors of users take the logits of the whole vocabulary
        size = space.vocab_size if sampling.logits_processor else space.num_logits
        legal = space.legal[:, :size].to(self.device)
        self.legal = legal[:1].expand(len(legal), -1) if space.is_uniform else legal
        self._narrow = not bool(self.legal.all())  # whether any token has to be left out
        self.bias = token_bias(sampling, self.legal.shape[-1], space.vocab_size)
        if space.constraint is not None:
            self._constrain()

    def _constrain(self) -> None:
        """Take the constraint of the space. Raises ``GenError`` where it cannot be honoured."""
        raise NotImplementedError

    def _require_controls(self, space: TokenSpace, sampling: SamplingParams) -> None:
        """Refuse sampling parameters that this target cannot honour, by name.

        Raises:
            GenError: latents have no logits, positions are not filled left to right, or the
                parameter belongs into the token space.
        """
        controls = sampling.controls()
        if space.channels and controls:
            raise GenError(
                f"sampling.{next(iter(controls))} is about tokens, and the model makes latents;"
                " expected a model of tokens"
            )
        if sampling.looks_back and not self.left_to_right:
            raise GenError(
                f"sampling.{sampling.looks_back[0]} reads the tokens before a position, which a"
                " masked or block model does not fill first; expected a causal model"
            )
        for name in IN_SPACE:
            if name in controls:
                raise GenError(
                    f"sampling.{name} came to a target; expected it in the token space, where"
                    " gen.pipeline.control.controlled puts it"
                )

    @property
    def rows(self) -> int:
        """Number of rows B in the batch."""
        return len(self.prompts.row_items)

    @property
    def prompt(self) -> Tensor:
        """Prompts of the rows, long [H B, P]."""
        return self.prompts.tokens

    @property
    def prompt_length(self) -> Tensor:
        """Lengths of the rows' prompts, long [H B]."""
        return self.prompts.lengths

    def with_params(self, sampling: SamplingParams) -> Self:
        """Make a fresh target of the same model and items with other sampling parameters.

        Without guidance it drops the unconditional branch.

        Raises:
            ValueError: guidance where there is no unconditional branch.
        """
        return self._handed_over(type(self)(*self._init_args(sampling)))

    def _handed_over(self, fresh: Self) -> Self:
        """Give a fresh target of the same items what this one was given after it was made."""
        fresh.name, fresh.known = self.name, self.known
        fresh.drafters = self.drafters
        fresh.router, fresh.adapters = self.router, self.adapters
        fresh.at_most(self.rows)
        return fresh

    def _init_args(self, sampling: SamplingParams) -> tuple:
        """Collect the arguments of another target of the same model and items."""
        prompts = self.prompts.all_tokens.chunk(self.branches)
        lengths = self.prompts.all_lengths.chunk(self.branches)
        uncond = uncond_length = None
        if sampling.guided and self.branches == 2:
            uncond, uncond_length = prompts[-1], lengths[-1]
        return self.model, prompts[0], self.space, sampling, uncond, lengths[0], uncond_length

    @property
    def replaces(self) -> bool:
        """True if rows can become other items."""
        return False

    def at_most(self, rows: int) -> None:
        """Hold so many rows at a time, the first items first; call it before any forward pass.

        Raises:
            ValueError: rows of this target cannot become other items.
        """
        if rows >= self.items:
            return
        if not self.replaces:
            keeper = type(self if self.cache is None else self.cache).__name__
            raise ValueError(
                f"a {keeper} takes no calls about some of its rows; expected all items at once"
            )
        self.prompts.limit(rows)
        self._follow_items()

    def replace(self, rows: Tensor, items: Tensor | None = None) -> None:
        """Give rows (bool [B]) other items, long [n]; None means the next ones that wait."""
        replaced = rows.cpu().numpy()
        self.prompts.assign(replaced, None if items is None else items.cpu().numpy())
        self._follow_items()
        self._reset_rows(replaced)

    def keep(self, rows: Tensor) -> None:
        """Keep rows, bool [B] or their numbers long [n], which may repeat; drop the others."""
        self.prompts.select(rows)

    def rename(self, items: np.ndarray) -> None:
        """Say which items the rows hold, int64 [B]; what is held for the rows stays theirs.

        Args:
            items: items with the prompts of those before.
        """
        self.prompts.row_items = items

    def of_items(self, items: np.ndarray) -> Self:
        """Make a fresh target of the same model and sampling parameters with these items.

        Args:
            items: numbers of this target's items, int64 [n], which may repeat.
        """
        model, prompt, space, sampling, uncond, length, uncond_length = self._init_args(
            self.sampling
        )
        index = torch.from_numpy(items).to(self.device)
        fresh = type(self)(
            model,
            prompt[index],
            space,
            sampling,
            None if uncond is None else uncond[index],
            length[index],
            None if uncond_length is None else uncond_length[index],
        )
        fresh.name, fresh.learned, fresh.evaluator = self.name, self.learned, self.evaluator
        fresh.drafters = self.drafters
        fresh.limits = None if self.limits is None else self.limits[items]
        fresh.known = None if self.known is None else self.known[index]
        fresh.router = self.router
        fresh.adapters = None if self.adapters is None else self.adapters[items]
        return fresh

    @property
    def opens(self) -> bool:
        """True if items can be given prompts after forward passes were run (``put``)."""
        return False

    def widest(self, longest: int) -> int:
        """Return the tokens to make room for, so that prompts of up to ``longest`` fit."""
        return longest

    def takes(self, other: Target) -> bool:
        """True if the prompts of another target's items fit in (``put``)."""
        return int(other.prompts.host_lengths.max()) <= self.prompts.all_tokens.shape[1]

    def with_room(self, items: int, width: int) -> Self:
        """Make a fresh target with room for other items: so many copies of this one's first.

        Args:
            items: number of items.
            width: tokens that a prompt may have, at least those of the first.
        """
        fresh = self.of_items(np.zeros(items, dtype=np.int64))
        model, prompt, space, sampling, uncond, length, uncond_length = fresh._init_args(
            self.sampling
        )
        prompt = F.pad(prompt, (0, max(0, width - prompt.shape[1])))
        roomy = type(self)(model, prompt, space, sampling, uncond, length, uncond_length)
        roomy.name, roomy.learned = self.name, self.learned
        roomy.drafters = self.drafters
        roomy.limits = None if self.limits is None else np.repeat(self.limits[:1], items)
        roomy.known, roomy.router, roomy.adapters = fresh.known, fresh.router, fresh.adapters
        return roomy

    def put(self, items: np.ndarray, other: Target, numbers: np.ndarray) -> None:
        """Give items that have no row the prompts, limits and sampling parameters of others.

        Args:
            items: items of this target, int64 [n].
            other: target with the same token space.
            numbers: items of it, int64 [n].

        Raises:
            ValueError: a prompt is longer than this target has room for.
        """
        self.prompts.put(items, other.prompts, numbers)
        if self.limits is not None and other.limits is not None:
            self.limits[items] = other.limits[numbers]
        if self.known is not None and other.known is not None:
            self.known[torch.from_numpy(items).to(self.device)] = other.known[
                torch.from_numpy(numbers).to(self.device)
            ]
        if self.adapters is not None:
            self.adapters[items] = 0 if other.adapters is None else other.adapters[numbers]
        if self.item_sampling is not None:
            for item in items.tolist():
                self.item_sampling[item] = other.sampling

    def _reset_rows(self, rows: np.ndarray) -> None:
        """Forget what is held for these rows (bool [B]), which were other items."""

    def _follow_items(self) -> None:
        """Derive what depends on the items that the rows hold."""

    @property
    def length(self) -> int:
        """Positions to generate."""
        return self.space.length

    @property
    def offset(self) -> int:
        """Positions of the grid before position 0 of this target: those of a given prefix."""
        return 0 if self.space.prefix is None else len(self.space.prefix)

    @property
    def num_prompt_tokens(self) -> Tensor:
        """Tokens of each row's prompt, without the unconditional one, long [B]."""
        return self.prompt_length[: self.rows]

    @property
    def captured(self) -> Any:
        """Recorded forward passes of the model (``gen.models.adapters.captured``); None where it
        has none."""
        return self.model.captured if isinstance(self.model, ModelAdapter) else None

    def language_model(self, method: str) -> SharedModel:
        """Return the model, for a drafter that reads its layers, embeddings and head; ``method`` is
        its name, for messages. Raises ``GenError``: the model has none."""
        if not isinstance(self.model, SharedModel):
            raise GenError(
                f"the drafter {method} needs the layers and the head of a network, and"
                f" {type(self.model).__name__} has none; expected a causal language model of"
                " transformers"
            )
        return self.model

    def token_table(self, path: str) -> TokenTable:
        """Read statistics of the model's tokens; errors are those of ``read_table``."""
        assert isinstance(self.model, ModelAdapter)
        return read_table(path, self.model, self.name, self.legal.shape[-1])

    def draft_sampling(self, target: Target) -> SamplingParams:
        """Return the sampling parameters to draft for ``target`` with, whose own these are: with
        the guidance that the model was trained to draft with. Raises ``GenError``: it was trained
        for another target or other sampling parameters."""
        facts = facts_of_model(target, self)
        guidance = None if facts is None else facts.net.get("guidance_scale")
        if guidance is None:
            return self.sampling
        return replace(self.sampling, guidance_scale=guidance)

    def prepare(self, step: Any) -> None:
        """Plan the next forward pass of a masked loop; without a cache there is nothing to plan.

        Args:
            step: ``MaskedStep`` with its canvas view and, where the block schedule reads no
                log-probabilities, its block progress.
        """

    def blank(self) -> Tensor:
        """Make the tokens of all items, [N, T(, C)], to be filled."""
        return self.space.blank(self.items, self.device)

    def _logprobs(
        self,
        logits: Tensor,
        legal: Tensor | None,
        sampling: SamplingParams | None = None,
        consume: bool = False,
        past: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Turn logits into log-probabilities.

        Args:
            logits: floats [H B, L, V].
            legal: allowed tokens, bool, broadcastable to [B, L, V]; None where all are.
            sampling: other sampling parameters than the target's.
            consume: the logits are not needed any more.
            past: adds to guided logits [B, L, V] what depends on the tokens before.
        """
        params = sampling or self.sampling
        if sampling is None and self.item_sampling is not None:
            groups = self._groups()
            if len(groups) > 1:
                return logprobs_of_groups(groups, *self._split(logits), legal, self.bias)
            params = groups[0][0]
        if self.bias is not None or past is not None:
            return params(self._scores(logits, past), None, legal, consume=True)
        return params(*self._split(logits), legal, consume=consume)

    def _scores(self, logits: Tensor, past: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return guided logits [B, L, V] with all that is added to them; see ``_logprobs``."""
        z = self._groups()[0][0].guide(*self._split(logits))
        if self.bias is not None:
            self.bias = self.bias.to(z)
            z = z + self.bias
        return z if past is None else past(z)

    def _split(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits [B, L, V] of both branches of CFG, or of the only one."""
        size = self.legal.shape[-1]
        logits = logits if logits.shape[-1] == size else logits[..., :size]
        if self.branches == 1:
            return logits, None
        cond, uncond = logits.chunk(2)
        return cond, uncond

    def _raw(self, logits: Tensor, legal: Tensor) -> Tensor:
        groups = [
            (SamplingParams(guidance_scale=params.guidance_scale), rows)
            for params, rows in self._groups()
        ]
        if len(groups) > 1:
            return logprobs_of_groups(groups, *self._split(logits), legal, self.bias)
        return self._logprobs(logits, legal, groups[0][0])

    def _groups(self) -> Groups:
        """Group the rows by their sampling parameters."""
        if self.item_sampling is None:
            return [(self.sampling, [])]
        return grouped([self.item_sampling[item] for item in self.prompts.row_items.tolist()])

    def _under(self, logits: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return ``StepOutput.under`` for logits [H n, T, V] of both branches."""

        def under(rows: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
            chosen = logits.unflatten(0, (self.branches, -1))[:, rows, positions]
            return self._logprobs(chosen.flatten(0, 1), allowed)

        return under
