"""Scenes with captions in free words, and a reader that says what an image shows.

    python -m gen.recipes.image.scenes draw SCENES --seed 7
    python -m gen.recipes.image.scenes read SCENES --frontend V/model
    python -m gen.recipes.image.scenes read SCENES --run RUN

A scene is one to three discs, or squares, of one colour at one side of the image. Its caption is in
English or German, with several words for everything. ``draw`` writes ``SCENES/train`` and
``SCENES/held-out``, folders of images with a ``.txt`` beside each, ``SCENES/held-out.jsonl``, the
held-out captions as prompts of a job, and ``SCENES/scenes.json``. ``read`` reads the images of a
job with such prompts, or the scenes as a frontend encodes and decodes them, pixels alone, and
prints the share that shows what the caption says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from gen.core.errors import GenError
from gen.modalities.image.modality import ImageModality
from gen.store.ledger import read_rows

SIZE, RADIUS = 64, 8
GROUND = (236, 232, 224)
COLOURS = {
    "red": (214, 60, 52),
    "blue": (58, 94, 214),
    "green": (48, 160, 84),
    "yellow": (232, 196, 48),
    "violet": (150, 76, 190),
}
SHAPES = ("disc", "square")
SIDES = ("top", "bottom", "left", "right")
ALONG = {1: (32,), 2: (20, 44), 3: (11, 32, 53)}  # centres of the shapes along their side
ACROSS = {"top": 14, "left": 14, "bottom": 49, "right": 49}
LEAST = 60  # pixels of a shape; a smaller region is a speck
SQUARE = 0.89  # a larger share of its bounding box is a square's; that of a disc is pi / 4
ASIDE = 8.0  # pixels from the middle; a shape that is nearer lies at no side

ENGLISH: dict[str, dict[Any, tuple[Any, ...]]] = {
    "colour": {
        "red": ("red", "crimson", "scarlet"),
        "blue": ("blue", "azure"),
        "green": ("green", "emerald"),
        "yellow": ("yellow", "golden"),
        "violet": ("violet", "purple"),
    },
    "count": {1: ("one", "a single"), 2: ("two", "a pair of"), 3: ("three",)},
    "shape": {
        "disc": (("dot", "dots"), ("disc", "discs"), ("ball", "balls")),
        "square": (("square", "squares"), ("box", "boxes"), ("block", "blocks")),
    },
    "side": {
        "top": ("along the top", "near the upper edge", "up high"),
        "bottom": ("along the bottom", "near the lower edge", "down low"),
        "left": ("on the left", "by the left side"),
        "right": ("on the right", "by the right side"),
    },
}
GERMAN: dict[str, dict[Any, tuple[Any, ...]]] = {
    "colour": {
        "red": ("rot",),
        "blue": ("blau",),
        "green": ("grün",),
        "yellow": ("gelb",),
        "violet": ("lila",),
    },
    "count": {1: ("ein Stück",), 2: ("zwei",), 3: ("drei",)},
    "shape": {
        "disc": (("Kreis", "Kreise"), ("Scheibe", "Scheiben")),
        "square": (("Quadrat", "Quadrate"), ("Würfel", "Würfel")),
    },
    "side": {"top": ("oben",), "bottom": ("unten",), "left": ("links",), "right": ("rechts",)},
}
ORDERS = {  # of a caption's words, by language
    "en": ("{count} {colour} {shape} {side}", "{side}, {count} {colour} {shape}",
           "{count} {shape} in {colour} {side}"),
    "de": ("{count} {shape} in {colour}, {side}", "{side}: {count} {shape}, {colour}"),
}  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """What an image shows.

    Attributes:
        colour: of all shapes.
        count: number of shapes, 1 to 3.
        shape: of all of them.
        side: side of the image.
    """

    colour: str
    count: int
    shape: str
    side: str


@dataclass(frozen=True)
class Drawn:
    """A scene with a caption and an image of it.

    Attributes:
        image: RGB, 64x64.
        is_held: whether the caption (or the scene) is in no training image.
    """

    scene: Scene
    caption: str
    image: Image.Image
    is_held: bool


def all_scenes(shapes: Sequence[str] = SHAPES) -> list[Scene]:
    """Return every combination, of some shapes."""
    return [Scene(*parts) for parts in itertools.product(COLOURS, ALONG, shapes, SIDES)]


def caption_of(scene: Scene, rng: random.Random) -> str:
    """Describe a scene, in German once in four times."""
    language, words = ("de", GERMAN) if rng.random() < 0.25 else ("en", ENGLISH)
    parts = {name: rng.choice(words[name][value]) for name, value in asdict(scene).items()}
    parts["shape"] = parts["shape"][scene.count > 1]
    return rng.choice(ORDERS[language]).format(**parts)


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """Draw a scene, every shape up to two pixels off its usual centre."""
    image = Image.new("RGB", (SIZE, SIZE), GROUND)
    pen = ImageDraw.Draw(image)
    for centre in ALONG[scene.count]:
        at = centre + rng.randint(-1, 1), ACROSS[scene.side] + rng.randint(-2, 2)
        x, y = at if scene.side in ("top", "bottom") else at[::-1]
        shape = pen.ellipse if scene.shape == "disc" else pen.rectangle
        shape([x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS], fill=COLOURS[scene.colour])
    return image


def make(
    count: int,
    seed: int,
    shapes: Sequence[str] = ("disc",),
    held_out: str = "caption",
    share: float = 0.2,
) -> list[Drawn]:
    """Draw scenes.

    Args:
        count: number of them.
        seed: of scenes, captions and images.
        shapes: shapes of the scenes.
        held_out: ``caption``: held-out captions are none of a training image, and their scenes may
            be; ``scene``: held-out combinations are in no training image.
        share: share that is held out, or a little more.
    """
    rng = random.Random(seed)
    possible = all_scenes(shapes)
    chosen = [rng.choice(possible) for _ in range(count)]
    captions = [caption_of(scene, rng) for scene in chosen]
    images = [draw(scene, rng) for scene in chosen]
    key: list[Any] = captions if held_out == "caption" else chosen
    order = list(dict.fromkeys(key))
    rng.shuffle(order)
    held: set[Any] = set()
    for value in order:
        if sum(k in held for k in key) >= share * count:
            break
        held.add(value)
    parts = zip(chosen, captions, images, key, strict=True)
    return [Drawn(scene, text, image, k in held) for scene, text, image, k in parts]


def regions(mask: np.ndarray) -> list[tuple[int, tuple[int, int, int, int]]]:
    """Return the regions of a mask, bool [H, W], that are no specks: their pixels and their boxes
    (left, top, right, bottom), right and bottom exclusive."""
    canvas, found = Image.fromarray(mask.astype(np.uint8)), []
    while canvas.getextrema()[1] == 1:
        first = int(np.flatnonzero(np.asarray(canvas) == 1)[0])
        ImageDraw.floodfill(canvas, (first % mask.shape[1], first // mask.shape[1]), 2)
        region = canvas.point(lambda value: 255 * (value == 2))
        box = region.getbbox()
        if region.histogram()[255] >= LEAST and box is not None:
            found.append((region.histogram()[255], box))
        canvas.paste(0, mask=region)
    return found


def read(image: Image.Image) -> Scene | None:
    """Return what an image shows, from its pixels alone; None where that is no scene: shapes of two
    colours, none or more than three, or shapes that do not lie at one side together."""
    pixels = np.asarray(image.convert("RGB").resize((SIZE, SIZE)), dtype=float)
    table = np.array([GROUND, *COLOURS.values()], dtype=float)
    nearest = np.square(pixels[:, :, None] - table).sum(-1).argmin(-1)
    by_colour = {c: regions(nearest == i) for i, c in enumerate(COLOURS, 1)}
    shown = [c for c, found in by_colour.items() if found]
    if len(shown) != 1 or len(by_colour[shown[0]]) not in ALONG:
        return None
    sizes, boxes = (np.array(part) for part in zip(*by_colour[shown[0]], strict=True))
    filled = sizes / np.prod(boxes[:, 2:] - boxes[:, :2], 1)
    offsets = (boxes[:, :2] + boxes[:, 2:] - SIZE) / 2  # of the centres, [N, 2]
    x, y = offsets.T
    at = {"top": -y, "bottom": y, "left": -x, "right": x}
    sides = [side for side, distance in at.items() if (distance > ASIDE).all()]
    if len(sides) != 1:
        return None
    return Scene(shown[0], len(boxes), SHAPES[int(filled.mean() > SQUARE)], sides[0])


def write(drawn: Sequence[Drawn], folder: Path) -> dict[str, Any]:
    """Write scenes as folders of images with captions, and return figures about them."""
    rows, trained = [], [d for d in drawn if not d.is_held]
    for number, one in enumerate(drawn):
        part = folder / ("held-out" if one.is_held else "train")
        part.mkdir(parents=True, exist_ok=True)
        one.image.save(part / f"{number:04d}.png")
        (part / f"{number:04d}.txt").write_text(one.caption, encoding="utf-8")
        row = {"id": f"{number:04d}", "prompt": one.caption, "meta": asdict(one.scene)}
        rows.append({**row, "held_out": one.is_held})
    prompts = [{k: v for k, v in row.items() if k != "held_out"} for row in rows if row["held_out"]]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts)
    (folder / "held-out.jsonl").write_text(lines, encoding="utf-8")
    (folder / "scenes.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return {
        "train": len(trained),
        "held_out": len(prompts),
        "held_out_scenes_in_train": len(
            {d.scene for d in drawn if d.is_held} & {d.scene for d in trained}
        ),
        "held_out_captions_in_train": len(
            {d.caption for d in drawn if d.is_held} & {d.caption for d in trained}
        ),
        "read_right": sum(read(d.image) == d.scene for d in drawn),
    }


def judge(asked: Sequence[Scene], images: Sequence[Image.Image]) -> dict[str, Any]:
    """Compare images with the scenes that they were asked for: the shares that show the whole
    scene, and each of its parts."""
    found = [read(image) for image in images]
    pairs = list(zip(asked, found, strict=True))
    shares: dict[str, Any] = {"images": len(images)}
    shares["obeyed"] = round(float(np.mean([a == f for a, f in pairs])), 4)
    for number, name in enumerate(asdict(asked[0])):
        right = [f is not None and astuple(a)[number] == astuple(f)[number] for a, f in pairs]
        shares[name] = round(float(np.mean(right)), 4)
    return shares


def judge_run(scenes: Path, run: Path) -> dict[str, Any]:
    """Judge the images of a job whose prompts are captions of ``scenes``.

    Raises:
        GenError: a prompt is none of them, or the job has no images.
    """
    told = json.loads((scenes / "scenes.json").read_text(encoding="utf-8"))
    known = {row["prompt"]: Scene(**row["meta"]) for row in told}
    rows = [row for row in read_rows(run) if row["status"] == "ok"]
    if not rows:
        raise GenError(f"{run} holds no images; expected the folder of gen run")
    unknown = [row["prompt"] for row in rows if row["prompt"] not in known]
    if unknown:
        raise GenError(f"prompt {unknown[0]!r} of {run} is no caption of {scenes}")
    images = [Image.open(run / row["file"]) for row in rows]
    return judge([known[row["prompt"]] for row in rows], images)


def judge_frontend(scenes: Path, frontend: Path) -> dict[str, Any]:
    """Judge all images of ``scenes`` as a frontend encodes and decodes them: no model of its codes
    obeys more captions."""
    told = json.loads((scenes / "scenes.json").read_text(encoding="utf-8"))
    made = ImageModality().frontend("codes", torch.device("cpu"), torch.float32, frontend)
    images = []
    for row in told:
        part = "held-out" if row["held_out"] else "train"
        image = Image.open(scenes / part / f"{row['id']}.png").convert("RGB")
        images += [made.postprocess(made.decode(made.encode(made.preprocess(image)[None]))[0])]
    return judge([Scene(**row["meta"]) for row in told], images)


def main(argv: list[str] | None = None) -> int:
    """Carry out ``draw`` or ``read``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="draw scenes")
    drawing.add_argument("scenes", type=Path, help="folder to write")
    drawing.add_argument("--count", type=int, default=300, help="scenes (300)")
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--shapes", nargs="+", choices=SHAPES, default=["disc"], help="(disc)")
    drawing.add_argument("--held-out", choices=("caption", "scene"), default="caption")
    reading = commands.add_parser("read", help="judge images")
    reading.add_argument("scenes", type=Path, help="folder of the scenes")
    of = reading.add_mutually_exclusive_group(required=True)
    of.add_argument("--run", type=Path, help="folder of a job: its images")
    of.add_argument("--frontend", type=Path, help="folder of a frontend: what it makes of them all")
    args = parser.parse_args(argv)
    if args.command == "draw":
        drawn = make(args.count, args.seed, args.shapes, args.held_out)
        figures = write(drawn, args.scenes)
    elif args.run is not None:
        figures = judge_run(args.scenes, args.run)
    else:
        figures = judge_frontend(args.scenes, args.frontend)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    main()
