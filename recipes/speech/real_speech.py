"""Published Whisper weights on spoken sentences: tokens of transformers' ``generate``, and errors.

    python -m gen.recipes.speech.real_speech models/whisper-tiny-en

The folder is one of transformers (``gen.recipes.speech.ctranslate2`` makes one). espeak-ng, which
has to be installed, speaks twenty sentences. Each row of the table is a sampler, alone or in
batches: how many of the sentences have the tokens of ``generate``, forward passes of the decoder
per sentence, and seconds for all of them. The last lines are word error rates against the text.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from gen.core.errors import GenError
from gen.media.audio import open_sound
from gen.media.containers import require_package
from gen.media.resample import resample
from gen.models.load.locate import quiet
from gen.pipeline.pipeline import Pipeline, load

SENTENCES = (
    "The old bridge over the river was closed for repairs last winter.",
    "Please bring a warm coat, because the evenings are cold in the mountains.",
    "She counted twelve white birds on the roof of the station.",
    "The train to the coast leaves every morning at half past seven.",
    "Nobody in the village could remember who had planted the apple tree.",
    "We opened the window and listened to the rain on the garden.",
    "His brother works as a baker in a small town near the border.",
    "The teacher asked the children to draw a map of their street.",
    "A quiet dog slept under the table while the guests were talking.",
    "They found the missing keys in the pocket of a blue jacket.",
    "The museum shows paintings, letters and instruments from three centuries.",
    "If the weather is good, we will walk along the beach on Sunday.",
    "The doctor told him to drink more water and to sleep longer.",
    "Our neighbours are building a house with a green roof.",
    "It took the engineers two years to finish the long tunnel.",
    "The library lends books, films and even musical instruments.",
    "After dinner the family played cards until midnight.",
    "The captain looked at the clouds and decided to stay in the harbour.",
    "Every spring the farmers sell flowers and honey at the market.",
    "The letter arrived too late, but the answer was still kind.",
)
RATE = 16_000
SAMPLERS: dict[str, Any] = {
    "autoregressive": "autoregressive",
    "speculative_jacobi, window 8": {"name": "speculative_jacobi", "window": 8},
    "prompt_lookup": "prompt_lookup",
    "suffix": {"name": "speculative", "drafter": "suffix"},
}  # all of them draw the model's own tokens
BATCHES = (1, 8)


def speak(text: str, path: Path, voice: str = "en") -> np.ndarray:
    """Write a sentence in a voice of espeak-ng, and return its samples at ``RATE``, float32 [n].

    Raises:
        GenError: espeak-ng is not installed.
    """
    if shutil.which("espeak-ng") is None:
        raise GenError("espeak-ng is not installed; expected it (apt-get install espeak-ng)")
    subprocess.run(["espeak-ng", "-v", voice, "-w", str(path), text], check=True)
    wave, rate = open_sound(path)
    return resample(wave, rate, RATE)[:, 0].astype(np.float32)


def expected(
    folder: Path, waves: Sequence[np.ndarray], limit: int
) -> tuple[list[list[int]], float]:
    """Decode with transformers, one sound at a time: tokens up to the end, and seconds."""
    with quiet():
        model = transformers.WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
        end, found, began = model.config.eos_token_id, [], time.perf_counter()
        for wave in waves:
            features = extractor(wave, sampling_rate=RATE, return_tensors="pt").input_features
            row = model.generate(features, max_new_tokens=limit, do_sample=False)[0].tolist()
            found.append([token for token in row if token < end])
    return found, time.perf_counter() - began


def decoded(
    pipe: Pipeline, waves: Sequence[np.ndarray], spec: Any, batch: int
) -> tuple[list[list[int]], list[str], float, float]:
    """Decode with gen: tokens up to the end, texts, passes per sound, and seconds for all."""
    assert pipe.checkpoint is not None, "the folder is a published model"
    end, began = pipe.checkpoint.binding.space.eos_token_id, time.perf_counter()
    prompts = [{"audio": (wave, RATE)} for wave in waves]
    out = pipe(prompts, spec, temperature=0.0, batch_size=batch, progress=False)
    taken = time.perf_counter() - began
    rows = [[token for token in row if token < end] for row in out.tokens.tolist()]
    return rows, out.media, float(np.mean([s.nfe for s in out.stats])), taken


def errors(texts: Sequence[str], said: Sequence[str]) -> float:
    """Return the word error rate of texts against what was said, without case and punctuation."""
    jiwer = require_package("jiwer", '"gen-toolkit[eval]"', "word error rates")
    plain = jiwer.Compose([jiwer.ToLowerCase(), jiwer.RemovePunctuation(), jiwer.Strip()])
    return jiwer.wer([plain(text) for text in said], [plain(text) for text in texts])


def compare(folder: Path, threads: int) -> bool:
    """Print the table of a model; return whether all tokens are those of transformers."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as sounds:
        waves = [speak(t, Path(sounds) / f"{n}.wav") for n, t in enumerate(SENTENCES)]
    pipe = load("text", model=folder, dtype="float32", device="cpu")
    assert pipe.checkpoint is not None, "the folder is a published model"
    want, taken = expected(folder, waves, pipe.checkpoint.binding.space.length)
    seconds = sum(map(len, waves)) / RATE
    print(f"{len(waves)} sentences, {seconds:.0f} s of speech, {sum(map(len, want))} tokens")
    print(f"{'sampler':30s} batch  equal  passes  seconds")
    print(f"{'transformers generate':30s} {1:5d}  {'':5s}  {'':6s}  {taken:7.1f}")
    all_equal, said = True, {}
    for name, spec in SAMPLERS.items():
        for batch in BATCHES:
            rows, texts, passes, taken = decoded(pipe, waves, spec, batch)
            equal = sum(mine == theirs for mine, theirs in zip(rows, want, strict=True))
            said[name], all_equal = texts, all_equal and equal == len(waves)
            print(f"{name:30s} {batch:5d}  {equal:2d}/{len(waves)}  {passes:6.1f}  {taken:7.1f}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in want]
    ours, theirs = (errors(heard, SENTENCES) for heard in (said["autoregressive"], texts))
    print(f"word error rate: {ours:.1%}, transformers {theirs:.1%}")
    silent = [np.zeros_like(wave) for wave in waves[:2]]  # control: nothing is said
    heard = decoded(pipe, silent, SAMPLERS["autoregressive"], 2)[0]
    differs = all(mine != theirs for mine, theirs in zip(heard, want[:2], strict=True))
    print(f"silence has other tokens: {'yes' if differs else 'no'}")
    return all_equal and differs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 where tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of transformers with a Whisper")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (1)")
    args = parser.parse_args(argv)
    return 0 if compare(args.folder, args.threads) else 1


if __name__ == "__main__":
    sys.exit(main())
