"""Word error rates of sentences (``gen.recipes.speech.sentences``): of the originals, of what a
codec decodes of their codes, and of what a model speaks.

    python -m gen.recipes.speech.heard SENTENCES/held --asr models/whisper-tiny-en \
      --frontend F/model --model E/model --out HEARD

``--asr`` is the folder of a Whisper. ``HEARD`` gets the sounds and an image of spectrograms, a row
of each. Copy synthesis is the limit of every model of the codes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from gen.core.errors import GenError
from gen.core.files import put
from gen.media.audio import read_wav, write_wav
from gen.media.spectrogram import spectrogram_png
from gen.models.load.locate import locate
from gen.pipeline.pipeline import load
from gen.recipes.speech.real_speech import errors
from gen.tokenizers.audio.codecs import open_codec

SHOWN = 4  # sentences whose spectrograms are drawn
SHEET = "spectrograms.png"
LONGEST = 64  # tokens that are heard in a sentence; Whisper repeats itself where it hears no words
ORIGINALS, COPIES, SPOKEN = "originals", "copy synthesis", "model"


def read(folder: Path, frontend: str) -> tuple[list[str], dict[str, list[np.ndarray]], int]:
    """Read the sentences of a folder, and encode and decode them.

    Args:
        folder: sounds with texts beside them.
        frontend: zoo name or folder of a codec.

    Returns:
        Captions, the waves float32 [n] of ``ORIGINALS`` and ``COPIES``, and their sampling rate.

    Raises:
        GenError: no sounds, or a sound without a text.
    """
    codec = open_codec(Path(locate(frontend, "frontend")))
    frame = codec.config.compression[0]
    captions: list[str] = []
    waves: dict[str, list[np.ndarray]] = {ORIGINALS: [], COPIES: []}
    for path in sorted(folder.glob("*.wav")):
        text = path.with_suffix(".txt")
        if not text.is_file():
            raise GenError(f"{path} has no text; expected what is said in {text.name}")
        captions.append(text.read_text(encoding="utf-8").strip())
        wave = read_wav(path, codec.rate)
        wave = np.pad(wave, (0, -len(wave) % frame))
        codes = codec.encode(codec.preprocess(wave)[None])
        waves[ORIGINALS].append(wave)
        waves[COPIES].append(np.asarray(codec.postprocess(codec.decode(codes)[0])))
    if not captions:
        raise GenError(f"{folder} has no sounds; expected WAV files, with texts beside them")
    return captions, waves, codec.rate


def sentence_of(caption: str) -> str:
    """Return the sentence of a caption, without the name of its voice."""
    return caption.partition(": ")[2] or caption


def speak(model: str, captions: Sequence[str], seed: int, temperature: float) -> list[np.ndarray]:
    """Speak captions with a model."""
    pipe = load("speech", model=model, device="cpu")
    made = pipe(list(captions), seed=seed, temperature=temperature, progress=False)
    return [np.asarray(wave) for wave in made.media]


def transcribe(asr: str, waves: Sequence[np.ndarray], rate: int) -> list[str]:
    """Return what a Whisper hears in sounds float32 [n]."""
    pipe = load("text", model=asr, device="cpu", dtype="float32", max_new_tokens=LONGEST)
    prompts = [{"audio": (wave, rate)} for wave in waves]
    return [str(text).strip() for text in pipe(prompts, temperature=0.0, progress=False).media]


def drawn(rows: Sequence[Sequence[np.ndarray]], rate: int, gap: int = 4) -> Image.Image:
    """Draw the spectrograms of sounds float32 [n], every list of them as a row."""
    images = [[spectrogram_png(wave, rate) for wave in row] for row in rows]
    wide, high = images[0][0].size
    size = (len(images[0]) * (wide + gap) - gap, len(images) * (high + gap) - gap)
    made = Image.new("RGB", size, "white")
    for y, row in enumerate(images):
        for x, image in enumerate(row):
            made.paste(image, (x * (wide + gap), y * (high + gap)))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="sounds with texts beside them")
    parser.add_argument("--asr", required=True, help="folder of a Whisper")
    parser.add_argument("--frontend", default="speech-codec", help="codec (speech-codec)")
    parser.add_argument("--model", help="model that speaks the captions")
    parser.add_argument("--seed", type=int, default=0, help="seed of its samples (0)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of its samples (1)")
    parser.add_argument("--out", type=Path, required=True, help="folder of sounds and spectrograms")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    captions, waves, rate = read(args.folder, args.frontend)
    if args.model:
        waves[SPOKEN] = speak(args.model, captions, args.seed, args.temperature)
    heard = {kind: transcribe(args.asr, sounds, rate) for kind, sounds in waves.items()}
    for kind, sounds in waves.items():
        folder = args.out / kind.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        for number, wave in enumerate(sounds):
            write_wav(folder / f"{number:03d}.wav", wave, rate)
    for number, caption in enumerate(captions):
        print(caption)
        for kind, texts in heard.items():
            print(f"  {kind:15s}{texts[number]}")
    image = drawn([sounds[:SHOWN] for sounds in waves.values()], rate)
    put(args.out / SHEET, lambda part: image.save(part, format="PNG"))
    said = [sentence_of(caption) for caption in captions]
    for kind, texts in heard.items():
        print(f"word error rate, {kind}: {errors(texts, said):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
