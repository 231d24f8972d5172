"""Text: up to 16 words that answer a task, or up to 10 words that translate some; one id per word.

A causal model's sequences end with the eos token ``<end>``: every later position holds it with
probability 1, and samplers stop there. To a masked model the eos token is an id like any other,
which fills the remaining positions (Nie et al., "LLaDA", arXiv 2502.09992): the length is not
decided beforehand, and tokens behind the first eos token are ignored. Tasks are those of
``gen.modalities.text.tasks``; a model of graphs translates (``gen.modalities.text.translation``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gen.contracts.condition import Condition
from gen.contracts.frontend import TokenFrontend, require_same_frontend
from gen.contracts.modality import Binding, Verdict
from gen.core.condition_parts import KINDS
from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.grid_base import GridModality
from gen.modalities.media_tokens import Description
from gen.modalities.text import tasks as text_tasks
from gen.modalities.text import translation
from gen.modalities.text.description import check_description, description_of, prompt_of
from gen.modalities.text.parallel import oracle_boards
from gen.models.load.locate import ZOO
from gen.models.load.networks import config_field
from gen.tokenizers.text.words import TextWords

if TYPE_CHECKING:
    from gen.contracts.oracle import Board

POSITIONS = 16  # words of a prompt, and of an answer with its eos token
NOTHING = 0  # word of an empty slot
GRAPH_WORDS = "text-dag-words"  # zoo folder of the words of translations
Asked = text_tasks.Task | translation.Translation | Description


@register("modality", "text")
class TextModality(GridModality):
    """Words that answer a task, whose condition is a ``Task``, or that translate digits, whose
    condition is a ``Translation``. The prompt of a task is its words, right-aligned in 16 slots;
    that of a translation is the ids of its source.
    """

    name = "text"
    media_kind = "data"
    extension = "txt"
    models = {
        "causal": "text-causal",
        "masked": "text-masked",
        "blocks": "text-masked",
        "causal-draft": "text-draft",
        "lattice": "text-dag",
        "causal-images": "image-captions",
        "causal-video": "audio-captions",
        "causal-audio": "audio-captions",
    }
    frontends = {"codes": "text-words"}
    default_sampling = {"temperature": 1.0}
    default_samplers = GridModality.default_samplers | {
        "masked": "fast_dllm",
        "lattice": "joint_viterbi",
    }
    slots = POSITIONS
    words = 1 + len(text_tasks.WORDS)
    unconditional = [NOTHING] * POSITIONS
    layout_name = "raster"
    edited_by = "span"
    length_first = False
    accepts = frozenset({"text", *KINDS})
    most = dict.fromkeys(KINDS, 1)

    def parse(self, condition: Condition) -> Asked:
        """Return the task of a text, or the description of a medium that is asked for."""
        condition.require(self.accepts, f"modality {self.name!r}", self.most)
        if any(part in KINDS for part in condition.parts):
            return description_of(condition)
        return self.condition(condition.text or "")

    def condition(self, prompt: str) -> text_tasks.Task | translation.Translation:
        if prompt.strip().lower() == "describe":
            raise GenError(
                "'describe' came without a medium; expected an image, a video or a sound"
            )
        try:
            if translation.is_translation(prompt):
                return translation.parse(prompt)
            return text_tasks.parse(prompt)
        except ValueError as error:
            raise GenError(str(error)) from None

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Held-out tasks, to measure with."""
        return [str(t) for t in text_tasks.tasks(count, 123 + seed, held=True)]

    def category(self, prompt: str) -> str:
        """Name the category of a task, after those of SPEED-Bench."""
        condition = self.condition(prompt)
        if isinstance(condition, translation.Translation):
            return "multilingual"
        return text_tasks.CATEGORIES[condition.op]

    def oracle_bench(self, prompts: int, repeats: int, seed: int) -> list[Board]:
        """Boards of ``gen bench --oracle`` (``gen.modalities.text.parallel``)."""
        return oracle_boards(prompts, repeats, seed)

    def prompt_words(self, condition: Asked) -> list[int]:
        if isinstance(condition, Description):
            raise GenError(
                f"the condition is {condition.part} to describe, and the model answers tasks;"
                " expected a captioner such as 'image-captions'"
            )
        if isinstance(condition, translation.Translation):
            raise GenError(
                f"the prompt is {str(condition)!r}, and the model answers tasks; expected a task"
                " such as 'sort 3 1 2 =', or a model of graphs such as 'text-dag' with a sampler"
                " such as 'joint_viterbi'"
            )
        words = [1 + text_tasks.WORDS.index(w) for w in condition.words()]
        return [NOTHING] * (self.slots - len(words)) + words

    def frontend(self, kind="codes", device="cpu", dtype=torch.float32, folder: Path | None = None):
        return TextWords.from_pretrained(folder or ZOO / self.frontends[kind], device, dtype)

    def codebook(self, frontend: TokenFrontend) -> None:
        """None: words have no vectors."""

    def bind(self, config: Any, frontend: TokenFrontend, model_name: str) -> Binding:
        if config_field(config, "vertices_per_word") is not None:
            return self._bind_graph(config, frontend, model_name)
        if config_field(config, "reads") is not None:
            return self._bind_captioner(config, frontend, model_name)
        binding = super().bind(config, frontend, model_name)
        legal = binding.space.legal.clone()
        legal[0, frontend.eos_token_id] = False  # an answer has at least one word
        counts = config_field(config, "code_counts")
        rarity = None if counts is None else log(sum(counts)) - torch.tensor(counts).log()
        if rarity is not None:  # the ids of conditions and the mask are never generated
            rarity = torch.cat(
                [rarity, rarity.new_full((config.vocab_size - len(rarity),), float(rarity.max()))]
            )
        delimiters = tuple(frontend.ids("="))  # ends a step of a sum
        # words of prompts have ids of their own, behind those of answers and of an empty slot
        said = torch.cat([torch.arange(config.codebook_size), torch.full((self.words,), -1)])
        said[-len(text_tasks.WORDS) :] = torch.tensor(
            [frontend.ids(word)[0] for word in text_tasks.WORDS]
        )
        return replace(
            binding,
            space=replace(
                binding.space,
                legal=legal,
                eos_token_id=frontend.eos_token_id,
                delimiters=delimiters,
                prompt_tokens=said,
                rarity=rarity,
            ),
        )

    def _bind_graph(self, config: Any, frontend: TokenFrontend, model_name: str) -> Binding:
        """Bind a model of graphs, which translates.

        Raises:
            GenError: its words are not those of its frontend, or not those of translations.
        """
        words = len(translation.WORDS)
        if not isinstance(frontend, TextWords):
            raise GenError(
                f"model {model_name} makes words, and its frontend is a {type(frontend).__name__};"
                f" expected words such as {GRAPH_WORDS!r}"
            )
        if config.source_words != translation.SOURCE_IDS or config.eos_id != words:
            raise GenError(
                f"model {model_name} has {config.source_words} source words and the eos token"
                f" {config.eos_id}; expected {translation.SOURCE_IDS} and {words}"
            )
        require_same_frontend(config, frontend, model_name, GRAPH_WORDS)
        # bos and unk stand behind the eos token, and no position takes them
        legal = torch.zeros(frontend.positions, config.vocab_size + 1, dtype=torch.bool)
        legal[:, : config.eos_id + 1] = True
        legal[0, config.eos_id] = False
        space = TokenSpace(
            (len(legal),),
            config.vocab_size + 1,
            legal,
            config.vocab_size,
            eos_token_id=config.eos_id,
        )

        def prompt(condition: Asked) -> list[int]:
            if isinstance(condition, translation.Translation):
                return condition.ids()
            raise GenError(
                f"the prompt is {str(condition)!r}, and model {model_name} translates; expected"
                " one such as 'translate: seven seven two'"
            )

        return Binding(space, prompt, [translation.BOS, translation.EOS])

    def _bind_captioner(self, config: Any, frontend: TextWords, model_name: str) -> Binding:
        """Bind a model that describes media. Raises ``GenError`` for one of other words."""
        size = frontend.eos_token_id + 1
        if config.codebook_size != size or tuple(config.grid) != (frontend.positions,):
            raise GenError(
                f"model {model_name} has codebook_size {config.codebook_size} and grid"
                f" {tuple(config.grid)}; expected {size} and {(frontend.positions,)}, those of its"
                " words"
            )
        require_same_frontend(config, frontend, model_name, config.frontend)
        legal = torch.zeros(frontend.positions, config.vocab_size, dtype=torch.bool)
        legal[:, :size] = True
        legal[0, frontend.eos_token_id] = False
        space = TokenSpace(
            (len(legal),), config.vocab_size, legal, eos_token_id=frontend.eos_token_id
        )
        nothing = [config.vocab_size - 1] * config.prefix_length  # the mask
        return Binding(space, prompt_of(config, model_name), nothing)

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        return tokens[:, None]

    def complete(self, media: str, condition: Asked) -> str:
        """Return a text; of a description, with commas as in captions."""
        return media.replace(" ,", ",") if isinstance(condition, Description) else media

    def is_path(self, media: Any) -> bool:
        """Return whether ``media`` names a file: a ``Path``, or a string that ends in ``.txt``. Any
        other string is a text.
        """
        return isinstance(media, Path) or (
            isinstance(media, str) and media.lower().endswith(f".{self.extension}")
        )

    def whole_frames(self, media: Any, frontend: TokenFrontend) -> str:
        """Text itself, or the text of a file."""
        media = self.load(Path(media)) if self.is_path(media) else media
        frontend.preprocess(media)  # raises for words without codes
        if not media.strip():
            raise GenError("the text to start from is empty; expected at least one word")
        return media

    def prefix(self, media: Any, frontend: TokenFrontend, space: TokenSpace) -> Tensor:
        ids = frontend.ids(self.whole_frames(media, frontend))
        if len(ids) >= space.length:
            raise GenError(
                f"the text to continue has {len(ids)} words; expected fewer than"
                f" {space.length}, the positions of an answer"
            )
        return torch.tensor(ids)

    def edit(
        self, source: Any, where: str, frontend: TokenFrontend, space: TokenSpace
    ) -> tuple[Tensor, Any]:
        """Prepare regeneration of a span of words.

        ``where`` is ``1:3``, words from 0; either end may be omitted. An end one past the last word
        lets the text grow. If the model ends inside the span, the words after it follow at once, so
        no kept word is lost.
        """
        text = self.whole_frames(source, frontend)
        words = frontend.split(text)
        first, last = span(where, len(words), space.length)
        canvas = torch.full((space.length,), frontend.eos_token_id)
        canvas[: len(words)] = torch.tensor(frontend.ids(text))
        canvas[first:last] = space.mask_token_id
        return canvas, lambda made: " ".join(
            [*words[:first], *made.split()[first:last], *words[last:]]
        )

    def save(self, media: str, path: Path, info: dict[str, Any]) -> None:
        Path(path).write_bytes(f"{media}\n".encode())  # line ends stay what they are

    def load(self, path: Path) -> str:
        try:
            return Path(path).read_bytes().decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise GenError(f"the text {path} cannot be read: {error}") from None

    def check(self, media: str, prompt: str) -> Verdict:
        condition = self.condition(prompt)
        if isinstance(condition, translation.Translation):
            return translation.check(condition, media)
        return text_tasks.check(condition, media)

    def judge(self, media: str, condition: Condition) -> Verdict:
        """Judge a text, or the description of a medium, which the checkers of media read."""
        asked = self.parse(condition)
        if isinstance(asked, Description):
            return check_description(asked, media)
        return self.check(media, condition.text or "")

    def grade(self, media: str, prompt: str) -> float:
        """Return the share of a text that is right: its longest right beginning."""
        condition = self.condition(prompt)
        if isinstance(condition, translation.Translation):
            return translation.grade(condition, media)
        return text_tasks.grade(condition, media)

    def grade_partial(self, media: str, prompt: str) -> float:
        """Return the share of an unfinished text that some right answer begins with."""
        condition = self.condition(prompt)
        if isinstance(condition, translation.Translation):
            return translation.grade_partial(condition, media)
        return text_tasks.grade_partial(condition, media)


def span(text: str, words: int, positions: int) -> tuple[int, int]:
    """First word of a span and the word after its last.

    Args:
        text: span such as '1:3', ':2' or '2:'.
        words: words of the text.
        positions: positions of an answer.

    Raises:
        GenError: the text is no span, or goes beyond the words.
    """
    match = re.fullmatch(r"\s*([0-9]*):([0-9]*)\s*", text)
    if not match:
        raise GenError(
            f"span {text!r} names no words; expected a range such as '1:3', ':2' or '2:'"
        )
    first, last = int(match[1] or 0), int(match[2] or words)
    if not 0 <= first < last <= positions or first > words:
        raise GenError(
            f"span {text!r} goes from word {first} to {last}; expected a range that begins at 0 to"
            f" {words} and ends at most at {positions}"
        )
    return first, last
