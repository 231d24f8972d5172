"""Janus and Janus-Pro: pictures after words, by a language model with embeddings and a head of its
own for codes (Wu et al., arXiv 2410.13848; Chen et al., arXiv 2501.17811).

A prompt is what a user says in the chat template, and then boi; the P x P codes of the picture
follow row by row. The unconditional half of guidance is the same prompt with pad in the place of
every id but bos and boi: as long as the conditional one, so that codes stand at the same positions.
"""

from __future__ import annotations

from typing import Any

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.modality import Binding
from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.open_vocabulary import FreeImage
from gen.models.load.locate import readable
from gen.models.load.pretrained import pretrained, tokenizer_of
from gen.models.published.janus import JanusLM
from gen.tokenizers.image.janus_vq import JanusVQ

CHAT = (  # of the published models, where a folder has no template
    "<|User|>: {text}\n\n<|Assistant|>:"
)


@register("checkpoint", "janus")
class Janus(Checkpoint):
    """Janus in the layout of transformers (`Janus-Pro-1B` of deepseek-community): square pictures
    of one size after words.

    ``chat``: whether prompts are put into the chat template as what a user says; without it the
    model gets the bare words.
    """

    modalities = ("image",)
    protocols = ("causal",)
    sampling = {"temperature": 1.0, "guidance_scale": 5.0}
    tested = (
        "tiny random folders against transformers' JanusForConditionalGeneration and its `generate`"
    )

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type in ("janus", "multi_modality")

    def __init__(
        self, files: CheckpointFiles, modality: str, how: LoadOptions, *, chat: bool = True
    ):
        if files.model_type != "janus":
            raise GenError(
                f"model {files.name} is in the layout of DeepSeek's own code; expected the one of"
                " transformers, such as deepseek-community/Janus-Pro-1B"
            )
        from transformers import JanusConfig, JanusForConditionalGeneration

        with readable("model", files.name):
            config = JanusConfig.from_dict(files.config)
        codes, grid, self._vocabulary = (
            config.vq_config.num_embeddings,
            (config.vq_config.num_patches,) * 2,
            config.text_config.vocab_size,
        )
        if config.vision_config.num_image_tokens != grid[0] * grid[1]:
            raise GenError(
                f"model {files.name} makes {config.vision_config.num_image_tokens} codes; expected"
                f" {grid[0]} x {grid[1]}, the grid of its frontend"
            )
        self._tokenizer = tokenizer_of(
            files.path, name=files.name, trust_remote_code=how.trust_remote_code
        )
        self._special = specials_of(files, self._tokenizer)
        self._template = (
            files.json("chat_template.json").get("chat_template") or self._tokenizer.chat_template
        )
        self._chat = chat
        self.words("a picture")  # what a tokenizer cannot do is said before the weights are read

        self.model = pretrained(
            JanusForConditionalGeneration,
            files.path,
            device=how.device,
            dtype=how.dtype,
            device_map=how.device_map,
            name=files.name,
        )
        self._adapter = JanusLM(self.model)
        self.frontend = JanusVQ(self.model.model.vqmodel)
        self.binding = Binding(
            TokenSpace.codes(grid, codes, codes, codebook=self.frontend.codebooks[0]),
            self.prompt,
            self.unconditional,
        )
        self.modality = FreeImage(self)

    def prompt(self, condition: str) -> list[int]:
        """The ids before the first code."""
        return self._adapter.prompt(self.words(condition))

    def unconditional(self, condition: str) -> list[int]:
        """The ids that guidance compares a condition's with."""
        kept = self._special["bos_token"], self._special["boi_token"]
        return self._adapter.prompt(
            [i if i in kept else self._special["pad_token"] for i in self.words(condition)]
        )

    def words(self, condition: str) -> list[int]:
        """The model's ids of a condition. Raises ``GenError`` for words that the tokenizer turns
        into ids that the model does not have."""
        text, tokenizer = condition, self._tokenizer
        if self._chat and self._template:
            said = [{"role": "user", "content": [{"type": "text", "text": condition}]}]
            text = tokenizer.apply_chat_template(
                said, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        elif self._chat:
            text = CHAT.format(text=condition)
        boi = self._special["boi_token"]
        ids = tokenizer(text + tokenizer.convert_ids_to_tokens(boi))["input_ids"]
        if ids[-1:] != [boi] or max(*ids, *self._special.values()) >= self._vocabulary:
            raise GenError(
                f"the tokenizer makes {ids} of the prompt {condition!r}; expected ids below"
                f" {self._vocabulary} that end with {boi}, the beginning of a picture"
            )
        return ids

    def adapter(self, protocol: str) -> JanusLM:
        return self._adapter


def specials_of(files: CheckpointFiles, tokenizer: Any) -> dict[str, int]:
    """The ids of bos, boi and pad: what the generation config says, else the tokenizer. Raises
    ``GenError`` for one that neither has."""
    config = files.json("generation_config.json")
    config = {**config, **(config.get("generation_kwargs") or {})}
    found = {}
    for key in ("bos_token", "boi_token", "pad_token"):
        found[key] = config.get(f"{key}_id")
        if found[key] is None:
            found[key] = getattr(tokenizer, f"{key}_id", None)
        if not isinstance(found[key], int) or not 0 <= found[key] < len(tokenizer):
            raise GenError(
                f"model {files.name} has the {key}_id {found[key]}; expected one of the tokenizer's"
                f" {len(tokenizer)} ids in generation_config.json, or in tokenizer_config.json"
            )
    return found
