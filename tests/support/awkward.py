"""Awkward files of pictures, sounds and clips, each with what it should be read as. Not a test.

Pictures and sounds are closed forms, so what a file should become at another size, rate or window
is computed and not read.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import soundfile as sf
from PIL import Image, ImageCms

SIDE, RATE, SAMPLES = 64, 16_000, 38_400  # of the built-in models of images and speech
FRAMES, FPS, SMALL = 16, 8, 32  # of those of clips
Expected = list[np.ndarray]
Made = tuple[dict[str, Expected], dict[str, str]]


def colours(u: np.ndarray, v: np.ndarray, time: float = 0.0) -> np.ndarray:
    """Smooth colours in [0, 255] at points across and down in [0, 1]; no symmetry."""
    red = 0.5 + 0.4 * np.cos(np.pi * u + 0.3)
    green = 0.5 + 0.4 * np.cos(np.pi * v - 0.4)
    blue = 0.5 + 0.3 * np.cos(np.pi * (u + 2 * v) / 2 + time)
    return 255 * np.stack(np.broadcast_arrays(red, green, blue), -1)


def points(count: int, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    return low + (np.arange(count) + 0.5) / count * (high - low)


def picture(width: int, height: int, time: float = 0.0) -> np.ndarray:
    """Pixels uint8 [h, w, 3] of the colours."""
    made = colours(points(width)[None], points(height)[:, None], time)
    return np.rint(made).astype(np.uint8)


def cropped(width: int, height: int, side: int = SIDE, time: float = 0.0) -> np.ndarray:
    """What a picture of this shape is at ``side``: its middle, in the closed form."""
    wide, high = min(1, height / width), min(1, width / height)
    u, v = (
        points(side, (1 - wide) / 2, (1 + wide) / 2),
        points(side, (1 - high) / 2, (1 + high) / 2),
    )
    return colours(u[None], v[:, None], time)


def grey(pixels: np.ndarray) -> np.ndarray:
    return pixels[..., :1].repeat(3, -1)


TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # from an upright picture to the stored
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x.swapaxes(0, 1)[::-1],
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: x.swapaxes(0, 1)[:, ::-1],
}


def images(folder: Path, large: tuple[int, int]) -> tuple[dict[str, Expected], dict[str, str]]:
    """Write pictures, one of them of the size ``large``. Returns what files should be, and the
    reasons of those that cannot be read."""
    folder.mkdir(parents=True)
    made: dict[str, Expected] = {}
    for number, turn in TURNS.items():
        exif = Image.Exif()
        exif[274] = number
        stored = Image.fromarray(np.ascontiguousarray(turn(picture(90, 60))))
        stored.save(folder / f"turned-{number}.png", exif=exif)
        made[f"turned-{number}.png"] = [cropped(90, 60)]
    plain = Image.fromarray(picture(80, 80))
    square = [cropped(80, 80)]
    Image.fromarray(picture(1, 1)).save(folder / "1x1.png")
    made["1x1.png"] = [np.broadcast_to(picture(1, 1), (SIDE, SIDE, 3))]
    Image.fromarray(picture(200, 50)).save(folder / "wide.jpg", quality=98, subsampling=0)
    made["wide.jpg"] = [cropped(200, 50)]
    small = Image.fromarray(picture(400, 300))
    small.resize(large).save(folder / "large.jpg", quality=95)
    made["large.jpg"] = [cropped(400, 300)]
    profile = ImageCms.createProfile("sRGB")
    plain.save(folder / "profile.png", icc_profile=ImageCms.ImageCmsProfile(profile).tobytes())
    plain.convert("CMYK").save(folder / "cmyk.jpg", quality=98, subsampling=0)
    plain.save(folder / "naïve 写真.webp", lossless=True)
    plain.save(folder / "two\nlines.png")
    plain.save(
        folder / "animated.webp", save_all=True, append_images=[plain.rotate(180)], lossless=True
    )
    for name in ("profile.png", "cmyk.jpg", "naïve 写真.webp", "two\nlines.png", "animated.webp"):
        made[name] = square
    opacity = np.full((80, 80, 1), 255, np.uint8)
    opacity[:, 40:] = 0
    Image.fromarray(np.concatenate([picture(80, 80), opacity], -1)).save(folder / "clear.png")
    half = cropped(80, 80).copy()
    half[:, 32:] = 255
    made["clear.png"] = [half]
    plain.quantize(256).save(folder / "palette.png")
    plain.quantize(256).save(
        folder / "animated.gif", save_all=True, append_images=[plain.rotate(180).quantize(256)]
    )
    made["palette.png"] = made["animated.gif"] = square
    level = picture(80, 80)[..., 0].astype(np.uint16) * 257
    for name in ("grey16.png", "grey16.tif"):
        Image.fromarray(level).save(folder / name)
        made[name] = [grey(cropped(80, 80))]
    striped = np.zeros((64, 64), bool)
    striped[:, :32] = True
    Image.fromarray(striped).save(folder / "bits.png")
    made["bits.png"] = [np.repeat(255.0 * striped[..., None], 3, -1)]
    (folder / "cut.jpg").write_bytes((folder / "wide.jpg").read_bytes()[:400])
    (folder / "empty.png").touch()
    (folder / "words.png").write_text("no picture")
    return made, {"cut.jpg": "cannot be read", "empty.png": "none of", "words.png": "none of"}


def wave(rate: int, seconds: float, first: float = 0.0) -> np.ndarray:
    """Sound in closed form, float [n]: two tones, of which one rises, from a time on."""
    time = first + np.arange(round(rate * seconds)) / rate
    return 0.3 * np.sin(2 * np.pi * 220 * time) + 0.2 * np.sin(2 * np.pi * (400 + 90 * time) * time)


def windows(seconds: float) -> Expected:
    """What a sound of this length is: windows, the last of them with silence."""
    length, found = SAMPLES / RATE, []
    count = max(1, int(seconds // length) + (seconds % length >= length / 2))
    for number in range(count):
        last = min(length, seconds - number * length)
        part = wave(RATE, last, number * length)
        found.append(np.pad(part, (0, SAMPLES - len(part))))
    return found


def sounds(folder: Path) -> tuple[dict[str, Expected], dict[str, str]]:
    """Write sounds. Returns what files should be, and the reasons of others."""
    folder.mkdir(parents=True)
    made: dict[str, Expected] = {}
    for rate in (8000, 11_025, 22_050, 44_100, 48_000, 96_000):
        sf.write(folder / f"{rate}.wav", wave(rate, 1.5), rate, "FLOAT")
        made[f"{rate}.wav"] = windows(1.5)
    for channels in range(2, 7):
        gains = np.linspace(0.4, 1.6, channels)  # whose mean is 1
        sf.write(folder / f"{channels}.wav", wave(RATE, 1.5)[:, None] * gains * 0.5, RATE, "FLOAT")
        made[f"{channels}.wav"] = [0.5 * part for part in windows(1.5)]
    kinds = {"deep.wav": "PCM_24", "a.flac": "PCM_16", "a.ogg": "VORBIS", "ö\n2.wav": "PCM_16"}
    for name, kind in kinds.items():
        sf.write(folder / name, wave(RATE, 1.5), RATE, kind)
        made[name] = windows(1.5)
    sf.write(folder / "a.opus", wave(48_000, 1.5), 48_000, "OPUS", format="OGG")
    sf.write(folder / "short.wav", wave(RATE, 0.01), RATE, "FLOAT")
    sf.write(folder / "long.wav", wave(44_100, 6.5), 44_100, "FLOAT")  # 2.7 windows
    made |= {"a.opus": windows(1.5), "short.wav": windows(0.01), "long.wav": windows(6.5)}
    encoded(folder / "a.m4a", wave(44_100, 1.5), 44_100)
    made["a.m4a"] = windows(1.5)
    whole = (folder / "8000.wav").read_bytes()
    (folder / "cut.wav").write_bytes(whole[: len(whole) // 2])
    (folder / "none.flac").write_bytes(b"")
    sf.write(folder / "nan.wav", np.full(2000, np.nan), RATE, "FLOAT")
    return made, {"cut.wav": "cut off", "none.flac": "cannot be read", "nan.wav": "NaN"}


def encoded(path: Path, samples: np.ndarray, rate: int) -> None:
    """Write a sound as AAC in MP4."""
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=rate, layout="mono")
        stream.bit_rate = 192_000
        frame = av.AudioFrame.from_ndarray(samples.astype(np.float32)[None], "fltp", "mono")
        # with times, from which the decoder knows how much of its start is to be dropped
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        fifo = av.AudioFifo()
        fifo.write(frame)
        for part in [*fifo.read_many(1024), *([fifo.read()] if fifo.samples else [])]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))


def clips(folder: Path) -> tuple[dict[str, Expected], dict[str, str]]:
    """Write clips. Returns what files should be, and the reasons of others."""
    folder.mkdir(parents=True)
    made: dict[str, Expected] = {}
    for name, fps in (("5.mkv", 5), ("24.mkv", 24), ("ntsc.mkv", 29.97), ("60.mp4", 60)):
        shown(folder / name, constant(fps, 2.0), 48, 36)
        made[name] = ticks(constant(fps, 2.0), 48, 36)
    shown(folder / "240.mkv", constant(240, 0.5), 32, 32)
    made["240.mkv"] = ticks(constant(240, 0.5), 32, 32)
    varied = [0.0, 0.05, 0.3, 0.35, 0.9, 1.0, 1.1, 1.7, 1.95]
    shown(folder / "varied\n速度.mkv", varied, 40, 40)
    made["varied\n速度.mkv"] = ticks(varied, 40, 40)
    shown(folder / "turned.mp4", constant(8, 2.0), 48, 36, turn=True)
    made["turned.mp4"] = ticks(constant(8, 2.0), 48, 36)
    shown(folder / "long.mkv", constant(8, 5.25), 32, 32)  # 2.6 windows
    made["long.mkv"] = ticks(constant(8, 5.25), 32, 32)
    frames = [Image.fromarray(picture(40, 40, time)) for time in constant(8, 2.0)]
    frames[0].save(
        folder / "a.webp", save_all=True, append_images=frames[1:], duration=125, lossless=True
    )
    frames[0].save(folder / "a.gif", save_all=True, append_images=frames[1:], duration=120)
    made["a.webp"] = made["a.gif"] = ticks(constant(8, 2.0), 40, 40)
    frames[0].save(folder / "still.webp")
    encoded(folder / "sound.mp4", wave(44_100, 1.0), 44_100)
    whole = (folder / "60.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    return made, {"still.webp": "is an image", "sound.mp4": "no video", "cut.mp4": "cut off"}


def constant(fps: float, seconds: float) -> list[float]:
    """Begins of the frames of a clip, in seconds."""
    return [i / fps for i in range(round(fps * seconds))]


def ticks(begins: list[float], width: int, height: int) -> Expected:
    """What a clip is: at every tick the frame that has begun, in windows; the last frame fills the
    rest of the last one."""
    step = (begins[-1] - begins[0]) / (len(begins) - 1)
    count = max(1, int(np.ceil((begins[-1] + step) * FPS - 1e-6)))
    times = [max(b for b in begins if b <= tick / FPS + 1e-6) for tick in range(count)]
    found = []
    for first in range(0, count, FRAMES):
        part = times[first : first + FRAMES]
        if first == 0 or len(part) >= FRAMES / 2:
            part += part[-1:] * (FRAMES - len(part))
            found.append(np.stack([cropped(width, height, SMALL, time) for time in part]))
    return found


def turned(path: Path) -> None:
    """Write into the header of an MP4 that it is shown turned by a quarter, clockwise."""
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 44
    matrix = np.array([0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30], ">i4")
    path.write_bytes(content[:at] + matrix.tobytes() + content[at + 36 :])


def shown(path: Path, begins: list[float], width: int, height: int, turn: bool = False) -> None:
    """Write a clip whose frames begin at these times. ``turn``: store it on its side, to be turned
    upright."""
    codec, form = ("libx264", "yuv444p") if path.suffix == ".mp4" else ("ffv1", "bgr0")
    sides = (height, width) if turn else (width, height)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=1000)
        stream.width, stream.height, stream.pix_fmt = *sides, form
        stream.codec_context.time_base = Fraction(1, 1000)
        if codec == "libx264":
            stream.options = {"crf": "4"}
        for begin in begins:
            pixels = picture(width, height, begin)
            if turn:
                pixels = np.rot90(pixels)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame = frame.reformat(format=form)
            frame.pts, frame.time_base = round(begin * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    if turn:
        turned(path)
