"""Prompts of the models of sounds and of their captions: given media as token ids.

Every medium becomes tokens through its frontend, and the tokens stand in the prompt. Words here are
counted from 0; a model adds the number of its codes.

    sound     the tiles of the clip (``NO_TILE`` where none is given), then the caption's words
    captions  the part, then the tiles of a clip or the codes of a sound, then ``PAD``
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from gen.core.errors import GenError, unknown
from gen.media.given import GivenMedia, read_media
from gen.media.resample import resample
from gen.modalities.audio import captions
from gen.modalities.audio.balls import FPS, FRAMES, HOP, RATE, SAMPLES, SIZE, TILE, tiles
from gen.models.load.locate import ZOO
from gen.tokenizers.audio.bands import Bands
from gen.tokenizers.video.tiles import Tiles

TILES_FOLDER, BANDS_FOLDER = "balls-tiles", "audio-bands"  # zoo folders of the frontends
WORDS_FOLDER = "audio-words"  # of the words of captions
STREAMS, LEVELS, STEP = 3, 6, HOP // 2  # of the codec: bands, codes of a band, samples of a frame
EDGES, TONES = (160.0, 400.0, 640.0, 1280.0), (320.0, 512.0, 800.0)  # Hz
CODES = STREAMS * LEVELS
STEPS = SAMPLES // STEP

CLIP = FRAMES * (SIZE // TILE) ** 2  # tiles of a clip
NO_TILE = len(tiles())
FIRST_SLOT = NO_TILE + 1  # word of a caption's word 0
SOUND_SLOTS, SOUND_WORDS = CLIP + captions.SLOTS, FIRST_SLOT + captions.WORDS

PARTS = ("video", "audio")  # word of the part that a caption is of: its index here
PAD = len(PARTS)
FIRST_TILE = PAD + 1
FIRST_CODE = FIRST_TILE + NO_TILE
MOST_MEDIA = max(CLIP, STEPS * STREAMS)  # token ids of a clip or a sound
CAPTION_SLOTS, CAPTION_WORDS = 1 + MOST_MEDIA, FIRST_CODE + CODES
# words that captions are written in, in the order of their ids; the end token follows
VOCABULARY = (
    *("a", *captions.COLOURS, "ball", "bounces", *map(str, captions.BOUNCES), "time", "times"),
    *(",", *captions.PITCHES, "and"),
)
CAPTION_POSITIONS = 18  # words of the longest caption, and the end token


@cache
def tile_frontend() -> Tiles:
    """Load the embedded frontend of clips."""
    return Tiles.from_pretrained(ZOO / TILES_FOLDER)


@cache
def band_frontend() -> Bands:
    """Load the embedded codec."""
    return Bands.from_pretrained(ZOO / BANDS_FOLDER)


def sound_words(clip: tuple[int, ...] | None, caption: captions.Caption) -> list[int]:
    """Words of a prompt of the model of sounds.

    Args:
        clip: tiles of a clip; None for a text alone.
        caption: what is stated about the clip or the sound.
    """
    shown = [NO_TILE] * CLIP if clip is None else list(clip)
    return shown + [FIRST_SLOT + slot for slot in caption.slots()]


UNCONDITIONAL = [NO_TILE] * CLIP + [FIRST_SLOT + s for s in captions.UNCONDITIONAL]


def caption_words(part: str, codes: list[int]) -> list[int]:
    """Words of a prompt of the model of captions.

    Args:
        part: one of ``PARTS``.
        codes: tiles of a clip, or token ids of a sound.

    Raises:
        GenError: an unknown part.
    """
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    first = FIRST_TILE if part == "video" else FIRST_CODE
    shown = [first + code for code in codes]
    return [PARTS.index(part), *shown, *[PAD] * (MOST_MEDIA - len(shown))]


def caption_prompt(part: str, media: Any) -> list[int]:
    """Token ids of a prompt of the model of captions, ``audio-captions``.

    Args:
        part: ``video`` or ``audio``.
        media: clip or sound, as ``gen.media.given.read_media`` takes them.

    Raises:
        GenError: an unknown part, or media of another length or size.
    """
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    given = media if isinstance(media, GivenMedia) else read_media(media, part, fps=FPS)
    codes = clip_codes(clip_frames(given)) if part == "video" else sound_codes(sound_wave(given))
    return [len(VOCABULARY) + 1 + word for word in caption_words(part, codes)]


def clip_codes(frames: np.ndarray, frontend: Tiles | None = None) -> list[int]:
    """Tiles of a clip uint8 [16, 16, 16, 3], ``CLIP`` integers."""
    used = frontend or tile_frontend()
    return used.encode(used.preprocess(frames)[None]).flatten().tolist()


def sound_codes(wave: np.ndarray, frontend: Bands | None = None) -> list[int]:
    """Token ids of a sound float [SAMPLES], band after band within a frame, ``STEPS * STREAMS``
    integers below ``CODES``."""
    used = frontend or band_frontend()
    codes = used.encode(used.preprocess(wave)[None])[0]
    return (codes + LEVELS * torch.arange(STREAMS)[:, None]).T.flatten().tolist()


def clip_frames(media: GivenMedia) -> np.ndarray:
    """Frames of a given clip, uint8 [16, 16, 16, 3]; larger ones of a whole multiple are averaged.

    Raises:
        GenError: another number of frames or another size.
    """
    frames = media.array
    count, height, width = frames.shape[:3]
    scale = height // SIZE
    if count != FRAMES or scale < 1 or (height, width) != (SIZE * scale, SIZE * scale):
        raise GenError(
            f"the clip has {count} frames of {width}x{height}; expected {FRAMES} of {SIZE}x{SIZE}"
            " or a whole multiple"
        )
    squares = frames.reshape(count, SIZE, scale, SIZE, scale, 3).mean((2, 4))
    return np.rint(squares).astype(np.uint8)


def sound_wave(media: GivenMedia) -> np.ndarray:
    """Wave of a given sound, float32 [SAMPLES]; a shorter one is followed by silence.

    Raises:
        GenError: several channels, a longer sound, or another rate where no package resamples.
    """
    wave, rate = media.array, media.rate or RATE
    if rate != RATE and wave.shape[1] == 1 and len(wave) * RATE <= SAMPLES * rate:
        wave, rate = resample(wave, rate, RATE), RATE
    if rate != RATE or wave.shape[1] != 1 or len(wave) > SAMPLES:
        raise GenError(
            f"the sound has {len(wave)} samples at {rate} Hz in {wave.shape[1]} channels; expected"
            f" at most {SAMPLES} at {RATE} Hz in one"
        )
    return np.pad(wave[:, 0], (0, SAMPLES - len(wave)))
