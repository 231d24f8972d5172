"""Log-probabilities of committed tokens, recorded from the forward passes that committed them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.logprobs import ItemLogprobs, TokenLogprob
from gen.models.targets.base import StepOutput
from gen.samplers.engine.host import to_device


class LogprobRecorder:
    """Record the log-probabilities of committed tokens and of the most probable ones.

    They stay on the device until decoding ends, so that no step waits for them.

    Args:
        items: number of items N.
        count: number of most probable tokens of every position; 0 records the committed ones alone.
    """

    def __init__(self, items: int, count: int):
        self.items, self.count = items, count
        self.owners: list[np.ndarray] = []
        self.tokens: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self.top: list[tuple[Tensor, Tensor]] = []

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
        self.owners.append(items[owner])
        self.tokens.append(drawn)
        self.chosen.append(logprobs.gather(1, drawn[:, None])[:, 0])
        best = logprobs.topk(min(self.count, logprobs.shape[1]), dim=1)
        self.top.append((best.indices, best.values))

    def of_item(self, item: int) -> LogprobRecorder:
        """Return a recorder of one item alone."""
        own = LogprobRecorder(1, self.count)
        columns = (self.owners, self.tokens, self.chosen, self.top)
        for owners, tokens, chosen, top in zip(*columns, strict=True):
            rows = (owners == item).nonzero()[0]
            if len(rows):
                at = to_device(rows, tokens.device)
                own.owners.append(np.zeros(len(rows), dtype=np.int64))
                own.tokens.append(tokens[at])
                own.chosen.append(chosen[at])
                own.top.append((top[0][at], top[1][at]))
        return own

    def output(self) -> list[ItemLogprobs]:
        """Return the log-probabilities of every item's tokens up to its eos token, inclusive."""
        found: list[ItemLogprobs] = [[] for _ in range(self.items)]
        if not self.owners:
            return found
        ids, values = (torch.cat(x).tolist() for x in zip(*self.top, strict=True))
        columns = torch.cat(self.tokens).tolist(), torch.cat(self.chosen).tolist(), ids, values
        owners = np.concatenate(self.owners).tolist()
        for item, token, chosen, top_ids, top_values in zip(owners, *columns, strict=True):
            pairs = zip(top_ids, top_values, strict=True)
            top = tuple((i, x) for i, x in pairs if x > -torch.inf)
            found[item].append(TokenLogprob(token, chosen, top))
        return found
