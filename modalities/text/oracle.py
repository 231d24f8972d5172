"""Oracle: a masked model with the exact distribution of a task's right answers, so every error of a
sampler is the sampler's own.

    A       the right answers of a task, all equally likely: one word per position, and the eos
            token behind the last word
    A(c)    those that agree with a partly unmasked canvas c at every committed position
    p(y_t = v | c) = |{y in A(c) : y_t = v}| / |A(c)|

A sampler that commits one position per forward pass draws an answer from A, whatever the order. A
sampler that commits several at once draws them independently, and its loss is known in closed form
(``gen.modalities.text.parallel``). The tasks are those of ParallelBench (Kang et al., arXiv
2510.04767) as stated by ``gen.modalities.text.tasks``.

After wrong parallel commits, A(c) may be empty. Then the distribution is that of the answers that
agree with c at the most positions. It stays defined, and a remasker that reads committed positions
can tell which of them conflict.
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

ENTRIES = 1 << 22  # answers per chunk, which bounds memory and changes no result


class Oracle:
    """Implementation of ``gen.models.adapters.protocols.MaskedModel`` whose condition is one id,
    the index of a task in ``tasks`` (each once).

    Ids are ``words`` (by default those of the answers), then ``eos_token_id``, then
    ``mask_token_id``.

    Attributes:
        length: positions of the longest answer, or the number passed.
        tables: per task, long [N, T], its right answers.
        space: token space in which all ids but the mask are allowed everywhere.

    Raises:
        ValueError: there is no task, or answers are longer than ``length`` or hold other words.
    """

    dtype = torch.float64
    ragged, shift = False, 0  # prompts are one id, and logits are about their own position

    def __init__(
        self,
        tasks: Sequence[Task],
        words: Sequence[str] | None = None,
        length: int | None = None,
        device: torch.device | str = "cpu",
    ):
        if not tasks:
            raise ValueError("the oracle got no task; expected at least one")
        self.tasks, self.device = list(dict.fromkeys(tasks)), torch.device(device)
        right_answers = [answers(task) for task in self.tasks]
        used = {word for some in right_answers for answer in some for word in answer}
        self.words = tuple(w for w in WORDS if w in used) if words is None else tuple(words)
        longest = max(len(answer) for some in right_answers for answer in some)
        self.length = longest if length is None else length
        if self.length < longest or not used <= set(self.words):
            raise ValueError(
                f"the oracle has {self.length} positions and the words"
                f" {' '.join(self.words)!r}; expected {longest} positions and the words"
                f" {' '.join(w for w in WORDS if w in used)!r}, which the answers need"
            )
        self.eos_token_id, self.mask_token_id = len(self.words), len(self.words) + 1
        self.vocab_size = len(self.words) + 2
        self.tables = [
            torch.tensor([self.canvas(answer) for answer in some], device=self.device)
            for some in right_answers
        ]
        numbers = [len(table) for table in self.tables]
        self._many = torch.tensor(numbers, device=self.device)
        # tables of one size are stacked, so that rows with different tasks are counted together
        self._stacks = {
            n: torch.stack([table.T for table in self.tables if len(table) == n])
            for n in sorted(set(numbers))
        }  # [K, T, N]
        self._level = torch.tensor(
            [numbers[:i].count(n) for i, n in enumerate(numbers)], device=self.device
        )
        legal = torch.ones(self.length, self.vocab_size, dtype=torch.bool)
        legal[:, self.mask_token_id] = False
        # initial counts, so that no id is unseen
        counts = (
            sum(
                table.flatten().bincount(minlength=self.vocab_size) / len(table)
                for table in self.tables
            )
            + 1
        )
        self.space = TokenSpace(
            (self.length,),
            self.vocab_size,
            legal,
            self.mask_token_id,
            eos_token_id=self.eos_token_id,
            delimiters=tuple(i for i, word in enumerate(self.words) if word == "="),
            rarity=-(counts / counts.sum()).log(),
        )

    def forward(self, ids: Tensor, canvas_length: int) -> Tensor:
        """Log-probabilities float64 [B, T, V] for ids [B, 1 + T], a task and a canvas; minus
        infinity for ids that no answer has there.
        """
        if ids.shape[1] != self.length + 1 or canvas_length != self.length:
            raise ValueError(
                f"the oracle got ids {tuple(ids.shape)} for {canvas_length} positions; expected"
                f" one id of a task and {self.length} positions"
            )
        # rows that begin alike stay alike for a while
        ids, row = ids.unique(dim=0, return_inverse=True)
        which, canvas = ids[:, 0], ids[:, 1:]
        count = torch.zeros(*canvas.shape, self.vocab_size, dtype=torch.float64, device=ids.device)
        for n, stack in self._stacks.items():
            for at in (
                (self._many[which] == n).nonzero()[:, 0].split(max(1, ENTRIES // (n * self.length)))
            ):
                count[at] = _count(stack[self._level[which[at]]], canvas[at], self.vocab_size)
        return (count / count.sum(-1, keepdim=True)).log()[row]

    def target(self, tasks: Sequence[Task], sampling: SamplingParams | None = None) -> MaskedTarget:
        """Target with one row per task; tasks may repeat.

        Raises:
            GenError: ``sampling`` is guided; there is no unconditional distribution.
        """
        sampling = sampling or SamplingParams()
        if sampling.guided:
            raise GenError(
                f"sampling.guidance_scale is {sampling.guidance_scale}; expected 1, the oracle"
                " has no unconditional distribution"
            )
        number = {task: i for i, task in enumerate(self.tasks)}
        return MaskedTarget(
            self, torch.tensor([[number[task]] for task in tasks]), self.space, sampling
        )

    def canvas(self, answer: Sequence[str]) -> list[int]:
        """Ids of an answer, followed by eos tokens.

        Raises:
            ValueError: the oracle lacks a word.
        """
        return [self.words.index(w) for w in answer] + [self.eos_token_id] * (
            self.length - len(answer)
        )

    def text(self, tokens: Sequence[int]) -> str:
        """Words of one row of T ids up to its end; ``_`` for a masked position."""
        names = (*self.words, "", "_")
        return " ".join(names[i] for i in takewhile(lambda i: i != self.eos_token_id, tokens))


def _count(answers: Tensor, canvas: Tensor, vocab_size: int) -> Tensor:
    """Count the answers [b, T, N] nearest to a canvas [b, T] that have each id at each position:
    [b, T, V].
    """
    # no answer holds the mask, so a masked position agrees with none of them
    agree = (answers == canvas[..., None]).sum(1)
    nearest = (agree == agree.amax(1, keepdim=True)).double()
    empty = torch.zeros(*canvas.shape, vocab_size, dtype=torch.float64, device=canvas.device)
    return empty.scatter_add_(2, answers, nearest[:, None].expand(answers.shape))


def oracle_target(
    tasks: Sequence[Task],
    sampling: SamplingParams | None = None,
    words: Sequence[str] | None = None,
) -> MaskedTarget:
    """Target with one row per task; tasks may repeat. ``target.model`` is the ``Oracle``, whose
    errors apply.
    """
    return Oracle(tasks, words).target(tasks, sampling)
