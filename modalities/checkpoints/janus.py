"""Janus and Janus-Pro: images from text, and text about images (Wu et al., arXiv 2410.13848; Chen
et al., arXiv 2501.17811).

Text about images is that of a language model which reads the projected vectors of a SigLIP encoder.
For images the same network has separate embeddings and a separate head for codes. Their prompt is
the user's message in the chat template, and then boi. The P x P codes of the image follow row by
row. The unconditional branch of classifier-free guidance is the same prompt with pad in place of
every id but bos and boi. Both branches have one length, so codes stand at the same positions.
"""

from __future__ import annotations

from typing import Any

import transformers

from gen.contracts.checkpoint import FROM_PRETRAINED, Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.modality import Binding
from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.checkpoints.image_text import EmbeddedImages
from gen.modalities.open_vocabulary import FreeImage
from gen.models.load.chat import render
from gen.models.load.locate import readable
from gen.models.load.pretrained import pretrained, tokenizer_of
from gen.models.published.janus import JanusLM
from gen.tokenizers.image.janus_vq import JanusVQ

CHAT = (  # template of the published models, where a folder has none
    "<|User|>: {text}\n\n<|Assistant|>:"
)


@register("checkpoint", "janus")
class Janus(Checkpoint):
    """Janus in the layout of transformers (`Janus-Pro-1B` of deepseek-community): square images of
    one size from text, and text about images.

    Args:
        chat: put prompts into the chat template as the user's message. Without it the model gets
            the bare words.
    """

    takes = FROM_PRETRAINED
    runs_from_disk = False
    modalities = ("image", "text")
    protocols = ("causal",)
    sampling = {"temperature": 1.0, "guidance_scale": 5.0}
    tested = (
        "tiny random folders against transformers' JanusForConditionalGeneration, its processor and"
        " its `generate`, for images and for text"
    )

    @classmethod
    def serving(cls, modality: str) -> type[Checkpoint]:
        return JanusText if modality == "text" else cls

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type in ("janus", "multi_modality")

    def __init__(
        self, files: CheckpointFiles, modality: str, load: LoadOptions, *, chat: bool = True
    ):
        require_layout(files)
        with readable("model", files.name):
            config = transformers.JanusConfig.from_dict(files.config)
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
            files.path, name=files.name, trust_remote_code=load.trust_remote_code
        )
        self._special = specials_of(files, self._tokenizer)
        self._template = (
            files.json("chat_template.json").get("chat_template") or self._tokenizer.chat_template
        )
        self._chat = chat
        self.words("an image")  # an unsuitable tokenizer fails here, before the weights are read

        self.model = pretrained(
            transformers.JanusForConditionalGeneration,
            files.path,
            **load.pretrained_keywords,
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
        """Ids before the first code."""
        return self._adapter.prompt(self.words(condition))

    def unconditional(self, condition: str) -> list[int]:
        """Ids of the unconditional branch of guidance."""
        unchanged = self._special["bos_token"], self._special["boi_token"]
        return self._adapter.prompt(
            [i if i in unchanged else self._special["pad_token"] for i in self.words(condition)]
        )

    def words(self, condition: str) -> list[int]:
        """Model ids of a condition.

        Raises:
            GenError: the tokenizer gives ids that the model does not have.
        """
        text, tokenizer = condition, self._tokenizer
        if self._chat and self._template:
            messages = [{"role": "user", "content": [{"type": "text", "text": condition}]}]
            text = render(tokenizer, messages, prompt=True, source=self._template)
        elif self._chat:
            text = CHAT.format(text=condition)
        boi = self._special["boi_token"]
        ids = tokenizer(text + tokenizer.convert_ids_to_tokens(boi))["input_ids"]
        if ids[-1:] != [boi] or max(*ids, *self._special.values()) >= self._vocabulary:
            raise GenError(
                f"the tokenizer makes {ids} of the prompt {condition!r}; expected ids below"
                f" {self._vocabulary} that end with {boi}, the beginning of an image"
            )
        return ids

    def adapter(self, protocol: str) -> JanusLM:
        return self._adapter


class JanusText(EmbeddedImages):
    """Text about images; options as of ``ImageText``."""

    network = transformers.JanusForConditionalGeneration

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return Janus.matches(files)

    def require(self, files: CheckpointFiles) -> None:
        require_layout(files)


def require_layout(files: CheckpointFiles) -> None:
    """Raise ``GenError`` for a folder that is not in the layout of transformers."""
    if files.model_type != "janus":
        raise GenError(
            f"model {files.name} is in the layout of DeepSeek's own code; expected the"
            " layout of transformers, such as deepseek-community/Janus-Pro-1B"
        )


def specials_of(files: CheckpointFiles, tokenizer: Any) -> dict[str, int]:
    """Ids of bos, boi and pad from the generation config, else from the tokenizer.

    Raises:
        GenError: neither has one of them.
    """
    config = files.json("generation_config.json")
    config = {**config, **(config.get("generation_kwargs") or {})}
    specials = {}
    for key in ("bos_token", "boi_token", "pad_token"):
        specials[key] = config.get(f"{key}_id")
        if specials[key] is None:
            specials[key] = getattr(tokenizer, f"{key}_id", None)
        if not isinstance(specials[key], int) or not 0 <= specials[key] < len(tokenizer):
            raise GenError(
                f"model {files.name} has the {key}_id {specials[key]}; expected one of the"
                f" tokenizer's {len(tokenizer)} ids in generation_config.json, or in"
                " tokenizer_config.json"
            )
    return specials
