"""Text that a table drafter looks at: the prompt and the committed tokens of every row, and the
texts of finished items.

Everything here is tensors on the target's device, so that no step waits for a copy to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.draft import Verdict
from gen.samplers.engine.host import to_device
from gen.samplers.engine.outputs import NONE, Outputs
from gen.samplers.engine.step_context import CausalStep

MOST_FINISHED = 1 << 14  # tokens of finished items that are kept


@dataclass
class Text:
    """Tokens that stand before the next position, row by row.

    Attributes:
        ids: texts of finished items, then prompt and output of the row, ``NONE`` between and behind
            them, long [b, S].
        end: column behind the last committed token, long [b].
        own: first column of the row's own text.
    """

    ids: Tensor
    end: Tensor
    own: int

    def last(self, count: int) -> Tensor:
        """Return the last ``count`` tokens, the latest one last, long [b, count]."""
        back = torch.arange(count, 0, -1, device=self.ids.device)
        at = self.end[:, None] - back
        return torch.where(at < self.own, NONE, self.ids.gather(1, at.clamp_min(0)))

    def next(self, at: Tensor) -> Tensor:
        """Return the tokens in columns [b, ...], ``NONE`` beyond the last one."""
        flat = at.flatten(1)
        inside = (flat >= 0) & (flat < self.ids.shape[1])
        ids = self.ids.gather(1, flat.clamp(0, self.ids.shape[1] - 1))
        return torch.where(inside, ids, NONE).view(at.shape)

    def matches(self, tails: Tensor) -> Tensor:
        """Count the tokens up to each column that are the last ones of some tails.

        Args:
            tails: tokens, the latest one last, long [b, n, N].

        Returns:
            Lengths between 0 and N, long [b, n, S]; 0 where no known token follows the column.
        """
        size = self.ids.shape[1]
        follows = F.pad(self.ids[:, 1:], (0, 1), value=NONE) >= 0
        alive = follows[:, None].expand(-1, tails.shape[1], -1)
        length = torch.zeros_like(alive, dtype=torch.long)
        for back in range(tails.shape[2]):
            one = tails[:, :, tails.shape[2] - 1 - back, None]
            before = F.pad(self.ids, (back, 0), value=NONE)[:, None, :size]
            alive = alive & (before == one) & (one >= 0)
            length = length + alive
        return length


def prompt_tokens(target: CausalTarget) -> Tensor:
    """Return the prompts of all items as tokens of the output, right-aligned, long [N, P].

    ``TokenSpace.prompt_tokens`` says which token an id of a prompt stands for. Without it an id is
    a token if it may come anywhere. Other ids are ``NONE``.
    """
    prompts, count = target.prompts, target.items
    ids, lengths = prompts.all_tokens[:count], prompts.all_lengths[:count]
    table = target.space.prompt_tokens
    if table is None:
        every = torch.arange(target.legal.shape[-1], device=ids.device)
        table = torch.where(target.legal.any(0), every, NONE)
    table = F.pad(table.to(ids.device), (0, 1), value=NONE)
    known = table[ids.clamp(0, len(table) - 1)]
    width = ids.shape[1]
    at = torch.arange(width, device=ids.device) - (width - lengths[:, None])
    tokens = known.gather(1, at.clamp_min(0))
    return torch.where((at < 0) | (tokens >= target.legal.shape[-1]), NONE, tokens)


class Context:
    """Texts of a call: prompt and output of every row, and of finished items if asked.

    Args:
        target: the model with its items.
        keeps: whether finished items are remembered.
    """

    def __init__(self, target: CausalTarget, keeps: bool = False):
        self.target, self.keeps = target, keeps
        self._prompts, self._version = prompt_tokens(target), target.prompts.version
        self.outputs = Outputs(target)
        self.finished = self.prompts[0, :0]  # texts of finished items, one after the other

    @property
    def prompts(self) -> Tensor:
        """Prompts of all items as tokens of the output, right-aligned, long [N, P]."""
        if self._version != self.target.prompts.version:  # items were given prompts since
            self._prompts, self._version = prompt_tokens(self.target), self.target.prompts.version
        return self._prompts

    @property
    def width(self) -> int:
        """Columns of one item's text, with the ``NONE`` before it."""
        return 1 + self.prompts.shape[1] + self.outputs.tokens.shape[1]

    def read(self, step: CausalStep, tokens: Tensor) -> Text:
        """Return the texts of the rows.

        Args:
            step: context of the step.
            tokens: committed tokens of the rows, long [b, T].
        """
        if self.keeps:
            self._remember(step)
        column = torch.arange(tokens.shape[1], device=tokens.device)
        output = torch.where(column < step.start[:, None], tokens, NONE)
        own = torch.cat([self.prompts[step.rows], output], 1)
        before = F.pad(self.finished, (0, 1), value=NONE).expand(len(own), -1)
        ids = torch.cat([before, own], 1)
        first = before.shape[1]
        return Text(ids, step.start + first + self.prompts.shape[1], first)

    def _remember(self, step: CausalStep) -> None:
        """Append the texts of the items that have left the batch, in their order."""
        left = self.outputs.begin(step)
        if len(left):
            items = to_device(left, self.prompts.device)
            text = torch.cat([self.prompts[items], self.outputs.tokens[items]], 1)
            text = F.pad(text, (1, 0), value=NONE).flatten()
            whole = MOST_FINISHED // self.width * self.width
            self.finished = torch.cat([self.finished, text])[-whole:]

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        """Note what a step commits."""
        if self.keeps:
            self.outputs.accept(step, verdict)


def tails_after(tails: Tensor, parents: Tensor, tokens: Tensor) -> Tensor:
    """Return the last tokens after some drafts.

    Args:
        tails: last tokens at the root and the drafts before, long [b, L + 1, N].
        parents: columns of the drafts' parents, -1 for the root, long [b, n].
        tokens: the drafts, long [b, n].

    Returns:
        Long [b, n, N].
    """
    row = torch.arange(len(tails), device=tails.device)[:, None]
    return torch.cat([tails[row, parents + 1][..., 1:], tokens[..., None]], -1)
