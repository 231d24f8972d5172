"""Galleries of edited images, animated images and very long prompts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from ledgers import write_rows
from PIL import Image

from gen.__main__ import main
from gen.gallery.write import write_gallery

SOURCE = np.full((64, 64, 3), 90, np.uint8)
MASK = np.zeros((64, 64), np.uint8)
MASK[32:, 32:] = 255


def starts_of(folder: Path) -> list[str]:
    """Addresses of the sources and masks that the page of a folder shows."""
    html = write_gallery(folder).read_text("utf-8")
    strips = re.findall(r'<div class="starts">.*?</div>', html, re.DOTALL)
    return [address for strip in strips for address in re.findall(r'src="([^"]*)"', strip)]


def sample(out: Path, *edit: str) -> None:
    prompt = "a small yellow cross at the bottom right"
    steps = ("--sampler", "maskgit", "sampler.steps=1", "--quiet", *edit)
    assert main(["sample", "image", prompt, "-n", "2", "--out", str(out), *steps]) == 0


@pytest.mark.parametrize("layout", ["files", "shards"])
def test_source_and_mask_of_an_edit_stand_beside_the_result(tmp_path, layout):
    for name, pixels in (("from.png", SOURCE), ("where.png", MASK)):
        Image.fromarray(pixels).save(tmp_path / name)
    edit = ("--source", str(tmp_path / "from.png"), "--mask", str(tmp_path / "where.png"))
    sample(tmp_path / "out", *edit, f"layout={layout}")
    for path in ("from.png", "where.png"):
        (tmp_path / path).unlink()  # the page opens nothing outside its folder
    shown = starts_of(tmp_path / "out")
    assert len(shown) == 4
    source, mask = (np.asarray(Image.open(tmp_path / "out" / name)) for name in shown[:2])
    assert np.array_equal(source, SOURCE) and np.array_equal(mask, MASK)


def test_an_image_that_was_not_edited_has_neither(tmp_path):
    sample(tmp_path / "out")
    assert starts_of(tmp_path / "out") == []


def row(number: int, **changes) -> dict:
    return {
        "id": f"{number:016x}",
        "index": number,
        "modality": "video",
        "prompt": "a red square moves right",
        "seed": number,
        "sampler": "sjd",
        "status": "ok",
        "error": None,
        "nfe": 4,
        **changes,
    }


def test_a_gif_is_an_image_element_and_an_mp4_a_video_element(tmp_path):
    frames = [Image.new("RGB", (32, 32), (40 * i, 0, 0)) for i in range(4)]
    frames[0].save(tmp_path / "0.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "1.mp4").write_bytes(b"")
    write_rows(tmp_path / "manifest.jsonl", [row(0, file="0.gif"), row(1, file="1.mp4")])
    html = write_gallery(tmp_path).read_text("utf-8")
    assert re.findall(r'<img src="([^"]*)"', html) == ["0.gif"]
    assert re.findall(r'<video[^>]* src="([^"]*)"', html) == ["1.mp4"]


def test_long_prompts_and_errors_are_cut_by_the_style_and_whole_in_the_title(tmp_path):
    long, error = "word " * 5000, "cause " * 5000
    failed = row(1, prompt=long, file=None, status="failed", error=error)
    write_rows(tmp_path / "manifest.jsonl", [row(0, prompt=long, file="gone.mp4"), failed])
    html = write_gallery(tmp_path).read_text("utf-8")
    assert re.search(r"\.clamp \{[^}]*-webkit-line-clamp: \d[^}]*overflow: hidden", html)
    for tag, text in (("h3", long), ("div", long), ("div", error)):
        assert re.search(rf'<{tag}[^>]* class="clamp" title="{text}">{text}</{tag}>', html) or (
            re.search(rf'<{tag} class="clamp" title="{text}">{text}</{tag}>', html)
        )
