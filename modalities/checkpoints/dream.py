"""Dream: a masked language model fine-tuned from Qwen2.5, with full attention (Ye et al., arXiv
2508.15487).

Its logits keep the shift of a causal model: the output at position i predicts the token at position
i + 1.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from gen.contracts.checkpoint import FROM_PRETRAINED, CheckpointFiles, LoadOptions
from gen.core.errors import GenError
from gen.core.registry import register
from gen.modalities.checkpoints.masked_text import MaskedText, Rules, newline_tokens
from gen.models.load.bounded_text import bounded_tokenizer
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
# values of config fields that may be missing
USUAL = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
RULES: Rules = {
    "hidden_act": ("silu", ("silu",)),
    "use_sliding_window": (False, (False,)),
    "rope_scaling": (None, (None,)),
    "rope_parameters": (None, (None,)),
    "tie_word_embeddings": (False, (False,)),
}


@register("checkpoint", "dream")
class Dream(MaskedText):
    """Dream: masked text with full attention and logits shifted by one position."""

    sampling = {"temperature": 0.2, "top_p": 0.95}  # sampling of the published scripts
    takes = FROM_PRETRAINED
    tested = (
        "tiny random weights under the published keys, against a forward pass written out; no"
        " published weights"
    )
    turn_end = "<|im_end|>"
    needed, rules = NEEDED, RULES

    def newline_ids(self) -> tuple[int, ...]:
        """Token ids that end a block by default: all whose text has a newline, as this vocabulary
        joins it to what stands before it."""
        return tuple(newline_tokens(self.tokenizer))

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "Dream"

    def tokenize(self, files: CheckpointFiles, load: LoadOptions) -> Any:
        """Load the tokenizer. It is Qwen2's under another name, which only the folder's own code
        resolves.
        """
        if files.has("tokenizer.json"):
            return super().tokenize(files, load)
        if not (files.has("vocab.json") and files.has("merges.txt")):
            raise GenError(
                f"model {files.name} has no tokenizer; expected tokenizer.json, or vocab.json"
                f" and merges.txt, in {files.folder}"
            )
        with quiet():
            tokenizer = transformers.Qwen2TokenizerFast.from_pretrained(
                files.folder, local_files_only=True
            )
        return bounded_tokenizer(tokenizer, files.name)

    def network(self, files: CheckpointFiles, load: LoadOptions) -> nn.Module:
        fields = {**USUAL, **files.config}
        config = transformers.Qwen2Config(
            **{key: fields[key] for key in (*NEEDED, *USUAL)},
            tie_word_embeddings=False,
            shifted=True,
            attn_implementation=load.attn_implementation,
        )
        return fill(
            without_storage(lambda: transformers.Qwen2ForCausalLM(config)),
            Weights(files.path, variant=load.hub.variant),
            **load.fill_keywords,
            name=files.name,
        )
