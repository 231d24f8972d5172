"""LLaDA2.0 and LLaDA2.1: masked text block by block, with a mixture of experts
(``gen.models.published.llada2``). arXiv 2512.15745.

The preset ``llada2`` decodes it as its authors do, in blocks that are counted from the first id of
the prompt. Masked samplers compute the whole canvas in every call; with ``cache: dual`` it is one
block, and with that preset the law stays exact. ``frame_blocks`` never computes a finished block
again, but takes prompts of whole blocks only, all of one length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gen.contracts.checkpoint import CheckpointFiles, LoadOptions
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.modalities.checkpoints.masked_text import MaskedText, Rules
from gen.models.load.weights import Weights, fill, without_storage

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
USUAL = {  # what its config may leave open
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
BLOCK = 32  # places of a block, where the config does not say


@register("checkpoint", "llada2")
class LLaDA2Text(MaskedText):
    """LLaDA2.0 and LLaDA2.1: masked text in blocks, mixture of experts.

    ``block_length``: by default what the config says, else 32. ``max_new_tokens``, ``chat`` and
    ``mask_token_id`` as all masked texts have them.
    """

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
        how: LoadOptions,
        *,
        max_new_tokens: int = 128,
        chat: bool | None = None,
        mask_token_id: int | None = None,
        block_length: int | None = None,
    ):
        self.block_length = (
            files.config.get("block_length", BLOCK) if block_length is None else block_length
        )
        if (
            not isinstance(self.block_length, int)
            or isinstance(self.block_length, bool)
            or self.block_length < 1
        ):
            raise bad_value("block_length", self.block_length, "an integer of at least 1")
        super().__init__(
            files,
            modality,
            how,
            max_new_tokens=max_new_tokens,
            chat=chat,
            mask_token_id=mask_token_id,
        )

    def network(self, files: CheckpointFiles, how: LoadOptions) -> nn.Module:
        from gen.models.published.llada2 import LLaDA2, LLaDA2Config

        said = {**USUAL, **files.config}
        experts, groups = said["num_experts"], said["n_group"]
        if (
            experts % groups
            or experts // groups < 2
            or not said["num_experts_per_tok"] <= said["topk_group"] * experts // groups <= experts
        ):
            raise GenError(
                f"the config of model {files.name} cannot be served: {experts} experts in {groups}"
                f" groups of which {said['topk_group']} are open, {said['num_experts_per_tok']} of"
                " them chosen; expected groups of one size, at least 2, and no more chosen than"
                " open"
            )
        config = LLaDA2Config(
            **{key: said[key] for key in (*NEEDED, *USUAL)}, block_length=self.block_length
        )
        unbiased = not said.get("moe_router_enable_expert_bias", True)
        weights = Weights(files.path)
        model = fill(
            without_storage(lambda: LLaDA2(config)),
            weights,
            optional=(r"expert_bias$",) if unbiased else (),
            device=how.device,
            dtype=how.dtype,
            device_map=how.device_map,
            name=files.name,
        )
        for key, bias in model.named_buffers():  # half precision would change who is chosen
            if key in weights and how.dtype != torch.float64:
                owner = model.get_submodule(key.rpartition(".")[0])
                owner.expert_bias = weights[key].to(bias.device, torch.float32)
        return model

    def adapter(self, protocol: str) -> Any:
        from gen.models.published.llada2 import AlignedBlockLM, BlockCausalLM

        return (AlignedBlockLM if protocol == "blocks" else BlockCausalLM)(self.model)
