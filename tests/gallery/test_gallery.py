"""The gallery: one static page that shows a job folder completely, honestly and without executing
anybody's prompt."""

from __future__ import annotations

import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from ledgers import add_rows, write_plan, write_rows, write_verdicts
from PIL import Image

from gen.core.errors import GenError
from gen.core.processes import worker_name
from gen.gallery.trace import colour, layout, replay
from gen.gallery.write import EXCERPT, write_gallery
from gen.media.audio import write_wav
from gen.media.video import write_mp4

EVIL = '<script>alert("x")</script> & {{title}} <img src=x onerror=alert(1)>'


class Page(HTMLParser):
    """Elements with their attributes, and the text inside each, in order."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._raw: str | None = None
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._raw = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._raw = None

    def handle_data(self, data):
        if self._raw == "script":
            self.scripts.append(data)
        elif self._raw is None and data.strip():
            self.text.append(data.strip())

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [
            a
            for t, a in self.elements
            if t == tag and all(a.get(k) == v for k, v in wanted.items())
        ]


def ident(number: int) -> str:
    return f"{number:016x}"


def write_trace(folder: Path, number: int, steps: object) -> None:
    (folder / "traces").mkdir(exist_ok=True)
    (folder / "traces" / f"{ident(number)}.json").write_text(json.dumps(steps))


def row(
    number: int, file: str | None, prompt: str, sampler: str = "autoregressive", **changes
) -> dict:
    return {
        "id": ident(number),
        "index": number,
        "modality": "image",
        "prompt": prompt,
        "seed": number,
        "sampler": sampler,
        "model": "a-model",
        "file": file,
        "sha256": "",
        "nfe": 4,
        "tokens": 16,
        "tokens_computed": 40,
        "mean_acceptance_length": 4.0,
        "draft_acceptance_rate": 0.5,
        "seconds": 0.25,
        "status": "ok",
        "error": None,
        "guarantee": "sampling",
        "batch": 2,
        **changes,
    }


STEPS = [
    {"window": [0, 1, 2, 3], "accepted": [], "committed": {"0": 7, "1": 7}, "removed": []},
    {
        "window": [2, 3, 4, 5, 6, 7],
        "accepted": [2],
        "committed": {"2": 1, "3": 2, "4": 3, "5": 4},
        "removed": [],
    },
    {"window": [1, 6, 7, 8], "accepted": [], "committed": {"6": 5, "1": 9}, "removed": [1, 5]},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        row(0, "000000-a b#1.png", "a red circle"),
        row(1, "000001.png", EVIL, "jacobi"),
        row(
            2,
            None,
            "a red circle",
            "jacobi",
            status="failed",
            error="RuntimeError: <NaN> at 3",
            nfe=None,
        ),
        row(3, "gone.png", "a blue ring"),
        row(4, "000004.wav", "seven", "jacobi", nfe=8),
        row(5, "000005.mp4", "moving", "jacobi", nfe=10),
        row(6, "000006.txt", "sort"),
    ]
    for name in ("000000-a b#1.png", "000001.png"):
        Image.new("RGB", (64, 48), (200, 30, 30)).save(tmp_path / name)
    for name in ("000004.wav", "000005.mp4"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "000006.txt").write_text("1 < 2 " + "x" * 1000)
    write_rows(tmp_path / "manifest.jsonl", rows)
    (tmp_path / "config.yaml").write_text("name: a <b> job\nmodality: image\n")
    write_trace(tmp_path, 0, STEPS)
    verdicts = {ident(0): (True, "saw a red circle"), ident(1): (False, "saw nothing")}
    told = {k: {"passed": f, "valid": True, "detail": d} for k, (f, d) in verdicts.items()}
    write_verdicts(tmp_path, told)
    return tmp_path


def page(folder: Path) -> Page:
    path = write_gallery(folder)
    assert path == folder / "index.html"
    return Page(path.read_text(encoding="utf-8"))


def section(folder: Path, name: str) -> str:
    text = write_gallery(folder).read_text(encoding="utf-8")
    found = re.search(rf'<section id="{name}"[^>]*>.*?</section>', text, re.DOTALL)
    return found[0] if found else ""


def test_every_ok_item_is_referenced_by_a_relative_quoted_path(folder):
    html = page(folder)
    sources = {a.get("src") for tag in ("img", "audio", "video") for a in html.all(tag)}
    sources |= {a["href"] for a in html.all("a")}
    assert {
        "000000-a%20b%231.png",
        "000001.png",
        "000004.wav",
        "000005.mp4",
        "000006.txt",
    } <= sources
    assert not any(s and re.match(r"/|\w+:|\.\.", s) for s in sources)
    assert all(a["loading"] == "lazy" for tag in ("audio", "video") for a in html.all(tag))
    assert all(a["loading"] == "lazy" for a in html.all("img") if a.get("src"))


def test_images_keep_their_size_and_small_ones_their_pixels(folder):
    (image,) = page(folder).all("img", src="000001.png")
    assert (image["width"], image["height"], image["class"]) == ("64", "48", "px")
    Image.new("RGB", (512, 512)).save(folder / "000001.png")
    (image,) = page(folder).all("img", src="000001.png")
    assert image["width"] == "512" and "class" not in image


def test_prompts_names_and_errors_are_inert(folder):
    html = page(folder)
    assert EVIL in html.text  # shown letter by letter, its braces included
    assert "image/a <b> job" in html.text and "RuntimeError: <NaN> at 3" in html.text
    assert not html.all("img", src="x") and not any("alert(" in s for s in html.scripts)
    assert not any(name.startswith("on") for _, attributes in html.elements for name in attributes)


def test_a_trace_cannot_close_its_script(folder):
    steps = [{**STEPS[0], "committed": {"0": 7}, "note": "</script><b>"}]
    write_trace(folder, 0, steps)
    (folder / "config.yaml").write_text("name: </script><script>alert(2)</script>\n")
    assert not any("alert(" in s for s in page(folder).scripts)


def test_the_page_needs_no_network(folder):
    text = write_gallery(folder).read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=\"//|@import|url\(", text)
    assert not Page(text).all("link", rel="stylesheet")


def test_the_trace_shows_for_each_position_the_step_that_committed_it(folder):
    cells = [a for a in page(folder).all("rect") if "data-p" in a]
    drawn = {int(a["data-p"]): int(a["data-step"]) for a in cells if "data-step" in a}
    assert drawn == {
        0: 1,
        2: 2,
        3: 2,
        4: 2,
        6: 3,
        1: 3,
    }  # 1 was taken back and committed again, 5 only taken back
    assert len(cells) == 9  # a square that holds positions 0..8
    assert all(a["fill"] == colour(drawn[int(a["data-p"])], 3) for a in cells if "data-step" in a)
    assert [int(a["data-n"]) for a in page(folder).all("rect") if "data-n" in a] == [2, 4, 2]


def test_the_player_gets_every_event_of_the_trace(folder):
    (data,) = [json.loads(s) for s in page(folder).scripts if s.startswith("[")]
    assert [dict(map(tuple, e["c"])) for e in data] == [
        {int(k): v for k, v in s["committed"].items()} for s in STEPS
    ]
    assert [[p for a, b in e["w"] for p in range(a, b + 1)] for e in data] == [
        s["window"] for s in STEPS
    ]
    assert [e["r"] for e in data] == [s["removed"] for s in STEPS]


def test_the_grid_comes_from_the_row_and_must_hold_the_trace(folder):
    def again(grid):
        write_rows(folder / "manifest.jsonl", [row(0, "000001.png", "a red circle", grid=grid)])

    again([2, 5])
    cells = [a for a in page(folder).all("rect") if "data-p" in a]
    assert len(cells) == 10 and max(float(a["x"]) for a in cells) > 4
    again([2, 2])
    with pytest.raises(GenError, match=r"grid is \[2, 2\].*9 positions"):
        write_gallery(folder)


def positions(grid, length, kind="image"):
    plan = layout(grid, length, "", kind)
    return [plan.cell(p) for p in range(plan.count)], plan.size


def test_an_image_is_drawn_as_its_grid_and_a_square_where_nobody_says_it():
    assert positions([2, 3], 6) == ([(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)], (3, 2))
    assert positions(None, 256)[1] == (16, 16) and len(positions(None, 250)[0]) == 256


def test_frames_stand_beside_each_other_and_begin_a_new_line_where_they_are_many():
    cells, size = positions([3, 2, 2], 12, "video")
    assert size == (8, 2) and cells[4:6] == [(3, 0), (4, 0)] and cells[-1] == (7, 1)
    cells, size = positions([40, 8, 8], 2560, "video")
    assert len(set(cells)) == 2560 and size == (14 * 9 - 1, 3 * 9 - 1)


def test_a_step_of_sound_is_a_column_with_a_row_per_stream():
    cells, size = positions([5, 2], 10, "audio")
    assert size == (5, 2) and cells[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    cells, (width, height) = positions([250, 4], 1000, "audio")
    assert len(set(cells)) == 1000 and width <= 96 and height == 3 * 5 - 1
    assert positions([2, 5], 10, "audio")[0][1] == (
        1,
        0,
    )  # stream after stream is stored as it is drawn


@pytest.mark.parametrize(
    ("grid", "kind"), [(None, "audio"), (None, "video"), ([150], "audio"), (None, "")]
)
def test_other_media_without_a_grid_are_one_line_that_wraps(grid, kind):
    cells, size = positions(grid, 150, kind)
    assert cells == [(p % 64, p // 64) for p in range(150)] and size == (64, 3)


def test_replaying_honours_removals():
    assert replay(STEPS[:2]) == {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2}
    assert replay(STEPS)[1] == 3 and 5 not in replay(STEPS)


def test_colours_of_steps_are_distinct_and_ever_lighter():
    ramp = [colour(s, 12) for s in range(1, 13)]
    light = [
        0.2126 * int(c[1:3], 16) + 0.7152 * int(c[3:5], 16) + 0.0722 * int(c[5:7], 16) for c in ramp
    ]
    assert len(set(ramp)) == 12 and light == sorted(light)
    assert colour(1, 1) == colour(1, 12)


def test_failed_and_missing_items_are_shown_as_such(folder):
    html = page(folder)
    failed = section(folder, "failed")
    assert (
        '<th scope="row">2</th>' in failed and "&lt;NaN&gt;" in failed and "blue ring" not in failed
    )
    assert "gone.png is missing" in html.text and "failed" in html.text
    assert not html.all("img", src="gone.png")


def test_a_folder_without_failures_or_traces_has_no_such_sections(folder):
    manifest = folder / "manifest.jsonl"
    manifest.write_text(manifest.read_text().splitlines()[0] + "\n")
    shutil.rmtree(folder / "traces")
    assert (
        section(folder, "failed") == ""
        and section(folder, "traces") == ""
        and section(folder, "comparison")
    )


def test_the_table_of_methods_holds_medians_and_shares(folder):
    lines = re.findall(
        r'<tr data-method="[^"]*"><th scope="row">(.*?)</tr>', section(folder, "methods"), re.DOTALL
    )
    texts = {line.split()[0]: Page(line).text for line in lines}
    assert texts["autoregressive"] == [
        "autoregressive",
        "sampling",
        "3",
        "4",
        "4.00",
        "0.25",
        "100%",
    ]
    assert texts["jacobi"] == [
        "jacobi",
        "sampling",
        "4",
        "8",
        "4.00",
        "0.25",
        "0%",
    ]  # the failed item has no calls


def test_marks_follow_the_verdicts_and_are_absent_without_them(folder):
    marks = [a["title"] for a in page(folder).all("b") if "saw" in (a.get("title") or "")]
    assert marks == [
        "passes: saw a red circle",
        "does not pass: saw nothing",
    ]
    (folder / "check.json").unlink()
    text = write_gallery(folder).read_text(encoding="utf-8")
    assert (
        "✓" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
        and "passed" not in Page(text).text
    )


def test_methods_of_several_models_are_kept_apart(folder):
    another = row(7, None, "a red circle", model="another", status="failed", error="no")
    add_rows(folder / "manifest.jsonl", [another])
    text = section(folder, "methods")
    assert "autoregressive · a-model" in text and "autoregressive · another" in text


def test_the_last_line_of_an_item_counts(folder):
    add_rows(folder / "manifest.jsonl", [row(2, "000001.png", "a red circle", "jacobi")])
    assert section(folder, "failed") == ""


def test_a_long_text_is_shown_in_part(folder):
    (text,) = [t for t in page(folder).text if t.startswith("1 < 2")]
    assert len(text) <= EXCERPT + 2 and text.endswith("…")


def test_writing_again_changes_nothing_and_leaves_nothing_behind(folder):
    first = write_gallery(folder).read_bytes()
    names = sorted(p.name for p in folder.iterdir())
    assert write_gallery(folder).read_bytes() == first
    assert sorted(p.name for p in folder.iterdir()) == names


def test_a_moved_folder_makes_the_same_page(folder, tmp_path):
    moved = tmp_path / "elsewhere" / "job"
    shutil.copytree(folder, moved, ignore=shutil.ignore_patterns("elsewhere"))
    assert write_gallery(moved).read_bytes() == write_gallery(folder).read_bytes()


def test_a_folder_without_manifest_and_a_broken_trace_are_refused(folder, tmp_path):
    with pytest.raises(GenError, match="has no manifest.jsonl"):
        write_gallery(tmp_path / "nowhere")
    for wrong, said in (
        ([{"committed": 3}], "is not a trace"),
        ({}, "is not a trace"),
        ([3], "is not a trace"),
    ):
        write_trace(folder, 0, wrong)
        with pytest.raises(GenError, match=f"{ident(0)}.json {said}.*expected a list of steps"):
            write_gallery(folder)
    (folder / "traces" / f"{ident(0)}.json").write_text('[{"win')
    with pytest.raises(GenError, match=f"{ident(0)}.json is damaged: it is not JSON"):
        write_gallery(folder)
    assert not (folder / "index.html").exists()
    write_verdicts(folder, {"000000": True})
    with pytest.raises(GenError, match="item 000000 is True in .*check.json"):
        write_gallery(folder)


def test_an_empty_manifest_makes_an_empty_page(folder):
    (folder / "manifest.jsonl").write_text("")
    assert "No items yet." in page(folder).text


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A job of an image, two sounds and two clips, one of each kind broken."""
    write_wav(tmp_path / "1 #.wav", np.sin(np.arange(8000) / 9), 8000)
    write_mp4(tmp_path / "3.mp4", np.full((4, 16, 12, 3), 90, np.uint8), 8, scale=4)
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    (tmp_path / "2.wav").write_bytes((tmp_path / "1 #.wav").read_bytes()[:900])
    (tmp_path / "4.mp4").write_bytes(b"no video")
    label = "sjd modality={} sampling.top_k={}"
    rows = [
        row(0, "0.png", "one", label.format("image", 100)),
        row(
            1,
            "1 #.wav",
            "two",
            label.format("speech", 7) + " window=4",
            modality="speech",
            model="b",
            grid=[3, 3],
        ),
        row(
            2, "2.wav", "two", label.format("speech", 7) + " window=8", modality="speech", model="b"
        ),
        row(
            3, "3.mp4", EVIL, label.format("video", 9), modality="video", model="c", grid=[2, 3, 3]
        ),
        row(4, "4.mp4", "four", label.format("video", 9), modality="video", model="c"),
    ]
    write_rows(tmp_path / "manifest.jsonl", rows)
    for number in (0, 1, 3):
        write_trace(tmp_path, number, STEPS)
    return tmp_path


def test_every_modality_has_a_section_with_tables_of_its_own(mixed):
    html = page(mixed)
    assert [a["id"] for a in html.all("div", **{"class": "modality"})] == [
        "modality-image",
        "modality-speech",
        "modality-video",
    ]
    methods = [Page(section(mixed, f"methods-{m}")).text for m in ("image", "speech", "video")]
    assert [m[m.index("seconds per item") + 1] for m in methods] == [
        "sjd",
        "sjd window=4",
        "sjd",
    ]  # the rest goes without saying
    assert "two" in section(mixed, "comparison-speech") and "four" not in section(
        mixed, "comparison-speech"
    )
    assert section(mixed, "traces-image") and section(mixed, "traces-video")
    ids = [a["id"] for _, a in html.elements if "id" in a]
    assert len(ids) == len(set(ids)) and {
        a["href"][1:] for a in html.all("a") if a["href"].startswith("#")
    } <= set(ids)


def test_every_address_on_a_page_of_several_modalities_is_there(mixed):
    html = page(mixed)
    named = {
        a[k]
        for _, a in html.elements
        for k in ("src", "href", "poster")
        if a.get(k) and not a[k].startswith(("#", "data:"))
    }
    assert len(named) >= 8 and all((mixed / unquote(n)).is_file() for n in named)
    assert not any(re.match(r"/|\w+:|\.\.", n) for n in named)


def test_sounds_and_clips_have_players_and_an_image_where_they_can_be_read(mixed):
    html = page(mixed)
    assert {a["src"] for a in html.all("audio", preload="metadata")} == {"1%20%23.wav", "2.wav"}
    clips = {a["src"]: a for a in html.all("video", preload="metadata")}
    assert all(
        a.keys() >= {"controls", "loop", "muted", "playsinline"} and "autoplay" not in a
        for a in clips.values()
    )
    assert (clips["3.mp4"]["width"], clips["3.mp4"]["height"]) == (
        "48",
        "64",
    ) and "poster" not in clips["4.mp4"]
    assert sorted(p.name for p in (mixed / "preview").iterdir()) == ["1 #.png", "3.png"]
    assert Image.open(mixed / "preview/1 #.png").size == (320, 120)


def test_a_preview_is_made_again_only_when_its_medium_is_newer(mixed):
    image, sound = mixed / "preview/1 #.png", mixed / "1 #.wav"
    write_gallery(mixed)
    first, made = image.read_bytes(), image.stat().st_mtime_ns
    write_gallery(mixed)
    assert image.stat().st_mtime_ns == made
    write_wav(sound, np.sin(np.arange(8000) / 3), 8000)
    os.utime(sound, ns=(made + 1, made + 1))
    write_gallery(mixed)
    assert image.read_bytes() != first
    sound.write_bytes(b"")
    os.utime(sound, ns=(2 * made, 2 * made))
    assert "preview/1" not in write_gallery(mixed).read_text() and not image.exists()


def test_what_a_killed_process_left_goes_when_nobody_can_be_at_work(mixed):
    (mixed / "preview").mkdir()
    left = mixed / "preview" / f".tmp-{worker_name().rpartition('-')[0]}-1-2-left.png"
    left.write_bytes(b"")
    write_plan(mixed / "plan.json", 6)  # five of six are there
    write_gallery(mixed)
    assert left.exists()
    (mixed / "plan.json").unlink()
    write_gallery(mixed)
    assert not left.exists()


def test_every_trace_is_drawn_on_the_grid_of_its_item(mixed):
    def count(name):
        return len([a for a in Page(section(mixed, name)).all("rect") if "data-p" in a])

    assert (count("traces-image"), count("traces-speech"), count("traces-video")) == (9, 9, 18)
    assert 'class="trace wide"' in section(mixed, "traces-video") and 'class="trace"' in section(
        mixed, "traces-image"
    )


def test_a_page_of_several_modalities_is_the_same_when_written_again_or_elsewhere(mixed, tmp_path):
    (mixed / "config.yaml").write_text("name: a job\n")
    first = write_gallery(mixed).read_bytes()
    shutil.copytree(mixed, tmp_path / "moved", ignore=shutil.ignore_patterns("moved", "preview"))
    assert (
        write_gallery(mixed).read_bytes() == first == write_gallery(tmp_path / "moved").read_bytes()
    )
