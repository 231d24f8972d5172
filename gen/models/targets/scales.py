"""Target of next-scale models: all positions of a scale in parallel, given the scales before it.

The scales share one distribution, whose guidance grows: with the guidance scale g of the sampling
parameters, scale k of S has

    g_k = 1 + (g - 1) k / (S - 1)

so that scale 0 is unguided and the last one is guided by g (VAR, arXiv 2404.02905). The pass that
refines a scale (HMAR, arXiv 2506.04421) has a guidance scale of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.protocols import ScalesModel, ScalesState
from gen.models.targets.base import StepOutput
from gen.models.targets.canvas_rule import AnyOrderTarget


class ScalesTarget(AnyOrderTarget):
    """Target of one scale after the other. All rows are in the same scale, so that none can take
    another item.

    Attributes:
        slices: positions of every scale.
        scale: the scale that is decoded now.
        f_hat: sum of the scales before it, [B, D, H, W].
        passes: forward passes so far.

    Raises:
        GenError: the scales of model and token space differ.
    """

    model: ScalesModel

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        quantize, blocks = self.model.quantize, self.space.blocks
        sizes = [block.stop - block.start for block in blocks] or quantize.lengths
        if sizes != quantize.lengths or sum(sizes) != self.length:
            raise GenError(
                f"the model has scales of {quantize.lengths} positions; expected those of the token"
                f" space, {sizes if blocks else self.length}"
            )
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self.slices = [slice(end - n, end) for n, end in zip(sizes, ends, strict=True)]
        self.scale, self.passes, self.f_hat = 0, 0, quantize.zeros(self.rows)
        # conditions by the number of branches of guidance, and those that no pass has read
        self._filling = self.model.begin(self.prompt, self.prompt_length)
        self._refining: dict[int, ScalesState] = {}
        self._unread = {0}

    @property
    def here(self) -> slice:
        """Positions of the scale that is decoded now."""
        return self.slices[self.scale]

    def sampling_at(self, scale: int) -> SamplingParams:
        """Return the sampling parameters of a scale."""
        last = len(self.slices) - 1
        ratio = scale / last if last else 0.0
        return replace(self.sampling, guidance_scale=1 + (self.sampling.guidance_scale - 1) * ratio)

    def maps(self) -> Tensor:
        """Reduce the sum of the scales before to the sides of this one: [B, n_k, D]."""
        return self.model.quantize.down(self.f_hat, self.scale).flatten(2).transpose(1, 2)

    def predict(self, rows: Tensor | None = None) -> StepOutput:
        """Run the pass that fills the scale: log-probabilities [n, n_k, V].

        Args:
            rows: rows whose scales are filled, long [n], of a Markov model; None means all.
        """
        state, maps = self._filling, self.maps()
        if rows is not None:
            state, maps = state.select(self.prompts.branch_rows(rows)), maps[rows]
        logits = self.model.fill(state, torch.cat([maps] * self.branches), self.scale)
        return self._output(logits, self.sampling_at(self.scale), self.branches, 0)

    def refine(
        self, ids: Tensor, hidden: Tensor, guidance: float = 1.0, rows: Tensor | None = None
    ) -> StepOutput:
        """Run the pass that refines the scale: log-probabilities [n, n_k, V].

        Args:
            ids: tokens of the scale, long [n, n_k]; a model that leaks reads masked ones too.
            hidden: bool [n, n_k], masked positions.
            guidance: guidance scale; 1 spares the unconditional half.
            rows: rows whose scales these are, long [n]; None means one per row.

        Raises:
            GenError: guidance where there is no unconditional branch.
        """
        params = replace(self.sampling, guidance_scale=guidance)
        branches = 2 if params.guided else 1
        if branches > self.branches:
            raise GenError(
                f"the refining pass has guidance {guidance}, and sampling.guidance_scale is 1, so"
                " that there are no unconditional prompts; expected another guidance_scale"
            )
        if branches not in self._refining:
            count = branches * self.rows
            prompts = self.prompt[:count], self.prompt_length[:count]
            self._refining[branches] = self.model.begin(*prompts)
            self._unread.add(branches)
        state, maps = self._refining[branches], self.maps()
        if rows is not None:
            chosen = torch.cat([rows + h * self.rows for h in range(branches)])
            state, maps = state.select(chosen), maps[rows]
        maps, ids, hidden = (torch.cat([x] * branches) for x in (maps, ids, hidden))
        logits = self.model.refine(state, maps, ids, hidden, self.scale)
        return self._output(logits, params, branches, branches)

    def _output(
        self, logits: Tensor, params: SamplingParams, branches: int, key: int
    ) -> StepOutput:
        """Turn the logits [H n, n_k, V] of a pass into log-probabilities, and count it."""
        cond, uncond = self._split(logits) if branches == self.branches else (logits, None)
        z = params.guide(cond[..., : self.legal.shape[-1]], uncond if params.guided else None)
        if self.bias is not None:
            z = z + self.bias.to(z)
        legal, plain = self.legal[self.here], SamplingParams()
        first = self.model.prefix_length if key in self._unread else 0
        self._unread.discard(key)
        self.passes += 1
        count = (logits.shape[1] + first) * branches
        return StepOutput(
            params(z, None, legal),
            count,
            count,
            raw=lambda: plain(z, None, legal),
            under=lambda rows, positions, allowed: params(z[rows, positions], None, allowed),
        )

    def commit(self, ids: Tensor) -> None:
        """Add the tokens of the scale, long [B, n_k], and go on to the next one."""
        self.commit_vectors(self.model.quantize.embedding(ids))

    def commit_vectors(self, vectors: Tensor) -> None:
        """Add vectors [B, n_k, D] in place of tokens, and go on to the next scale."""
        with torch.no_grad():
            self.f_hat = self.f_hat + self.model.quantize.up(vectors, self.scale)
        self.scale += 1

    def keep(self, rows: Tensor) -> None:
        """Keep rows, bool [B] or their numbers long [n], which may repeat; drop the others."""
        numbers = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        for branches, state in self._refining.items():
            chosen = torch.cat([numbers + h * self.rows for h in range(branches)])
            self._refining[branches] = state.select(chosen)
        self._filling = self._filling.select(self.prompts.branch_rows(numbers))
        self.f_hat = self.f_hat[numbers]
        super().keep(rows)
