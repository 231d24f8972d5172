"""Text by any causal language model of transformers (``AutoModelForCausalLM``)."""

from __future__ import annotations

import torch
import transformers

from gen.contracts.checkpoint import SPLIT, CheckpointFiles, LoadOptions
from gen.contracts.modality import Binding
from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.checkpoints.options import answer_length
from gen.modalities.checkpoints.turns_and_ids import Conversation, LanguagePrompts, TokenIds
from gen.modalities.open_vocabulary import FreeText
from gen.models.adapters.cache_probe import require_slots
from gen.models.adapters.language_models import CausalLM
from gen.models.load.chat import chat_token_ids, uses_chat_template
from gen.models.load.locate import config_field
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
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type in CAUSAL_LM_TYPES or "AutoModelForCausalLM" in files.config.get(
            "auto_map", {}
        )

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        max_new_tokens: int | None = None,
        chat: bool | None = None,
    ):
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
        ends = ends_of(self.model, tokenizer)
        self.frontend = HFText(tokenizer, size, ends, load.device)
        legal = torch.ones(1, size, dtype=torch.bool).expand(max_new_tokens, -1)
        space = TokenSpace((max_new_tokens,), size, legal, eos_token_id=ends[0] if ends else None)
        self.binding = Binding(space, self.prompt, self.prompt("")[:1] or [ends[0] if ends else 0])
        self.modality = FreeText(self)

    def prompt(self, text: str | Conversation | TokenIds) -> list[int]:
        """Token ids of a prompt, in the chat template if ``chat`` is on."""
        ids = self.ids_of(text)
        if ids is not None:
            return ids
        if self.chat and text:
            return chat_token_ids(self.tokenizer, text)
        return self.tokenizer(text)["input_ids"]

    def adapter(self, protocol: str) -> CausalLM:
        return CausalLM(self.model)


def ends_of(model, tokenizer) -> tuple[int, ...]:
    """Ids that end a text: the generation config's, else the tokenizer's."""
    eos_ids = config_field(config_field(model, "generation_config"), "eos_token_id")
    eos_ids = tokenizer.eos_token_id if eos_ids is None else eos_ids
    return () if eos_ids is None else (eos_ids,) if isinstance(eos_ids, int) else tuple(eos_ids)
