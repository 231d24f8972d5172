"""Views of a gallery: traces that lie down and count the output alone, the verdict as a filter, and
samplers side by side in a large job."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from browser import Seen
from ledgers import write_plan, write_rows, write_verdicts
from PIL import Image

from gen.gallery import media
from gen.gallery.trace import draw_trace, layout
from gen.gallery.write import write_gallery
from gen.media.video import write_mp4
from gen.store.ledger import parse_rows


@pytest.mark.parametrize("grid", [[49, 2], [16, 2], [150, 8]])
@pytest.mark.parametrize("kind", ["video", "audio", ""])
def test_traces_of_motion_actions_and_speech_lie_down(grid, kind):
    width, height = layout(grid, grid[0] * grid[1], "", kind).size
    assert width > 2 * height
    upright = layout(grid, grid[0] * grid[1], "", "image").size  # the control
    assert upright[0] < upright[1]


STEPS = [
    {"window": [0], "committed": {"0": 5}},
    {"window": [1, 2], "committed": {"1": 6, "2": 7}},
    {"window": [3, 9], "committed": {str(p): 0 for p in range(3, 10)}},
]


def test_a_trace_counts_the_tokens_of_its_output_and_not_what_fills_the_row():
    drawn = draw_trace(STEPS, None, "", "text", own=4)
    assert "4 in 3 passes" in drawn["chart"] and "at most 2 tokens" in drawn["chart"]
    assert "10 in 3 passes" in draw_trace(STEPS, None, "", "text")["chart"]


def test_a_cell_of_a_text_says_which_word_it_is():
    grid = draw_trace(STEPS, None, "", "text", own=4, text="sort 3 1 <2>")["grid"]
    titles = re.findall("<title>(.*?)</title>", grid)
    assert titles[0] == "&#x27;sort&#x27;, position 0, token 5, pass 1"
    assert titles[3] == "&#x27;&lt;2&gt;&#x27;, position 3, token 0, pass 3"


def test_a_single_pass_does_not_fill_the_chart():
    chart = draw_trace(STEPS[:1], None, "", "text")["chart"]
    assert 'viewBox="0 0 8 ' in chart


def test_the_poster_of_a_motion_is_from_its_middle(tmp_path):
    frames = np.repeat(np.array([0, 90, 250, 0], np.uint8), 3)[:, None, None, None]
    write_mp4(tmp_path / "a.mp4", np.broadcast_to(frames, (12, 32, 32, 3)), 8)
    media.preview_of(tmp_path / "a.mp4", tmp_path, {})
    assert np.asarray(Image.open(tmp_path / "preview/a.png")).mean() > 200


def folder_of(folder: Path, count: int) -> Path:
    """Three samplers, half of whose images pass."""
    folder.mkdir()
    rows = []
    for i in range(count):
        name = f"{i:06d}.png"
        Image.new("RGB", (16, 16), (i % 255, 90, 200)).save(folder / name)
        about = {"sampler": ("ar", "sjd", "maskgit")[i % 3], "prompt": f"prompt {i // 6}"}
        rows.append({"id": f"{i:016x}", "status": "ok", "file": name, "nfe": 4, **about})
    write_rows(folder / "manifest.jsonl", rows)
    write_plan(folder / "plan.json", count)
    verdicts = {r["id"]: {"passed": i % 2 == 0, "detail": "looked"} for i, r in enumerate(rows)}
    write_verdicts(folder, verdicts)
    (folder / "config.yaml").write_text("name: fast\n")
    return folder


def test_the_page_of_a_config_is_titled_with_its_modality(tmp_path):
    assert "<h1>image/fast</h1>" in write_gallery(folder_of(tmp_path / "o", 6)).read_text()


def test_a_prompt_has_the_names_of_the_media_in_its_condition(tmp_path):
    given = [
        {"prompt": "make it red", "condition": {"images": ["in/x.png"]}},
        {"prompt": "", "condition": {"audio": ["y.wav"], "images": ["data:image/png;base64,AAAA"]}},
        {"prompt": "alone", "condition": {"observation": "z.json"}},
    ]
    rows = [
        {"id": f"{i}", "file": f"{i}.png", "status": "ok", **row} for i, row in enumerate(given)
    ]
    for row in rows:
        Image.new("RGB", (8, 8)).save(tmp_path / row["file"])
    write_rows(tmp_path / "manifest.jsonl", rows)
    page = write_gallery(tmp_path).read_text()
    heads = re.findall(r"<(?:h3|th)[^>]*rowheader[^>]*>([^<]*)<", page)
    assert heads == ["make it red · x.png", "y.wav", "alone"]


@pytest.mark.slow
def test_what_did_not_pass_can_be_filtered_in_a_small_job(tmp_path):
    page = write_gallery(folder_of(tmp_path / "o", 24))
    seen = Seen(page, {"verdict": "not passed"})
    hidden = [t for t in seen.tiles if re.match(r"<figure[^>]* hidden", t)]
    assert not seen.console and len(seen.tiles) == 24 and len(hidden) == 12
    assert all('data-verdict="passed"' in t for t in hidden) and "12 of 24 items" in seen.dom


@pytest.mark.slow
def test_samplers_stand_side_by_side_in_a_large_job_and_verdicts_are_a_filter(tmp_path):
    page = write_gallery(folder_of(tmp_path / "o", 240))
    seen = Seen(page, {"view": "compare", "verdict": "passed"})
    table = seen.dom[seen.dom.index('aria-label="prompt by method"') :]
    heads = re.findall(r'class="head" role="columnheader">([^<]*)<', table)
    assert not seen.console and heads == ["prompt", "ar", "sjd", "maskgit"]
    lines = re.findall(r'<h3 role="rowheader"[^>]*>prompt (\d+)</h3>', table)
    assert lines == [str(n) for n in range(34)] and len(seen.tiles) == 100
    assert "120 of 240 items" in seen.dom
    plain = Seen(page)  # the control: item by item
    assert '<h3 role="rowheader"' not in plain.dom and plain.items[:3] == [0, 1, 2]


@pytest.mark.slow
def test_a_link_to_a_hidden_section_shows_it_and_goes_there(tmp_path):
    folder = folder_of(tmp_path / "o", 24)
    rows = parse_rows(folder / "manifest.jsonl")
    for i, row in enumerate(rows):
        row["modality"] = "image" if i < 12 else "speech"
    write_rows(
        folder / "manifest.jsonl", [{k: v for k, v in r.items() if k != "crc"} for r in rows]
    )
    page = write_gallery(folder)
    script = """<script>addEventListener("load", () => {
      location.hash = "modality=image";
      setTimeout(() => { document.querySelector('a[href="#modality-speech"]').click(); }, 300);
      setTimeout(() => {
        const top = document.getElementById("modality-speech").getBoundingClientRect().top;
        document.title = "at " + Math.round(top) + " of " + Math.round(scrollY);
      }, 900);
    });</script>"""
    page.write_text(page.read_text().replace("</body>", script + "</body>"))
    top, scrolled = map(int, re.search(r"<title>at (-?\d+) of (\d+)", Seen(page).dom).groups())
    assert abs(top) < 5 and scrolled > 0
