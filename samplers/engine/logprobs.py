"""Log-probabilities of committed tokens, recorded from the forward passes that committed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.logprobs import ItemLogprobs, TokenLogprob
from gen.samplers.engine.host import to_device

if TYPE_CHECKING:
    from gen.models.targets.base import StepOutput


class LogprobRecorder:
    """Record the log-probabilities of committed tokens and of the most probable ones.

    They stay on the device until decoding ends, so that no step waits for them.

    Args:
        items: number of items N.
        count: number of most probable tokens K of every position; 0 records the committed ones
            alone.

    Attributes:
        steps: of the n tokens of each step, their items int64 [n] on the host; the tokens long [n]
            and their log-probabilities [n]; the most probable ones long [n, K] and theirs [n, K].
    """

    def __init__(self, items: int, count: int):
        self.items, self.count = items, count
        self.steps: list[tuple[np.ndarray, Tensor, Tensor, Tensor, Tensor]] = []

    def add(
        self,
        items: np.ndarray,
        num_committed: np.ndarray,
        tokens: Tensor,
        path: Tensor | None,
        output: StepOutput,
    ) -> None:
        """Record the tokens that a step commits, in the order of their positions.

        Token k of a row was drawn from column k of the forward pass; in a tree, from the column of
        the accepted draft before it.

        Args:
            items: item of each row, int64 [b].
            num_committed: tokens to commit, int64 [b].
            tokens: tokens of the verdict, long [b, W].
            path: numbers of the accepted drafts of a tree, long [b, L]; None for a chain.
            output: outcome of the forward pass.
        """
        if output.raw is None:
            raise ValueError("the target gives no log-probabilities before temperature and filters")
        ordinal = np.arange(int(num_committed.max()))
        owner, number = (ordinal < num_committed[:, None]).nonzero()
        row, index = (to_device(x, tokens.device) for x in (owner, number))
        column = index if path is None else F.pad(path + 1, (1, 0))[row, index]
        logprobs, drawn = output.raw()[row, column], tokens[row, index]
        chosen = logprobs.gather(1, drawn[:, None])[:, 0]
        best = logprobs.topk(min(self.count, logprobs.shape[1]), dim=1)
        self.steps.append((items[owner], drawn, chosen, best.indices, best.values))

    def of_item(self, item: int) -> LogprobRecorder:
        """Return a recorder of one item alone."""
        own = LogprobRecorder(1, self.count)
        for owners, *columns in self.steps:
            rows = (owners == item).nonzero()[0]
            if len(rows):
                at = to_device(rows, columns[0].device)
                tokens, chosen, ids, values = (x[at] for x in columns)
                own.steps.append((np.zeros_like(rows), tokens, chosen, ids, values))
        return own

    def output(self) -> list[ItemLogprobs]:
        """Return the log-probabilities of every item's tokens up to its eos token, inclusive."""
        found: list[ItemLogprobs] = [[] for _ in range(self.items)]
        if not self.steps:
            return found
        owners, *columns = zip(*self.steps, strict=True)
        tokens = (torch.cat(x).tolist() for x in columns)
        pairs = zip(np.concatenate(owners).tolist(), *tokens, strict=True)
        for item, token, chosen, ids, values in pairs:
            top = tuple((i, x) for i, x in zip(ids, values, strict=True) if x > -torch.inf)
            found[item].append(TokenLogprob(token, chosen, top))
        return found
