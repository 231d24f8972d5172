"""Architecture of the built-in model of sounds: the Llama on a grid, whose prompt is hidden states
of another model.

A prompt has one vector per position, such as the last hidden states of a language model that read a
clip and its caption (VATT, arXiv 2411.05679). A vector of zeros states nothing, and the mask at all
positions is the unconditional prompt of classifier-free guidance.

    x[p] = W state[p] + located(p)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from gen.models.nets.grid import GridLlamaConfig, GridLlamaForCausalLM


class GridStatesConfig(GridLlamaConfig):
    """``GridLlamaConfig`` plus the condition: ``state_size`` entries of a state, ``states_of``, the
    name of the model whose states they are, and ``states_digest``, the digest of its weights.
    ``caption_encoder``: the same of a model of ``gen train``, as
    ``gen.modalities.text_encoder`` writes it.
    """

    model_type = "gen_grid_states"

    def __init__(
        self, state_size=96, states_of=None, states_digest=None, caption_encoder=None, **kwargs
    ):
        super().__init__(**kwargs)
        self.state_size, self.states_of = state_size, states_of
        self.states_digest, self.caption_encoder = states_digest, caption_encoder


class GridStatesForCausalLM(GridLlamaForCausalLM):
    """Llama over a token grid after a prompt of states. Token ids of ``vocab_size`` and above mark
    the positions that take a state."""

    config_class = GridStatesConfig

    def __init__(self, config: GridStatesConfig):
        super().__init__(config)
        self.enter = nn.Linear(config.state_size, config.hidden_size, bias=False)
        self.post_init()

    def embed_prompted(self, ids: Tensor, positions: Tensor, states: Tensor) -> Tensor:
        """Embed token ids [B, L] at positions [B, L], some of which take their states [B, L, S]:
        [B, L, D].
        """
        size = self.config.vocab_size
        own = self.model.embed_tokens(ids.clamp_max(size - 1))
        given = self.enter(states.to(own.dtype))
        return torch.where((ids >= size)[..., None], given, own) + self.locate(positions)

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, states=None, **kwargs):
        """Run the model; ``states`` [B, P, S] are those of the first P positions."""
        if states is None:
            return super().forward(input_ids, position_ids, inputs_embeds, **kwargs)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        positions = position_ids.expand_as(input_ids)
        padded = nn.functional.pad(states, (0, 0, 0, input_ids.shape[1] - states.shape[1]))
        more: dict[str, Any] = {"position_ids": positions, **kwargs}
        return super().forward(
            inputs_embeds=self.embed_prompted(input_ids, positions, padded), **more
        )


AutoConfig.register(GridStatesConfig.model_type, GridStatesConfig)
AutoModelForCausalLM.register(GridStatesConfig, GridStatesForCausalLM)
