"""LLaDA: a masked language model with the blocks of Llama, which sees the whole text both ways. Nie
et al., arXiv 2502.09992; LLaDA-1.5 is the same."""

from __future__ import annotations

from torch import nn

from gen.contracts.checkpoint import CheckpointFiles, LoadOptions
from gen.core.registry import register
from gen.modalities.checkpoints.masked_text import MaskedText, Rules
from gen.models.load.weights import Weights, fill, without_storage

NEEDED = ("d_model", "n_heads", "n_layers", "vocab_size")
RULES: Rules = {  # what its config leaves open, and what Llama's blocks can do
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
    """LLaDA and LLaDA-1.5: masked text, full attention."""

    tested = (
        "tiny random weights under the published keys, against a forward pass written out; no"
        " published weights"
    )
    turn_end = "<|eot_id|>"
    needed, rules = NEEDED, RULES

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "llada"

    def network(self, files: CheckpointFiles, how: LoadOptions) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        said = files.config
        tied = said.get("weight_tying", True)
        config = LlamaConfig(
            vocab_size=said.get("embedding_size") or said["vocab_size"],
            hidden_size=said["d_model"],
            intermediate_size=said.get("mlp_hidden_size")
            or said.get("mlp_ratio", 4) * said["d_model"],
            num_hidden_layers=said["n_layers"],
            num_attention_heads=said["n_heads"],
            num_key_value_heads=said.get("n_kv_heads") or said["n_heads"],
            max_position_embeddings=said.get("max_sequence_length", 1024),
            rms_norm_eps=said.get("rms_norm_eps", 1e-5),
            rope_theta=said.get("rope_theta", 1e4),
            tie_word_embeddings=tied,
        )
        return fill(
            without_storage(lambda: LlamaForCausalLM(config)),
            Weights(files.path),
            rename=RENAMES,
            optional=("^lm_head",) if tied else (),
            device=how.device,
            dtype=how.dtype,
            device_map=how.device_map,
            name=files.name,
        )
