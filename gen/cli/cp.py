"""Command ``cp``."""

from __future__ import annotations

import argparse
from pathlib import Path

from gen.config.packaged import TRAINING, find_config
from gen.core.errors import GenError
from gen.core.files import writing


def cp(args: argparse.Namespace) -> int:
    """Copy a config to edit it."""
    training = str(args.config).removeprefix("configs/").startswith(TRAINING)
    source, dest = find_config(args.config, training), Path(args.dest)
    if dest.is_dir():
        dest = dest / source.name
    with writing(dest):
        try:
            with dest.open("xb") as file:
                file.write(source.read_bytes())
        except FileExistsError as error:
            raise GenError(f"{dest} exists already; expected an unused name") from error
    print(dest)
    return 0
