"""Text by any causal language model of transformers (``AutoModelForCausalLM``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from gen.contracts.checkpoint import SPLIT, CheckpointFiles, LoadOptions
from gen.contracts.modality import Binding
from gen.core.errors import GenError
from gen.core.registry import register
from gen.modalities.checkpoints.options import (
    answer_length,
    answer_space,
    ends_of,
    stated_generation,
    stated_sampling,
)
from gen.modalities.checkpoints.turns_and_ids import Conversation, LanguagePrompts, TokenIds
from gen.modalities.open_vocabulary import FreeText
from gen.models.adapters.cache_probe import require_slots
from gen.models.adapters.language_models import CausalLM
from gen.models.load.chat import uses_chat_template
from gen.models.load.generation_config import first_tokens
from gen.models.load.pooling import Pooling
from gen.models.load.pretrained import pretrained, tokenizer_of
from gen.models.load.transformers_compat import CAUSAL_LM_TYPES
from gen.tokenizers.text.hf_text import HFText


@register("checkpoint", "causal_lm")
class CausalText(LanguagePrompts):
    """Causal language models of transformers whose attention takes masks and positions (Llama,
    Qwen, Gemma ...).

    Classifier-free guidance compares a prompt with its own first token, a text that has only begun.

    Args:
        max_new_tokens: positions of an answer (128, or half of the model's where that is less).
        chat: put prompts into the tokenizer's chat template as the user's message. The default is
            to do so where the tokenizer has a template.
        generation_config: take the sampling parameters of the folder's generation_config.json as
            defaults. Its eos tokens end a text in any case.
    """

    takes = SPLIT
    modalities = ("text",)
    protocols = ("causal",)
    sampling = {"temperature": 1.0}
    tested = (
        "tiny random Llama, Qwen3 and GPT-NeoX folders against their own classes and `generate`"
    )
    catch_all = True

    @classmethod
    def sampling_of(cls, files: CheckpointFiles, options: Mapping[str, Any]) -> dict[str, Any]:
        return stated_sampling(files, options, cls.sampling)

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        # transformers would take the decoder of an encoder-decoder model alone
        return not files.is_encoder_decoder and (
            files.model_type in CAUSAL_LM_TYPES
            or "AutoModelForCausalLM" in files.config.get("auto_map", {})
        )

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        max_new_tokens: int | None = None,
        chat: bool | None = None,
        generation_config: bool = True,
    ):
        said = stated_generation(files, generation_config)
        given = {"max_new_tokens": max_new_tokens, "generation_config": generation_config}
        self.sampling = self.sampling_of(files, given)
        max_new_tokens = answer_length(files, max_new_tokens)
        needs_code = "auto_map" in files.config and files.model_type not in CAUSAL_LM_TYPES
        if needs_code and not load.trust_remote_code:
            raise GenError(
                f"model {files.name} is a {files.model_type!r}, which needs code from its"
                " own folder; expected trust_remote_code=True, or another model"
            )
        tokenizer = tokenizer_of(
            files.folder,
            name=files.name,
            trust_remote_code=load.trust_remote_code,
            **files.gguf_keywords,
        )
        self.tokenizer, self.chat = tokenizer, uses_chat_template(tokenizer, chat, files.name)
        self.model = pretrained(
            transformers.AutoModelForCausalLM,
            files.folder,
            **load.pretrained_keywords,
            **files.gguf_keywords,
            name=files.name,
            trust_remote_code=load.trust_remote_code,
        )
        require_slots(
            CausalLM(self.model),
            files.name,
            lambda ids: self.model(input_ids=ids, use_cache=False).logits,
        )
        size = self.model.config.get_text_config().vocab_size
        ends = ends_of(files, self.model, tokenizer, tokenizer if self.chat else None)
        self.frontend = HFText(tokenizer, size, ends, load.device)
        space = answer_space(max_new_tokens, size, ends, first_tokens(said, files.name))
        self.binding = Binding(space, self.prompt, self.prompt("")[:1] or [ends[0] if ends else 0])
        self.pooling = Pooling.of(files.folder)
        self.modality = FreeText(self)

    def prompt(self, text: str | Conversation | TokenIds) -> list[int]:
        """Token ids of a prompt, in the chat template if ``chat`` is on."""
        ids = self.ids_of(text)
        if ids is not None:
            return ids
        if self.chat and text:
            return self.chat_ids(text)
        return self.tokenizer(text)["input_ids"]

    def adapter(self, protocol: str) -> CausalLM:
        return CausalLM(self.model)
