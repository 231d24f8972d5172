"""Condition of the model of sounds: hidden states of the model of captions.

The model of captions reads the tiles of a clip and the words of a caption. Its last hidden states,
one for every tile and one for every word, are the prompt of the model of sounds (VATT, arXiv
2411.05679), which thus has the clip at its full frame rate. The rows of what is not given, and
those behind the last word, are zeros.

    rows      0 .. CLIP - 1    tiles of the clip, frame after frame
              CLIP ..          words of the caption
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from gen.contracts.condition import ConditionEncoder
from gen.core.errors import GenError
from gen.core.registry import register
from gen.media.given import GivenMedia
from gen.modalities.audio import captions, prompts
from gen.models.adapters.feature_prompts import POSITIONS, VECTORS
from gen.models.load.digest import digest_of
from gen.models.zoo import load_lm
from gen.tokenizers.text.words import TextWords

ROWS = prompts.CLIP + prompts.CAPTION_POSITIONS  # states of a prompt


@dataclass(frozen=True)
class SoundCondition:
    """Condition of a sound.

    Attributes:
        caption: what a text states; nothing without one.
        clip: given clip, or None.
        tiles: its tiles.
    """

    caption: captions.Caption
    clip: GivenMedia | None = None
    tiles: tuple[int, ...] | None = None

    def __str__(self) -> str:
        said = str(self.caption)
        return said if self.clip is None else " | ".join(p for p in (said, str(self.clip)) if p)


@torch.no_grad()
def caption_states(
    model: torch.nn.Module,
    clips: Sequence[Sequence[int] | None],
    texts: Sequence[list[int]],
) -> Tensor:
    """Return the states [B, ROWS, S] of clips and of the word ids of captions.

    Args:
        model: the model of captions.
        clips: tiles of every clip, None where there is none.
        texts: word ids of every caption, without the end token; empty where there is none.
    """
    words = len(prompts.VOCABULARY) + 1
    asked = [prompts.caption_words("video", list(clip or ())) for clip in clips]
    width = max(map(len, texts), default=0)
    end = words - 1  # what stands behind the last word is read by no row before it
    said = [text + [end] * (width - len(text)) for text in texts]
    ids = torch.tensor([[words + w for w in a] + s for a, s in zip(asked, said, strict=True)])
    hidden = model.model(
        inputs_embeds=model.embed(ids, torch.arange(ids.shape[1]).expand_as(ids)),
        use_cache=False,
    ).last_hidden_state
    out = hidden.new_zeros(len(ids), ROWS, hidden.shape[-1])
    seen = torch.tensor([clip is not None for clip in clips])
    out[seen, : prompts.CLIP] = hidden[seen, 1 : 1 + prompts.CLIP]
    spoken = torch.arange(width) < torch.tensor([len(text) for text in texts])[:, None]
    rows = hidden[:, prompts.CAPTION_SLOTS :]
    out[:, prompts.CLIP : prompts.CLIP + width] = rows * spoken[..., None]
    return out


@register("condition_encoder", "sound_states")
class SoundStates(ConditionEncoder):
    """Model of captions whose states are conditions. It is loaded when first needed.

    Args:
        name: zoo name or folder.
        digest: digest of its weights that the model of sounds was trained with; None for any.
    """

    def __init__(self, name: str, digest: str | None = None):
        self.name, self.digest = name, digest
        self.words = TextWords.of(prompts.VOCABULARY, prompts.CAPTION_POSITIONS)

    @cached_property
    def model(self) -> torch.nn.Module:
        """The network. Raises ``GenError`` for one of other weights."""
        model = load_lm(self.name, torch.device("cpu"), torch.float32)
        found = digest_of(model)
        if self.digest not in (None, found):
            raise GenError(
                f"the states of {self.name} are of weights {found}; expected those of"
                f" {self.digest}, with which the model of sounds was trained"
            )
        return model

    def encode(self, condition: SoundCondition) -> dict[str, Tensor]:
        """Return the ``vectors`` [ROWS, S] of a condition, and their ``positions``."""
        states = caption_states(self.model, [condition.tiles], [self.word_ids(condition.caption)])
        return {VECTORS: states[0], POSITIONS: torch.arange(ROWS)}

    def word_ids(self, caption: captions.Caption) -> list[int]:
        """Return the word ids of a caption."""
        return self.words.ids(str(caption))


@cache
def sound_states(name: str, digest: str | None = None) -> SoundStates:
    """Return the states of a model of captions, the same object for the same name and digest."""
    return SoundStates(name, digest)
