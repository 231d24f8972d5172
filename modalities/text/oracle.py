"""A masked model that knows: the exact law of a task's right answers, so that whatever a sampler
gets wrong is the sampler's doing.

    A       the right answers of a task, all equally likely: words, one per place, and behind the
            last word the end id
    A(c)    those that agree with a partly filled canvas c at every committed place
    p(y_t = v | c) = |{y in A(c) : y_t = v}| / |A(c)|

A sampler that commits one place per call draws an answer from A, whatever the order. One that
commits several at once draws them independently of each other, and what it loses is known in closed
form (``gen.modalities.text.parallel``). The tasks are those of ParallelBench (Kang et al., arXiv
2510.04767) as ``gen.modalities.text.tasks`` states them.

Where parallel commits went wrong, A(c) may be empty. Then the law is that of the answers that agree
with c at the most places: what is nearest to being right still has a law, and a remasker that looks
at committed places sees which of them stand in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.modalities.text.tasks import WORDS, Task, answers
from gen.models.targets.masked import MaskedTarget

ENTRIES = 1 << 22  # of answers that are looked at together: memory, nothing else


class Oracle:
    """Implements ``gen.models.adapters.protocols.MaskedModel``. A condition is one id, the index of
    a task in ``tasks`` (each once).

    Ids: ``words`` (by default those that some answer has), then ``eos_token_id``, then ``mask_token_id``.
    ``length``: the places of the longest answer, or as many as said. ``tables``: per task, long [N,
    T], its right answers. ``space``: all ids but the mask are legal everywhere.

    Raises ``ValueError`` for no task, or if answers are longer than ``length`` or hold other words.
    """

    dtype = torch.float64

    def __init__(
        self,
        tasks: Sequence[Task],
        words: Sequence[str] | None = None,
        length: int | None = None,
        device: torch.device | str = "cpu",
    ):
        if not tasks:
            raise ValueError("the oracle came with no task; expected at least one")
        self.tasks, self.device = list(dict.fromkeys(tasks)), torch.device(device)
        found = [answers(task) for task in self.tasks]
        used = {word for some in found for answer in some for word in answer}
        self.words = tuple(w for w in WORDS if w in used) if words is None else tuple(words)
        longest = max(len(answer) for some in found for answer in some)
        self.length = longest if length is None else length
        if self.length < longest or not used <= set(self.words):
            raise ValueError(
                f"the oracle came with {self.length} places and the words {' '.join(self.words)!r};"
                f" the answers have up to {longest} places and the words"
                f" {' '.join(w for w in WORDS if w in used)!r}"
            )
        self.eos_token_id, self.mask_token_id = len(self.words), len(self.words) + 1
        self.vocab_size = len(self.words) + 2
        self.tables = [
            torch.tensor([self.canvas(answer) for answer in some], device=self.device)
            for some in found
        ]
        numbers = [len(table) for table in self.tables]
        self._many = torch.tensor(numbers, device=self.device)
        # tables of one size lie on top of each other, so that rows with different tasks are counted
        # together
        self._stacks = {
            n: torch.stack([table.T for table in self.tables if len(table) == n])
            for n in sorted(set(numbers))
        }  # [K, T, N]
        self._level = torch.tensor(
            [numbers[:i].count(n) for i, n in enumerate(numbers)], device=self.device
        )
        legal = torch.ones(self.length, self.vocab_size, dtype=torch.bool)
        legal[:, self.mask_token_id] = False
        said = (
            sum(
                table.flatten().bincount(minlength=self.vocab_size) / len(table)
                for table in self.tables
            )
            + 1
        )  # so that no id has never come up
        self.space = TokenSpace(
            (self.length,),
            self.vocab_size,
            legal,
            self.mask_token_id,
            eos_token_id=self.eos_token_id,
            rarity=-(said / said.sum()).log(),
        )

    def forward(self, ids: Tensor, canvas_length: int) -> Tensor:
        """Ids [B, 1 + T], a task and a canvas -> log-probabilities float64 [B, T, V], minus
        infinity for what no answer has there."""
        if ids.shape[1] != self.length + 1 or canvas_length != self.length:
            raise ValueError(
                f"the oracle came with ids {tuple(ids.shape)} for {canvas_length} places; "
                f"expected one id of a task and {self.length} places"
            )
        ids, row = ids.unique(
            dim=0, return_inverse=True
        )  # rows that began alike are alike for a while
        which, canvas = ids[:, 0], ids[:, 1:]
        count = torch.zeros(*canvas.shape, self.vocab_size, dtype=torch.float64, device=ids.device)
        for n, stack in self._stacks.items():
            for at in (
                (self._many[which] == n).nonzero()[:, 0].split(max(1, ENTRIES // (n * self.length)))
            ):
                count[at] = _count(stack[self._level[which[at]]], canvas[at], self.vocab_size)
        return (count / count.sum(-1, keepdim=True)).log()[row]

    def target(self, tasks: Sequence[Task], sampling: SamplingParams | None = None) -> MaskedTarget:
        """One row per task, of which there may be several alike. Raises ``GenError`` for a guided
        sampling: there is nothing to guide away from."""
        sampling = sampling or SamplingParams()
        if sampling.guided:
            raise GenError(
                f"sampling.guidance_scale is {sampling.guidance_scale}; expected 1, the oracle has no law"
                " without a task"
            )
        number = {task: i for i, task in enumerate(self.tasks)}
        return MaskedTarget(
            self, torch.tensor([[number[task]] for task in tasks]), self.space, sampling
        )

    def canvas(self, answer: Sequence[str]) -> list[int]:
        """The ids of an answer, with the ends behind it. Raises ``ValueError`` for a word that the
        oracle has not."""
        return [self.words.index(w) for w in answer] + [self.eos_token_id] * (
            self.length - len(answer)
        )

    def text(self, tokens: Sequence[int]) -> str:
        """What one row of T ids says, up to its end; an empty place says ``_``."""
        names = (*self.words, "", "_")
        return " ".join(names[i] for i in takewhile(lambda i: i != self.eos_token_id, tokens))


def _count(answers: Tensor, canvas: Tensor, vocab_size: int) -> Tensor:
    """How many of the answers [b, T, N] that are nearest to a canvas [b, T] have each id at each
    place: [b, T, V]."""
    agree = (answers == canvas[..., None]).sum(
        1
    )  # no answer holds the mask, so an empty place agrees with none of them
    nearest = (agree == agree.amax(1, keepdim=True)).double()
    empty = torch.zeros(*canvas.shape, vocab_size, dtype=torch.float64, device=canvas.device)
    return empty.scatter_add_(2, answers, nearest[:, None].expand(answers.shape))


def oracle_target(
    tasks: Sequence[Task],
    sampling: SamplingParams | None = None,
    words: Sequence[str] | None = None,
) -> MaskedTarget:
    """A target with one row per task, of which there may be several alike; ``target.model`` is the
    ``Oracle``. Raises as that does."""
    return Oracle(tasks, words).target(tasks, sampling)
