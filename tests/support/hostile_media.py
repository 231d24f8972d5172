"""Media that somebody made to harm or to mislead, as bytes by name. Not a test."""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from gen.media.audio import write_sound
from gen.media.motion.bvh import ROTATIONS, write_bvh
from gen.media.motion.retarget import KNOWN
from gen.media.motion.skeleton import JOINTS, Motion
from gen.media.video import write_video

FLIPS = 8  # of each whole file
CUTS = (0.02, 0.3, 0.97)


def damaged(whole: dict[str, bytes]) -> dict[str, bytes]:
    """Return cut and flipped copies of whole files."""
    found = {}
    for name, data in whole.items():
        stem, _, suffix = name.rpartition(".")
        dice = random.Random(name)
        for share in CUTS:
            found[f"{stem}-cut{share}.{suffix}"] = data[: int(share * len(data))]
        for number in range(FLIPS):
            flipped = bytearray(data)
            at = dice.randrange(min(len(data), 200) if number % 2 else len(data))
            flipped[at] ^= 1 << dice.randrange(8)
            found[f"{stem}-flip{number}.{suffix}"] = bytes(flipped)
    return found


def chunk(name: bytes, body: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, *more: bytes, data: bytes = b"") -> bytes:
    """Return a PNG of grey pixels that states a size."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(data or bytes(100)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + body + chunk(b"IEND", b"")


def written(suffix: str, write: Callable[[Path], object]) -> bytes:
    """Return the bytes of a file that a function writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{suffix}"
        write(path)
        return path.read_bytes()


def image_bytes(form: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format=form)
    return out.getvalue()


def images(canary: Path) -> dict[str, bytes]:
    """Images: bombs, programs, other formats, damage."""
    whole = {
        f"{form.lower()}.{form.lower()}": image_bytes(form)
        for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
    }
    script = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n({canary}) (w) file closefile\n"
    bomb = zlib.compress(bytes(300_000_000))
    return {
        **damaged(whole),
        **{f"ps.{s}": script.encode() for s in ("png", "eps", "jpg", "webp", "tiff", "bmp")},
        "wide.png": png(2**31 - 1, 1),
        "tall.png": png(1, 2**31 - 1),
        "square.png": png(50_000, 50_000),
        "zero.png": png(0, 0),
        "just-over.png": png(8001, 8000),
        "text-bomb.png": png(8, 8, chunk(b"zTXt", b"a\0\0" + bomb)),
        "profile-bomb.png": png(8, 8, chunk(b"iCCP", b"a\0\0" + bomb)),
        "international.png": png(8, 8, chunk(b"iTXt", b"a\0\1\0\0\0" + bomb)),
        "data-bomb.png": png(8, 8, data=bytes(300_000_000)),
        "many-chunks.png": png(8, 8, *[chunk(b"tEXt", b"a\0b")] * 50_000),
        "gif-screen.gif": b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(20),
        "bmp-size.bmp": b"BM" + bytes(12) + struct.pack("<IiiHHI", 40, 10**6, 10**6, 1, 24, 0),
        "ppm-size.ppm": b"P6 1000000 1000000 255\n" + bytes(100),
        "ppm-digits.ppm": b"P6 " + b"9" * 100_000 + b" 1 255\n",
        "ppm-endless.ppm": b"P6 #" + b"a" * 1_000_000,
        "svg.png": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="/etc/passwd"/></svg>',
        "xpm.png": b"/* XPM */ static char *a[] = {",
        "fli.png": b"\x00\x00\x00\x00\x11\xaf" + bytes(200),
        "wmf.png": b"\xd7\xcd\xc6\x9a\x00\x00" + bytes(60),
        "pdf.png": b"%PDF-1.4\n1 0 obj <</OpenAction <</S /Launch>>>> endobj",
        "psd.png": b"8BPS\0\1" + bytes(60),
        "fits.png": b"SIMPLE  =                    T" + bytes(200),
        "hdf5.png": b"\x89HDF\r\n\x1a\n" + bytes(60),
        "empty.png": b"",
        "letter.png": b"P",
        "html.jpg": b"<html><script>1</script></html>",
        "noise.jpg": random.Random(1).randbytes(5000),
    }


def wav(rate: int = 8000, channels: int = 1, bits: int = 16, size: int | None = None) -> bytes:
    """Return a WAV of 200 bytes of samples whose header says what is asked for."""
    block = max(1, channels * bits // 8)
    head = struct.pack("<HHIIHH", 1, channels, rate, rate * block % 2**32, block % 2**16, bits)
    data = b"data" + struct.pack("<I", 200 if size is None else size) + bytes(200)
    body = b"WAVEfmt " + struct.pack("<I", 16) + head + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def sounds(canary: Path) -> dict[str, bytes]:
    """Sounds: headers that promise, other formats, damage."""
    wave = np.sin(np.arange(800) / 9)
    whole = {f"{s}.{s}": written(s, lambda p: write_sound(p, wave, 8000)) for s in ("wav", "mp3")}
    whole["flac.flac"] = written("flac", lambda p: write_sound(p, wave, 8000))
    flac, plain = bytearray(whole["flac.flac"]), wav()
    flac[21] |= 0x0F
    flac[22:26] = b"\xff" * 4  # 2^36 - 1 samples
    return {
        **damaged(whole),
        "promises.flac": bytes(flac),
        "promises.wav": wav(size=2**31),
        "endless.wav": wav(size=2**32 - 1),
        "no-rate.wav": wav(rate=0),
        "fast.wav": wav(rate=2**32 - 1),
        "slow.wav": wav(rate=1),
        "no-channel.wav": wav(channels=0),
        "channels.wav": wav(channels=65535),
        "bits.wav": wav(bits=64),
        "one-bit.wav": wav(bits=1),
        "empty.wav": b"",
        "riff.wav": b"RIFF" + bytes(4) + b"WAVE",
        "nested.wav": b"RIFF\xff\xff\xff\xffWAVE" + b"LIST\xff\xff\xff\xff" * 1000,
        # sizes that libsndfile takes for negative ones, in lists and of them
        "back.wav": b"RIFF\xff\xff\xff\xffWAVE" + b"LIST\xf7\xff\xff\xff" * 100,
        "inner.wav": plain[:12]
        + b"LIST\x18\0\0\0INFOPEAK\xf7\xff\xff\xff"
        + bytes(12)
        + plain[12:],
        "aiff.wav": b"FORM" + struct.pack(">I", 100) + b"AIFFCOMM" + bytes(90),
        "raw.raw": bytes(1000),
        "au.wav": b".snd" + struct.pack(">5I", 24, 2**31, 1, 8000, 1),
        "w64.wav": b"riff\x2e\x91\xcf\x11" + b"\xff" * 60,
        "caf.wav": b"caff\0\1\0\0desc" + b"\x7f" * 60,
        "mat.wav": b"MATLAB 5.0 MAT-file" + bytes(200),
        "midi.wav": b"MThd" + bytes(30),
        "ogg.wav": b"OggS" + bytes(60),
        "id3.mp3": b"ID3\4\0\0\x7f\x7f\x7f\x7f" + bytes(100),
        "playlist.wav": f"#EXTM3U\nfile://{canary.parent}/secret.wav\n".encode(),
        "noise.wav": random.Random(2).randbytes(5000),
    }


def clips(canary: Path) -> dict[str, bytes]:
    """Clips: playlists and protocols under any name, headers that promise, damage."""
    frames = np.random.default_rng(0).integers(0, 255, (6, 16, 16, 3), np.uint8)
    whole = {f"{s}.{s}": written(s, lambda p: write_video(p, frames, 8.0)) for s in ("mp4", "gif")}
    whole["mkv.mkv"] = written("mkv", lambda p: write_video(p, frames, 8.0))
    secret = canary.parent / "secret.mkv"
    lists = {
        "m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{secret}\n#EXT-X-ENDLIST\n",
        "http": "#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n",
        "concat": f"ffconcat version 1.0\nfile '{secret}'\n",
        "dash": f'<?xml version="1.0"?><MPD><BaseURL>{secret}</BaseURL></MPD>',
        "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
        "lavfi": "testsrc=size=9000x9000",
        "script": 'LoadPlugin("a")\n',
        "subtitle": "WEBVTT\n\n00:00.000 --> 00:01.000\nhello\n",
        "pls": f"[playlist]\nFile1={secret}\n",
    }
    found = {
        f"{name}.{suffix}": text.encode()
        for name, text in lists.items()
        for suffix in ("mp4", "mkv", "gif")
    }
    screen = bytearray(whole["gif.gif"])
    screen[6:10] = b"\xff" * 4
    return {
        **damaged(whole),
        **found,
        "screen.gif": bytes(screen),
        "moov.mp4": b"\0\0\0\x14ftypisom" + bytes(8) + b"\x7f\xff\xff\xffmoov",
        "nested.mp4": b"\0\0\0\x14ftypisom" + bytes(8) + b"\0\0\x10\0moov" * 400,
        "ebml.mkv": b"\x1a\x45\xdf\xa3" + b"\xff" * 300,
        "empty.mp4": b"",
        "image.mp4": image_bytes("PNG"),
        "sound.mp4": wav(),
        "noise.mp4": random.Random(3).randbytes(5000),
        "noise.mkv": b"\x1a\x45\xdf\xa3" + random.Random(4).randbytes(5000),
    }


def npy(shape: str, descr: str = "'<f4'", data: bytes = bytes(64)) -> bytes:
    """Return an array file with a header of one's own."""
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head.encode("latin-1") + data


class _Touch:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def arrays(canary: Path) -> dict[str, bytes]:
    """Arrays: shapes that lie, pickles, headers that are programs."""
    held = pickle.dumps(np.array([_Touch(canary)], dtype=object), 2)
    return {
        **damaged({"good.npy": npy("(16,)"), "table.npy": npy("(4, 4)")}),
        "huge.npy": npy(f"({2**40},)"),
        "huge2.npy": npy("(1000000, 1000000, 1000000)"),
        "beyond.npy": npy("(1000,)"),
        "negative.npy": npy("(-1,)"),
        "product.npy": npy("(-1, -16)"),
        "overflow.npy": npy(f"({2**62}, 4)"),
        "object.npy": npy("(1,)", "'|O'", held),
        "pickle.npy": held,
        "program.npy": npy(f"(__import__('os').system('touch {canary}'),)"),
        "text-shape.npy": npy("('a',)"),
        "float-shape.npy": npy("(1.5,)"),
        "no-shape.npy": npy("None"),
        "deep.npy": npy("(" * 60 + ")" * 60),
        "void.npy": npy("(2,)", "'|V1000000000'"),
        "text.npy": npy("(2,)", "'<U1000000000'"),
        "nested.npy": npy("(2,)", "[('a', '<f4', (1000000, 1000000))]"),
        "objects-inside.npy": npy("(2,)", "[('a', '|O')]", held),
        "date.npy": npy("(2,)", "'<M8[s]'"),
        "version.npy": b"\x93NUMPY\x09\x09" + bytes(60),
        "header.npy": b"\x93NUMPY\2\0" + struct.pack("<I", 2**31) + bytes(60),
        "empty.npy": b"",
        "endless.npy": npy("(16,)" + " " * 9000 + '"'),
    }


def archives(canary: Path) -> dict[str, bytes]:
    """Archives of arrays: bombs, lies, pickles."""

    def zipped(**entries: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in entries.items():
                file.writestr(f"{name}.npy", data)
        return out.getvalue()

    inside = {
        f"{name.removesuffix('.npy')}.npz": zipped(action=data)
        for name, data in arrays(canary).items()
        if "-" not in name
    }
    unnamed = io.BytesIO()
    with zipfile.ZipFile(unnamed, "w") as file:
        file.writestr("action", arrays(canary)["endless.npy"])
    lying = bytearray(zipped(action=npy("(16,)")))
    at = lying.rfind(b"PK\1\2")
    lying[at + 24 : at + 28] = struct.pack("<I", 2**32 - 2)
    return {
        **inside,
        **damaged({"good.npz": zipped(action=npy("(16,)"))}),
        "bomb.npz": zipped(action=npy("(75000000,)", data=bytes(300_000_000))),
        "bombs.npz": zipped(**{f"a{i}": npy("(25000000,)", data=bytes(10**8)) for i in range(12)}),
        "lying.npz": bytes(lying),
        "other.npz": zipped(other=npy("(16,)")),
        "path.npz": zipped(**{"../../action": npy("(16,)")}),
        "no-zip.npz": b"PK\3\4" + bytes(100),
        "npy.npz": npy("(16,)"),
        "unnamed.npz": unnamed.getvalue(),
    }


def foreign_skeleton() -> str:
    """Return three frames of a person whose joints have the names of Mixamo."""
    still = Motion(np.zeros((3, 3)), np.tile(np.eye(3), (3, len(JOINTS), 1, 1)))
    text = written("bvh", lambda path: write_bvh(path, still)).decode()
    for joint, name in KNOWN["Mixamo"].items():
        text = re.sub(f"(ROOT|JOINT) {joint}\n", rf"\1 {name}\n", text)
    return text


def skeletons(canary: Path) -> dict[str, bytes]:
    """Motions of skeletons that no person has."""
    joints = [f"JOINT a{i} {{ OFFSET 0 0 0 CHANNELS 0 " for i in range(20_000)]
    found = {
        "deep.bvh": "".join(joints[:3000]) + "}" * 3000,
        "wide.bvh": "} ".join(joints) + "}",
        "long.bvh": "JOINT " + "a" * 100_000 + " {" * 3,
        "many.bvh": "OFFSET " * 100_000,
    }
    head, tail = "HIERARCHY\nROOT a { OFFSET 0 0 0 CHANNELS 0 ", "}\nMOTION\nFrames: 1\n"
    found = {name: f"{head}{said}{tail}Frame Time: 0.05\n\n" for name, said in found.items()}
    person, rotations = foreign_skeleton(), " ".join(ROTATIONS)
    rows = person.split("Frame Time: 0.050000\n")[1]
    lines = [["1"] * 9 + line.split()[9:] for line in rows.splitlines()]
    lines[1][6:9] = ["0"] * 3
    rows = "".join(" ".join(line) + "\n" for line in lines)
    hips, *others = person.split(f"CHANNELS 3 {rotations}")
    moved = f"CHANNELS 3 {rotations}".join(
        ["CHANNELS 3 Xposition Yposition Zposition" + others[0], *others[1:]]
    )
    found |= {
        "slow.bvh": person.replace("Time: 0.050000", "Time: 1e9"),
        "endless.bvh": person.replace("Time: 0.050000", "Time: 1e308"),
        "vast.bvh": re.sub(r"OFFSET \S+ \S+ \S+", "OFFSET 1e300 1 1", person),
        "boneless.bvh": (hips + moved[: moved.index("Frame Time")] + "Frame Time: 0.05\n" + rows),
    }
    return {name: said.encode() for name, said in found.items()}
