"""Architecture of the built-in models of latents: the grid Llama over continuous vectors, with a
diffusion head.

A sequence is a condition of ``prefix_length`` words followed by the latents of the grid in raster
order. The trunk turns it into conditioning vectors z, one per position, and the head samples the
latent of a position given its z.

causal   z at position i depends on the condition and the latents before i
masked   an encoder takes the condition and the known latents only; a decoder takes its output, with
         a mask vector at every unknown position, and returns z at all positions (MAR, arXiv
         2406.11838)

The trunks are transformers' ``LlamaModel``, called with full attention for masked models.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, LlamaConfig, LlamaModel, PreTrainedModel

from gen.models.load.cache_argument import with_cache
from gen.models.load.transformers_compat import Cache
from gen.models.nets.diffusion_head import DiffusionHead
from gen.models.nets.grid import Located


class GridLatentConfig(LlamaConfig):
    """``LlamaConfig`` plus the layout. ``vocab_size`` counts condition words.

    ``grid``, ``prefix_length``, ``causal``: as in ``GridLlamaConfig``. ``latent_channels``: floats
    per position. ``encoder_layers``: those of the ``num_hidden_layers`` that belong to a masked
    model's encoder. ``head_width``, ``head_depth``, ``head_steps``, ``sigma_floor``: sizes of the
    diffusion head.
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
    """Trunk and diffusion head. Inputs are the vectors of ``embed_words`` and ``embed_latents``,
    without location embeddings."""

    config_class = GridLatentConfig
    base_model_prefix = ""
    # transformers' eager attention takes its softmax in float32 whatever the dtype: a row of
    # float64 would then depend, in its eighth digit, on how many slots the forward pass reads and
    # on how many numbers the processor adds at a time
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

    def embed_words(self, token_ids: Tensor) -> Tensor:
        """Embed condition words [B, P]: [B, P, D]."""
        return self.words(token_ids)

    def embed_latents(self, latents: Tensor) -> Tensor:
        """Project latents [B, T, C] to [B, T, D]."""
        return self.enter(latents.to(self.enter.weight.dtype))

    def forward(self, words: Tensor, latents: Tensor) -> Tensor:
        """Compute conditioning vectors [B, T, D] from words [B, P] and latents [B, T, C].

        A causal model uses the latents before each position, a masked one those that are not NaN.
        """
        if not self.config.causal:
            return self._masked(words, latents)
        p = words.shape[1]
        positions = torch.arange(p + latents.shape[1], device=words.device).expand(len(words), -1)
        inputs = torch.cat([self.embed_words(words), self.embed_latents(latents)], 1)[:, :-1]
        return self.run(inputs, positions[:, :-1])[:, p - 1 :]

    def run(
        self,
        inputs: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Run the causal trunk over vectors [B, L, D] at absolute positions [B, L]."""
        return _run(self.model, inputs + self.locate(positions), positions, mask, cache)

    @property
    def prefix_columns(self) -> int:
        """Positions of the condition."""
        return self.config.prefix_length

    @property
    def decoder_width(self) -> int:
        """Width of the decoder's inputs."""
        return self.config.hidden_size

    @property
    def depths(self) -> tuple[int, int]:
        """Layers of encoder and decoder."""
        layers, encoder = self.config.num_hidden_layers, self.config.encoder_layers
        return encoder, layers - encoder

    def encoder_inputs(self, words: Tensor, latents: Tensor) -> Tensor:
        """Embed words [B, P] and latents [B, T, C] at their locations: [B, P + T, D]."""
        inputs = torch.cat([self.embed_words(words), self.embed_latents(latents.nan_to_num())], 1)
        return inputs + self.locate(_columns(inputs))

    def run_encoder(
        self, inputs: Tensor, columns: Tensor, mask: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """Encode inputs [B, L, D] at columns [B, L] under an additive mask: [B, L, D]."""
        return _run(self.encoder, inputs, columns, mask, cache)

    def decoder_inputs(self, encoded: Tensor, known: Tensor) -> Tensor:
        """Inputs of the decoder [B, P + T, D] from the encoder's outputs at ``known`` columns."""
        inputs = torch.where(known[..., None], encoded, self.unknown.to(encoded.dtype))
        return inputs + self.locate(_columns(inputs), self.decoder_axes, self.decoder_prefix)

    def run_decoder(
        self, inputs: Tensor, columns: Tensor, mask: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """Decode inputs [B, L, D] at columns [B, L] under an additive mask: [B, L, D]."""
        return _run(self.model, inputs, columns, mask, cache)

    def finish(self, z: Tensor, known: Tensor) -> Tensor:
        """Return the conditioning vectors [B, T, D] as they are."""
        return z

    def _masked(self, words: Tensor, latents: Tensor) -> Tensor:
        """Compute conditioning vectors [B, T, D] of all positions."""
        known = torch.cat([torch.ones_like(words, dtype=torch.bool), ~latents.isnan().any(-1)], 1)
        inputs = self.encoder_inputs(words, latents)
        # only known positions are computed: those of each row come first, and the surplus of a row
        # with fewer is masked from attention
        order = (~known).long().argsort(dim=1, stable=True)[:, : int(known.sum(1).max())]
        gather = order[..., None].expand(-1, -1, inputs.shape[-1])
        mask = _attention_mask(known.gather(1, order), inputs.dtype)
        out = self.run_encoder(inputs.gather(1, gather), order, mask)
        encoded = torch.zeros_like(inputs, dtype=out.dtype).scatter(1, gather, out)
        inputs = self.decoder_inputs(encoded, known)
        mask = _attention_mask(torch.ones_like(known), inputs.dtype)
        return self.run_decoder(inputs, _columns(inputs), mask)[:, self.config.prefix_length :]


def _columns(inputs: Tensor) -> Tensor:
    """Columns [B, L] of inputs [B, L, D] that begin with the condition."""
    return torch.arange(inputs.shape[1], device=inputs.device).expand(len(inputs), -1)


def _run(
    trunk: LlamaModel, inputs: Tensor, columns: Tensor, mask: Tensor | None, cache: Cache | None
) -> Tensor:
    return trunk(
        inputs_embeds=inputs,
        position_ids=columns,
        attention_mask=mask,
        use_cache=cache is not None,
        **with_cache(trunk, cache),
    ).last_hidden_state


def _attention_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Build an additive mask [B, 1, L, L]: all positions attend to the ``visible`` ones [B, L]."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )
    return mask[:, None, None].expand(-1, -1, visible.shape[1], -1)


AutoConfig.register(GridLatentConfig.model_type, GridLatentConfig)
AutoModel.register(GridLatentConfig, GridLatentModel)
