"""Draw the screenshots of the live page in a headless Chromium, with the models in the package.

PYTHONPATH=. python docs/figures/page.py      write docs/images/page*.png
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlencode

import uvicorn
from PIL import Image

from gen.engine.engine import Engine
from gen.serve.app import make_app

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from chrome import Tab  # noqa: E402  # the driver of the tests

IMAGES = ROOT / "docs" / "images"
CIRCLE = "a large red circle at the top left"
LANES = "[...document.querySelectorAll('.lane')].map((lane) => lane.dataset.state)"
PASSES = "document.querySelectorAll('[aria-label=\"forward pass\"]')"
# file, call, size of the window, dark, share of the passes that is shown
SCREENSHOTS = (
    (
        "page",
        {
            "modality": "image",
            "prompt": CIRCLE,
            "seed": 3,
            "sampler": ["autoregressive", "speculative_jacobi", "maskgit_remask"],
        },
        (1360, 1190),
        False,
        0.5,
    ),
    (
        "page-phone",
        {"modality": "text", "prompt": "close { [ ] } [ { =", "seed": 1, "sampler": ["sjd"]},
        (390, 844),
        True,
        1.0,
    ),
    (
        "page-motion",
        {
            "modality": "motion",
            "prompt": "a person waves slowly with both hands twice",
            "seed": 1,
            "sampler": ["speculative_jacobi", "maskgit"],
        },
        (1360, 1000),
        True,
        1.0,
    ),
)


def draw(tab: Tab, address: str, call: dict, size: tuple[int, int], share: float) -> None:
    """Make a call and show a share of its passes."""
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1}
    tab.send("Emulation.setDeviceMetricsOverride", mobile=size[0] < 600, **metrics)
    tab.send("Page.navigate", url="about:blank")
    tab.send("Page.navigate", url=f"{address}#{urlencode(call, doseq=True)}")
    tab.until(lambda: tab.value("document.documentElement?.dataset.ready") == "yes", 90)
    tab.value("document.getElementById('generate').click()")
    tab.until(lambda: tab.value(LANES) == ["done"] * len(call["sampler"]), 90)
    tab.value(
        f"{PASSES}.forEach((slider) => {{ slider.value = Math.round({share} * slider.max);"
        " slider.dispatchEvent(new Event('input')); })"
    )
    tab.value("document.activeElement.blur()")
    time.sleep(1.5)


def main() -> None:
    """Write all screenshots."""
    engine = Engine(device="cpu")
    config = uvicorn.Config(make_app(engine), host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    with tempfile.TemporaryDirectory() as folder:
        tab = Tab(Path(folder), address)
        for name, call, size, dark, share in SCREENSHOTS:
            draw(tab, address, call, size, share)
            path = IMAGES / f"{name}.png"
            tab.look(path, *size, dark=dark)
            with Image.open(path) as image:  # 256 colours are a third of the bytes
                few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
                few.save(path, optimize=True)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
        tab.close()
    server.should_exit = True
    engine.close()


if __name__ == "__main__":
    main()
