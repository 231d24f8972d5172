"""Beam search over the outputs of a graph, merged by their tokens (arXiv 2205.07459).

Many paths have the same tokens. Of a beginning y_1..y_n of outputs, the mass at its last vertex is

    f_n(k) = log P(y_n | v_k) + logsumexp_{j<k} ( f_{n-1}(j) + log E_jk ),      f_0(0) = 0

so that it is a sum over all of them. The ``beam_size`` beginnings of most mass go on, counted with
the mass W of what may follow (``gen.samplers.lattice.paths``), and the outputs y of n tokens
compete by log P(y) / n^alpha. The released search also adds a language model of n-grams, which is
not here; its five best tokens and nucleus of 0.9 per vertex are ``top_k`` and ``top_p``.

Guarantee: none. With ``length_penalty`` 0 and a beam of all beginnings, the most probable output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.params import integer
from gen.core.registry import register
from gen.samplers.lattice.base import Decoded, GraphRun, LatticeSampler
from gen.samplers.lattice.paths import log_product
from gen.samplers.lattice.viterbi import length_penalty


@register("sampler", "dag_beam")
@dataclass(frozen=True)
class DagBeam(LatticeSampler):
    """Search outputs by the mass of all of their paths, in one forward pass.

    ``beam_size``: beginnings that go on. ``length_penalty``: exponent of the number of tokens that
    scores are divided by.
    """

    beam_size: int = integer(10, least=1, each="row")
    length_penalty: float = length_penalty(1.1)

    guarantee = "approximate"
    reference = "the most probable output; a deterministic rule"
    aliases = {"alpha": "length_penalty", "beam": "beam_size"}

    @property
    def deterministic(self) -> bool:
        return True

    def decode(self, run: GraphRun) -> Decoded:
        links, after = run.links, run.links.completions()
        rows, size = links.last.shape
        every = torch.arange(rows, device=after.device)
        f = torch.full((rows, 1, size), -torch.inf, dtype=after.dtype, device=after.device)
        f[:, 0, 0] = 0.0
        tokens = torch.zeros(rows, 1, links.most, dtype=torch.long, device=after.device)
        best = torch.full((rows,), -torch.inf, dtype=after.dtype, device=after.device)
        found, counts = tokens[:, 0].clone(), torch.zeros_like(every)
        for count in range(links.most + 1):
            ended = torch.logsumexp(f + links.ending(count)[:, None], 2) / max(count, 1) ** (
                self.length_penalty
            )
            score, winner = ended.max(1)
            better = score > best
            found = torch.where(better[:, None], tokens[every, winner], found)
            counts = torch.where(better, count, counts)
            best = torch.where(better, score, best)
            if count < links.most:
                f, tokens = self._extend(run, f, tokens, after[:, count + 1], count)
        return Decoded(found, counts)

    def _extend(
        self, run: GraphRun, f: Tensor, tokens: Tensor, after: Tensor, position: int
    ) -> tuple[Tensor, Tensor]:
        """Add a token to the beginnings, and keep those of most mass.

        Args:
            run: the run.
            f: masses [B, K, L].
            tokens: tokens of the beginnings, long [B, K, N].
            after: W of the vertices as that position, [B, L].
            position: position of the token.
        """
        logprobs = run.output.at(position)
        logprobs = logprobs.masked_fill(logprobs.isnan(), -torch.inf)
        onward = log_product(f, run.links.inner.exp())
        whole = log_product(onward + after[:, None], logprobs.exp())
        size = whole.shape[-1]
        chosen = whole.flatten(1).topk(min(self.beam_size, whole[0].numel())).indices
        origin, token = chosen // size, chosen % size
        every = torch.arange(len(f), device=f.device)[:, None]
        emitted = logprobs.transpose(1, 2)[every, token]
        grown = tokens[every, origin].clone()
        grown[:, :, position] = token
        return onward[every, origin] + emitted, grown
