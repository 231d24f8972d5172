"""The architecture of the embedded models of latents: the grid Llama over vectors in place of ids,
with a diffusion head.

A sequence is a condition of ``prefix_length`` words and then the latents of the grid in raster
order. The trunk turns it into conditioning vectors z, one per place, and the head samples the
latent of a place given its z.

causal   z of place i from the condition and the latents before i
masked   an encoder sees the condition and the known latents only; a decoder sees what it made of
         them, with a mask vector at every unknown place, and gives z of all places (MAR, arXiv
         2406.11838)

The trunks are transformers' ``LlamaModel``, called with full attention where the model is masked.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, LlamaConfig, LlamaModel, PreTrainedModel

from gen.models.nets.diffusion_head import DiffusionHead
from gen.models.nets.grid import Located


class GridLatentConfig(LlamaConfig):
    """``LlamaConfig`` plus the layout. ``vocab_size`` counts condition words.

    ``grid``, ``prefix_length``, ``causal``: as in ``GridLlamaConfig``. ``latent_channels``: floats
    per place. ``encoder_layers``: of the ``num_hidden_layers``, those of a masked model's encoder.
    ``head_width``, ``head_depth``, ``head_steps``, ``sigma_floor``: of the diffusion head.
    """

    model_type = "gen_grid_latent"

    def __init__(
        self,
        grid=(8, 8),
        prefix_length=8,
        latent_channels=16,
        causal=True,
        encoder_layers=0,
        head_width=192,
        head_depth=3,
        head_steps=16,
        sigma_floor=0.01,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.grid, self.prefix_length, self.latent_channels = (
            list(grid),
            prefix_length,
            latent_channels,
        )
        self.causal, self.shifted, self.encoder_layers = causal, causal, encoder_layers
        self.head_width, self.head_depth, self.head_steps, self.sigma_floor = (
            head_width,
            head_depth,
            head_steps,
            sigma_floor,
        )


class GridLatentModel(Located, PreTrainedModel):
    """See the module. Inputs are vectors: ``embed_words`` and ``embed_latents`` make them, without
    their places."""

    config_class = GridLatentConfig
    base_model_prefix = ""
    # transformers' eager attention takes its softmax in float32 whatever the dtype: a row of float64
    # would then depend, in its eighth digit, on how many slots the call reads and on how many
    # numbers the processor adds at a time
    _supports_sdpa = True

    def __init__(self, config: GridLatentConfig):
        super().__init__(config)
        d = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, d)
        self.enter = nn.Linear(config.latent_channels, d)
        self.add_tables(config)
        trunk = copy.deepcopy(config)
        trunk.vocab_size, trunk.num_hidden_layers = (
            1,
            config.num_hidden_layers - config.encoder_layers,
        )
        self.model = LlamaModel(trunk)
        if not config.causal:
            trunk = copy.deepcopy(trunk)
            trunk.num_hidden_layers = config.encoder_layers
            self.encoder = LlamaModel(trunk)
            self.unknown = nn.Parameter(torch.zeros(d))
            self.decoder_prefix = nn.Embedding(config.prefix_length, d)
            self.decoder_axes = nn.ModuleList(nn.Embedding(n, d) for n in config.grid)
        self.head = DiffusionHead(
            config.latent_channels,
            d,
            config.head_width,
            config.head_depth,
            config.head_steps,
            config.sigma_floor,
        )
        self.post_init()

    def embed_words(self, ids: Tensor) -> Tensor:
        return self.words(ids)

    def embed_latents(self, latents: Tensor) -> Tensor:
        return self.enter(latents.to(self.enter.weight.dtype))

    def forward(self, words: Tensor, latents: Tensor) -> Tensor:
        """Conditioning vectors [B, T, D] of all places from words [B, P] and latents [B, T, C]. A
        causal model sees those before each place, a masked one those that are not NaN."""
        p = words.shape[1]
        at = torch.arange(p + latents.shape[1], device=words.device).expand(len(words), -1)
        if not self.config.causal:
            return self._decode(at, *self._encode(words, latents, at))
        inputs = torch.cat([self.embed_words(words), self.embed_latents(latents)], 1)[:, :-1]
        return self.run(inputs, at[:, :-1])[:, p - 1 :]

    def run(self, inputs: Tensor, position_ids: Tensor, **kwargs) -> Tensor:
        """The causal trunk over vectors [B, L, D] without places at these absolute positions."""
        inputs = inputs + self.locate(position_ids)
        return self.model(
            inputs_embeds=inputs, position_ids=position_ids, **{"use_cache": False, **kwargs}
        ).last_hidden_state

    def _encode(self, words: Tensor, latents: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """What the encoder makes of the known places, laid out over all: [B, P + T, D]; and which
        are known [B, P + T]."""
        known = torch.cat([torch.ones_like(words, dtype=torch.bool), ~latents.isnan().any(-1)], 1)
        inputs = torch.cat(
            [self.embed_words(words), self.embed_latents(latents.nan_to_num())], 1
        ) + self.locate(at)
        # only known places are computed: each row's own come first, the rest of a shorter row is
        # hidden from everybody
        order = (~known).long().argsort(dim=1, stable=True)[:, : int(known.sum(1).max())]
        shown = known.gather(1, order)
        gather = order[..., None].expand(-1, -1, inputs.shape[-1])
        out = self.encoder(
            inputs_embeds=inputs.gather(1, gather),
            position_ids=order,
            attention_mask=_attend(shown, inputs.dtype),
            use_cache=False,
        ).last_hidden_state
        out = torch.zeros_like(inputs, dtype=out.dtype).scatter(1, gather, out)
        return out, known

    def _decode(self, at: Tensor, encoded: Tensor, known: Tensor) -> Tensor:
        inputs = torch.where(known[..., None], encoded, self.unknown.to(encoded.dtype))
        inputs = inputs + self.locate(at, self.decoder_axes, self.decoder_prefix)
        mask = _attend(torch.ones_like(known), inputs.dtype)
        out = self.model(
            inputs_embeds=inputs, position_ids=at, attention_mask=mask, use_cache=False
        ).last_hidden_state
        return out[:, self.config.prefix_length :]


def _attend(shown: Tensor, dtype: torch.dtype) -> Tensor:
    """A float mask [B, 1, L, L]: everybody attends to what is shown."""
    mask = torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill_(
        ~shown, torch.finfo(dtype).min
    )
    return mask[:, None, None].expand(-1, -1, shown.shape[1], -1)


AutoConfig.register(GridLatentConfig.model_type, GridLatentConfig)
AutoModel.register(GridLatentConfig, GridLatentModel)
