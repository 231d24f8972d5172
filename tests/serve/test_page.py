"""The page in a headless browser: typing, watching, cancelling, comparing, painting, keys alone.

The tests need a Chromium; those of accessibility need npm too, which fetches axe-core.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from chrome import CONTROL, SHIFT, Tab
from live_pages import finished, go, ready, resized, served, states, text, too_wide
from PIL import Image

import gen
from gen.engine.engine import Engine
from gen.serve.settings import Settings

CIRCLE = "a large red circle at the top left"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine():
    engine = Engine(device="cpu")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def address(engine):
    with served(engine) as address:
        yield address


@pytest.fixture
def tab(address, tmp_path):
    tab = Tab(tmp_path / "profile", address)
    ready(tab)
    yield tab
    assert tab.logs == []
    tab.close()


def image(tab: Tab, lane: int = 0) -> np.ndarray:
    """Pixels of the image that a lane shows."""
    source = tab.value(f"document.querySelectorAll('.lane')[{lane}].querySelector('img').src")
    content = base64.b64decode(source.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def offline(prompt: str, **how) -> np.ndarray:
    return np.asarray(gen.load("image", device="cpu")(prompt, **how).images[0])


def test_a_typed_prompt_fills_the_canvas_pass_by_pass(tab, address):
    tab.value("document.getElementById('prompt').select()")
    tab.write(CIRCLE)
    tab.click("#generate")
    seen = set()
    label = "document.querySelector('.tokens')?.getAttribute('aria-label') ?? ''"

    def over() -> bool:
        seen.add(tab.value(label))
        return states(tab) == ["done"]

    tab.until(over, 90)
    told = [s for s in seen if "forward passes" in s]
    assert len(told) > 3 and any("no token yet" in s for s in told)
    assert any("draft accepted" in s for s in told)
    assert np.array_equal(image(tab), offline(CIRCLE, seed=0))
    passes = gen.load("image", device="cpu")(CIRCLE, seed=0).stats[0].nfe
    assert text(tab, ".figures dd") == str(passes)
    assert "256" in text(tab, ".figures") and "same tokens" in text(tab, ".lane header")


def test_a_replay_shows_the_canvas_of_every_pass(tab, address):
    go(tab, address, modality="image", prompt=CIRCLE, seed=3, sampler="maskgit")
    tab.click("#generate")
    finished(tab)
    slide = "(n) => { const s = document.querySelector('[aria-label=\"forward pass\"]');"
    slide += " s.value = n; s.dispatchEvent(new Event('input')); }"
    known = []
    for n in range(13):
        tab.value(f"({slide})({n})")
        tab.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        label = tab.value("document.querySelector('.tokens').getAttribute('aria-label')")
        known.append(int(label.split(" drawn")[0].split()[-1]) if " drawn" in label else 0)
    assert known[0] == 0 and known[-1] == 256 and known == sorted(set(known))


HOLD = """
const send = window.fetch;
window.held = [];
window.fetch = async (...request) => {
  if (String(request[0]).includes("live/sampler")) await new Promise((go) => window.held.push(go));
  return send(...request);
};
"""


def test_the_page_is_ready_once_the_parameters_are_known_and_nothing_moves(tab, address):
    tab.send("Page.addScriptToEvaluateOnNewDocument", source=HOLD)
    tab.send("Page.navigate", url="about:blank")
    tab.send("Page.navigate", url=f"{address}#modality=video&sampler=autoregressive")
    tab.until(lambda: tab.value("window.held?.length > 0"))
    height = "document.getElementById('call').getBoundingClientRect().height"
    frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    tab.value(frames)
    assert tab.value("document.documentElement.dataset.ready") is None
    before = tab.value(height)

    def is_ready_once_answered() -> bool:
        tab.value("held.splice(0).forEach((go) => go())")
        return tab.value("document.documentElement.dataset.ready") == "yes"

    tab.until(is_ready_once_answered)
    tab.value(frames)
    assert tab.value(height) == before


@pytest.mark.parametrize("way", ["key", "button"])
def test_a_call_is_cancelled(tab, address, engine, way):
    go(tab, address, modality="video", prompt="a red square moves right", samples=8,
       sampler="autoregressive")  # fmt: skip
    before = sum(n for (_, state), n in engine.stats.requests.items() if state == "cancelled")
    tab.click("#generate")
    tab.until(lambda: "decoding" in text(tab, ".lane .state"))
    if way == "key":
        tab.press("Escape")
    else:
        tab.click("#cancel")
    tab.until(lambda: states(tab) == ["cancelled"], 20)
    after = sum(n for (_, state), n in engine.stats.requests.items() if state == "cancelled")
    assert after == before + 1
    tab.until(lambda: engine.stats.running.total() == 0)
    assert not tab.value("document.getElementById('generate').disabled")


def test_samplers_are_compared_on_one_seed(tab, address):
    go(tab, address, modality="image", prompt=CIRCLE, seed=3,
       sampler=["autoregressive", "speculative_jacobi", "maskgit"])  # fmt: skip
    tab.click("#generate")
    finished(tab, 3)
    rows = tab.value(
        "[...document.querySelectorAll('#comparison tbody tr')]"
        ".map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    assert [row[0] for row in rows] == ["autoregressive", "speculative_jacobi", "maskgit"]
    assert [row[1] for row in rows] == ["same tokens", "same tokens", "approximate"]
    assert [row[-1] for row in rows] == ["–", "yes", "no"]
    assert float(rows[0][2]) == 256 > float(rows[1][2]) > float(rows[2][2]) == 12
    assert np.array_equal(image(tab, 0), image(tab, 1))
    assert not np.array_equal(image(tab, 0), image(tab, 2))


def generate_anew(tab: Tab) -> None:
    """Start a call by keys and wait for its result, which replaces the one that is shown."""
    tab.value("document.querySelector('.lane').id = 'before'")
    tab.press("Enter", CONTROL)
    tab.until(lambda: tab.value("document.getElementById('before') === null"))
    finished(tab)


def edit_started(tab: Tab, address: str) -> np.ndarray:
    go(tab, address, modality="image", prompt=CIRCLE, seed=3, sampler="maskgit")
    tab.click("#generate")
    finished(tab)
    source = image(tab)
    tab.value("[...document.querySelectorAll('.links button')][0].focus()")
    tab.press("Enter")
    tab.until(lambda: tab.value("document.activeElement?.getAttribute('role')") == "application")
    return source


def changed_by(tab: Tab, source: np.ndarray) -> np.ndarray:
    """Cells [16, 16] of the result that differ from the source."""
    tab.value("document.getElementById('seed').value = 11")
    generate_anew(tab)
    return (image(tab) != source).any(-1).reshape(16, 4, 16, 4).any((1, 3))


def test_a_painted_mask_is_made_anew_and_nothing_else(tab, address):
    source = edit_started(tab, address)
    tab.drag(".painter canvas", (0.6, 0.8), (0.9, 0.8))
    assert "0 of" not in text(tab, ".painter output")
    changed = changed_by(tab, source)
    assert changed[12:14, 9:15].any() and not changed[:11].any() and not changed[:, :8].any()


def test_a_mask_is_painted_with_the_keyboard(tab, address):
    source = edit_started(tab, address)
    for _ in range(4):
        tab.press("ArrowDown")
    for _ in range(3):
        tab.press("ArrowRight", SHIFT)
    assert text(tab, ".painter output").startswith("8 of 256 cells")
    tab.press("Delete")
    assert text(tab, ".painter output").startswith("4 of 256 cells")
    changed = changed_by(tab, source)
    assert changed.any() and not changed[:12].any() and not changed[:, :9].any()


def test_an_empty_mask_is_refused_in_words(tab, address):
    edit_started(tab, address)
    tab.press("Enter", CONTROL)
    tab.until(lambda: "mask is empty" in text(tab, "#alert"))


def test_a_clip_is_continued_from_the_page(tab, address):
    go(tab, address, modality="video", prompt="a red square moves right", seed=1)
    tab.click("#generate")
    finished(tab)
    tab.value("[...document.querySelectorAll('.links button')][0].click()")
    tab.until(lambda: "Continues video.mkv" in text(tab, "#given"))
    generate_anew(tab)
    tab.click("details.copy summary")
    tab.until(lambda: "prefix='prefix.mkv'" in text(tab, "pre"))
    assert text(tab, "details.copy .links").endswith("prefix.mkv")


def test_every_control_is_reached_and_a_call_is_made_by_keys_alone(tab, address):
    tab.value("document.body.focus()")
    reached = []
    for _ in range(60):
        tab.press("Tab")
        name = tab.value(
            "(document.activeElement.id || document.activeElement.textContent || '').slice(0, 40)"
        )
        reached.append(name)
        if name == "cancel" or name in reached[:-1]:
            break
    for name in ("theme", "prompt", "compare", "seed", "dice", "samples", "generate"):
        assert name in reached
    tab.value("document.getElementById('prompt').select()")
    tab.write("a small blue ring in the centre")
    tab.press("Enter", CONTROL)
    finished(tab)
    assert np.array_equal(image(tab), offline("a small blue ring in the centre", seed=0))
    tab.value("document.querySelector('details.copy summary').focus()")
    tab.press("Enter")
    tab.until(lambda: "gen.load('image')" in text(tab, "pre"))
    tab.press("Tab")
    tab.press("ArrowRight")
    assert text(tab, "pre").startswith("curl ")
    tab.press("ArrowRight")
    assert text(tab, "pre").startswith("modality: image")


@pytest.mark.parametrize("modality", ["image", "video", "speech", "motion", "action", "text"])
def test_the_page_fits_the_width_of_a_phone(tab, address, modality):
    resized(tab, 390, 844)
    prompt = example(tab, modality)
    go(tab, address, modality=modality, sampler=["speculative_jacobi", "maskgit"], prompt=prompt)
    tab.click("#generate")
    tab.until(lambda: len(states(tab)) == 2 and all(states(tab)), 90)
    tab.value("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    time.sleep(0.5)
    assert too_wide(tab) == [] and tab.value("document.documentElement.scrollWidth") == 390
    tab.value("document.querySelector('.lane').style.width = '400px'")
    # the control: what is too wide is found
    assert too_wide(tab) and tab.value("document.documentElement.scrollWidth") > 390


def example(tab: Tab, modality: str) -> str:
    found = tab.value("fetch('live/modalities').then((answer) => answer.json())")
    return next(m["examples"][0] for m in found if m["name"] == modality)


def test_a_link_reproduces_the_call(tab, address):
    sampler = json.dumps({"name": "sjd", "window": 8})
    call = {"modality": "image", "model": "image-causal", "prompt": CIRCLE, "seed": 7, "samples": 1}
    go(tab, address, **call, sampler=sampler, **{"sampling.temperature": 0.8})
    tab.click("#generate")
    finished(tab)
    how = {"sampler": {"name": "sjd", "window": 8}, "temperature": 0.8}
    first, link = image(tab), tab.value("location.hash")
    assert np.array_equal(first, offline(CIRCLE, seed=7, **how))
    tab.send("Page.navigate", url="about:blank")
    tab.send("Page.navigate", url=address + link)
    ready(tab)
    tab.click("#generate")
    finished(tab)
    assert np.array_equal(image(tab), first)


def test_a_script_in_a_prompt_is_shown_as_text(tab, address):
    script = '<img src=x onerror="window.harm=1"><script>window.harm=1</script>'
    go(tab, address, modality="text", prompt=script, sampler=f'{{"name": "{"<b>x</b>"}"}}')
    assert tab.value("document.getElementById('prompt').value") == script
    tab.click("#generate")
    tab.until(lambda: states(tab) == ["failed"])
    assert "<img src=x" in text(tab, ".lane .state")
    tab.click("details.copy summary")
    tab.until(lambda: "onerror" in text(tab, "pre"))
    assert tab.value("window.harm") is None
    # were it markup all the same, the policy of the page would not let it run
    tab.value(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.harm = 1';"
        " document.querySelector('header').append(s); })()"
    )
    assert tab.value("window.harm") is None
    assert tab.value("document.querySelectorAll('main img[src=x], main script').length") == 0


def test_a_server_with_a_key_asks_for_it_once(engine, tmp_path):
    with served(engine, Settings(api_keys=("a-right-key",))) as address:
        tab = Tab(tmp_path / "profile", address)
        try:
            tab.until(lambda: tab.value("document.getElementById('key')?.open"), 90)
            for key in ("a-wrong-key", "a-right-key"):
                assert tab.value("document.documentElement.dataset.ready") is None
                tab.value("document.getElementById('key-text').focus()")
                tab.write(key)
                tab.press("Enter")
                time.sleep(0.5)
            ready(tab)
            go(tab, address, modality="text", prompt="sort 3 1 2 =")
            tab.click("#generate")
            finished(tab)
            tab.click("details.copy summary")
            tab.until(lambda: "gen.load" in text(tab, "pre"))
            tab.send("Page.navigate", url=f"{address}world")
            tab.until(lambda: tab.value("typeof session === 'string'"), 60)
        finally:
            tab.close()


def test_the_world_is_played_from_the_page(tab):
    tab.click("a[href=world]")
    tab.until(lambda: tab.value("typeof session === 'string'"), 60)
    tab.press("ArrowRight")
    tab.until(lambda: text(tab, "#count") == "1")


def test_the_theme_is_the_readers_or_the_systems(tab, address):
    colour = "getComputedStyle(document.body).backgroundColor"
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    tab.send("Emulation.setEmulatedMedia", features=[scheme])
    dark = tab.value(colour)
    tab.click("#theme")
    light = tab.value(colour)
    assert text(tab, "#theme") == "Theme: light" and light != dark
    tab.send("Page.reload")
    time.sleep(0.2)
    ready(tab)
    assert tab.value(colour) == light


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """Source of axe-core, which npm fetches into a temporary folder."""
    if shutil.which("npm") is None:
        pytest.skip("no npm here, so axe-core did not look at the page")
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), "axe-core@4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"npm cannot fetch axe-core: {done.stderr[-200:]}")
    return Path(folder, "node_modules/axe-core/axe.min.js").read_text()


def faults(tab: Tab, axe: str) -> list[str]:
    """Serious and critical faults of the page as it is."""
    if tab.value("typeof axe") == "undefined":
        tab.send("Runtime.evaluate", expression=axe)
    found = tab.value("axe.run(document).then((r) => r.violations)")
    return [
        f"{v['impact']} {v['id']}: {node['html'][:120]} {node['failureSummary'][:300]}"
        for v in found
        if v["impact"] in ("serious", "critical")
        for node in v["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("modality", ["image", "video", "speech", "motion", "action", "text"])
def test_axe_finds_no_serious_fault(tab, address, axe, theme, modality):
    scheme = {"name": "prefers-color-scheme", "value": theme}
    tab.send("Emulation.setEmulatedMedia", features=[scheme])
    prompt = example(tab, modality)
    go(tab, address, modality=modality, sampler=["speculative_jacobi", "maskgit"], prompt=prompt)
    assert faults(tab, axe) == []
    tab.click("#generate")
    tab.until(lambda: len(states(tab)) == 2 and all(states(tab)), 90)
    if modality == "image":
        tab.value("[...document.querySelectorAll('.links button')][0].click()")
        tab.until(lambda: tab.value("document.querySelector('.painter') !== null"))
    tab.value("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    tab.until(lambda: tab.value("document.querySelectorAll('pre').length") == 2)
    assert faults(tab, axe) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_fault_of_the_world(tab, address, axe, theme):
    scheme = {"name": "prefers-color-scheme", "value": theme}
    tab.send("Emulation.setEmulatedMedia", features=[scheme])
    tab.send("Page.navigate", url=f"{address}world")
    tab.until(lambda: tab.value("typeof session === 'string'"), 60)
    assert faults(tab, axe) == []


def test_axe_would_find_a_serious_fault(tab, axe):
    tab.value("document.getElementById('prompt').labels[0].remove()")
    assert any("label" in fault for fault in faults(tab, axe))
