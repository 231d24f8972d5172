"""The image on the first page is made with the weights in the package, and shows its prompts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


def script():
    spec = importlib.util.spec_from_file_location("figure", ROOT / "docs" / "figures" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demo_image_is_of_these_weights_and_shows_its_prompts():
    figure = script()
    record = json.loads(figure.RECORD.read_text("utf-8"))
    assert not figure.is_stale(record), "make it again: python docs/figures/demo.py"
    assert all(all(verdicts) for verdicts in record["passed"].values()), record["passed"]
    assert Image.open(figure.FILE).width > 600


def test_other_weights_or_another_script_make_the_image_stale():
    figure = script()
    record = json.loads(figure.RECORD.read_text("utf-8"))
    for name in record["digests"]:
        assert figure.is_stale({"digests": {**record["digests"], name: "0" * 16}})
