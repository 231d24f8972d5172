"""The gallery of a large job: pages of items from small scripts, opened in a real browser; written
again and again while the job runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlencode

import numpy as np
import pytest
from browser import Seen
from ledgers import write_plan, write_rows, write_verdicts
from PIL import Image

from gen.gallery import write as gallery
from gen.gallery.items import CHUNK
from gen.gallery.media import LARGEST
from gen.gallery.write import PAGE, preview_of, write_gallery
from gen.media.audio import write_wav
from gen.media.video import write_mp4
from gen.store.ledger import parse_rows

SAMPLERS = ["speculative_jacobi window=16", "autoregressive", "maskgit steps=8", "halton"]
EVIL = '</script><script>alert("x")</script> {{title}} \u2028 `${alert(1)}` \\'


def row(i: int, of: int) -> dict:
    """Failed is every 37th, speech every 7th; samplers take turns in four blocks."""
    failed = i % 37 == 36
    return {
        "id": f"{i:016x}",
        "index": i,
        "modality": "speech" if i % 7 == 3 else "image",
        "prompt": EVIL if i == 1 else f"prompt {i % 50}",
        "seed": i // 50,
        "sampler": SAMPLERS[i * 4 // of],
        "model": "m",
        "file": None if failed else f"{i:06d} #.png",
        "nfe": 4,
        "mean_acceptance_length": 4.0,
        "seconds": 0.1,
        "guarantee": "sampling",
        "status": "failed" if failed else "ok",
        "error": f"RuntimeError: <{i}>" if failed else None,
        **({"overrides": {"sampler": {"window": 3}, "sampling": {"top_k": 5}}} if i == 0 else {}),
    }


def write_job(folder: Path, n: int, planned: int | None = None) -> list[dict]:
    folder.mkdir(exist_ok=True)
    for k in range(4):
        if not (folder / f"source-{k}.png").exists():
            Image.new("RGB", (16, 16), (60 * k, 90, 200 - 40 * k)).save(folder / f"source-{k}.png")
    rows = [row(i, planned or n) for i in range(n)]
    for r in rows:
        if r["file"] and not (folder / r["file"]).exists():
            os.link(folder / f"source-{r['index'] % 4}.png", folder / r["file"])
    write_plan(folder / "plan.json", planned or n)
    write_rows(folder / "manifest.jsonl", rows)
    (folder / "config.yaml").write_text(
        "# made\nname: a <large> job\nprompts:\n" + "- a prompt: name\n".replace(": ", " ") * 12000
    )
    return rows


# --- in a browser


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("large")
    rows = write_job(folder, 2000)
    write_gallery(folder)
    return folder, rows


class Images(HTMLParser):
    """The attributes of every image in a piece of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.found.append(dict(attributes))


def walk(page: Path, views: list[dict]) -> list[tuple[list[str], str]]:
    """Per view (words for the address): which items are on the screen, and what the page counts."""
    script = """<script>addEventListener("load", async () => {
      const seen = [];
      for (const view of VIEWS) {
        location.hash = view;
        await new Promise((resolve) => setTimeout(resolve, 20));
        const shown = all(".tile").filter((tile) => !tile.closest("[hidden]"));
        const count = document.querySelector(".filters output").textContent;
        seen.push([shown.map((tile) => tile.dataset.index ?? tile.textContent), count]);
      }
      document.body.innerHTML = "<pre>" + JSON.stringify(seen) + "</pre>";
    });</script>"""
    walked = page.with_name("walked.html")
    text = page.read_text().replace(
        "</body>", script.replace("VIEWS", json.dumps([urlencode(v) for v in views])) + "</body>"
    )
    walked.write_text(text)
    seen = Seen(walked)
    assert not seen.console
    return json.loads(unescape(re.search(r"<pre>(.*)</pre>", seen.dom, re.DOTALL)[1]))


def test_the_first_page_of_2000_items_shows_100_lazily_and_in_peace(large):
    folder, _rows = large
    seen = Seen(folder / "index.html")
    assert seen.faults() == [] and seen.items == list(range(100))
    images = Images("".join(seen.tiles)).found
    assert len(images) == 98 and all(
        p["loading"] == "lazy" for p in images
    )  # two of the first hundred failed
    assert all((folder / unquote(p["src"])).is_file() for p in images)
    assert (
        "window=3 sampling.top_k=5" in seen.tiles[0]
        and "2,000 items" in seen.dom
        and "a &lt;large&gt; job" in seen.dom
    )
    assert EVIL in unescape(
        seen.tiles[1]
    )  # letter by letter; a script in it would stand in the console or end the tile
    assert "failed" in seen.tiles[36] and "RuntimeError: &lt;36&gt;" in seen.tiles[36]


def test_a_view_opens_at_its_address(large):
    folder, rows = large
    seen = Seen(folder / "index.html", {"sampler": "autoregressive", "page": 2})
    assert seen.items == list(range(600, 700)) and not seen.console
    assert all(f"{r['id']}" not in seen.dom for r in rows[:1])  # ids are for machines


def test_filters_show_exactly_the_items_they_should(large):
    folder, rows = large
    want = {("page", "2"): rows[100:200]}
    cases = [
        {"sampler": "halton"},
        {"modality": "speech"},
        {"status": "failed"},
        {"q": "PROMPT 7", "status": "ok"},
        {"sampler": "autoregressive", "modality": "speech", "status": "failed"},
        {"sampler": "none"},
    ]
    for case in cases:
        fits = [r for r in rows if all(r[k] == v for k, v in case.items() if k != "q")]
        fits = [
            r
            for r in fits
            if "q" not in case or all(w in r["prompt"] for w in case["q"].lower().split())
        ]
        for page in range(-(-len(fits) // 100) or 1):
            want[(*((k, v) for k, v in case.items()), ("page", str(page + 1)))] = fits[
                100 * page : 100 * page + 100
            ]
    views = [dict([v]) if isinstance(v[0], str) else dict(v) for v in want]
    seen = walk(folder / "index.html", views)
    assert len(seen) > 12
    for view, (items, _), expected in zip(views, seen, want.values(), strict=True):
        assert [int(i) for i in items] == [r["index"] for r in expected], view
    counts = {json.dumps(v): said for v, (_, said) in zip(views, seen, strict=True)}
    assert counts['{"status": "failed", "page": "1"}'] == "54 of 2,000 items"
    assert counts['{"sampler": "none", "page": "1"}'] == "0 of 2,000 items"


def test_a_broken_file_of_items_is_found_by_the_check_and_named_on_the_page(large, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(
        large[0], broken, ignore=shutil.ignore_patterns(".profile"), copy_function=os.link
    )
    path = broken / "gallery/items-00002.js"
    text = path.read_text()
    path.unlink()  # it is one file with that of the whole job
    path.write_text(text[:-40])
    faults = " ".join(Seen(broken / "index.html").faults())
    assert "SyntaxError" in faults and "gallery/items-00002.js cannot be read" in faults
    write_gallery(broken)
    assert path.read_text() == text


def test_the_filters_of_a_small_page_hide_what_does_not_fit(tmp_path):
    rows = write_job(tmp_path, 100)
    write_gallery(tmp_path)
    views = [
        {"page": 1},
        {"sampler": "autoregressive"},
        {"modality": "speech"},
        {"status": "failed"},
        {"sampler": "halton", "status": "failed"},
        {"q": "prompt 7"},
    ]
    seen = walk(tmp_path / "index.html", views)
    fits = [
        len([r for r in rows if all(r[k] == v for k, v in view.items() if k != "page")])
        for view in views[:5]
    ]
    assert [len(tiles) for tiles, _ in seen] == [*fits, 10] and fits == [100, 25, 14, 2, 0]
    assert [said for _, said in seen][:2] == ["", "25 of 100 items"] and seen[4][
        1
    ] == "No item is like this."


# --- while the job runs


def written(folder: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (folder / "gallery").iterdir()}


def test_a_page_of_up_to_200_items_is_whole_and_a_larger_one_comes_in_files(tmp_path):
    write_job(tmp_path / "small", PAGE)
    write_job(
        tmp_path / "large", 10, PAGE + 1
    )  # what is planned counts, so that a page does not change its kind
    small, large = (write_gallery(tmp_path / n).read_text() for n in ("small", "large"))
    assert "Prompt by prompt" in small and not (tmp_path / "small/gallery").exists()
    assert "Prompt by prompt" not in large and written(tmp_path / "large").keys() == {
        "items-00000.js"
    }
    assert (
        "<noscript>" in large
        and 'href="manifest.jsonl"' in large
        and "10 of 201 items so far" in large
    )
    assert not re.search(r"https?:|src=\"//|@import|url\(|fetch\(", large)


def test_only_files_whose_items_changed_are_written_again(tmp_path):
    write_job(tmp_path, 1200, 2000)
    assert "1,200 of 2,000 items so far" in write_gallery(tmp_path).read_text()
    first = written(tmp_path)
    write_gallery(tmp_path)
    assert written(tmp_path) == first and len(first) == 3
    write_job(tmp_path, 1250, 2000)
    write_gallery(tmp_path)
    changed = {n for n, w in written(tmp_path).items() if first.get(n) != w}
    assert changed == {"items-00002.js"}
    last = json.loads(
        (tmp_path / "gallery/items-00002.js").read_text().split("], ", 1)[1].removesuffix(");\n")
    )
    assert [item[0] for item in last] == list(range(2 * CHUNK, 1250))
    write_verdicts(tmp_path, {f"{3:016x}": {"passed": False, "valid": True, "detail": "nothing"}})
    (tmp_path / row(700, 2000)["file"]).unlink()  # what is not in the rows counts as well
    before = written(tmp_path)
    write_gallery(tmp_path)
    assert {n for n, w in written(tmp_path).items() if before.get(n) != w} == {
        "items-00000.js",
        "items-00001.js",
    }
    assert "000700 #.png is missing" in (tmp_path / "gallery/items-00001.js").read_text()


def test_files_of_items_that_are_no_more_go_when_the_job_is_whole(tmp_path):
    write_job(tmp_path, 600)
    write_gallery(tmp_path)
    write_job(tmp_path, 400, 600)
    write_gallery(tmp_path)
    assert len(written(tmp_path)) == 2  # somebody else may know more than this call
    write_job(tmp_path, 400)
    write_gallery(tmp_path)
    assert written(tmp_path).keys() == {"items-00000.js"}


def test_of_several_writers_the_last_one_leaves_the_newest_page(tmp_path, monkeypatch):
    write_job(tmp_path, 300, 301)
    real = gallery._write

    def overtaken(folder: Path) -> None:
        """Writes what it read before somebody else finished the job."""
        real(folder)
        write_job(tmp_path, 301)

    monkeypatch.setattr(gallery, "_write", overtaken)
    assert "<dd>301</dd>" in write_gallery(tmp_path).read_text()
    monkeypatch.setattr(gallery, "TURNS", 1)  # control: without looking again the old page stays
    write_job(tmp_path, 300, 301)
    assert "<dd>300 of 301 items so far</dd>" in write_gallery(tmp_path).read_text()


def test_many_may_write_at_once(tmp_path):
    write_job(tmp_path, 900)
    problems: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(3):
                write_gallery(tmp_path)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [] and written(tmp_path).keys() == {"items-00000.js", "items-00001.js"}
    assert not list(tmp_path.rglob(".tmp-*"))


def test_failures_and_traces_of_a_large_job_are_the_first_of_many(tmp_path):
    rows = write_job(tmp_path, 2000)
    (tmp_path / "traces").mkdir()
    steps = [{"window": [0], "accepted": [], "committed": {"0": 7}}]
    for r in rows[:20]:
        (tmp_path / "traces" / f"{r['id']}.json").write_text(json.dumps(steps))
    text = write_gallery(tmp_path).read_text()
    assert (
        text.count('<td class="error">') == 50
        and "and 4 more" in text
        and '<a href="#status=failed">' in text
    )
    assert (
        text.count('<article class="trace') == 12 and "The first 12 of 20 that were traced" in text
    )


# --- media in tars


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A job whose media are in a tar: an image, a sound, a clip, a text and numbers with an image
    beside them."""
    (tmp_path / "shards").mkdir()
    work = tmp_path / "work"
    work.mkdir()
    Image.new("RGBA", (600, 300), (9, 9, 9, 99)).save(work / "0-a.png")
    write_wav(work / "1-b.wav", np.sin(np.arange(4000) / 9), 8000)
    write_mp4(work / "2-c.mp4", np.full((2, 320, 640, 3), 90, np.uint8), 8)
    (work / "3-d.txt").write_text("words")
    (work / "4-e.npz").write_bytes(b"numbers")
    Image.new("RGB", (9, 9)).save(work / "4-e.jpg")
    (work / "5-f.png").write_bytes(b"no image")
    Image.new("L", (7, 5)).save(work / "6-g.png")
    rows = []
    for i, path in enumerate(sorted(p for p in work.iterdir() if p.suffix != ".jpg")):
        also = {"also": ["4-e.jpg"]} if i == 4 else {}
        rows.append(
            {
                **row(i, 7),
                "file": "shards/00000.tar",
                "member": path.name,
                "shard_sha256": "x",
                **also,
            }
        )
        preview_of(path, tmp_path, rows[-1])
    shutil.rmtree(work)
    (tmp_path / "shards/00000.tar").write_bytes(b"")
    write_rows(tmp_path / "manifest.jsonl", rows)
    return tmp_path


def test_a_preview_is_a_small_image_of_what_can_be_seen(shards):
    sizes = {p.name: Image.open(p).size for p in (shards / "preview").glob("*.png")}
    assert sizes == {
        "0-a.png": (LARGEST, LARGEST // 2),
        "1-b.png": (320, 120),
        "2-c.png": (LARGEST, LARGEST // 2),
        "4-e.png": (9, 9),
        "6-g.png": (7, 5),
    }
    assert Image.open(shards / "preview/0-a.png").mode == "RGBA"


def test_media_in_tars_are_shown_by_their_previews_and_linked_to_their_tar(shards):
    text = write_gallery(shards).read_text()
    assert all(f'"preview/{n}.png"' in text for n in ("0-a", "1-b", "2-c", "4-e"))
    assert text.count('<a href="shards/00000.tar">00000.tar</a>') == 7
    assert '<a class="box" href="shards/00000.tar">3-d.txt</a>' in text and ">5-f.png</a>" in text
    # a page cannot reach into a tar; the first ones of a job are copied
    assert re.findall(r'<(audio|video)[^>]* src="([^"]*)"', text) == [
        ("audio", "preview/1-b.wav"),
        ("video", "preview/2-c.mp4"),
    ]
    (shards / "shards/00000.tar").unlink()
    text = write_gallery(shards).read_text()
    assert text.count("shards/00000.tar is missing") == 7 and "preview/0-a.png" not in text


def test_a_shard_on_its_way_shows_its_previews_without_a_tar(shards):
    (shards / "shards/00000.tar").unlink()
    manifest = shards / "manifest.jsonl"
    rows = parse_rows(manifest)
    write_rows(manifest, [{k: v for k, v in r.items() if k != "shard_sha256"} for r in rows])
    text = write_gallery(shards).read_text()
    assert 'src="preview/0-a.png"' in text and "is missing" not in text and "00000.tar" not in text
    assert '<div class="box">3-d.txt</div>' in text


@pytest.mark.parametrize(
    "names",
    [
        {"file": "../secret.png"},
        {"file": "shards/../../x.tar", "member": "0-a.png"},
        {"file": "/etc/passwd"},
    ],
)
def test_a_manifest_shows_nothing_from_elsewhere(tmp_path, names):
    (tmp_path / "secret.png").write_bytes(b"")
    folder = tmp_path / "job"
    folder.mkdir()
    write_rows(folder / "manifest.jsonl", [{**row(0, 1), **names, "shard_sha256": "x"}])
    text = write_gallery(folder).read_text()
    assert "is missing" in text and not re.search(r'(src|href)="[^"]*(secret|x\.tar|passwd)', text)
