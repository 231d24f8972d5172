"""Image autoencoder with a multi-scale residual codebook: the tokenizer of next-scale models (VAR,
arXiv 2404.02905).

Encoder and decoder are those of ``diffusers.AutoencoderKL``, without noise. With a ``patch_size``
p, p x p vectors of the encoder form one vector of the feature map.
"""

from __future__ import annotations

import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.autoencoders.vae import Decoder, Encoder
from torch import Tensor, nn

from gen.models.nets.residual_scales import ResidualScales


class ScaleVQModel(ModelMixin, ConfigMixin):
    """Encoder, residual quantiser over scales, decoder.

    Args:
        scales: (height, width) of every scale, coarse to fine.
        codes: vectors V of the codebook.
        latent_channels: channels of the encoder's output.
        patch_size: sides of the encoder's vectors that form one vector of the feature map.
        block_out_channels: channels per level, full resolution first.
        layers_per_block: residual blocks per level.
        attention_levels: levels with attention.
        mid_attention: attention in the middle.
        norm_num_groups: groups of the norms.
        kernel: size of the convolutions before and after the quantiser.
        rho: share of the convolution in phi.
        shared_phi: number of convolutions phi.
    """

    @register_to_config
    def __init__(
        self,
        scales: tuple = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (8, 8)),
        codes: int = 256,
        latent_channels: int = 4,
        patch_size: int = 1,
        block_out_channels: tuple = (32, 32, 64),
        layers_per_block: int = 1,
        attention_levels: tuple = (),
        mid_attention: bool = False,
        norm_num_groups: int = 16,
        kernel: int = 1,
        rho: float = 0.5,
        shared_phi: int = 4,
    ):
        super().__init__()
        levels = range(len(block_out_channels))
        kinds = ["Attn" if n in attention_levels else "" for n in levels]
        shared = dict(
            block_out_channels=tuple(block_out_channels),
            layers_per_block=layers_per_block,
            norm_num_groups=norm_num_groups,
            mid_block_add_attention=mid_attention,
        )
        self.encoder = Encoder(
            out_channels=latent_channels,
            down_block_types=tuple(f"{kind}DownEncoderBlock2D" for kind in kinds),
            double_z=False,
            **shared,
        )
        self.decoder = Decoder(
            in_channels=latent_channels,
            up_block_types=tuple(f"{kind}UpDecoderBlock2D" for kind in reversed(kinds)),
            **shared,
        )
        self.quant_conv, self.post_quant_conv = (
            nn.Conv2d(latent_channels, latent_channels, kernel, padding=kernel // 2)
            for _ in range(2)
        )
        channels = latent_channels * patch_size**2
        self.quantize = ResidualScales(scales, codes, channels, rho, shared_phi)

    @property
    def factor(self) -> int:
        """Pixels per vector of the feature map, each way."""
        return 2 ** (len(self.config.block_out_channels) - 1) * self.config.patch_size

    def features(self, x: Tensor) -> Tensor:
        """Encode images [B, 3, h, w] in [-1, 1] to feature maps [B, D, H, W]."""
        return F.pixel_unshuffle(self.quant_conv(self.encoder(x)), self.config.patch_size)

    def pixels(self, f: Tensor) -> Tensor:
        """Decode feature maps [B, D, H, W] to images [B, 3, h, w]."""
        return self.decoder(self.post_quant_conv(F.pixel_shuffle(f, self.config.patch_size)))
