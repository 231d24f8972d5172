"""The gallery of a small job opens with its outputs, prompt by prompt."""

from __future__ import annotations

from gen.gallery.write import write_gallery
from tests.gallery.test_gallery import folder  # noqa: F401  a fixture


def test_outputs_come_before_the_table_of_methods_and_the_traces(folder):
    write_gallery(folder)
    page = (folder / "index.html").read_text("utf-8")
    order = [page.index(f'<section id="{name}') for name in ("comparison", "methods", "traces")]
    assert order == sorted(order)
