"""Write the images of the page on own media, as its executed notebook shows them.

python docs/figures/own_media.py      write docs/images/own-media/*
"""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
NOTEBOOK, FOLDER = DOCS / "notebooks" / "own_images.ipynb", DOCS / "images" / "own-media"


def main() -> None:
    """Write the image of every cell that names one in ``metadata.image``."""
    FOLDER.mkdir(exist_ok=True)
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if (name := cell["metadata"].get("image")) is None:
            continue
        data = next(o["data"] for o in cell["outputs"] if "data" in o)
        if name.endswith(".svg"):
            (FOLDER / name).write_text("".join(data["image/svg+xml"]), encoding="utf-8")
        else:
            (FOLDER / name).write_bytes(b64decode("".join(data["image/png"])))


if __name__ == "__main__":
    main()
