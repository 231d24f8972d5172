"""Word error rates of sentences (``gen.recipes.speech.sentences``): of the originals, of what a
codec decodes of their codes, and of what a model speaks.

    python -m gen.recipes.speech.heard SENTENCES/held --asr models/whisper-tiny-en \
      --frontend F/model --model E/model --out HEARD

``--asr`` is the folder of a speech recogniser of transformers. ``HEARD`` gets the sounds, and a
picture of spectrograms. Copy synthesis is the limit of every model of the codes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from gen.core.errors import GenError
from gen.core.files import put
from gen.eval.metric import Item
from gen.eval.metrics.wer import WER, Recogniser
from gen.media.audio import write_wav
from gen.media.spectrogram import spectrogram_png
from gen.pipeline.pipeline import load
from gen.training.frontends import load_encoder
from gen.training.sources import find_sources, read_source

SHOWN = 4  # sentences whose spectrograms are drawn
PICTURE = "spectrograms.png"
SENTENCE = "sentence"  # key of a row: what is said, without the name of the voice
ORIGINALS, COPIES, SPOKEN = "originals", "copy synthesis", "model"


def read(folder: Path, frontend: str | None) -> tuple[list[str], dict[str, list[np.ndarray]], int]:
    """Read the sentences of a folder, and encode and decode them.

    Args:
        folder: sounds with texts beside them.
        frontend: zoo name or folder of a codec; None takes the modality's own.

    Returns:
        Captions, the waves float32 [n] of ``ORIGINALS`` and ``COPIES``, and their sampling rate.

    Raises:
        GenError: a sound without a text.
    """
    encoder = load_encoder("speech", frontend)
    codec = encoder.frontend
    frame = codec.config.compression[0]
    captions, waves = [], {ORIGINALS: [], COPIES: []}
    for source in find_sources(folder, "speech"):
        (medium,) = read_source(source, encoder.modality, 0, True, codec.rate)
        if medium.condition is None:
            raise GenError(f"{source.name} has no text; expected what is said in it")
        captions.append(medium.condition["text"])
        wave = np.asarray(medium.media)
        wave = np.pad(wave, (0, -len(wave) % frame))
        codes = codec.encode(codec.preprocess(wave)[None])
        waves[ORIGINALS].append(wave)
        waves[COPIES].append(np.asarray(codec.postprocess(codec.decode(codes)[0])))
    return captions, waves, codec.rate


def listen(
    metric: WER,
    recogniser: Recogniser,
    captions: Sequence[str],
    waves: Sequence[np.ndarray],
    rate: int,
    folder: Path,
) -> tuple[list[str], float]:
    """Write sounds, and return what is heard in each, and the word error rate of all.

    Args:
        metric: the metric.
        recogniser: what its ``open`` returned.
        captions: captions of the sounds.
        waves: sounds float32 [n].
        rate: their sampling rate.
        folder: folder to write into.
    """
    texts: list[str] = []

    def hear(wave: np.ndarray, rate: int) -> str:
        texts.append(recogniser.function(wave, rate).strip())
        return texts[-1]

    folder.mkdir(parents=True, exist_ok=True)
    samples = []
    for number, (caption, wave) in enumerate(zip(captions, waves, strict=True)):
        path = folder / f"{number:03d}.wav"
        write_wav(path, wave, rate)
        item = Item({"prompt": caption, "meta": {SENTENCE: sentence_of(caption)}}, path)
        samples.append((item, metric.read(item, recogniser)))
    total = metric.measure(iter(samples), replace(recogniser, function=hear))
    return texts, metric.scores(total, None)["wer"]


def sentence_of(caption: str) -> str:
    """Return the sentence of a caption, without the name of its voice."""
    return caption.partition(": ")[2] or caption


def speak(model: str, captions: Sequence[str], seed: int) -> list[np.ndarray]:
    """Speak captions with a model, as it samples by default."""
    pipe = load("speech", model=model, device="cpu")
    return [np.asarray(wave) for wave in pipe(list(captions), seed=seed, progress=False).media]


def drawn(rows: Sequence[Sequence[np.ndarray]], rate: int, gap: int = 4) -> Image.Image:
    """Draw the spectrograms of sounds float32 [n], every list of them as a row."""
    pictures = [[spectrogram_png(wave, rate) for wave in row] for row in rows]
    wide, high = pictures[0][0].size
    size = (len(pictures[0]) * (wide + gap) - gap, len(pictures) * (high + gap) - gap)
    made = Image.new("RGB", size, "white")
    for y, row in enumerate(pictures):
        for x, picture in enumerate(row):
            made.paste(picture, (x * (wide + gap), y * (high + gap)))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="sounds with texts beside them")
    parser.add_argument(
        "--asr", required=True, help="folder of a speech recogniser, such as Whisper"
    )
    parser.add_argument("--frontend", help="codec (that of the built-in models)")
    parser.add_argument("--model", help="model that speaks the captions")
    parser.add_argument("--seed", type=int, default=0, help="seed of its samples (0)")
    parser.add_argument("--out", type=Path, required=True, help="folder of sounds and pictures")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    metric = WER(asr=args.asr, text=SENTENCE)
    recogniser = metric.open(torch.device("cpu"))
    captions, waves, rate = read(args.folder, args.frontend)
    if args.model:
        waves[SPOKEN] = speak(args.model, captions, args.seed)
    heard, rates = {}, {}
    for kind, sounds in waves.items():
        folder = args.out / kind.replace(" ", "-")
        heard[kind], rates[kind] = listen(metric, recogniser, captions, sounds, rate, folder)
    for number, caption in enumerate(captions):
        print(caption)
        for kind, texts in heard.items():
            print(f"  {kind:15s}{texts[number]}")
    picture = drawn([sounds[:SHOWN] for sounds in waves.values()], rate)
    put(args.out / PICTURE, lambda part: picture.save(part, format="PNG"))
    for kind, found in rates.items():
        print(f"word error rate, {kind}: {found:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
