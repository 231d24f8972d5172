"""LLaDA2.0 and LLaDA2.1: masked text block by block, with a mixture of experts
(``gen.models.published.llada2``, arXiv 2512.15745).

The preset ``llada2`` decodes as the authors do, in blocks counted from the first id of the prompt.
Masked samplers compute the whole canvas in every forward pass. With ``cache: dual`` the canvas is
one block, and with that preset the distribution stays exact. ``frame_blocks`` never recomputes a
finished block, but takes only prompts of whole blocks, all of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gen.contracts.checkpoint import FILLED, CheckpointFiles, LoadOptions
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.modalities.checkpoints.masked_text import MaskedText, Rules
from gen.modalities.checkpoints.options import is_integer
from gen.models.load.weights import Weights, fill, without_storage
from gen.models.published.llada2 import AlignedBlockLM, BlockCausalLM, LLaDA2, LLaDA2Config

NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "moe_intermediate_size",
)
USUAL = {  # values of config fields that may be missing
    "head_dim": None,
    "use_qkv_bias": False,
    "use_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 16384,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0,
}
RULES: Rules = {
    "hidden_act": ("silu", ("silu",)),
    "score_function": ("sigmoid", ("sigmoid",)),
    "norm_topk_prob": (True, (True,)),
    "use_qk_norm": (True, (True,)),
    "norm_head": (False, (False,)),
    "use_rmsnorm": (True, (True,)),
    "use_sliding_window": (False, (False,)),
    "rope_scaling": (None, (None,)),
    "rope_parameters": (None, (None,)),
    "tie_word_embeddings": (False, (False,)),
}
BLOCK = 32  # positions of a block, where the config has no value


@register("checkpoint", "llada2")
class LLaDA2Text(MaskedText):
    """LLaDA2.0 and LLaDA2.1: masked text in blocks, mixture of experts.

    Args:
        block_length: positions of a block. The default is the config's, else 32.
        max_new_tokens: as in ``MaskedText``.
        chat: as in ``MaskedText``.
        mask_token_id: as in ``MaskedText``.
        delimiters: as in ``MaskedText``.
        token_counts: as in ``MaskedText``.
    """

    takes = FILLED
    protocols = ("masked", "blocks")
    tested = (
        "tiny random weights under the published keys, against a forward pass written out and"
        " LLaDA2Pipeline of diffusers; no published weights"
    )
    turn_end = "<|role_end|>"
    needed, rules = NEEDED, RULES

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "llada2_moe"

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        max_new_tokens: int | None = None,
        chat: bool | None = None,
        mask_token_id: int | None = None,
        delimiters: Sequence[int | str] | None = None,
        token_counts: str | Path | None = None,
        block_length: int | None = None,
    ):
        self.block_length = (
            files.config.get("block_length", BLOCK) if block_length is None else block_length
        )
        if not is_integer(self.block_length, 1):
            raise bad_value("block_length", self.block_length, "an integer of at least 1")
        super().__init__(
            files,
            modality,
            load,
            max_new_tokens=max_new_tokens,
            chat=chat,
            mask_token_id=mask_token_id,
            delimiters=delimiters,
            token_counts=token_counts,
        )

    def network(self, files: CheckpointFiles, load: LoadOptions) -> nn.Module:
        fields = {**USUAL, **files.config}
        experts, groups = fields["num_experts"], fields["n_group"]
        if (
            experts % groups
            or experts // groups < 2
            or not fields["num_experts_per_tok"]
            <= fields["topk_group"] * experts // groups
            <= experts
        ):
            raise GenError(
                f"the config of model {files.name} cannot be served: {experts} experts in"
                f" {groups} groups of which {fields['topk_group']} are open,"
                f" {fields['num_experts_per_tok']} of them chosen; expected groups of one size,"
                " at least 2, and no more chosen than open"
            )
        config = LLaDA2Config(
            **{key: fields[key] for key in (*NEEDED, *USUAL)}, block_length=self.block_length
        )
        unbiased = not fields.get("moe_router_enable_expert_bias", True)
        weights = Weights(files.path, variant=load.hub.variant)
        model = fill(
            without_storage(lambda: LLaDA2(config)),
            weights,
            optional=(r"expert_bias$",) if unbiased else (),
            **load.fill_keywords,
            name=files.name,
        )
        # rounding the bias to half precision would change the routing
        for key, bias in model.named_buffers():
            if key in weights and load.dtype != torch.float64:
                owner = model.get_submodule(key.rpartition(".")[0])
                owner.expert_bias = weights[key].to(bias.device, torch.float32)
        return model

    def adapter(self, protocol: str) -> Any:
        return (AlignedBlockLM if protocol == "blocks" else BlockCausalLM)(self.model)
