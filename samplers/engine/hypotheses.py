"""Search loop: the hypotheses of an item are rows of the batch.

Every row holds a hypothesis: a text that may come out. A step is one forward pass for all rows of
all items. Each gives the distribution behind its hypothesis, and the item's ``Search`` says with
which rows and tokens the item goes on: a row may go on with several tokens (it is copied with its
cache), with one, or be dropped. Items advance independently and know nothing of each other; an item
that is over gives its row to a waiting item (``gen.samplers.engine.rows``). No random number is
drawn. Ties go to the lower hypothesis and then to the lower token id, so an item's tokens are the
same in any batch.

Scores are log-probabilities of the final distribution (``gen.core.sampling_params``): guidance,
allowed tokens, temperature and filters are in them. At temperature 0 one token is left everywhere,
and every search is greedy decoding.

A trace shows the text that came out: each token in the last forward pass that computed its
position, although the search may have settled it later.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gen.core.distributions import has_no_distribution
from gen.core.errors import GenError
from gen.core.sampler import Sampler
from gen.samplers.engine.failed import refuse_failed
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import BatchSlots
from gen.samplers.engine.stats import StatsRecorder

if TYPE_CHECKING:
    from gen.core.stats import SampleOutput
    from gen.models.targets.base import StepOutput
    from gen.models.targets.causal import CausalTarget

Text = tuple[int, ...]


class Scores(NamedTuple):
    """Distribution behind a hypothesis, as far as a search reads it.

    Attributes:
        ids: the most likely tokens, the first one first.
        logprobs: their log-probabilities; tokens without any are left out.
        entropy: of the whole distribution, in nats.
    """

    ids: list[int]
    logprobs: list[float]
    entropy: float


class Extension(NamedTuple):
    """Row of the next step.

    Attributes:
        row: row of the item that it goes on from, counted within the item.
        tokens: token at ``position``; several are superposed.
        position: position of the token; the next forward pass is about the one behind it. One that
            the row has passed already is taken back to.
        weights: of superposed tokens, which sum to 1.
    """

    row: int
    tokens: Sequence[int]
    position: int
    weights: Sequence[float] = (1.0,)


@dataclass(frozen=True)
class Item:
    """Item that a search is about.

    Attributes:
        prompt: token ids of its prompt.
        length: positions to fill.
        ends: token ids that end a text.
    """

    prompt: list[int]
    length: int
    ends: frozenset[int]

    def is_over(self, token: int, position: int) -> bool:
        """Tell whether a text is over with this token at this position."""
        return token in self.ends or position + 1 >= self.length


class Search(ABC):
    """Search of one item by the parameters of a method. It begins with one row: its prompt."""

    def __init__(self, params: Any, item: Item):
        self.params, self.item = params, item

    @abstractmethod
    def extend(self, rows: list[Scores]) -> list[Extension]:
        """Say how the item goes on behind the distributions of its rows: the rows of the next step;
        none where the search is over."""

    @abstractmethod
    def possible(self) -> list[Text]:
        """Return the texts of which one will come out or will be the beginning of it."""

    @abstractmethod
    def result(self) -> Text:
        """Return the text that comes out, up to its end, once the search is over."""


class DeterministicSampler(Sampler):
    """Causal sampler whose tokens follow from the distributions alone."""

    protocol = "causal"
    reference = "greedy decoding; a deterministic rule"
    guarantee = "approximate"

    @property
    def deterministic(self) -> bool:
        return True


class SearchSampler(DeterministicSampler):
    """Rule that searches among several texts of an item.

    Attributes:
        search: search of an item.
        superposed: whether a row may have several tokens as one input.
    """

    search: ClassVar[type[Search]]
    superposed: ClassVar[bool] = False

    @property
    def returns_logprobs(self) -> bool:
        return False  # a search takes tokens of several texts

    @abstractmethod
    def width(self, num_ends: int) -> int:
        """Count the most likely tokens of each row that the search reads, of a token space with so
        many tokens that end a text."""

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        began = time.perf_counter()
        if self.superposed:
            target.require_superposition("superposed decoding")
        run = SearchRun(self, target, trace)
        while len(run.slots):
            # 1. One forward pass behind every hypothesis
            output = run.predict()
            # 2. The one copy to the host: the most likely tokens of every row
            scores = run.to_host(output)
            # 3. Every item says with which rows and tokens it goes on
            over = run.extend(scores, output)
            # 4. Give the rows of items that are over to waiting items
            run.report(callback)
            run.retire(over)
        return run.output(time.perf_counter() - began)


class SearchRun:
    """Rows of a search loop.

    Attributes:
        slots: items of the rows; the rows of an item stand behind each other.
        start: position that each row's next forward pass is about, int64 [b].
        last: tokens before it, int64 [b, K]; before position 0 anything.
        weights: their weights, float64 [b, K].
        searches: search of every item that was begun.
        windows: of every item that was begun, positions that each forward pass was about.
        tokens: tokens of all items, int64 [N, T], on the host.
        num_known: positions of each item that are settled, int64 [N].
        num_made: tokens of each item up to its end, int64 [N].
    """

    def __init__(self, sampler: SearchSampler, target: CausalTarget, trace: bool = False):
        if target.limits is not None:
            raise GenError(
                "max_new_tokens differs between items, and a search of hypotheses takes one number;"
                " expected one, or a sampler that draws tokens"
            )
        self.target, self.sampler = target, sampler
        self.width = min(sampler.width(len(target.space.row_ends)), target.legal.shape[-1])
        self.slots = BatchSlots(target)
        self.start = np.zeros(len(self.slots), dtype=np.int64)
        self.last, self.weights = self.start[:, None], np.ones((len(self.slots), 1))
        self.searches: dict[int, Search] = {}
        self.windows: dict[int, list[list[int]]] = {}
        self.tokens = np.zeros((target.items, target.length), dtype=np.int64)
        self.num_known, self.num_made = np.zeros((2, target.items), dtype=np.int64)
        self.recorder, self.num_steps = StatsRecorder(target.items, trace), 0

    def predict(self) -> StepOutput:
        """Run the forward pass of a step: log-probabilities [b, 1, V]."""
        device = self.target.device
        last, positions = to_device(self.last, device), to_device(self.start[:, None], device)
        if last.shape[1] == 1:
            return self.target.predict(last, positions)
        weights = to_device(self.weights[:, None], device)
        return self.target.predict_superposed(last[:, None], weights, positions)

    def to_host(self, output: StepOutput) -> list[Scores]:
        """Copy the most likely tokens of every row to the host, and refuse rows without any."""
        logprobs = output.logprobs[:, 0]
        ids, largest = first_largest(logprobs, self.width)
        entropy = torch.special.entr(logprobs.exp()).sum(-1, keepdim=True)
        failed = has_no_distribution(logprobs)[:, None]
        floats = torch.cat([largest, entropy], 1).double().view(torch.int64)
        table = torch.cat([ids, failed.long(), floats], 1).cpu().numpy()
        width = ids.shape[1]
        floats = np.ascontiguousarray(table[:, width + 1 :]).view(np.float64)
        position = np.where(table[:, width] > 0, self.start, -1)
        refuse_failed(self.target, self.slots.items, position)
        found = []
        for row, values in zip(table[:, :width].tolist(), floats.tolist(), strict=True):
            count = width - values[:width].count(-np.inf)
            found.append(Scores(row[:count], values[:count], values[-1]))
        return found

    def extend(self, scores: list[Scores], output: StepOutput) -> np.ndarray:
        """Let every item go on, and note the counts of the step. Returns the rows after it whose
        item is over, bool [b]; an item that is over keeps one row."""
        items = self.slots.items
        first = np.flatnonzero(np.diff(items, prepend=-1))
        self._count(first, output)
        rows: list[Extension] = []
        over: list[bool] = []
        bounds = zip(first.tolist(), [*first[1:].tolist(), len(items)], strict=True)
        for number, (begin, behind) in zip(items[first].tolist(), bounds, strict=True):
            if number not in self.searches:
                self._begin(number)
            search = self.searches[number]
            self.windows[number].append(np.unique(self.start[begin:behind]).tolist())
            extensions = search.extend(scores[begin:behind])
            if not extensions:
                self._finish(number, search.result())
            over += [not extensions] * max(len(extensions), 1)
            going = extensions or [Extension(0, (0,), -1)]
            rows += [row._replace(row=begin + row.row) for row in going]
        index = [row.row for row in rows]
        if index != list(range(len(items))):
            self.slots.continue_as(np.array(index), items[index])
        widest = max(len(row.tokens) for row in rows) if self.sampler.superposed else 1
        self.start = np.array([row.position + 1 for row in rows])
        self.last = np.zeros((len(rows), widest), dtype=np.int64)
        self.weights = np.zeros((len(rows), widest))
        for i, row in enumerate(rows):
            self.last[i, : len(row.tokens)] = row.tokens
            self.weights[i, : len(row.tokens)] = row.weights
        return np.array(over)

    def _begin(self, number: int) -> None:
        """Begin the search of an item."""
        prompts, space = self.target.prompts, self.target.space
        length = int(prompts.host_lengths[number])
        prompt = prompts.all_tokens[number, :length].tolist()
        item = Item(prompt, self.target.length, frozenset(space.row_ends))
        self.searches[number] = self.sampler.search(self.sampler, item)
        self.windows[number] = []

    def _count(self, first: np.ndarray, output: StepOutput) -> None:
        """Note the counts of a step: one forward pass for every item, at its ``first`` row."""
        ran = np.zeros(len(self.slots), dtype=np.int64)
        ran[first] = 1
        if output.ran_network is not None:
            ran[first] = np.logical_or.reduceat(output.ran_network.cpu().numpy(), first)
        counts = output.num_computed_tokens, output.num_computed_positions
        self.recorder.add(self.slots.items, *counts, ran=ran)
        self.num_steps += 1

    def _finish(self, number: int, text: Text) -> None:
        """Write the tokens of an item that is over, filled up with the eos token, and its trace."""
        eos_token_id = self.target.space.eos_token_id
        self.tokens[number, len(text) :] = 0 if eos_token_id is None else eos_token_id
        self.tokens[number, : len(text)] = text
        self.num_known[number], self.num_made[number] = self.target.length, len(text)
        if self.recorder.traces is None:
            return
        windows = self.windows[number]
        last_pass = {n: step for step, window in enumerate(windows) for n in window}
        committed: list[dict[int, int]] = [{} for _ in windows]
        for n, token in enumerate(self.tokens[number].tolist()):
            committed[last_pass[n] if n < len(text) else -1][n] = token
        for window, tokens in zip(windows, committed, strict=True):
            self.recorder.add_trace(number, window, (), tokens)

    def report(self, callback: Callable | None) -> None:
        """Tell the callback how far all items are."""
        if callback is None:
            return
        for number in np.unique(self.slots.items).tolist():
            if self.num_known[number] < self.target.length:
                shared = shared_beginning(self.searches[number].possible())
                self.tokens[number, : len(shared)] = shared
                self.num_known[number] = len(shared)
        known = np.arange(self.target.length) < self.num_known[:, None]
        callback(
            {
                "step": self.num_steps,
                "done": int(self.num_known.sum()),
                "total": self.tokens.size,
                "tokens": to_device(self.tokens.copy(), self.target.device),
                "known": to_device(known, self.target.device),
            }
        )

    def retire(self, over: np.ndarray) -> None:
        """Give the rows of items that are over (bool [b]) to waiting items, or drop them."""
        change = self.slots.retire(over)
        if change is not None:
            self.start = change.follow(self.start, 0)
            self.last, self.weights = change.follow(self.last), change.follow(self.weights)

    def output(self, seconds: float) -> SampleOutput:
        """Collect the result."""
        tokens = to_device(self.tokens, self.target.device)
        return self.recorder.output(tokens, seconds, self.num_made.tolist())


def first_largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the ``count`` largest numbers of each row of x [b, V], the largest first: their indices,
    long [b, count], and they themselves. Equal ones come in the order of their index, which
    ``topk`` does not promise."""
    least = x.topk(count, -1).values[:, -1:]
    above, equal = x > least, x == least
    room = count - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    order = torch.arange(x.shape[-1], 0, -1, device=x.device)
    index = torch.where(chosen, order, 0).topk(count, -1).indices
    largest, rank = x.gather(-1, index).sort(dim=-1, descending=True, stable=True)
    return index.gather(-1, rank), largest


def shared_beginning(texts: Sequence[Text]) -> Text:
    """Return the tokens that all texts begin with."""
    first, last = min(texts), max(texts)
    for n, (a, b) in enumerate(zip(first, last, strict=False)):
        if a != b:
            return first[:n]
    return min(first, last, key=len)
