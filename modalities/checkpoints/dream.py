"""Dream: a masked language model that began as Qwen2.5 and sees the whole text both ways. It kept a
causal model's habit: what comes out at place i is about place i + 1. Ye et al., arXiv
2508.15487."""

from __future__ import annotations

from typing import Any

from torch import nn

from gen.contracts.checkpoint import CheckpointFiles, LoadOptions
from gen.core.errors import GenError
from gen.core.registry import register
from gen.modalities.checkpoints.masked_text import MaskedText, Rules
from gen.models.load.locate import quiet
from gen.models.load.weights import Weights, fill, without_storage

NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
USUAL = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}  # what its config may leave open
RULES: Rules = {
    "hidden_act": ("silu", ("silu",)),
    "use_sliding_window": (False, (False,)),
    "rope_scaling": (None, (None,)),
    "rope_parameters": (None, (None,)),
    "tie_word_embeddings": (False, (False,)),
}


@register("checkpoint", "dream")
class Dream(MaskedText):
    """Dream: masked text, full attention, logits one place early."""

    sampling = {"temperature": 0.2, "top_p": 0.95}  # as its authors draw
    tested = (
        "tiny random weights under the published keys, against a forward pass written out; no"
        " published weights"
    )
    turn_end = "<|im_end|>"
    needed, rules = NEEDED, RULES

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "Dream"

    def tokenize(self, files: CheckpointFiles, how: LoadOptions) -> Any:
        """Its tokenizer is Qwen2's under another name, which only the folder's own code would
        know."""
        from transformers import Qwen2TokenizerFast

        if files.has("tokenizer.json"):
            return super().tokenize(files, how)
        if not (files.has("vocab.json") and files.has("merges.txt")):
            raise GenError(
                f"model {files.name} has no tokenizer: expected tokenizer.json, or vocab.json and"
                f" merges.txt, in {files.folder}"
            )
        with quiet():
            return Qwen2TokenizerFast.from_pretrained(files.folder, local_files_only=True)

    def network(self, files: CheckpointFiles, how: LoadOptions) -> nn.Module:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        said = {**USUAL, **files.config}
        config = Qwen2Config(
            **{key: said[key] for key in (*NEEDED, *USUAL)}, tie_word_embeddings=False, shifted=True
        )
        return fill(
            without_storage(lambda: Qwen2ForCausalLM(config)),
            Weights(files.path),
            device=how.device,
            dtype=how.dtype,
            device_map=how.device_map,
            name=files.name,
        )
