"""Small folders of media with captions, one per modality. Not a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from gen.contracts.modality import Modality
from gen.core.registry import registry
from gen.modalities.action.modality import ActionChunk, Situation
from gen.modalities.action.tasks import episodes
from gen.modalities.audio import balls
from gen.modalities.image import captions as shapes
from gen.modalities.motion import captions as moves
from gen.modalities.motion.synth import draw as perform
from gen.modalities.speech import synth as spoken
from gen.modalities.text import tasks
from gen.modalities.video import captions as moving


def images(folder: Path, count: int, seed: int = 0) -> Path:
    """Draw captioned shapes as ``0000.png`` with ``0000.txt`` beside it."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for i, caption in enumerate(shapes.captions(count, seed, held=False, two=0.2)):
        Image.fromarray(shapes.draw(caption, rng)).save(folder / f"{i:04d}.png")
        (folder / f"{i:04d}.txt").write_text(f"{caption}\n")
    return folder


def _keep(name: str, folder: Path, made: list[tuple[object, str | None]]) -> Path:
    modality: Modality = registry.get("modality", name)()
    folder.mkdir(parents=True)
    for i, (media, caption) in enumerate(made):
        modality.keep(media, folder / f"{i}.{modality.kept or modality.extension}")
        if caption is not None:
            (folder / f"{i}.txt").write_text(caption)
    return folder


def speech(folder: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    said = spoken.utterances(count, 0, held=False)
    return _keep("speech", folder, [(spoken.speak(u, rng), str(u)) for u in said])


def audio(folder: Path, count: int) -> Path:
    return _keep(
        "audio",
        folder,
        [
            (balls.render([(3, "high", True)]), str(s.caption()))
            for s in balls.scenes(count, 0, False)
        ],
    )


def video(folder: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    captions = moving.captions(count, 0, held=False)
    return _keep("video", folder, [(moving.draw(c, rng), str(c)) for c in captions])


def motion(folder: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    captions = moves.captions(count, 0, held=False)
    return _keep("motion", folder, [(perform(c, rng), str(c)) for c in captions])


def action(folder: Path, count: int) -> Path:
    data = episodes(count, 0, held=False)
    rows = zip(data.actions, data.tasks, data.states, strict=True)
    return _keep("action", folder, [(ActionChunk(a, Situation(t, s)), None) for a, t, s in rows])


def text(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    lines = [
        f"{task}\t{' '.join(tasks.draw_answer(task, rng))}"
        for task in tasks.tasks(count, 0, held=False)
    ]
    (folder / "tasks.txt").write_text("\n".join(lines) + "\n")
    return folder


FOLDERS: dict[str, Callable[[Path, int], Path]] = {
    "image": images,
    "speech": speech,
    "audio": audio,
    "video": video,
    "motion": motion,
    "action": action,
    "text": text,
}
