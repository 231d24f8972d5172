"""View of an item in a gallery: its output, a preview image, or a box with the reason why there is
none.

In layout ``files`` the page refers to the output files; sound has a spectrogram and video its
middle frame in ``preview/``, since a motion begins like any other. A page cannot open a file inside
a tar, so there the worker writes a preview (`preview_of`) while the output is still a file, and the
page names its tar. The first sounds and videos of a job are copied beside their previews.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from PIL import Image

from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError
from gen.core.files import TEMPORARY, sha256, writing
from gen.core.processes import worker_name
from gen.media.audio import open_sound
from gen.media.images import image_size, read_image
from gen.media.spectrogram import spectrogram_png
from gen.media.video import middle_frame
from gen.store.ledger import SHARDS

ENDINGS = {
    "image": ("png", "jpg", "jpeg", "webp", "gif", "bmp", "avif"),
    "audio": ("wav", "mp3", "flac", "ogg", "opus", "m4a"),
    "video": ("mp4", "webm", "mov"),
}
KINDS = {ending: kind for kind, endings in ENDINGS.items() for ending in endings}
PREVIEW = "preview"  # folder of the images of outputs that a page cannot show
LARGEST = 256  # pixels of a preview
PLAYED, PLAYED_BYTES = 200, 1 << 20  # items of a job in tars that can be played, and their size
SMALL = 160  # pixels; smaller images are enlarged with their pixels kept square
EXCERPT = 400  # characters of a text that are shown
STARTS = ("source", "mask")  # images that an edit starts from
Row = dict[str, Any]


class View(NamedTuple):
    """View of an item.

    Attributes:
        kind: image, audio, video, text, file (a box with a name), missing or failed.
        source: address of the output file.
        image: address of the image that the page shows.
        note: text, name or error.
        tar: address of the archive that holds the output.
    """

    kind: str
    source: str = ""
    image: str = ""
    note: str = ""
    tar: str = ""


class Files:
    """Files of a job folder and their times of change, read from the disk once, not once per
    item."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.media, self.previews = _times(folder), _own(folder / PREVIEW)
        self.tars = {f"{SHARDS}/{name}" for name in _own(folder / SHARDS)}


def _times(folder: Path) -> dict[str, int]:
    """Times of the files of a folder. Links are left out: they may lead anywhere."""
    found: dict[str, int] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # moved to its own name meanwhile
                    if entry.is_file(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:
        pass
    return found


def _own(folder: Path) -> dict[str, int]:
    return {} if folder.is_symlink() else _times(folder)


def view(files: Files, row: Row) -> View:
    """Return the view of an item, and make its preview if there is none or an older one.

    Names outside this folder and its shards give a view without an address.
    """
    if row.get("status") != "ok":
        return View("failed", note=str(row.get("error")))
    return _in_tar(files, row) if "member" in row else _plain(files, row)


def stamp(files: Files, row: Row) -> tuple[Any, ...]:
    """Return the state that `view` depends on beside the row: the output's time of change, its
    preview and its tar."""
    name = row.get("member") or row.get("file")
    if not isinstance(name, str):
        return ()
    changed = files.media.get(name, 0)
    return (
        changed,
        files.previews.get(preview_name(name), -1) >= changed,
        "member" in row and row.get("file") in files.tars,
    )


def _plain(files: Files, row: Row) -> View:
    name = str(row.get("file"))
    if name not in files.media:
        return View("missing", note=f"{name} is missing")
    if row.get("also"):
        name = next(
            (n for n in (name, *map(str, row["also"])) if kind_of(n) and n in files.media), name
        )
    kind, source = kind_of(name), quote(name)
    if kind == "image":
        return View(kind, source, source)
    if kind:
        return View(kind, source, _preview(files, name))
    if name.lower().endswith(".txt"):
        path = files.folder / name
        if row.get("sha256") and name == row["file"] and sha256(path) != row["sha256"]:
            return View("missing", source, note=f"{name} is not the file that its row describes")
        return View("text", source, note=excerpt(path))
    return View("file", source, note=name)


def _in_tar(files: Files, row: Row) -> View:
    """View of an item in a tar. An incomplete shard has no tar yet; a committed item without a tar
    is missing."""
    there = row.get("file") in files.tars
    if not there and row.get("shard_sha256"):
        return View("missing", note=f"{row.get('file')} is missing")
    tar, name = quote(row["file"]) if there else "", preview_name(str(row["member"]))
    if name in files.previews:
        image = f"{PREVIEW}/{quote(name)}"
        stem = name.rpartition(".")[0]
        for played in (f"{stem}.{ending}" for k in ("audio", "video") for ending in ENDINGS[k]):
            if played in files.previews:
                return View(kind_of(played), f"{PREVIEW}/{quote(played)}", image, tar=tar)
        return View("image", image, image, tar=tar)
    if isinstance(row.get("text"), str):
        return View("text", tar, note=_cut(row["text"]), tar=tar)
    return View("file", tar, note=str(row["member"]), tar=tar)


def excerpt(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return _cut(file.read(EXCERPT + 1))


def _cut(text: str) -> str:
    return text[:EXCERPT] + (" …" if len(text) > EXCERPT else "")


def kind_of(name: str) -> str:
    return KINDS.get(name.rpartition(".")[2].lower(), "")


# --- Previews


def preview_name(medium: str) -> str:
    """``000000-alpha-s0.wav`` -> ``000000-alpha-s0.png``, in the folder ``preview``."""
    name = medium.rpartition("/")[2]
    return f"{name.rpartition('.')[0] or name}.png"


def preview_of(path: Path, folder: Path, row: Row) -> None:
    """Write a preview of an output to ``folder/preview``, while the output is still a file.

    The preview is an image of at most 256 pixels: the image itself, the middle frame of a video, or
    the spectrogram of a sound. The first sounds and videos of a job are copied too. Other and
    unreadable files have none. A further file of the item (``also``) is used if it lies beside
    ``path`` and can be shown while the output cannot.

    Args:
        path: file of the output.
        folder: folder of the job.
        row: row of the item; the preview is named after its ``member``, else after ``path``.

    Raises:
        GenError: the disk is full.
    """
    beside = (path, *(path.with_name(Path(str(name)).name) for name in row.get("also") or ()))
    seen = next((p for p in beside if kind_of(p.name) and p.is_file()), None)
    if seen is None:
        return
    image = folder / PREVIEW / preview_name(str(row.get("member") or path.name))
    drawn = _draw(seen, image)
    short = seen.stat().st_size <= PLAYED_BYTES and int(row.get("index") or 0) < PLAYED
    if drawn and short and kind_of(seen.name) in ("audio", "video"):
        _put(image.with_suffix(seen.suffix), lambda temporary: shutil.copyfile(seen, temporary))


def start_name(medium: str, start: str) -> str:
    """``000000-alpha-s0.png`` and ``mask`` -> ``000000-alpha-s0.mask.png``, in ``preview``."""
    return f"{preview_name(medium).removesuffix('.png')}.{start}.png"


def preview_start(start: EditSpec, folder: Path, row: Row) -> None:
    """Write previews of the source and the mask of an edited image, for the first items of a job.

    Only the worker that reads both does so: a page never opens files outside its folder.

    Args:
        start: source and mask.
        folder: folder of the job.
        row: row of the item.

    Raises:
        GenError: the disk is full.
    """
    if int(row.get("index") or 0) >= PLAYED:
        return
    for name, path in zip(STARTS, (start.source, start.mask), strict=True):
        if isinstance(path, (str, Path)) and kind_of(str(path)) == "image":
            medium = str(row.get("member") or row["file"])
            _draw(Path(path), folder / PREVIEW / start_name(medium, name))


def starts(files: Files, row: Row) -> list[tuple[str, str]]:
    """List the source and the mask of an edited image, with the addresses of their previews."""
    medium = str(row.get("member") or row.get("file"))
    names = ((name, start_name(medium, name)) for name in STARTS)
    return [(name, f"{PREVIEW}/{quote(image)}") for name, image in names if image in files.previews]


def preview_sheet(sheet: Path, folder: Path, row: Row) -> None:
    """Copy the sheet of a search's candidates for a page that cannot open the tar it goes to, for
    the first items of a job.

    Args:
        sheet: file of the sheet.
        folder: folder of the job.
        row: row of the item.

    Raises:
        GenError: the disk is full.
    """
    name = row.get("search", {}).get("sheet")
    if name and int(row.get("index") or 0) < PLAYED:
        _put(folder / PREVIEW / name, lambda temporary: shutil.copyfile(sheet, temporary))


def _preview(files: Files, name: str) -> str:
    """Return the address of an output's preview, made if there is none or an older one; empty for
    files that only a browser can read."""
    image = preview_name(name)
    if image not in files.previews or files.previews[image] < files.media[name]:
        if not _draw(files.folder / name, files.folder / PREVIEW / image):
            return ""
        files.previews[image] = files.media[name]
    return f"{PREVIEW}/{quote(image)}"


def _draw(path: Path, image: Path) -> bool:
    try:
        small = _is_small(path)
        drawn = None if small else DRAW[kind_of(path.name)](path)
    # Pillow raises any of these for a broken image
    except (GenError, OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        image.unlink(missing_ok=True)  # preview of an earlier output
        return False
    if drawn is None:
        _put(image, lambda temporary: shutil.copyfile(path, temporary))
    else:
        _put(image, lambda temporary: drawn.save(temporary, format="PNG", compress_level=1))
    return True


def _put(path: Path, write: Callable[[Path], object]) -> None:
    """Write a preview. Not `put`: a preview may be lost in a crash of the machine, so no item waits
    for the disk."""
    temporary = path.with_name(f"{TEMPORARY}{worker_name()}-{threading.get_ident()}-{path.name}")
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        try:
            write(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _is_small(path: Path) -> bool:
    """Return True for an output that is small enough to be its own preview."""
    if path.suffix.lower() != ".png":
        return False
    return max(image_size(path)) <= LARGEST


def _thumbnail(path: Path) -> Image.Image:
    return _small(read_image(path, alpha=True))


def _small(image: Image.Image) -> Image.Image:
    image.thumbnail((LARGEST, LARGEST))
    return image


DRAW = {
    "image": _thumbnail,
    "video": lambda path: _small(Image.fromarray(middle_frame(path))),
    "audio": lambda path: spectrogram_png(*open_sound(path)),
}
