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
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.sampling_params import has_no_distribution
from gen.core.stats import SampleOutput
from gen.models.targets.base import StepOutput
from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.failed import refuse_failed
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import BatchSlots
from gen.samplers.engine.stats import StatsRecorder

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
    """Search of one item, which begins with one row: its prompt."""

    @abstractmethod
    def extend(self, rows: list[Scores]) -> list[Extension]:
        """Say how the item goes on.

        Args:
            rows: distributions of the item's rows.

        Returns:
            Rows of the next step; none where the search is over.
        """

    @abstractmethod
    def possible(self) -> list[Text]:
        """Return the texts of which one will come out or will be the beginning of it."""

    @abstractmethod
    def result(self) -> Text:
        """Return the text that comes out, up to its end, once the search is over."""


@dataclass
class Progress:
    """Progress of one item.

    Attributes:
        search: its search.
        windows: positions that every forward pass was about.
    """

    search: Search
    windows: list[list[int]] = field(default_factory=list)


def decode_hypotheses(
    target: CausalTarget,
    search: Callable[[Item], Search],
    width: int,
    *,
    superposed: bool = False,
    trace: bool = False,
    callback: Callable | None = None,
) -> SampleOutput:
    """Decode every item of a target by a search.

    Args:
        target: model, prompts and sampling parameters of N items.
        search: makes the search of an item.
        width: most likely tokens of each row that the search reads.
        superposed: whether rows may have several tokens as one input.
        trace: whether to record every step.
        callback: called after every step with its number, the tokens and which are known: those
            that all texts of an item share.
    """
    began = time.perf_counter()
    state = SearchState(target, search, width, superposed, trace)
    while len(state.slots):
        # 1. One forward pass behind every hypothesis
        output = state.predict()
        # 2. The one copy to the host: the most likely tokens of every row
        scores = state.to_host(output)
        state.record(output)
        # 3. Every item says with which rows and tokens it goes on
        over = state.extend(scores)
        # 4. Give the rows of items that are over to waiting items
        state.report(callback)
        state.retire(over)
    return state.output(time.perf_counter() - began)


class SearchState:
    """Rows of a search loop.

    Attributes:
        slots: items of the rows; the rows of an item stand behind each other.
        start: position that each row's next forward pass is about, int64 [b].
        last: tokens before it, int64 [b, K]; before position 0 anything.
        weights: their weights, float64 [b, K].
        progress: progress of every item that was begun.
        tokens: tokens of all items, int64 [N, T], on the host.
        num_known: positions of each item that are settled, int64 [N].
        num_made: tokens of each item up to its end, int64 [N].
    """

    def __init__(
        self,
        target: CausalTarget,
        search: Callable[[Item], Search],
        width: int,
        superposed: bool,
        trace: bool,
    ):
        self.target, self.make, self.superposed = target, search, superposed
        self.width = min(width, target.legal.shape[-1])
        self.slots = BatchSlots(target)
        rows = len(self.slots)
        self.start = np.zeros(rows, dtype=np.int64)
        self.last, self.weights = np.zeros((rows, 1), dtype=np.int64), np.ones((rows, 1))
        self.progress: dict[int, Progress] = {}
        self.tokens = np.zeros((target.items, target.length), dtype=np.int64)
        self.num_known = np.zeros(target.items, dtype=np.int64)
        self.num_made = np.zeros(target.items, dtype=np.int64)
        self.recorder = StatsRecorder(target.items, trace)
        self.num_steps = 0
        self.ends = frozenset(target.space.row_ends)
        if target.limits is not None:
            raise GenError(
                "max_new_tokens differs between items, and a search of hypotheses takes one number;"
                " expected one, or a sampler that draws tokens"
            )

    def item(self, number: int) -> Item:
        """Describe an item for its search."""
        prompts = self.target.prompts
        length = int(prompts.host_lengths[number])
        prompt = prompts.all_tokens[number, :length].tolist()
        return Item(prompt, self.target.length, self.ends)

    def predict(self) -> StepOutput:
        """Run the forward pass of a step: log-probabilities [b, 1, V]."""
        device = self.target.device
        last, positions = to_device(self.last, device), to_device(self.start[:, None], device)
        if last.shape[1] == 1:
            return self.target.predict(last, positions)
        weights = to_device(self.weights[:, None], device)
        return self.target.predict_superposed(last[:, None], weights, positions)

    def to_host(self, output: StepOutput) -> list[Scores]:
        """Copy the most likely tokens of every row to the host.

        Raises:
            GenError: a row has no distribution.
        """
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

    def groups(self) -> list[tuple[int, int, int]]:
        """List the items of the batch with their first row and the one behind their last."""
        items = self.slots.items
        first = np.flatnonzero(np.diff(items, prepend=-1))
        behind = np.append(first[1:], len(items))
        return list(zip(items[first].tolist(), first.tolist(), behind.tolist(), strict=True))

    def record(self, output: StepOutput) -> None:
        """Note the counts of a step: one forward pass for every item."""
        groups, positions = self.groups(), output.num_computed_positions
        is_first = np.zeros(len(self.slots), dtype=bool)
        is_first[[first for _, first, _ in groups]] = True
        ran: np.ndarray = is_first
        if output.ran_network is not None:
            rows = output.ran_network.cpu().numpy()
            ran = is_first.copy()
            for _, first, behind in groups:
                ran[first] = rows[first:behind].any()
        items = self.slots.items
        self.recorder.add(items, output.num_computed_tokens, positions, ran=ran.astype(np.int64))
        self.num_steps += 1
        for number, first, behind in groups:
            if number not in self.progress:
                self.progress[number] = Progress(self.make(self.item(number)))
            window = np.unique(self.start[first:behind]).tolist()
            self.progress[number].windows.append(window)

    def extend(self, scores: list[Scores]) -> np.ndarray:
        """Let every item go on.

        Returns:
            Rows after it whose item is over, bool [b]; an item that is over keeps one row.
        """
        index: list[int] = []
        rows: list[Extension] = []
        over: list[bool] = []
        for number, first, behind in self.groups():
            search = self.progress[number].search
            extensions = search.extend(scores[first:behind])
            if not extensions:
                self._finish(number, search.result())
            for extension in extensions or [Extension(0, (0,), -1)]:
                index.append(first + extension.row)
                rows.append(extension)
                over.append(not extensions)
        if index != list(range(len(self.slots))):
            self.slots.continue_as(np.array(index), self.slots.items[index])
        widest = max(len(row.tokens) for row in rows) if self.superposed else 1
        self.start = np.asarray([row.position + 1 for row in rows], dtype=np.int64)
        self.last = np.zeros((len(rows), widest), dtype=np.int64)
        self.weights = np.zeros((len(rows), widest))
        for i, row in enumerate(rows):
            self.last[i, : len(row.tokens)] = row.tokens
            self.weights[i, : len(row.tokens)] = row.weights
        return np.asarray(over, dtype=bool)

    def _finish(self, number: int, text: Text) -> None:
        """Write the tokens of an item that is over, filled up with the eos token."""
        eos_token_id = self.target.space.eos_token_id
        self.tokens[number, len(text) :] = 0 if eos_token_id is None else eos_token_id
        self.tokens[number, : len(text)] = text
        self.num_known[number], self.num_made[number] = self.target.length, len(text)
        if self.recorder.traces is not None:
            self._trace(number, text)

    def _trace(self, number: int, text: Text) -> None:
        """Record the trace of an item that is over."""
        windows = self.progress[number].windows
        last_pass = {n: step for step, window in enumerate(windows) for n in window}
        committed: list[dict[int, int]] = [{} for _ in windows]
        for n, token in enumerate(self.tokens[number].tolist()):
            step = last_pass[n] if n < len(text) else len(windows) - 1
            committed[step][n] = token
        for window, tokens in zip(windows, committed, strict=True):
            self.recorder.add_trace(number, window, (), tokens)

    def report(self, callback: Callable | None) -> None:
        """Tell the callback how far all items are."""
        if callback is None:
            return
        for number in np.unique(self.slots.items).tolist():
            if self.num_known[number] < self.target.length:
                shared = shared_beginning(self.progress[number].search.possible())
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
    """Find the ``count`` largest numbers of each row of x [b, V], the largest first.

    Equal ones come in the order of their index, which ``topk`` does not promise.

    Returns:
        Their indices, long [b, count], and they themselves.
    """
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
