"""LLaDA and LLaDA-1.5: masked language models with Llama's blocks and full attention (Nie et al.,
arXiv 2502.09992).
"""

from __future__ import annotations

import transformers
from torch import nn

from gen.contracts.checkpoint import FROM_PRETRAINED, CheckpointFiles, LoadOptions
from gen.core.registry import register
from gen.modalities.checkpoints.masked_text import MaskedText, Rules
from gen.models.load.weights import Weights, fill, without_storage

NEEDED = ("d_model", "n_heads", "n_layers", "vocab_size")
# values of config fields that may be missing, and the values that Llama's blocks support
RULES: Rules = {
    "block_type": ("sequential", ("llama",)),
    "layer_norm_type": ("default", ("rms",)),
    "activation_type": ("swiglu", ("silu",)),
    "rope": (False, (True,)),
    "alibi": (False, (False,)),
    "include_bias": (False, (False,)),
    "include_qkv_bias": (False, (False, None)),
    "bias_for_layer_norm": (None, (None, False)),
    "attention_layer_norm": (False, (False,)),
    "layer_norm_with_affine": (True, (True,)),
    "scale_logits": (False, (False,)),
    "input_emb_norm": (False, (False,)),
    "block_group_size": (1, (1,)),
    "multi_query_attention": (None, (None, False)),
    "clip_qkv": (None, (None,)),
}
RENAMES = (
    (r"^model\.transformer\.wte\.", "model.embed_tokens."),
    (r"^model\.transformer\.ln_f\.", "model.norm."),
    (r"^model\.transformer\.ff_out\.", "lm_head."),
    (r"^model\.transformer\.blocks\.(\d+)\.", r"model.layers.\1."),
    (r"(layers\.\d+)\.([qkv]_proj)\.", r"\1.self_attn.\2."),
    (r"(layers\.\d+)\.attn_out\.", r"\1.self_attn.o_proj."),
    (r"(layers\.\d+)\.ff_proj\.", r"\1.mlp.gate_proj."),
    (r"(layers\.\d+)\.up_proj\.", r"\1.mlp.up_proj."),
    (r"(layers\.\d+)\.ff_out\.", r"\1.mlp.down_proj."),
    (r"(layers\.\d+)\.attn_norm\.", r"\1.input_layernorm."),
    (r"(layers\.\d+)\.ff_norm\.", r"\1.post_attention_layernorm."),
)


@register("checkpoint", "llada")
class LLaDA(MaskedText):
    """LLaDA and LLaDA-1.5: masked text with full attention."""

    takes = FROM_PRETRAINED
    tested = (
        "tiny random weights under the published keys, against a forward pass written out; no"
        " published weights"
    )
    turn_end = "<|eot_id|>"
    needed, rules = NEEDED, RULES

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "llada"

    def network(self, files: CheckpointFiles, load: LoadOptions) -> nn.Module:
        fields = files.config
        tied = fields.get("weight_tying", True)
        config = transformers.LlamaConfig(
            vocab_size=fields.get("embedding_size") or fields["vocab_size"],
            hidden_size=fields["d_model"],
            intermediate_size=fields.get("mlp_hidden_size")
            or fields.get("mlp_ratio", 4) * fields["d_model"],
            num_hidden_layers=fields["n_layers"],
            num_attention_heads=fields["n_heads"],
            num_key_value_heads=fields.get("n_kv_heads") or fields["n_heads"],
            max_position_embeddings=fields.get("max_sequence_length", 1024),
            rms_norm_eps=fields.get("rms_norm_eps", 1e-5),
            rope_theta=fields.get("rope_theta", 1e4),
            tie_word_embeddings=tied,
            attn_implementation=load.attn_implementation,
        )
        return fill(
            without_storage(lambda: transformers.LlamaForCausalLM(config)),
            Weights(files.path, variant=load.hub.variant),
            rename=RENAMES,
            optional=("^lm_head",) if tied else (),
            **load.fill_keywords,
            name=files.name,
        )
