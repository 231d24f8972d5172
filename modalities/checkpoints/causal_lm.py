"""Texts by any causal language model of transformers (``AutoModelForCausalLM``)."""

from __future__ import annotations

import torch

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.modality import Binding
from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.open_vocabulary import FreeText
from gen.models.adapters.cache_probe import require_slots
from gen.models.adapters.language_models import CausalLM
from gen.models.load.pretrained import chat_token_ids, pretrained, tokenizer_of, uses_chat_template
from gen.tokenizers.text.hf_text import HFText


@register("checkpoint", "causal_lm")
class CausalText(Checkpoint):
    """Any causal language model of transformers whose attention takes masks and positions (Llama,
    Qwen, Gemma ...).

    ``max_new_tokens``: the places of an answer. ``chat``: whether prompts are put into the
    tokenizer's chat template as what a user says; by default where it has one. A prompt has no
    unconditional half but its first id, so guidance compares it with a text that has only begun.
    """

    modalities = ("text",)
    protocols = ("causal",)
    sampling = {"temperature": 1.0}
    tested = (
        "tiny random Llama, Qwen3 and GPT-NeoX folders against their own classes and `generate`"
    )
    catch_all = True

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN,
        )

        return files.model_type in KNOWN or "AutoModelForCausalLM" in files.config.get(
            "auto_map", {}
        )

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        how: LoadOptions,
        *,
        max_new_tokens: int = 128,
        chat: bool | None = None,
    ):
        from transformers import AutoModelForCausalLM

        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise GenError(
                f"max_new_tokens is {max_new_tokens!r}; expected an integer of at least 1"
            )
        if "auto_map" in files.config and not how.trust_remote_code:
            from transformers.models.auto.modeling_auto import (
                MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN,
            )

            if files.model_type not in KNOWN:
                raise GenError(
                    f"model {files.name} is a {files.model_type!r} that only code of its own folder"
                    " can run; expected trust_remote_code=True, or another model"
                )
        tokenizer = tokenizer_of(
            files.path, name=files.name, trust_remote_code=how.trust_remote_code
        )
        self.tokenizer, self.chat = tokenizer, uses_chat_template(tokenizer, chat, files.name)
        self.model = pretrained(
            AutoModelForCausalLM,
            files.path,
            device=how.device,
            dtype=how.dtype,
            device_map=how.device_map,
            name=files.name,
            trust_remote_code=how.trust_remote_code,
        )
        require_slots(
            CausalLM(self.model),
            files.name,
            lambda ids: self.model(input_ids=ids, use_cache=False).logits,
        )
        size = self.model.config.get_text_config().vocab_size
        ends = ends_of(self.model, tokenizer)
        self.frontend = HFText(tokenizer, size, ends, how.device)
        legal = torch.ones(1, size, dtype=torch.bool).expand(max_new_tokens, -1)
        space = TokenSpace((max_new_tokens,), size, legal, eos_token_id=ends[0] if ends else None)
        self.binding = Binding(space, self.prompt, self.prompt("")[:1] or [ends[0] if ends else 0])
        self.modality = FreeText(self)

    def prompt(self, text: str) -> list[int]:
        if self.chat and text:
            return chat_token_ids(self.tokenizer, text)
        return self.tokenizer(text)["input_ids"]

    def adapter(self, protocol: str) -> CausalLM:
        return CausalLM(self.model)


def ends_of(model, tokenizer) -> tuple[int, ...]:
    """The ids that end a text: what the generation config says, else the tokenizer's."""
    said = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    said = tokenizer.eos_token_id if said is None else said
    return () if said is None else (said,) if isinstance(said, int) else tuple(said)
