"""Image files are read as a viewer shows them. Expected pixels are known, not read."""

from __future__ import annotations

import base64
import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageCms
from png_files import GREY, GREY_ALPHA, PALETTE, RGB, RGBA, png

from gen.contracts.condition import Condition
from gen.core.errors import GenError
from gen.media.given import GivenMedia, read_media
from gen.media.images import as_rgb, image_size, read_image
from gen.modalities.image.modality import ImageModality
from gen.serve.api.errors import ApiError
from gen.serve.api.media import given_image
from gen.tokenizers.text.segments import segments

RAMP = np.repeat(np.arange(256, dtype=np.uint16)[None], 3, 0)  # levels of 8 bits


def saved(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def read(content: bytes, **options) -> np.ndarray:
    return np.asarray(read_image(content, **options))


def grey(levels: np.ndarray) -> np.ndarray:
    return np.repeat(levels.astype(np.uint8)[..., None], 3, -1)


def corners(height: int = 16, width: int = 24) -> np.ndarray:
    """Four quarters of other colours, so that every way to turn them looks different."""
    out = np.zeros((height, width, 3), np.uint8)
    out[: height // 2, : width // 2] = (250, 10, 10)
    out[: height // 2, width // 2 :] = (10, 250, 10)
    out[height // 2 :, : width // 2] = (10, 10, 250)
    out[height // 2 :, width // 2 :] = (240, 240, 10)
    return out


# --- Orientation

# how rows and columns are stored: value of the tag -> stored pixels of an upright image
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[:, ::-1],
}
KINDS = {
    "PNG": {},
    "TIFF": {},
    "WEBP": {"lossless": True},
    "JPEG": {"quality": 100, "subsampling": 0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", STORED)
def test_an_image_is_upright(kind, value, tmp_path):
    exif = Image.Exif()
    exif[274] = value
    stored = Image.fromarray(np.ascontiguousarray(STORED[value](corners())))
    content = saved(stored, kind, exif=exif, **KINDS[kind])
    error = np.abs(read(content).astype(int) - corners())
    assert error.max() <= (4 if kind == "JPEG" else 0)
    (tmp_path / "a").write_bytes(content)
    assert image_size(tmp_path / "a") == (24, 16)
    assert np.array_equal(read(content), as_rgb(Image.open(io.BytesIO(content))))
    assert value == 1 or not np.array_equal(np.asarray(stored), corners())  # control


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"?"])
def test_a_damaged_exif_block_is_ignored(exif):
    assert np.array_equal(read(saved(Image.fromarray(corners()), "PNG", exif=exif)), corners())


def test_an_orientation_that_does_not_exist_is_ignored():
    exif = Image.Exif()
    exif[274] = 9
    assert np.array_equal(read(saved(Image.fromarray(corners()), "PNG", exif=exif)), corners())


# --- Levels


def tiff(levels: np.ndarray, order: str, meaning: int = 1) -> bytes:
    """A TIFF of one grey channel of 16 bits, tag by tag."""
    height, width = levels.shape
    data = levels.astype(f"{order}u2").tobytes()
    tags = [(256, width), (257, height), (258, 16), (259, 1), (262, meaning), (273, 8), (277, 1)]
    tags += [(278, height), (279, len(data))]
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags)
    magic = b"II*\0" if order == "<" else b"MM\0*"
    head = magic + struct.pack(f"{order}I", 8 + len(data))
    return head + data + struct.pack(f"{order}H", len(tags)) + entries + bytes(4)


COLOURS = np.stack([RAMP, RAMP[:, ::-1], 255 - RAMP // 2], -1)
STEPS = (np.arange(8) % 4)[None].repeat(2, 0)  # levels of 2 bits
MAP = np.array([(255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 8, 7)], np.uint8)
LEVELS = {
    "PNG, grey of 16 bits": (png(RAMP * 257, GREY, 16), grey(RAMP)),
    "TIFF, grey of 16 bits, little-endian": (tiff(RAMP * 257, "<"), grey(RAMP)),
    "TIFF, grey of 16 bits, big-endian": (tiff(RAMP * 257, ">"), grey(RAMP)),
    "TIFF, 16 bits, white is zero": (tiff(RAMP * 257, "<", 0), grey(255 - RAMP)),
    "PGM of 16 bits": (b"P5 256 3 65535\n" + (RAMP * 257).astype(">u2").tobytes(), grey(RAMP)),
    "PNG, RGB of 16 bits": (png(COLOURS * 257, RGB, 16), COLOURS),
    "PPM of 8 bits": (b"P6 256 3 255\n" + COLOURS.astype(np.uint8).tobytes(), COLOURS),
    "PNG, 1 bit": (png(RAMP % 2, GREY, 1), grey(RAMP % 2 * 255)),
    "PNG, 2 bits": (png(STEPS, GREY, 2), grey(STEPS * 85)),
    "PNG, 4 bits": (png(RAMP % 16, GREY, 4), grey(RAMP % 16 * 17)),
    "PNG, palette of 2 bits": (png(STEPS, PALETTE, 2, ((b"PLTE", MAP.tobytes()),)), MAP[STEPS]),
    "PNG, palette of 8 bits": (png(STEPS, PALETTE, 8, ((b"PLTE", MAP.tobytes()),)), MAP[STEPS]),
    "TIFF, floats in [0, 1]": (
        saved(Image.fromarray((RAMP / 255).astype(np.float32)), "TIFF"),
        grey(RAMP),
    ),
    "BMP, 1 bit": (saved(Image.fromarray(RAMP % 2 == 1), "BMP"), grey(RAMP % 2 * 255)),
}


@pytest.mark.parametrize("name", LEVELS)
def test_levels_are_scaled_to_8_bits(name):
    content, expected = LEVELS[name]
    assert np.array_equal(read(content), expected)
    assert len(np.unique(expected)) > 1


def test_levels_between_those_of_8_bits_are_rounded():
    levels = np.array([[0, 127, 128, 129, 385, 386, 65534, 65535]])
    expected = [0, 0, 0, 1, 1, 2, 255, 255]
    assert read(png(levels, GREY, 16))[0, :, 0].tolist() == expected


@pytest.mark.parametrize(
    "levels, words",
    [
        (np.array([[0.0, 2.0]], np.float32), "from 0.0 to 2.0 .* expected 0 to 1"),
        (np.array([[0.0, np.nan]], np.float32), "nan"),
        (np.array([[-1, 5]], np.int32), "from -1 to 5 .* expected 0 to 65535"),
        (np.array([[0, 70_000]], np.int32), "to 70000"),
    ],
)
def test_levels_of_an_unknown_range_are_refused(levels, words):
    image = Image.fromarray(levels)
    with pytest.raises(GenError, match=words):
        as_rgb(image)
    with pytest.raises(GenError, match=words):
        read(saved(image, "TIFF"))


# --- Transparency

CLEAR = (b"tRNS", bytes([255, 0, 128, 255]))  # of a palette


def blended(colour: tuple[int, ...], opacity: int) -> list[int]:
    """A colour over white, in exact arithmetic to half a level."""
    return [int(np.floor((c * opacity + 255 * (255 - opacity)) / 255 + 0.5)) for c in colour]


OPACITIES = np.array([[0, 1, 100, 128, 254, 255]])
SIX = OPACITIES.shape
RED = np.broadcast_to(np.array([200, 20, 60]), (*SIX, 3))
OVER = np.array([[blended((200, 20, 60), a) for a in OPACITIES[0]]])
GREY_OVER = np.array([[blended((90,) * 3, a) for a in OPACITIES[0]]])
NINETY = np.full(SIX, 90)
CLEAR_RED = np.dstack([RED, OPACITIES]).astype(np.uint8)
TRANSPARENT = {
    "PNG, RGBA": (png(CLEAR_RED, RGBA), OVER),
    "PNG, RGBA of 16 bits": (png(CLEAR_RED.astype(int) * 257, RGBA, 16), OVER),
    "PNG, grey with alpha": (png(np.dstack([NINETY, OPACITIES]), GREY_ALPHA), GREY_OVER),
    "PNG, 16-bit grey with alpha": (
        png(np.dstack([NINETY, OPACITIES]) * 257, GREY_ALPHA, 16),
        GREY_OVER,
    ),
    "PNG, palette with opacities": (
        png(np.array([[0, 1, 2, 3]]), PALETTE, 8, ((b"PLTE", MAP.tobytes()), CLEAR)),
        np.array([[(255, 0, 0), (255, 255, 255), blended((0, 0, 255), 128), (9, 8, 7)]]),
    ),
    "PNG, one clear grey": (
        png(np.array([[7, 8]]), GREY, 8, ((b"tRNS", struct.pack(">H", 7)),)),
        np.array([[[255] * 3, [8] * 3]]),
    ),
    "PNG, one clear grey of 16 bits": (
        png(np.array([[7, 8, 514]]), GREY, 16, ((b"tRNS", struct.pack(">H", 7)),)),
        np.array([[[255] * 3, [0] * 3, [2] * 3]]),
    ),
    "PNG, one clear colour": (
        png(MAP[None, :2], RGB, 8, ((b"tRNS", struct.pack(">HHH", 255, 0, 0)),)),
        np.array([[(255, 255, 255), (0, 255, 0)]]),
    ),
    "WebP": (saved(Image.fromarray(CLEAR_RED), "WEBP", lossless=True, exact=True), OVER),
    "TIFF": (saved(Image.fromarray(CLEAR_RED), "TIFF"), OVER),
    "GIF": (
        saved(
            Image.frombytes("P", (2, 1), b"\0\1"), "GIF", transparency=1, optimize=False
        ),  # black, and a clear level
        np.array([[(0, 0, 0), (255, 255, 255)]]),
    ),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_what_is_transparent_is_over_white(name):
    content, expected = TRANSPARENT[name]
    assert np.array_equal(read(content), expected)
    kept = read_image(content, alpha=True)
    assert kept.mode == "RGBA" and np.asarray(kept)[..., 3].min() < 255


def test_arrays_and_images_in_memory_are_over_white_as_well():
    for given in (CLEAR_RED, Image.fromarray(CLEAR_RED), CLEAR_RED / 255, [CLEAR_RED]):
        kind = "video" if isinstance(given, list) else "image"
        found = read_media(np.stack(given) if kind == "video" else given, kind).array
        assert np.array_equal(found.reshape(OVER.shape), OVER)
    for mode in ("PA", "LA"):
        flat = Image.fromarray(CLEAR_RED).convert("RGBA").convert(mode)
        assert np.array_equal(np.asarray(as_rgb(flat))[0, 0], [255, 255, 255])


# --- Colours


def swapped_profile() -> bytes:
    """A profile whose red is sRGB's blue: sRGB with two primaries exchanged."""
    content = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for i in range(struct.unpack(">I", content[128:132])[0]):
        at = 132 + 12 * i
        name = bytes(content[at : at + 4])
        content[at : at + 4] = {b"rXYZ": b"bXYZ", b"bXYZ": b"rXYZ"}.get(name, name)
    text = "sRGB".encode("utf-16-be")
    assert text in content
    return bytes(content).replace(text, "wide".encode("utf-16-be")).replace(b"sRGB", b"wide")


def test_a_colour_profile_is_converted():
    pure = Image.fromarray(corners())
    for kind in ("PNG", "TIFF", "WEBP"):
        content = saved(pure, kind, icc_profile=swapped_profile(), **KINDS[kind])
        assert np.abs(read(content).astype(int) - corners()[..., ::-1]).max() <= 2
    clear = Image.fromarray(np.dstack([corners(), np.full((16, 24), 255, np.uint8)]))
    clear.putpixel((0, 0), (1, 2, 3, 0))
    found = read(saved(clear, "PNG", icc_profile=swapped_profile()))
    assert found[0, 0].tolist() == [255] * 3
    assert np.abs(found.astype(int) - corners()[..., ::-1])[1:].max() <= 2


def test_a_profile_of_srgb_leaves_the_pixels_as_they_are(caplog):
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert np.array_equal(read(saved(Image.fromarray(noise), "PNG", icc_profile=profile)), noise)
    assert not caplog.records


@pytest.mark.parametrize("profile", [b"damaged", b"\0" * 200])
def test_a_damaged_profile_is_named_and_not_used(profile, caplog):
    content = saved(Image.fromarray(corners()), "PNG", icc_profile=profile)
    assert np.array_equal(read(content), corners())
    assert "the colour profile of image bytes is not used" in caplog.text


GAMMA = (b"gAMA", struct.pack(">I", 100_000))  # linear light


@pytest.mark.parametrize(
    "chunks, exponent",
    [
        ((GAMMA,), 1 / 2.2),
        (((b"gAMA", struct.pack(">I", 45_455)),), 1),
        ((GAMMA, (b"sRGB", b"\0")), 1),
        (((b"gAMA", struct.pack(">I", 0)),), 1),
    ],
)
def test_the_gamma_of_a_png_is_that_of_the_display(chunks, exponent):
    expected = np.rint(255 * (RAMP / 255) ** exponent)
    for levels, kind, bits in ((RAMP, GREY, 8), (RAMP * 257, GREY, 16)):
        assert np.array_equal(read(png(levels, kind, bits, chunks)), grey(expected))
    assert exponent == 1 or not np.array_equal(expected, RAMP)


INK = np.array([(255, 0, 0, 0), (0, 255, 0, 0), (0, 0, 255, 0), (0, 0, 0, 255), (0, 0, 0, 0)])
INKED = np.array([(0, 255, 255), (255, 0, 255), (255, 255, 0), (0, 0, 0), (255, 255, 255)])


@pytest.mark.parametrize("kind", ["TIFF", "JPEG"])
def test_inks_are_their_colours(kind):
    """A JPEG of inks, as Adobe's programs write it, holds them inverted."""
    squares = np.kron(INK, np.ones((16, 1))).reshape(5, 16, 1, 4).repeat(16, 2)
    content = saved(Image.fromarray(squares.astype(np.uint8).reshape(80, 16, 4), "CMYK"), kind)
    assert kind == "TIFF" or b"Adobe" in content
    found = read(content)[8::16, 8]
    assert np.abs(found.astype(int) - INKED).max() <= 3


def test_luma_and_chroma_become_colours():
    image = Image.fromarray(corners(64, 64)).convert("YCbCr")
    for content in (saved(image, "TIFF"), saved(image, "JPEG", quality=95)):
        assert np.abs(read(content)[8::48, 8::48].astype(int) - corners()[::15, ::23]).max() <= 4
    assert np.abs(np.asarray(as_rgb(image)).astype(int) - corners(64, 64)).max() <= 2


# --- Animations, and what is refused


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_read(kind):
    frames = [Image.new("RGB", (8, 8), c) for c in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    more = {"lossless": True} if kind == "WEBP" else {}
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=90, **more)
    assert Image.open(io.BytesIO(content)).n_frames == 3
    assert (read(content) == (255, 0, 0)).all()


def test_a_page_description_is_not_opened(tmp_path):
    content = saved(Image.new("RGB", (8, 8)), "EPS")
    assert Image.open(io.BytesIO(content)).format == "EPS"  # Pillow itself would run Ghostscript
    (tmp_path / "a.png").write_bytes(content)
    for given in (content, tmp_path / "a.png"):
        with pytest.raises(GenError, match=r"cannot be read: it is none of PNG, JPEG, WEBP"):
            read_image(given)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Truncated File")
def test_every_cut_of_a_file_is_one_error_or_the_whole_image():
    noise = np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    for kind in KINDS:
        content = saved(Image.fromarray(noise), kind, **KINDS[kind])
        whole = read(content)
        for n in range(0, len(content), 7):
            try:
                assert np.array_equal(read(content[:n]), whole)
            except GenError as error:
                assert "\n" not in str(error) and "cannot be read" in str(error)


def test_too_many_pixels_are_refused_before_they_are_decoded():
    with pytest.raises(GenError, match="has 4000x4000 pixels; expected at most 100"):
        read_image(saved(Image.new("L", (4000, 4000)), "PNG"), most_pixels=100)


# --- Doors


def test_every_door_reads_the_same_image(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    pixels = np.dstack([corners(), np.full((16, 24), 255, np.uint8)])
    pixels[:4, :4, 3] = 0
    expected = corners()
    expected[:4, :4] = 255
    stored = Image.fromarray(np.ascontiguousarray(STORED[6](pixels)))
    content, path = saved(stored, "PNG", exif=exif), tmp_path / "photo.png"
    path.write_bytes(content)
    coded = base64.b64encode(content).decode()
    uri = f"data:image/png;base64,{coded}"
    for given in (path, str(path), content, uri, {"base64": coded}, Image.open(path)):
        found = Condition.of({"text": "describe", "image": given}).media("images")[0]
        assert found == GivenMedia("image", expected)
    for image in (
        ImageModality().load(path),
        given_image(uri, "image"),
        segments(f"![image]({uri})")[0].image(),
    ):
        assert image.mode == "RGB" and np.array_equal(np.asarray(image), expected)
    # control: what is stored is neither upright nor opaque
    assert not np.array_equal(np.asarray(Image.open(path).convert("RGB")), expected)


def test_a_request_brings_formats_of_a_shorter_list():
    content = saved(Image.fromarray(corners()), "BMP")
    assert np.array_equal(read(content), corners())
    with pytest.raises(ApiError, match="none of PNG, JPEG, WEBP; expected"):
        given_image(content, "image")
