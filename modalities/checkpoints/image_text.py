"""Base of the families that answer texts and conversations about images.

A prompt is made by the folder's own processor of transformers: its chat template, where there is
one, and then its tokenizer and its image processor. Images stand where the text, or a turn of the
conversation, has the processor's image token; where neither has one, they stand before the words of
the first user turn. The output is text, drawn from the whole vocabulary of the language model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import transformers
from PIL import Image
from torch import Tensor

from gen.contracts.checkpoint import FROM_PRETRAINED, CheckpointFiles, LoadOptions
from gen.contracts.condition import CONDITION, Condition, ConditionEncoder, Prompt
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value, cut
from gen.core.tool_calls import DEFAULT, ToolFormat
from gen.media.given import GivenMedia
from gen.modalities.checkpoints.options import (
    answer_length,
    answer_space,
    ends_of,
    stated_generation,
    stated_sampling,
)
from gen.modalities.checkpoints.turns_and_ids import (
    Conversation,
    LanguagePrompts,
    TokenIds,
    require_messages,
    texts_of,
)
from gen.modalities.media_tokens import Recent
from gen.modalities.open_vocabulary import FreeText
from gen.models.adapters.cache_probe import require_slots
from gen.models.adapters.feature_prompts import POSITIONS, VECTORS, FeaturePromptLM
from gen.models.adapters.language_models import CausalLM
from gen.models.load.bounded_text import bounded_tokenizer, require_readable_rules
from gen.models.load.chat import chat_text, own_format, uses_chat_template
from gen.models.load.generation_config import first_tokens
from gen.models.load.locate import quiet
from gen.models.load.pretrained import pretrained
from gen.tokenizers.text.hf_text import HFText

# conditions whose inputs are kept, and images whose vectors and whose token ids are kept
KEPT_INPUTS, KEPT_VECTORS, KEPT_IDS = 64, 16, 256
EXPECTED = "expected processor_config.json or preprocessor_config.json"
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Question:
    """Text or conversation, and the images that stand in it, in their order."""

    said: str | Conversation
    images: tuple[GivenMedia, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the images, which stand for them where their pixels are not kept."""
        return tuple(image.digest for image in self.images)

    def __str__(self) -> str:
        return " | ".join(map(str, (self.said, *self.images)))


class ImageText(LanguagePrompts):
    """Language model that answers texts and conversations about images.

    Classifier-free guidance compares a prompt with a text that has only begun.

    Args:
        max_new_tokens: positions of an answer (128, or half of the model's where that is less).
        chat: put prompts into the processor's chat template as the user's message. The default is
            to do so where the processor has a template.
        generation_config: take the sampling parameters of the folder's generation_config.json as
            defaults. Its eos tokens end a text in any case.
    """

    accepts = frozenset({"text", "messages", "tools", "images", "tokens"})
    takes = FROM_PRETRAINED
    runs_from_disk = False
    modalities = ("text",)
    protocols = ("causal",)
    sampling = {"temperature": 1.0}
    network: Any  # class of transformers that is loaded
    kept: ClassVar[int]  # encoded images that are kept

    @abstractmethod
    def adapter(self, protocol: str) -> CausalLM:
        """Return the adapter of the model."""

    @abstractmethod
    def with_images(self, question: Question, ids: list[int]) -> list[int] | Prompt:
        """Return the prompt of a question that has images.

        Args:
            question: the question.
            ids: token ids of the processor, the image token at all positions of images.
        """

    @abstractmethod
    def encode_images(self, question: Question) -> Tensor:
        """Return the images of a question as the language model reads them, [m, ...] for the m
        positions of the image token."""

    @classmethod
    def sampling_of(cls, files: CheckpointFiles, options: Mapping[str, Any]) -> dict[str, Any]:
        return stated_sampling(files, options, cls.sampling)

    def require(self, files: CheckpointFiles) -> None:
        """Raise ``GenError`` for files that the family cannot serve; no weights are loaded."""

    def load(self, files: CheckpointFiles, load: LoadOptions) -> Any:
        """Load the model."""
        return pretrained(
            self.network,
            files.path,
            **load.pretrained_keywords,
            name=files.name,
        )

    @property
    def tool_format(self) -> ToolFormat | None:
        return (own_format(self.templates) or DEFAULT) if self.templates.chat_template else None

    def illegal(self) -> Sequence[int]:
        """Return the token ids that an answer never has."""
        return ()

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
        self.require(files)
        said = stated_generation(files, generation_config)
        given = {"max_new_tokens": max_new_tokens, "generation_config": generation_config}
        self.sampling = self.sampling_of(files, given)
        max_new_tokens = answer_length(files, max_new_tokens)
        self.processor = processor_of(files, load)
        self.tokenizer = self.processor.tokenizer
        templates = self.processor if self.processor.chat_template else self.tokenizer
        self.templates, self.chat = templates, uses_chat_template(templates, chat, files.name)
        self.model = self.load(files, load)
        require_slots(
            CausalLM(self.model),
            files.name,
            lambda ids: self.model(input_ids=ids, use_cache=False).logits,
        )
        size = self.model.config.get_text_config().vocab_size
        ends = ends_of(files, self.model, self.tokenizer, templates if self.chat else None)
        self.frontend = HFText(self.tokenizer, size, ends, load.device)
        first = first_tokens(said, files.name)
        space = answer_space(max_new_tokens, size, ends, first, self.illegal())
        space = replace(space, prompt_tokens=torch.arange(size))
        self._recent_inputs, self._recent_images = Recent(KEPT_INPUTS), Recent(self.kept)
        begun = self.tokenizer("")["input_ids"][:1] or [ends[0] if ends else 0]
        self.binding = Binding(space, self.prompt, begun)
        self.modality = FreeText(self)

    def parse(self, condition: Condition) -> Question | TokenIds:
        """Return the question that text or messages and images state, or token ids.

        Raises:
            GenError: text and messages came together, something came beside token ids, or there
                are not as many images as positions of images.
        """
        condition.require(self.accepts, "the model", self.most)
        if condition.tokens is not None:
            if len(condition.parts) > 1:
                raise GenError(
                    "the model takes tokens alone as its condition; got"
                    f" {' and '.join(condition.parts)}"
                )
            return self.given_ids(condition.tokens)
        require_messages(condition)
        self.require_short(condition.text or "", *texts_of(condition.messages or ()))
        images = condition.media("images")
        if condition.messages is None:
            text = condition.text or ""
            question = Question(text.strip() if images else self.condition(text), images)
        elif condition.text is not None:
            raise GenError("the model takes either text or messages; got both")
        else:
            question = Question(Conversation.of(condition.messages, condition.tools), images)
        self.prompt(question)  # what the processor refuses fails here
        return question

    def prompt(self, condition: str | Question | TokenIds) -> list[int] | Prompt:
        """Token ids of a prompt, and where its images stand.

        Raises:
            GenError: there are not as many images as positions of images, or the processor
                refuses the question.
        """
        if isinstance(condition, TokenIds):
            return list(condition.ids)
        question = Question(condition) if isinstance(condition, str) else condition
        ids = list(self.inputs(question)[0])
        return self.with_images(question, ids) if question.images else ids

    def text_of(self, question: Question) -> str:
        """Return the text that the processor takes: one image token for each image.

        Raises:
            GenError: the number of image tokens is not that of the images.
        """
        token, said, count = self.processor.image_token, question.said, len(question.images)
        if isinstance(said, Conversation) or self.chat:
            turns = _asked(said, count, token)
            tools = said.tools if isinstance(said, Conversation) else ()
            text = chat_text(self.templates, turns, token, tools)
            self.require_short(text)
        else:
            text = said if token in said else token * count + said
        if text.count(token) != count:
            raise GenError(
                f"the prompt has {text.count(token)} positions of images ({token!r}), and the"
                f" condition has {count} images; expected one image for each position"
            )
        return text

    def inputs(self, question: Question) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Return the token ids of a question and the inputs of the image encoder."""
        key = question.said, question.digests
        return self._recent_inputs.of(key, lambda: self._processed(question))

    @torch.no_grad()
    def images(self, question: Question) -> Tensor:
        """Return the encoded images of a question, see ``encode_images``; questions about the same
        images share them."""
        return self._recent_images.of(question.digests, lambda: self.encode_images(question))

    def _processed(self, question: Question) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        text = self.text_of(question)
        if not text:
            raise GenError("the prompt is empty; expected a text or an image")
        bos = self.tokenizer.bos_token
        more = {} if bos is None or not text.startswith(bos) else {"add_special_tokens": False}
        images = [Image.fromarray(image.array) for image in question.images]
        try:
            with quiet():
                found = self.processor(
                    text=text, images=images or None, return_tensors="pt", **more
                )
        except Exception as error:  # processors raise whatever they like
            reason = cut(" ".join(str(error).split()))
            raise GenError(
                f"the processor of the model refuses the condition: {reason}; expected a text and"
                " images that it takes"
            ) from None
        if not found["input_ids"].numel():
            raise bad_value("the prompt", text, "a text that the tokenizer has tokens for")
        pixels = {k: v for k, v in found.items() if k not in TEXT_INPUTS}
        for key, value in pixels.items():
            if isinstance(value, Tensor):
                dtype = self.dtype if value.is_floating_point() else value.dtype
                pixels[key] = value.to(self.device, dtype)
        return tuple(found["input_ids"][0].tolist()), pixels

    @property
    def image_token_id(self) -> int:
        """Token id that the processor writes at the positions of an image."""
        return self.model.config.image_token_id

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the model."""
        return self.model.dtype


class EmbeddedImages(ImageText, ConditionEncoder):
    """Family whose images are vectors of an image encoder at the positions of the image token."""

    kept = KEPT_VECTORS

    def with_images(self, question: Question, ids: list[int]) -> Prompt:
        token = self.image_token_id
        return Prompt([CONDITION if i == token else i for i in ids], question, self)

    def encode(self, condition: Question) -> dict[str, Tensor]:
        """Return the vectors of a question's images, and the positions that they take.

        Raises:
            GenError: the encoder makes another number of vectors.
        """
        ids = torch.tensor(self.inputs(condition)[0])
        positions = (ids == self.image_token_id).nonzero()[:, 0]
        vectors = self.images(condition)
        _require_one_each(len(vectors), len(positions))
        return {VECTORS: vectors, POSITIONS: positions}

    def encode_images(self, question: Question) -> Tensor:
        found = self.model.model.get_image_features(**self.inputs(question)[1]).pooler_output
        return torch.cat([x.reshape(-1, x.shape[-1]) for x in found])

    def adapter(self, protocol: str) -> FeaturePromptLM:
        return FeaturePromptLM(self.model)


class TokenisedImages(ImageText):
    """Family whose images are token ids of the vocabulary at the positions of the image token."""

    kept = KEPT_IDS

    def with_images(self, question: Question, ids: list[int]) -> list[int]:
        token, image_ids = self.image_token_id, self.images(question).tolist()
        _require_one_each(len(image_ids), ids.count(token))
        following = iter(image_ids)
        return [next(following) if i == token else i for i in ids]

    def encode_images(self, question: Question) -> Tensor:
        return self.model.model.get_image_tokens(**self.inputs(question)[1]).flatten()

    def adapter(self, protocol: str) -> CausalLM:
        return CausalLM(self.model)


def _require_one_each(found: int, positions: int) -> None:
    """Raise ``GenError`` unless the images take as many positions as the processor gave them."""
    if found != positions:
        raise GenError(
            f"the images take {found} positions, and the processor of the model gives them"
            f" {positions}; expected equal numbers, and the processor of this very model"
        )


def processor_of(files: CheckpointFiles, load: LoadOptions) -> Any:
    """Load the processor of texts and images of a folder. Raises ``GenError`` where it has none of
    images, or one that cannot be read."""
    options = {"trust_remote_code": load.trust_remote_code}
    found = _read_processor(transformers.AutoProcessor, files, options)
    if not isinstance(found, transformers.ProcessorMixin):
        raise GenError(f"model {files.name} has no image processor; {EXPECTED}")
    bounded_tokenizer(found.tokenizer, files.name)
    return found


def image_processor_of(files: CheckpointFiles) -> Any:
    """Load the image processor of a folder. Raises ``GenError`` where there is none, or one that
    cannot be read."""
    return _read_processor(transformers.AutoImageProcessor, files, {})


def _read_processor(cls: Any, files: CheckpointFiles, options: dict[str, Any]) -> Any:
    try:
        require_readable_rules(files.folder / "tokenizer.json", files.name)
        with quiet():
            return cls.from_pretrained(files.folder, local_files_only=True, **options)
    except GenError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        reason = cut(" ".join(str(error).split()))
        raise GenError(
            f"the image processor of model {files.name} cannot be read: {reason}; {EXPECTED}"
        ) from None


def _asked(said: str | Conversation, count: int, token: str) -> list[dict[str, Any]]:
    """Return turns with a position for each of ``count`` images: those that they have, or else
    before the words of the first user turn."""
    if isinstance(said, str):
        turns, placed = [{"role": "user", "content": said}], token in said
    else:
        turns, placed = said.messages, said.images > 0 or token in str(said)
    if placed or not count:
        return turns
    for turn in turns:
        if turn["role"] == "user":
            content = turn["content"]
            words = [{"type": "text", "text": content}] if isinstance(content, str) else content
            turn["content"] = [*({"type": "image"} for _ in range(count)), *words]
            break
    return turns
