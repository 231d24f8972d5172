"""Measurements and model cards of the models of sounds and captions.

All figures are of held-out clips. Sounds are judged by the checker, which reads the waveform alone;
its onsets are compared with the hits of the simulator.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gen.modalities.audio import balls, checker, prompts
from gen.modalities.audio.balls import Scene
from gen.modalities.audio.captions import PITCHES, Ball, Caption
from gen.models.zoo import load_lm
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_evaluation import CARD_HEAD, few
from gen.tokenizers.text.words import TextWords

STEPS = (16, 8, 4)  # forward passes of MaskGIT; the first is the default
GUIDANCE = (1.0, 3.0)  # beside the default
SEED = 777
BATCH = 20


def evaluate(zoo: Path, held_out: int, log: Callable = print) -> dict[str, Any]:
    """Measure the models in ``zoo``, and write ``evaluation-audio.json`` there and model cards."""
    began = time.time()
    scenes = balls.scenes(held_out, SEED, held=True)
    result = {
        "held_out": held_out,
        "checker": checker_figures(scenes),
        "captions": caption_figures(zoo, scenes),
        "sounds": sound_figures(zoo, scenes, log),
    }
    result["minutes"] = round((time.time() - began) / 60, 1)
    log(json.dumps({key: result[key] for key in ("checker", "captions")}))
    (zoo / "evaluation-audio.json").write_text(json.dumps(result, indent=1) + "\n")
    write_cards(zoo, result)
    return result


# --- Scores


def scores(
    waves: Sequence[np.ndarray], scenes: Sequence[Scene], pitches: Sequence[Caption] | None = None
) -> dict[str, float]:
    """Compare sounds with the hits of clips.

    Args:
        waves: sounds.
        scenes: the clips that they should belong to.
        pitches: captions whose pitches should be heard; None for those of the colours.

    Returns:
        ``onset_f1`` within one frame, ``exact_f1`` in the same frame, ``event_f1`` within one frame
        and with the right pitch, ``pitch`` and ``loudness``: share of right ones of the matched
        onsets, ``count``: share of clips with the right number of hits.
    """
    found = {"near": 0, "exact": 0, "pitch": 0, "loudness": 0}
    heard_total = hits_total = counts = 0
    said = pitches or [scene.caption() for scene in scenes]
    for wave, scene, caption in zip(waves, scenes, said, strict=True):
        heard, hits = checker.listen(wave), scene.hits()
        asked = {ball.colour: ball.sounds for ball in caption.balls}
        frames = [hit.frame for hit in hits]
        pairs = checker.matches(heard, frames)
        found["near"] += len(pairs)
        found["exact"] += len(checker.matches(heard, frames, within=0))
        found["pitch"] += sum(heard[i].pitch == asked[hits[j].colour] for i, j in pairs)
        found["loudness"] += sum(heard[i].loud == hits[j].loud for i, j in pairs)
        heard_total, hits_total = heard_total + len(heard), hits_total + len(hits)
        counts += len(heard) == len(hits)

    def f1(matched: int) -> float:
        return round(2 * matched / max(1, heard_total + hits_total), 4)

    def share(part: int) -> float:
        return round(part / max(1, found["near"]), 4)

    return {
        "onset_f1": f1(found["near"]),
        "exact_f1": f1(found["exact"]),
        "event_f1": f1(found["pitch"]),
        "pitch": share(found["pitch"]),
        "loudness": share(found["loudness"]),
        "count": round(counts / len(scenes), 4),
    }


def rotated(items: Sequence[Any]) -> list[Any]:
    """Return the items, each replaced by its successor."""
    return [*items[1:], *items[:1]]


def checker_figures(scenes: list[Scene]) -> dict[str, Any]:
    """Scores of real sounds, of reconstructed ones, and of those of other clips."""
    codec = prompts.band_frontend()
    real = [scene.wave() for scene in scenes]
    again = [
        codec.postprocess(codec.decode(codec.encode(codec.preprocess(w)[None]))[0]) for w in real
    ]
    return {
        "real": scores(real, scenes),
        "codec": scores(again, scenes),
        "shuffled": scores(real, rotated(scenes), [s.caption() for s in rotated(scenes)]),
        "onsets_in_silence": len(checker.listen(np.zeros(balls.SAMPLES))),
    }


# --- Captions


@torch.no_grad()
def describe(model: Any, rows: Sequence[list[int]], words: TextWords) -> list[str]:
    """Write the most likely caption of every prompt.

    Args:
        model: the network of captions.
        rows: prompts of equal length (``gen.modalities.audio.prompts.caption_prompt``).
        words: its frontend.
    """
    ids = torch.tensor(rows)
    start = ids.shape[1]
    for _ in range(words.positions):
        logits = model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits[:, : words.eos_token_id + 1].argmax(-1, keepdim=True)], 1)
    signals = words.decode(ids[:, start:][:, None])
    return [words.postprocess(signal) for signal in signals]


def caption_figures(zoo: Path, scenes: list[Scene]) -> dict[str, float]:
    """Share of clips and of sounds that are described word for word."""
    words = TextWords.from_pretrained(zoo / prompts.WORDS_FOLDER)
    model = load_lm(zoo / "audio-captions", torch.device("cpu"), torch.float32)
    expected = [" ".join(words.split(str(scene.caption()))) for scene in scenes]
    figures = {}
    for part in prompts.PARTS:
        media = [s.frames() if part == "video" else s.wave() for s in scenes]
        rows = [prompts.caption_prompt(part, item) for item in media]
        said = describe(model, rows, words)
        same = [a == b for a, b in zip(said, expected, strict=True)]
        figures[part] = round(statistics.mean(same), 4)
        shuffled = [a == b for a, b in zip(said, rotated(expected), strict=True)]
        figures[f"{part}_shuffled"] = round(statistics.mean(shuffled), 4)
    return figures


# --- Sounds


def other_pitches(scene: Scene) -> Caption:
    """Caption of a scene that states pitches which are not those of the colours."""
    turned = dict(zip(PITCHES, rotated(PITCHES), strict=True))
    said = scene.caption().balls
    return Caption(tuple(Ball(b.colour, None, turned[str(b.pitch)]) for b in said))


def stated_pitch(waves: Sequence[np.ndarray], scenes: Sequence[Scene]) -> float:
    """Share of the hits in sounds whose pitch is one of those of the captions."""
    right = [
        h.pitch in {b.pitch for b in scene.caption().balls}
        for wave, scene in zip(waves, scenes, strict=True)
        for h in checker.listen(wave)
    ]
    return round(sum(right) / max(1, len(right)), 4)


def sound_figures(zoo: Path, scenes: list[Scene], log: Callable = print) -> dict[str, Any]:
    """Scores of generated sounds by what they are made for; the last rows on a quarter of the
    clips."""
    pipe = Pipeline("audio", str(zoo / "audio-masked"), device="cpu")
    clips = [{"video": scene.frames()} for scene in scenes]
    texts = [str(scene.caption()) for scene in scenes]
    both = [{"text": t, **c} for t, c in zip(texts, clips, strict=True)]
    steered = [other_pitches(scene) for scene in scenes]
    rows: dict[str, Any] = {}

    def make(asked: Sequence[Any], steps: int = STEPS[0], **options: float) -> list[np.ndarray]:
        out = pipe(asked, {"name": "maskgit", "steps": steps}, seed=0, batch_size=BATCH, **options)
        passes.extend(s.nfe for s in out.stats)
        return [np.asarray(m) for m in out.media]

    def add(
        name: str,
        waves: list[np.ndarray],
        pitches: list[Caption] | None = None,
        shift: bool = False,
    ) -> None:
        of = rotated(scenes) if shift else scenes[: len(waves)]
        rows[name] = {**scores(waves, of, pitches), "clips": len(waves), "nfe": max(passes)}
        passes.clear()
        log(f"{name}: {json.dumps(rows[name])}")

    passes: list[int] = []
    heard = make(clips)
    add("clip", heard)
    passes.append(STEPS[0])
    add("clip of another", heard, shift=True)
    asked = [{"text": str(c), **v} for c, v in zip(steered, clips, strict=True)]
    add("clip, other pitches", make(asked), steered)
    heard = make(texts)
    passed = [checker.check(w, s.caption()).passed for w, s in zip(heard, scenes, strict=True)]
    add("caption", heard)
    rows["caption"]["as_stated"] = round(statistics.mean(passed), 4)
    rows["caption"]["stated_pitch"] = stated_pitch(heard, scenes)
    first = few(clips)
    add("clip and caption", make(few(both)))
    for steps in STEPS[1:]:
        add(f"clip, {steps} passes", make(first, steps))
    for scale in GUIDANCE:
        add(f"clip, guidance {scale:g}", make(first, guidance_scale=scale))
    return rows


# --- Cards

MADE = (
    "\nMade by `python -m gen.recipes.audio all --work DIR` from synthetic media. No other data"
    " were used.\n"
)
ABOUT = {
    prompts.TILES_FOLDER: (
        "All tiles of 8x8 pixels that the clips of `gen.modalities.audio.balls` can show. Nothing\n"
        "is trained."
    ),
    prompts.BANDS_FOLDER: (
        "A channel vocoder of three bands with six levels, 16 frames a second. Nothing is trained."
    ),
    prompts.WORDS_FOLDER: "The words of captions of bouncing balls. Nothing is trained.",
    "audio-captions": (
        "A small causal Llama with embeddings of positions (`gen/models/nets/grid.py`): a clip as\n"
        "tiles, or a sound as codes, then the words of its caption."
    ),
    "audio-masked": (
        "A small Llama with frame and band embeddings (`gen/models/nets/grid.py`): the tiles of a\n"
        "clip and four words of a caption, then 96 codes of `audio-bands`, any of them masked."
    ),
}


def write_cards(zoo: Path, result: dict[str, Any]) -> None:
    """Write a README.md into the folder of every model and frontend."""
    said, rows = result["captions"], result["sounds"]
    measured = {
        "audio-captions": (
            f"\nOf {result['held_out']} held-out clips, {said['video']:.3f} of the captions of"
            f" clips and\n{said['audio']:.3f} of those of sounds are right word for word.\n"
        ),
        "audio-masked": (
            "\nMeasured on held-out clips with MaskGIT.\n\n"
            "| made for | clips | onset F1 | same frame | pitch | forward passes |\n"
            "| --- | --- | --- | --- | --- | --- |\n"
            + "".join(
                f"| {n} | {r['clips']} | {r['onset_f1']:.3f} | {r['exact_f1']:.3f} |"
                f" {r['pitch']:.3f} | {r['nfe']:g} |\n"
                for n, r in rows.items()
            )
        ),
    }
    for folder, text in ABOUT.items():
        card = f"{CARD_HEAD}# {folder}\n\n{text}\n{MADE}{measured.get(folder, '')}"
        (zoo / folder / "README.md").write_text(card)
