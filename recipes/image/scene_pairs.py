"""Pairs of media to train models on whose conditions are images, and readers of what they make.

    python -m gen.recipes.image.scene_pairs draw PAIRS --kind edits
    python -m gen.recipes.image.scene_pairs draw PAIRS --kind beeps
    python -m gen.recipes.image.scene_pairs read --run RUN

``edits``: a scene, an instruction such as ``make it red`` or ``move it to the top``, and the scene
behind it; a row of ``metadata.jsonl`` names the three. ``beeps``: a scene of one to three discs,
and a sound of as many beeps, high where the discs are at the top and low where they are at the
bottom; both have one name.

``draw`` writes ``PAIRS/train``, ``PAIRS/held-out``, whose combinations of scene and answer are in
no training pair, and two files of prompts for jobs: ``held-out.jsonl``, and ``shuffled.jsonl``, in
which every row has the image of another one. ``read`` reads what a job made of either and prints
the share that is what the row's own image asks for.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gen.core.errors import GenError
from gen.media.audio import read_wav, write_wav
from gen.media.images import read_image
from gen.recipes.image import scenes
from gen.recipes.image.scenes import COLOURS, SIDES, Scene
from gen.store.ledger import read_rows

KINDS = ("edits", "beeps")
SIDE = 32  # pixels of an image
RATE, SECONDS = 16_000, 1.0
BEEP, GAP, LATEST = 0.1875, 0.125, 0.0625  # seconds: a beep, between two, before the first
PITCHES = {"top": 800.0, "left": 512.0, "right": 512.0, "bottom": 320.0}  # Hz, by side
FRAME = 500  # samples whose loudness is measured together
LOUD = 0.3  # share of the loudest frame from which on one is part of a beep


@dataclass(frozen=True)
class Asked:
    """What a pair shows.

    Attributes:
        before: scene of the condition.
        after: scene of the answer; of a sound the same one.
        text: the instruction; empty for a sound.
    """

    before: Scene
    after: Scene
    text: str = ""


def edits() -> list[Asked]:
    """Return every edit of every scene of discs: another colour, or another side."""
    found = []
    for scene in scenes.all_scenes(("disc",)):
        recoloured = (replace(scene, colour=c) for c in COLOURS if c != scene.colour)
        moved = (replace(scene, side=s) for s in SIDES if s != scene.side)
        found += [Asked(scene, to, f"make it {to.colour}") for to in recoloured]
        found += [Asked(scene, to, f"move it to the {to.side}") for to in moved]
    return found


def beeps() -> list[Asked]:
    """Return every scene of discs, to be heard."""
    return [Asked(scene, scene) for scene in scenes.all_scenes(("disc",))]


def sound(scene: Scene, rng: random.Random) -> np.ndarray:
    """Return the beeps of a scene, float32 [n]."""
    wave = np.zeros(int(RATE * SECONDS), np.float32)
    first = int(RATE * rng.uniform(0, LATEST))
    time = np.arange(int(RATE * BEEP)) / RATE
    tone = 0.5 * np.sin(2 * np.pi * PITCHES[scene.side] * time) * np.hanning(len(time)) ** 0.25
    for number in range(scene.count):
        start = first + int(RATE * (BEEP + GAP) * number)
        part = wave[start : start + len(tone)]
        part += tone[: len(part)].astype(np.float32)
    return wave


def heard(wave: np.ndarray) -> tuple[int, float] | None:
    """Return how many beeps a sound has, and the pitch that theirs is nearest to, by its samples
    alone; None for one without."""
    frames = wave[: len(wave) // FRAME * FRAME].reshape(-1, FRAME)
    loudness = np.sqrt(np.square(frames).mean(1))
    if not len(loudness) or loudness.max() < 0.01:
        return None
    loud = np.pad(loudness > LOUD * loudness.max(), 1)
    count = int((loud[1:] & ~loud[:-1]).sum())
    spectrum = np.abs(np.fft.rfft(wave * np.hanning(len(wave))))
    peak = float(np.fft.rfftfreq(len(wave), 1 / RATE)[spectrum.argmax()])
    return count, min(PITCHES.values(), key=lambda pitch: abs(np.log(max(peak, 1) / pitch)))


def split(kind: str, share: float, seed: int) -> tuple[list[Asked], list[Asked]]:
    """Return the combinations that are trained on, and a share of them that are held out."""
    found = edits() if kind == "edits" else beeps()
    random.Random(seed).shuffle(found)
    held = round(share * len(found))
    return found[held:], found[:held]


def write(kind: str, folder: Path, count: int, held: int, seed: int) -> dict[str, Any]:
    """Write pairs, and return figures about them.

    Args:
        kind: ``edits`` or ``beeps``.
        folder: folder to write.
        count: pairs to train on.
        held: pairs that are held out.
        seed: of combinations and media.
    """
    rng, parts = random.Random(seed), split(kind, 0.2, seed)
    rows: list[dict[str, Any]] = []
    for part, chosen, many in zip(("train", "held-out"), parts, (count, held), strict=True):
        root = folder / part
        rows = [_write_pair(rng.choice(chosen), root, i, rng) for i in range(many)]
        if kind == "edits":
            keys = ("file_name", "image", "text")
            table = [{key: row[key] for key in keys} for row in rows]
            _write_lines(root / "metadata.jsonl", table)
    asked = [
        {
            "id": f"{i:04d}",
            **({"prompt": row["text"]} if row["text"] else {}),
            "image": str(Path("held-out") / row["image"]),
            "meta": row["meta"],
        }
        for i, row in enumerate(rows)
    ]
    _write_lines(folder / "held-out.jsonl", asked)
    images = [row["image"] for row in asked]
    turned = images[len(images) // 2 :] + images[: len(images) // 2]
    shuffled = [{**row, "image": image} for row, image in zip(asked, turned, strict=True)]
    _write_lines(folder / "shuffled.jsonl", shuffled)
    return {"train": count, "held_out": held, "combinations": [len(part) for part in parts]}


def _write_pair(asked: Asked, root: Path, number: int, rng: random.Random) -> dict[str, Any]:
    """Write the files of a pair; return its row."""
    seed, name = rng.random(), f"{number:04d}"
    is_sound = not asked.text
    before = Path("" if is_sound else "before") / f"{name}.png"
    after = Path("" if is_sound else "after") / f"{name}.{'wav' if is_sound else 'png'}"
    for path in (before, after):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
    _draw(asked.before, seed).save(root / before)
    if is_sound:
        write_wav(root / after, sound(asked.after, rng), RATE)
    else:
        _draw(asked.after, seed).save(root / after)
    meta = {**asdict(asked.after), "pitch": PITCHES[asked.after.side]}
    named = {"file_name": after.as_posix(), "image": before.as_posix()}
    return {**named, "text": asked.text, "meta": meta}


def _draw(scene: Scene, seed: float) -> Image.Image:
    drawn = scenes.draw(scene, random.Random(seed))
    return drawn.resize((SIDE, SIDE), Image.Resampling.BOX)


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def judge(path: Path, meta: dict[str, Any]) -> dict[str, bool]:
    """Compare a made file with what its row asks for, part by part."""
    if path.suffix == ".png":
        shown = scenes.read(read_image(path))
        found = {} if shown is None else asdict(shown)
        parts = ("count", "colour", "side")
    else:
        beep = heard(read_wav(path, RATE))
        found = {} if beep is None else {"count": beep[0], "pitch": beep[1]}
        parts = ("count", "pitch")
    return {part: found.get(part) == meta[part] for part in parts}


def judge_run(run: Path) -> dict[str, Any]:
    """Judge what a job made of a file of prompts of ``write``.

    Raises:
        GenError: the job made nothing.
    """
    rows = [row for row in read_rows(run) if row["status"] == "ok"]
    if not rows:
        raise GenError(f"{run} holds no media; expected the folder of gen run")
    found = [judge(run / row["file"], row["meta"]) for row in rows]
    shares = {part: round(float(np.mean([f[part] for f in found])), 4) for part in found[0]}
    right = round(float(np.mean([all(f.values()) for f in found])), 4)
    return {"media": len(found), "obeyed": right, **shares}


def main(argv: list[str] | None = None) -> int:
    """Carry out ``draw`` or ``read``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="draw pairs")
    drawing.add_argument("pairs", type=Path, help="folder to write")
    drawing.add_argument("--kind", choices=KINDS, default=KINDS[0])
    drawing.add_argument("--count", type=int, default=1200, help="pairs to train on (1200)")
    drawing.add_argument("--held", type=int, default=120, help="pairs that are held out (120)")
    drawing.add_argument("--seed", type=int, default=0)
    reading = commands.add_parser("read", help="judge what a job made")
    reading.add_argument("--run", type=Path, required=True, help="folder of the job")
    args = parser.parse_args(argv)
    if args.command == "draw":
        figures = write(args.kind, args.pairs, args.count, args.held, args.seed)
    else:
        figures = judge_run(args.run)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    main()
