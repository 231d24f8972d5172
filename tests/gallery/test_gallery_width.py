"""A gallery fits a window of 1,400 pixels: nothing of its page has to be scrolled sideways."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from chrome import Tab
from ledgers import write_plan, write_rows, write_verdicts
from PIL import Image

from gen.gallery.write import write_gallery
from gen.media.audio import write_wav
from gen.media.video import write_mp4

WIDTH = 1400
SAMPLERS = [f"speculative_jacobi drafter_weights=work/drafter/{c * 80}" for c in "ab"]
SAMPLERS += [f"masked_iterative order=confidence steps={n}" for n in range(2, 12)]
PROMPT = "a large green cross at the left and a small yellow triangle at the right " + "x" * 300
WIDE = """[...document.querySelectorAll('*')].filter((e) => e.scrollWidth > e.clientWidth + 1
  && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)).map((e) => e.className)"""
COUNTS = {"image": 12, "audio": 6, "video": 8, "text": 8}  # samplers of each modality


def write_medium(path: Path) -> None:
    if path.suffix == ".png":
        Image.new("RGB", (64, 64), (9, 90, 200)).save(path)
    elif path.suffix == ".wav":
        write_wav(path, np.sin(np.arange(800) / 9), 8000)
    elif path.suffix == ".mp4":
        write_mp4(path, np.full((2, 16, 16, 3), 90, np.uint8), 8)
    else:
        path.write_text("word " * 40)


def folder_of(folder: Path, counts: dict[str, int]) -> Path:
    """Two items of a long prompt of every sampler."""
    folder.mkdir()
    ends, rows = {"audio": ".wav", "text": ".txt", "video": ".mp4"}, []
    for modality, count in counts.items():
        for sampler in SAMPLERS[:count] * 2:
            name = f"{len(rows):06d}{ends.get(modality, '.png')}"
            write_medium(folder / name)
            about = {"modality": modality, "sampler": sampler, "prompt": PROMPT, "seconds": 1.5}
            about |= {"guarantee": "same_tokens", "model": "m", "nfe": 256}
            about |= {"overrides": {"sampler": {"window": 8}, "sampling": {"top_k": 100}}}
            rows.append({"id": f"{len(rows):016x}", "status": "ok", "file": name, **about})
    rows.append({**rows[0], "id": "f" * 16, "status": "failed", "error": "e" * 300})
    write_rows(folder / "manifest.jsonl", rows)
    write_plan(folder / "plan.json", len(rows))
    (folder / "config.yaml").write_text("name: wide\n")
    verdicts = {r["id"]: {"passed": True, "detail": "looked"} for r in rows}
    write_verdicts(folder, verdicts)
    return folder


@pytest.fixture
def opened(tmp_path):
    """Opens the page of samplers of some modalities in a window of ``WIDTH``."""
    tabs = []

    def open_page(counts: dict[str, int]) -> Tab:
        page = write_gallery(folder_of(tmp_path / f"o{len(tabs)}", counts))
        tab = Tab(tmp_path / f"profile{len(tabs)}", page.resolve().as_uri())
        tabs.append(tab)
        tab.until(lambda: tab.value("document.readyState") == "complete")
        size = {"width": WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        tab.send("Emulation.setDeviceMetricsOverride", **size)
        tab.until(lambda: tab.value("innerWidth") == WIDTH)
        return tab

    yield open_page
    for tab in tabs:
        tab.close()


@pytest.mark.slow
def test_tables_of_many_samplers_with_long_parameters_need_no_scrolling(opened):
    tab = opened(COUNTS)
    lines = tab.value("document.querySelectorAll('.compare .line:not(.top)').length")
    assert lines == len(COUNTS)
    assert tab.value("document.documentElement.scrollWidth") <= WIDTH
    assert tab.value(WIDE) == []
    tab.value("document.querySelector('.compare').style.setProperty('--col', '8rem')")
    assert tab.value(WIDE) == ["compare"]  # control: columns that do not shrink would not fit
