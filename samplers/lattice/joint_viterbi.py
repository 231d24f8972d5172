"""Joint Viterbi decoding of a graph (Shao et al., arXiv 2210.05193).

For every number of tokens n, the most probable path a of n vertices with its tokens

    S_n = log P_0 + max_a  sum_{i=1..n} [ log E_{a_{i-1}, a_i} + log P_{a_i} ] + log E_{a_n, L-1}
    log P_j = max_v log P(v | v_j),      a_0 = 0

and of these the n with the largest S_n / n^beta.

Guarantee: with ``length_penalty`` 0, the most probable path and tokens of all allowed numbers of
tokens; for one number of tokens they are that for any penalty. Otherwise none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gen.core.registry import register
from gen.samplers.lattice.base import GraphRun
from gen.samplers.lattice.viterbi import PathSampler


@register("sampler", "joint_viterbi")
@dataclass(frozen=True)
class JointViterbi(PathSampler):
    """Find the most probable path and tokens of every length and choose a length, in one pass.

    ``length_penalty``: exponent of the number of tokens that scores are divided by. ``max_length``:
    largest number of tokens; None for that of the graph.
    """

    papers = ("2210.05193", "2205.07459")
    reference = "the most probable path and tokens; a deterministic rule"

    def rewards(self, run: GraphRun) -> tuple[list[Tensor], Tensor]:
        found = [run.best_rewards(position) for position in range(run.links.most)]
        # bos, which no position may hold: the emission of the model itself
        return found, run.output.graph.emissions[:, 0].amax(-1)
