"""Architecture of the built-in captioner of images: the Llama on a grid, whose prompt is a grid of
codes that a small convolutional network sees as a whole.

A prompt is the codes of an image in raster order and one more token, at which writing begins. With
attention alone a small model has to learn which codes are neighbours, and a code sees the rows
above it alone. Convolutions over the codes' embeddings give every code its surroundings:

    x[p] = embed(code[p]) + W3 silu(W2 * silu(W1 * embed(code)))[p] + located(p)
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from gen.models.nets.grid import GridLlamaConfig, GridLlamaForCausalLM


class GridReaderConfig(GridLlamaConfig):
    """``GridLlamaConfig`` plus the image: ``image_grid`` is its rows and columns of codes, and
    ``stem_channels`` the channels of the convolutions.
    """

    model_type = "gen_grid_reader"

    def __init__(self, image_grid=(16, 16), stem_channels=64, **kwargs):
        super().__init__(**kwargs)
        self.image_grid, self.stem_channels = list(image_grid), stem_channels


class GridReaderForCausalLM(GridLlamaForCausalLM):
    """Llama that writes about a grid of codes. A call that holds one code of a row's prompt holds
    all of them."""

    config_class = GridReaderConfig

    def __init__(self, config: GridReaderConfig):
        super().__init__(config)
        d, c = config.hidden_size, config.stem_channels
        self.stem = nn.Sequential(
            nn.Conv2d(d, c, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(c, c, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(c, d, 3, padding=1),
        )
        self.post_init()

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embed token ids [B, L] at absolute positions [B, L]: [B, L, D]."""
        embedded = self.model.embed_tokens(ids)
        rows, columns = self.config.image_grid
        cells = rows * columns
        if positions.shape[1] >= cells:  # else the prompt was read before
            at = positions.clamp_max(cells)  # what is no code goes to a cell that is cut off
            image = embedded.new_zeros(len(ids), cells + 1, embedded.shape[-1])
            image = image.scatter(1, at[..., None].expand_as(embedded), embedded)[:, :cells]
            seen = self.stem(image.transpose(1, 2).unflatten(2, (rows, columns))).flatten(2)
            seen = nn.functional.pad(seen.transpose(1, 2), (0, 0, 0, 1))
            embedded = embedded + seen.gather(1, at[..., None].expand_as(embedded))
        return embedded + self.locate(positions)


AutoConfig.register(GridReaderConfig.model_type, GridReaderConfig)
AutoModelForCausalLM.register(GridReaderConfig, GridReaderForCausalLM)
