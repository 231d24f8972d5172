"""Write image files: PNG, WebP (both lossless) and JPEG, with metadata.

``gen.media.containers`` states what written files promise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from gen.core.errors import GenError
from gen.media.containers import existing_file, info_to_comment

FORMATS = ("png", "webp", "jpg")
QUALITY = 95  # of a JPEG, without subsampled colours
DESCRIPTION = 0x010E  # the Exif tag ImageDescription
EXIF_MOST = 65_000  # bytes of Exif that a JPEG has room for


def write_image(path: Path, image: Image.Image, info: dict[str, Any]) -> None:
    """Write an image in the format of its extension.

    A PNG holds each fact as a text chunk. A WebP or JPEG holds all of them as JSON in its Exif
    description; a JPEG whose facts are longer than 65,000 bytes holds those that fit.

    Args:
        path: Output file.
        image: The image.
        info: Facts; values are texts or JSON-serialisable.
    """
    suffix = path.suffix.lower().removeprefix(".")
    if suffix == "png":
        meta = PngImagePlugin.PngInfo()
        for key, value in info.items():
            meta.add_text(key, str(value))
        image.save(path, format="PNG", pnginfo=meta)
        return
    if suffix not in (*FORMATS, "jpeg"):
        raise GenError(f"image {path.name} ends in .{suffix}; expected .{', .'.join(FORMATS)}")
    said = dict(info)
    while said and suffix != "webp" and len(info_to_comment(said)) > EXIF_MOST:
        del said[max(said, key=lambda key: len(str(said[key])))]
    exif = Image.Exif()
    if said:
        exif[DESCRIPTION] = info_to_comment(said)
    rgb = image if image.mode in ("RGB", "L") else image.convert("RGB")
    if suffix == "webp":
        rgb.save(path, format="WEBP", lossless=True, method=4, quality=80, exif=exif.tobytes())
    else:
        rgb.save(path, format="JPEG", quality=QUALITY, subsampling=0, exif=exif.tobytes())


def read_image_info(path: str | Path) -> dict[str, Any]:
    """Read the facts that ``write_image`` wrote, or ``{}``.

    Raises:
        GenError: a file that is missing or no image.
    """
    try:
        with Image.open(existing_file(path, "image")) as image:
            image.load()
            if isinstance(image, PngImagePlugin.PngImageFile):
                return dict(image.text)
            text = image.getexif().get(DESCRIPTION, "")
    except OSError as error:
        raise GenError(f"image {path} cannot be read: {error}") from None
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
