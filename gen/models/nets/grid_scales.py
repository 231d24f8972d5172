"""Architecture of the built-in next-scale models: a Llama trunk over the token maps of a residual
quantiser, coarse to fine.

A sequence is a condition of ``prefix_length`` words, then the scales. The input of a position of
scale k is the sum of all earlier scales, reduced to the sides of scale k (VAR, arXiv 2404.02905),
and its output is the token of that same position.

fill     a scale sees the condition, itself, and the earlier scales; with ``markov`` not those
         (HMAR, arXiv 2506.04421), since its input holds their sum
refine   a Markov model reads the tokens of its own scale too, some of them masked: its last
         ``tail_layers`` layers exist twice, once for each of the two passes
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, LlamaConfig, LlamaModel, PreTrainedModel

from gen.models.load.cache_argument import with_cache
from gen.models.load.transformers_compat import Cache
from gen.models.nets.residual_scales import ResidualScales


class GridScalesConfig(LlamaConfig):
    """``LlamaConfig`` plus the scales. ``vocab_size`` counts condition words.

    ``scales``: (height, width) of every scale. ``codes``, ``channels``, ``rho``, ``shared_phi``:
    those of the frontend's quantiser. ``prefix_length``: words of a condition. ``markov``: a scale
    does not see the earlier ones. ``tail_layers``: last layers that a Markov model has for each of
    its two passes; 0 for a model that cannot refine.
    """

    model_type = "gen_grid_scales"

    def __init__(
        self,
        scales=((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (8, 8)),
        codes=256,
        channels=16,
        rho=0.5,
        shared_phi=4,
        prefix_length=8,
        markov=False,
        tail_layers=0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.scales = [list(sides) for sides in scales]
        self.codes, self.channels, self.rho, self.shared_phi = codes, channels, rho, shared_phi
        self.prefix_length, self.markov, self.tail_layers = prefix_length, markov, tail_layers
        self.causal = False


class GridScalesModel(PreTrainedModel):
    """Trunk, heads and a copy of the frontend's quantiser, which makes the inputs.

    Attributes:
        quantize: quantiser of the frontend.
        base: layers of both passes.
        fill, refine: last layers of each pass, of a model that refines.
    """

    config_class = GridScalesConfig
    base_model_prefix = ""
    _supports_sdpa = True

    def __init__(self, config: GridScalesConfig):
        super().__init__(config)
        d, tail = config.hidden_size, config.tail_layers
        self.quantize = ResidualScales(
            config.scales, config.codes, config.channels, config.rho, config.shared_phi
        )
        self.words = nn.Embedding(config.vocab_size, d)
        self.prefix = nn.Embedding(config.prefix_length, d)
        self.enter = nn.Linear(config.channels, d)
        self.levels = nn.Embedding(len(config.scales), d)
        self.positions = nn.Embedding(sum(self.quantize.lengths), d)
        self.base = _trunk(config, config.num_hidden_layers - tail)
        self.head = nn.Linear(d, config.codes, bias=False)
        if tail:
            self.base.norm = nn.Identity()
            self.fill, self.refine = _trunk(config, tail), _trunk(config, tail)
            self.unknown = nn.Parameter(torch.zeros(d))
            self.refine_head = nn.Linear(d, config.codes, bias=False)
        self.post_init()

    @property
    def refines(self) -> bool:
        """True if the model has the pass that refines."""
        return self.config.tail_layers > 0

    def embed_words(self, words: Tensor) -> Tensor:
        """Embed a condition [B, P]: [B, P, C]."""
        return self.words(words) + self.prefix.weight

    def embed_maps(self, maps: Tensor, scale: int) -> Tensor:
        """Embed the reduced sum of the scales before one scale, [B, n_k, D]: [B, n_k, C]."""
        first = sum(self.quantize.lengths[:scale])
        locations = self.positions.weight[first : first + maps.shape[1]]
        return self.enter(maps) + self.levels.weight[scale] + locations

    def embed_refined(self, maps: Tensor, own: Tensor, hidden: Tensor, scale: int) -> Tensor:
        """Embed a scale of the pass that refines: [B, n_k, C].

        Args:
            maps: reduced sum of the scales before it, [B, n_k, D].
            own: its reduced known tokens, [B, n_k, D] (``ResidualScales.own``).
            hidden: bool [B, n_k], masked positions.
            scale: the scale.
        """
        known = nn.functional.linear(own, self.enter.weight)
        tokens = torch.where(hidden[..., None], self.unknown.to(known.dtype), known)
        return self.embed_maps(maps, scale) + tokens

    def embed_all(self, ids: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Embed all scales given their tokens, long [B, T]: [B, T, C].

        Args:
            ids: tokens of all scales.
            hidden: bool [B, T], masked positions of the pass that refines; None for the other pass.
        """
        start = self.quantize.zeros(len(ids))[..., 0, 0][:, None]
        sizes = self.quantize.lengths
        first = start.expand(-1, sizes[0], -1)
        maps = torch.cat([first, self.quantize.inputs(ids).to(start.dtype)], 1).split(sizes, 1)
        if hidden is None:
            return torch.cat([self.embed_maps(m, scale) for scale, m in enumerate(maps)], 1)
        out = []
        for scale, parts in enumerate(
            zip(maps, ids.split(sizes, 1), hidden.split(sizes, 1), strict=True)
        ):
            m, tokens, masked = parts
            own = self.quantize.own(tokens, masked, scale)
            out.append(self.embed_refined(m, own.to(m.dtype), masked, scale))
        return torch.cat(out, 1)

    def columns(self, scales: Sequence[int], device: torch.device) -> Tensor:
        """Position ids of the cells of some scales, long [n]: those of the cells of the last scale
        under their centres, behind the condition.
        """
        height, width = self.quantize.sides[-1]
        out = []
        for h, w in (self.quantize.sides[scale] for scale in scales):
            rows = (torch.arange(h, device=device) * 2 + 1) * height // (2 * h)
            cols = (torch.arange(w, device=device) * 2 + 1) * width // (2 * w)
            out.append((rows[:, None] * width + cols).flatten())
        return torch.cat(out) + self.config.prefix_length

    def forward(self, words: Tensor, ids: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Compute the logits [B, T, V] of all scales in one pass.

        Args:
            words: condition, long [B, P].
            ids: tokens, long [B, T].
            hidden: bool [B, T], masked positions of the pass that refines; None for the other pass.
        """
        refine = hidden is not None
        inputs = torch.cat([self.embed_words(words), self.embed_all(ids, hidden)], 1)
        states = self.run(inputs, *self.whole(words.device, inputs.dtype), refine=refine)
        return self.logits(states[:, self.config.prefix_length :], refine)

    def logits(self, hidden: Tensor, refine: bool = False) -> Tensor:
        """Return the logits [B, L, V] of outputs [B, L, C] of a pass."""
        return self.refine_head(hidden) if refine else self.head(hidden)

    def whole(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Make position ids [P + T] and the additive mask [P + T, P + T] of all scales at once."""
        p = self.config.prefix_length
        columns = torch.cat(
            [
                torch.arange(p, device=device),
                self.columns(range(len(self.quantize.sides)), device),
            ]
        )
        level = torch.tensor([-1] * p, device=device)
        sizes = torch.tensor(self.quantize.lengths, device=device)
        level = torch.cat([level, torch.arange(len(sizes), device=device).repeat_interleave(sizes)])
        sees = level[:, None] >= level
        if self.config.markov:
            sees = (level[:, None] == level) | (level < 0)
        mask = torch.zeros(sees.shape, dtype=dtype, device=device)
        return columns, mask.masked_fill_(~sees, torch.finfo(dtype).min)

    def run(
        self,
        inputs: Tensor,
        columns: Tensor,
        mask: Tensor,
        caches: Sequence[Cache] | None = None,
        refine: bool = False,
    ) -> Tensor:
        """Run the layers of a pass over inputs [B, L, C] at position ids [L]: [B, L, C].

        Args:
            inputs: embedded condition and scales.
            columns: position ids.
            mask: additive mask [L, S] over the cached positions and these.
            caches: one per part of the trunk (``parts``), which grow; None for none.
            refine: run the pass that refines.
        """
        hidden = inputs
        for number, part in enumerate(self.parts(refine)):
            hidden = part(
                inputs_embeds=hidden,
                position_ids=columns.expand(len(inputs), -1),
                attention_mask=mask[None, None].expand(len(inputs), -1, -1, -1),
                use_cache=caches is not None,
                **with_cache(part, None if caches is None else caches[number]),
            ).last_hidden_state
        return hidden

    def parts(self, refine: bool = False) -> list[nn.Module]:
        """Return the parts of the trunk that a pass runs, in order."""
        if not self.refines:
            return [self.base]
        return [self.base, self.refine if refine else self.fill]


def _trunk(config: GridScalesConfig, layers: int) -> LlamaModel:
    """Create ``layers`` layers and a final norm."""
    trunk = copy.deepcopy(config)
    trunk.vocab_size, trunk.num_hidden_layers = 1, layers
    return LlamaModel(trunk)


AutoConfig.register(GridScalesConfig.model_type, GridScalesConfig)
AutoModel.register(GridScalesConfig, GridScalesModel)
