"""Read and write image files: PNG, WebP (both lossless) and JPEG out, raster formats of Pillow in.

``gen.media.containers`` states what written files promise. A file is read as a viewer shows it:
upright (Exif orientation), 8 bits per channel (more are scaled), over white where it is
transparent, in sRGB (embedded ICC profile, else the gamma of a PNG), and the first frame of an
animation. An image of Pillow in memory, whose mode and metadata are those of a file, is converted
by the same rules.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin, UnidentifiedImageError

from gen.core.errors import GenError
from gen.media.bounds import MOST_PIXELS, require_pixels
from gen.media.containers import existing_file, info_to_comment

FORMATS = ("png", "webp", "jpg")
# formats of Pillow that files are opened as: none that runs another program or a page description
# language. JPEG includes the files of several images that phones write.
OPENED = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
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


# --- Reading

ORIENTATION = 0x0112  # Exif tag
# value of that tag -> what makes the image upright
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
TIFF_BITS, TIFF_MEANING = 258, 262  # tags BitsPerSample and PhotometricInterpretation
WHITE_IS_ZERO = 0
DISPLAY_GAMMA = 2.2
SAME_GAMMA = 0.05  # exponents this close to 1 leave an image as it is, as in libpng


def read_image(
    source: Path | bytes,
    name: str = "image",
    formats: Sequence[str] = OPENED,
    most_pixels: int = MOST_PIXELS,
    alpha: bool = False,
) -> Image.Image:
    """Read an image file as a viewer shows it.

    Args:
        source: path, or the bytes of a file.
        name: name of the image, for messages.
        formats: formats of Pillow that may be opened.
        most_pixels: largest width x height.
        alpha: keep transparency instead of putting it over white.

    Returns:
        An RGB image; RGBA for a transparent one with ``alpha``. It has no metadata.

    Raises:
        GenError: the file is missing, damaged, too large or of another format.
    """
    if isinstance(source, bytes):
        said, file = f"{name} bytes", io.BytesIO(source)
    else:
        said, file = f"{name} {source}", existing_file(source, name)
    try:
        with Image.open(file, formats=_openers(formats)) as image:
            require_pixels(said, image.width, image.height, most_pixels)
            return _shown(image, said) if alpha else _over_white(_shown(image, said))
    except (GenError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise GenError(
            f"{said} cannot be read: it is none of {', '.join(_openers(formats))}; expected an"
            " image file such as PNG"
        ) from None
    except Exception as error:  # a damaged file may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GenError(
            f"{said} cannot be read: {reason}; expected an image file such as PNG"
        ) from None


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of Pillow to RGB by the rules of ``read_image``. Raises ``GenError`` for
    numbers outside the range of its mode."""
    if image.mode == "RGB" and not image.info:
        return image
    return _over_white(_shown(image, "the image"))


@dataclass(frozen=True)
class ImageHeader:
    """What the header of an image file states.

    Attributes:
        size: width and height of the upright image.
        mode: mode of Pillow.
        orientation: Exif orientation, 1 to 8.
        is_transparent: whether it has an alpha channel or a transparent colour.
        is_animated: whether it has several frames.
    """

    size: tuple[int, int]
    mode: str
    orientation: int
    is_transparent: bool
    is_animated: bool


def image_header(path: Path) -> ImageHeader:
    """Read the header of an image file, and no pixels. Raises ``GenError``."""
    try:
        with Image.open(existing_file(path, "image"), formats=_openers(OPENED)) as image:
            orientation = _orientation(image)
            # the size of a TIFF is that of its upright image
            is_across = orientation >= 5 and image.format != "TIFF"
            return ImageHeader(
                image.size[::-1] if is_across else image.size,
                image.mode,
                orientation,
                image.has_transparency_data,
                bool(getattr(image, "is_animated", False)),
            )
    except (GenError, MemoryError):
        raise
    except Exception as error:  # a damaged file may raise anything
        raise GenError(f"image {path} cannot be read: {error}") from None


def image_size(path: Path) -> tuple[int, int]:
    """Return width and height of the upright image, from its header alone. Raises ``GenError``."""
    return image_header(path).size


def over_white(pixels: np.ndarray) -> np.ndarray:
    """Put transparent pixels over white: uint8 [..., 4] -> uint8 [..., 3]."""
    opacity = pixels[..., 3:].astype(np.uint16)  # sums are at most 255 * 255 + 127
    return ((pixels[..., :3] * opacity + 255 * (255 - opacity) + 127) // 255).astype(np.uint8)


def _openers(formats: Sequence[str]) -> list[str]:
    """Return those of some formats that this Pillow has."""
    Image.init()
    return [name for name in formats if name in Image.OPEN]


def _over_white(image: Image.Image) -> Image.Image:
    return image if image.mode == "RGB" else Image.fromarray(over_white(np.asarray(image)))


def _shown(image: Image.Image, said: str) -> Image.Image:
    """Return the image as RGB or RGBA: upright, 8 bits, sRGB, without metadata."""
    image.load()  # a TIFF turns itself upright here
    turn, opacity = UPRIGHT.get(_orientation(image)), _opacity(image)
    shown = _srgb(_eight_bits(image, said), image.info, said)
    if opacity is not None:
        shown.putalpha(opacity)
    if turn is not None:
        shown = shown.transpose(turn)
    shown.info = {}
    return shown


def _orientation(image: Image.Image) -> int:
    """Return the Exif orientation, 1 to 8; 1 where there is none."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:  # a damaged Exif block may raise anything, and viewers ignore it
        return 1
    return value if value in UPRIGHT else 1


def _opacity(image: Image.Image) -> Image.Image | None:
    """Return the alpha channel, mode L; None for an image without transparency."""
    if not image.has_transparency_data:
        return None
    if image.mode.startswith("I"):  # one level is transparent
        clear = np.asarray(image) == image.info["transparency"]
        return Image.fromarray(np.where(clear, 0, 255).astype(np.uint8))
    return image.convert("RGBA").getchannel("A")


def _eight_bits(image: Image.Image, said: str) -> Image.Image:
    """Return the colours in a mode of 8 bits: L, RGB or CMYK."""
    if image.mode in ("L", "RGB", "CMYK"):
        return image
    if image.mode in ("P", "PA"):
        return image.convert("RGBA").convert("RGB")
    if not image.mode.startswith(("I", "F")):
        return image.convert("L" if image.mode in ("1", "LA") else "RGB")
    levels, tags = np.asarray(image), getattr(image, "tag_v2", {})
    most = 1.0
    if image.mode != "F":
        most = 2 ** min(tags.get(TIFF_BITS, (16,))[0], 16) - 1
    if not (np.isfinite(levels).all() and levels.min() >= 0 and levels.max() <= most):
        raise GenError(
            f"{said} has levels from {levels.min()} to {levels.max()} (mode {image.mode});"
            f" expected 0 to {most:g}"
        )
    scaled = np.rint(levels * (255 / most)).astype(np.uint8)
    # Pillow inverts such a TIFF of 8 bits, but none of 16
    is_negative = tags.get(TIFF_MEANING) == WHITE_IS_ZERO
    return Image.fromarray(255 - scaled if is_negative else scaled)


def _srgb(image: Image.Image, info: dict[str, Any], said: str) -> Image.Image:
    """Convert colours (mode L, RGB or CMYK) to a new image in sRGB."""
    profile, gamma = info.get("icc_profile"), info.get("gamma")  # texts of a PNG are there, too
    if isinstance(profile, bytes):
        try:
            return _by_profile(image, profile)
        except (ImageCms.PyCMSError, ImportError, OSError, ValueError, TypeError) as error:
            # as viewers do with a damaged profile, or one of another kind of colours
            reason = " ".join(str(error).split())
            logging.getLogger("gen").warning(
                "the colour profile of %s is not used: %s", said, reason
            )
    rgb = image.convert("RGB")
    if profile or not isinstance(gamma, float) or gamma <= 0 or "srgb" in info:
        return rgb
    exponent = 1 / (gamma * DISPLAY_GAMMA)
    if abs(exponent - 1) < SAME_GAMMA:
        return rgb
    return rgb.point([round(255 * (level / 255) ** exponent) for level in range(256)] * 3)


def _by_profile(image: Image.Image, content: bytes) -> Image.Image:
    """Convert colours to sRGB by an ICC profile. Raises ``PyCMSError`` if it does not fit."""
    profile = ImageCms.ImageCmsProfile(io.BytesIO(content))
    if "srgb" in ImageCms.getProfileDescription(profile).lower():
        return image.convert("RGB")  # exactly, which a transform need not be
    if image.mode == "L" and profile.profile.xcolor_space.strip() == "RGB":
        image = image.convert("RGB")
    target = ImageCms.createProfile("sRGB")
    made = ImageCms.profileToProfile(image, profile, target, outputMode="RGB")
    return made if made is not None else image.convert("RGB")


# --- Metadata


def read_image_info(path: str | Path) -> dict[str, Any]:
    """Read the facts that ``write_image`` wrote, or ``{}``.

    Raises:
        GenError: a file that is missing or no image.
    """
    try:
        with Image.open(existing_file(path, "image"), formats=_openers(OPENED)) as image:
            require_pixels(f"image {path}", image.width, image.height)
            image.load()
            if isinstance(image, PngImagePlugin.PngImageFile):
                return dict(image.text)
            text = image.getexif().get(DESCRIPTION, "")
    except (GenError, MemoryError):
        raise
    except Exception as error:  # a damaged file may raise anything
        raise GenError(f"image {path} cannot be read: {error}") from None
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
